// Elementwise programs that are compiled with the library, so that no intermediate result leaves the registers. No
// torch in here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "exec/program/elementwise.h"

namespace elaswave::exec {

// The compiled form of a program: the same operations in the same order, hence the same bits. Null if it has none.
Elementwise::Compiled compiled_form(std::size_t arrays, std::span<const Elementwise::Operation> operations,
                                    std::span<const std::size_t> outputs);

}  // namespace elaswave::exec

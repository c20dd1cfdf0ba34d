// Unit programs for Python, shared by what binds them. Private to bindings/.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "exec/program.h"

namespace elaswave {

// A program's data as passes.unit_program writes it.
exec::ProgramSpec program_of(const pybind11::dict& data);

// Program and Chain.
void bind_program(pybind11::module_& module);

}  // namespace elaswave

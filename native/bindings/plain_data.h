// Python's plain values as exec::Data. Private to bindings/.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "exec/spec/data.h"

namespace elaswave {

// None, bool, int, float, str, lists, tuples, dicts with names as keys, and dataclasses (their fields by name), nested
// as one likes. Throws ExecError for anything else.
exec::Data plain_data(const pybind11::handle& object);

}  // namespace elaswave

// What each area adds to the Python module `elaswave_fx._native`; the module's entry calls them in this order.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "commit/guards.h"

namespace elaswave {

// Endpoint (held by std::shared_ptr<comm::Endpoint>), Transfer, Group, and the translation of comm errors into the
// classes of elaswave_fx.errors.
void bind_comm(pybind11::module_& module);

// StepMachine, for the simulator: the machine that the engine runs.
void bind_commit(pybind11::module_& module);
// How often each safety rule was asked, by name.
pybind11::dict consulted(const commit::Guards& guards);

// Program and UnitSequence.
void bind_program(pybind11::module_& module);

// Engine and its results, and the translation of exec errors. Needs bind_comm before it.
void bind_exec(pybind11::module_& module);

}  // namespace elaswave

// elaswave_fx._native: the module itself. Import torch first; the module relies on its libraries being loaded.
#include "bindings/bindings.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native runtime of elaswave_fx: communication and execution.";
  elaswave::bind_comm(module);
  elaswave::bind_commit(module);
  elaswave::bind_program(module);
  elaswave::bind_exec(module);
}

// elaswave_fx._native: the module itself. Import torch first; the module relies on its libraries being loaded.
#include "bindings/bindings.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native runtime of elaswave_fx: communication and execution.";
  if (elaswave::bind_comm) elaswave::bind_comm(module);
  if (elaswave::bind_exec) elaswave::bind_exec(module);
}

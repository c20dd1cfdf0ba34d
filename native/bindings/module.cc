// elaswave_fx._native: the module itself. Import torch first; the module relies on its libraries being loaded.
#include "bindings/bindings.h"

namespace elaswave {
// An area that is not built is left out.
void bind_comm(pybind11::module_& module) __attribute__((weak));
void bind_exec(pybind11::module_& module) __attribute__((weak));
}  // namespace elaswave

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native runtime of elaswave_fx: communication and execution.";
  if (elaswave::bind_comm != nullptr) elaswave::bind_comm(module);
  if (elaswave::bind_exec != nullptr) elaswave::bind_exec(module);
}

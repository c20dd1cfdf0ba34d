// elaswave_fx._liveness: Python's view of liveness.h, a module of its own because launchers need no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "liveness/liveness.h"

namespace py = pybind11;
using elaswave::liveness::Table;

PYBIND11_MODULE(_liveness, module) {
  module.doc() = "The end of a process, noticed before the kernel has closed its sockets.";
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Table>(module, "LivenessTable")
      .def(py::init<std::size_t>(), py::arg("slots"))
      .def("hold", &Table::hold, py::arg("slot"), NoGil())
      .def("watch", &Table::watch, py::arg("slot"), NoGil())
      .def("fileno", &Table::fd)
      .def("ended", &Table::ended);
}

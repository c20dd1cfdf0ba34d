// Python's view of unit programs: one by itself, and a sequence of them.
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/plain_data.h"
#include "exec/device/memory.h"
#include "exec/program/below_autograd_guard.h"
#include "exec/program/read_program.h"
#include "exec/program/unit_sequence.h"
#include "exec/state/optimizer.h"

namespace py = pybind11;

namespace elaswave {
namespace {

using exec::ProgramValues;
using exec::SharedProgram;
using exec::UnitSequence;

c10::IValue ivalue_of(const py::handle& object) {
  if (py::isinstance<py::bool_>(object)) return py::cast<bool>(object);
  if (py::isinstance<py::int_>(object)) return py::cast<std::int64_t>(object);
  if (py::isinstance<py::float_>(object)) return py::cast<double>(object);
  if (object.is_none()) return {};
  return py::cast<at::Tensor>(object);
}

py::object object_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? py::cast(value.toTensor()) : py::none();
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isTensorList()) return py::cast(value.toTensorVector());
  return py::none();
}

ProgramValues values_of(const py::sequence& objects) {
  ProgramValues values;
  for (const py::handle object : objects) values.push_back(ivalue_of(object));
  return values;
}

py::list objects_of(const ProgramValues& values) {
  py::list objects;
  for (const c10::IValue& value : values) objects.append(object_of(value));
  return objects;
}

std::shared_ptr<SharedProgram> make_program(const py::dict& data) {
  return std::make_shared<SharedProgram>(exec::read_program(exec::Reader(plain_data(data), "program")));
}

py::list run(SharedProgram& program, const py::sequence& inputs) {
  ProgramValues values = values_of(inputs);
  {
    const py::gil_scoped_release release;
    values = program.run(std::move(values));
  }
  return objects_of(values);
}

void add(UnitSequence& units, std::shared_ptr<SharedProgram> forward, const py::sequence& fixed,
         UnitSequence::Places reads, std::vector<std::size_t> writes, std::shared_ptr<SharedProgram> backward,
         std::shared_ptr<SharedProgram> weights, std::size_t results, std::vector<std::size_t> tangents,
         UnitSequence::Places gradients) {
  units.add({std::move(forward), values_of(fixed), std::move(reads), std::move(writes), std::move(backward),
             std::move(weights), results, std::move(tangents), std::move(gradients)});
}

py::tuple step(UnitSequence& units, const py::sequence& values, std::size_t gradients, std::size_t loss,
               std::size_t loss_gradient) {
  ProgramValues given = values_of(values);
  UnitSequence::Result result;
  {
    const py::gil_scoped_release release;
    result = units.step(std::move(given), gradients, loss, loss_gradient);
  }
  return py::make_tuple(objects_of(result.values), objects_of(result.gradients), result.forward_s, result.backward_s,
                        result.weights_s);
}

// Runs before the first one that counts: they touch all memory.
constexpr int kWarmUp = 1;

double update_seconds(const py::dict& data, const std::vector<float>& numbers, std::int64_t elements, int runs) {
  exec::UnitProgram program(exec::read_program(exec::Reader(plain_data(data), "program")));
  const py::gil_scoped_release release;
  const exec::BelowAutogradGuard guard;
  exec::Optimizer optimizer(program);
  exec::BoxSpec box;
  box.roles.bucket = BucketId(0);
  box.hi = elements;
  const auto ones = [elements] { return exec::host_empty({elements}, at::kFloat).fill_(1.0F); };
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < program.num_outputs(); ++i) tensors.push_back(ones());
  exec::ShardState state = exec::make_state(box, std::move(tensors));
  const at::Tensor gradient = ones();
  std::vector<at::Tensor> hyper;
  for (const float number : numbers) hyper.push_back(exec::host_empty({}, at::kFloat).fill_(number));
  std::vector<double> taken_s;
  for (int run = -kWarmUp; run < runs; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    optimizer.update(box, state, gradient, hyper);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (run >= 0) taken_s.push_back(taken.count());
  }
  return *std::min_element(taken_s.begin(), taken_s.end());
}

}  // namespace

void bind_program(py::module_& module) {
  py::class_<SharedProgram, std::shared_ptr<SharedProgram>>(
      module, "Program", "A verified unit program; see passes/unit_program.py for its data.")
      .def(py::init(&make_program), py::arg("data"))
      .def_property_readonly("name", &SharedProgram::name)
      .def("run", &run, py::arg("inputs"), "Tensors and numbers in, tensors, numbers and None out.");
  py::class_<UnitSequence>(module, "UnitSequence",
                           "Programs of units one after another, forward and back; see build/unit_sequence.py.")
      .def(py::init<>())
      .def("add", &add, py::arg("forward"), py::arg("fixed"), py::arg("reads"), py::arg("writes"),
           py::arg("backward").none(true), py::arg("weights").none(true), py::arg("results"), py::arg("tangents"),
           py::arg("gradients"))
      .def("step", &step, py::arg("values"), py::arg("gradients"), py::arg("loss"), py::arg("loss_gradient"),
           "All values, all gradients, and seconds of each unit: forward, backward, of it for weights.");
  module.def("update_seconds", &update_seconds, py::arg("program"), py::arg("numbers"), py::arg("elements"),
             py::arg("runs"), "Of the optimizer's program on so many elements, as engines run it: the fastest run.");
}

}  // namespace elaswave

// Python's view of unit programs: one by itself, and a chain of them.
#include "bindings/program.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones_like.h>
#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exec/plain_dispatch.h"
#include "exec/unit_program.h"

namespace py = pybind11;

namespace elaswave {
namespace {

using exec::Arg;
using exec::ExecError;
using Values = std::vector<c10::IValue>;

Arg arg_of(const py::handle& object) {
  static const std::map<std::string, Arg::Kind> kinds = {
      {"slot", Arg::Kind::kSlot},     {"none", Arg::Kind::kNone},
      {"bool", Arg::Kind::kBool},     {"int", Arg::Kind::kInt},
      {"float", Arg::Kind::kReal},    {"str", Arg::Kind::kString},
      {"dtype", Arg::Kind::kDtype},   {"device", Arg::Kind::kDevice},
      {"layout", Arg::Kind::kLayout}, {"memory_format", Arg::Kind::kMemoryFormat},
      {"list", Arg::Kind::kList},
  };
  const auto parts = py::cast<py::sequence>(object);
  const auto name = py::cast<std::string>(parts[0]);
  const auto found = kinds.find(name);
  if (found == kinds.end()) throw ExecError("program: unknown kind of argument \"" + name + "\"");
  Arg arg;
  arg.kind = found->second;
  switch (arg.kind) {
    case Arg::Kind::kNone:
      break;
    case Arg::Kind::kBool:
      arg.integer = py::cast<bool>(parts[1]) ? 1 : 0;
      break;
    case Arg::Kind::kSlot:
    case Arg::Kind::kInt:
      arg.integer = py::cast<std::int64_t>(parts[1]);
      break;
    case Arg::Kind::kReal:
      arg.real = py::cast<double>(parts[1]);
      break;
    case Arg::Kind::kList:
      for (const py::handle item : py::cast<py::sequence>(parts[1])) arg.items.push_back(arg_of(item));
      break;
    default:
      arg.text = py::cast<std::string>(parts[1]);
  }
  return arg;
}

}  // namespace

exec::ProgramSpec program_of(const py::dict& data) {
  exec::ProgramSpec spec;
  spec.name = py::cast<std::string>(data["name"]);
  spec.num_inputs = py::cast<int>(data["num_inputs"]);
  spec.num_slots = py::cast<int>(data["num_slots"]);
  spec.outputs = py::cast<std::vector<int>>(data["outputs"]);
  for (const py::handle item : data["instructions"]) {
    const auto entry = py::cast<py::dict>(item);
    exec::Instruction instruction;
    instruction.op = py::cast<std::string>(entry["op"]);
    if (entry.contains("overload")) instruction.overload = py::cast<std::string>(entry["overload"]);
    for (const py::handle arg : entry["args"]) instruction.args.push_back(arg_of(arg));
    instruction.outs = py::cast<std::vector<int>>(entry["outs"]);
    if (entry.contains("frees")) instruction.frees = py::cast<std::vector<int>>(entry["frees"]);
    instruction.unpack = entry.contains("unpack") && py::cast<bool>(entry["unpack"]);
    spec.instructions.push_back(std::move(instruction));
  }
  return spec;
}

namespace {

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

// A unit program. Threads that call it at once take turns.
class PyProgram {
 public:
  explicit PyProgram(const py::dict& data) : program_(program_of(data)) {}
  const std::string& name() const { return program_.name(); }

  // Without the GIL.
  Values call(Values inputs) {
    const std::lock_guard lock(mutex_);
    return program_.run(std::move(inputs));
  }

  py::list run(const py::sequence& inputs) {
    Values values;
    for (const py::handle input : inputs) values.push_back(ivalue_of(input));
    {
      const py::gil_scoped_release release;
      values = call(std::move(values));
    }
    py::list outputs;
    for (const c10::IValue& value : values) outputs.append(object_of(value));
    return outputs;
  }

 private:
  exec::UnitProgram program_;
  std::mutex mutex_;
};

// Programs of units one after another, forward and back. Values and gradients have numbered places; what a forward
// program leaves for the backward one stays here.
class PyChain {
 public:
  using Places = std::vector<std::pair<std::size_t, std::size_t>>;  // position among the program's, place

  void add(std::shared_ptr<PyProgram> forward, const py::sequence& fixed, Places reads, std::vector<std::size_t> writes,
           std::shared_ptr<PyProgram> backward, std::vector<std::size_t> tangents, Places gradients) {
    Unit unit{std::move(forward),  {}, std::move(reads), std::move(writes), std::move(backward), std::move(tangents),
              std::move(gradients)};
    for (const py::handle value : fixed) unit.fixed.push_back(ivalue_of(value));
    units_.push_back(std::move(unit));
  }

  // `values`: what is given, None for what units write. Returns all values, all gradients, and seconds by unit.
  py::tuple step(const py::sequence& values, std::size_t gradients, std::size_t loss, std::size_t loss_gradient) {
    Values found, back(gradients);
    for (const py::handle value : values) found.push_back(ivalue_of(value));
    std::vector<double> forward_s, backward_s(units_.size());
    {
      const py::gil_scoped_release release;
      const exec::PlainDispatch plain;
      std::vector<Values> held;
      for (const Unit& unit : units_) forward_s.push_back(run_forward(unit, found, held));
      if (loss_gradient < back.size()) back[loss_gradient] = at::ones_like(found.at(loss).toTensor());
      for (std::size_t i = units_.size(); i-- > 0; held.pop_back()) {
        if (units_[i].backward) backward_s[i] = run_backward(units_[i], std::move(held.back()), back);
      }
    }
    py::list outputs, grads;
    for (const c10::IValue& value : found) outputs.append(object_of(value));
    for (const c10::IValue& value : back) grads.append(object_of(value));
    return py::make_tuple(outputs, grads, forward_s, backward_s);
  }

 private:
  struct Unit {
    std::shared_ptr<PyProgram> forward;
    Values fixed;
    Places reads;
    std::vector<std::size_t> writes;
    std::shared_ptr<PyProgram> backward;
    std::vector<std::size_t> tangents;
    Places gradients;
  };
  using Clock = std::chrono::steady_clock;

  static double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  static double run_forward(const Unit& unit, Values& found, std::vector<Values>& held) {
    Values inputs = unit.fixed;
    for (const auto& [position, place] : unit.reads) inputs.at(position) = found.at(place);
    const auto begin = Clock::now();
    Values outputs = unit.forward->call(std::move(inputs));
    const double seconds = seconds_since(begin);
    const auto results = static_cast<std::ptrdiff_t>(unit.writes.size());
    for (std::size_t i = 0; i < unit.writes.size(); ++i) found.at(unit.writes[i]) = outputs.at(i);
    held.emplace_back(outputs.begin() + results, outputs.end());
    return seconds;
  }

  static double run_backward(const Unit& unit, Values inputs, Values& back) {
    for (const std::size_t place : unit.tangents) inputs.push_back(back.at(place));
    const auto begin = Clock::now();
    const Values outputs = unit.backward->call(std::move(inputs));
    const double seconds = seconds_since(begin);
    for (const auto& [position, place] : unit.gradients) {
      c10::IValue& sum = back.at(place);
      sum = sum.isNone() ? outputs.at(position) : at::add(sum.toTensor(), outputs.at(position).toTensor());
    }
    return seconds;
  }

  std::vector<Unit> units_;
};

}  // namespace

void bind_program(py::module_& module) {
  py::class_<PyProgram, std::shared_ptr<PyProgram>>(module, "Program",
                                                    "A verified unit program; see passes.unit_program for its data.")
      .def(py::init<const py::dict&>(), py::arg("data"))
      .def_property_readonly("name", &PyProgram::name)
      .def("run", &PyProgram::run, py::arg("inputs"), "Tensors and numbers in, tensors, numbers and None out.");
  py::class_<PyChain>(module, "Chain", "Programs of units one after another, forward and back; see runtime/chain.py.")
      .def(py::init<>())
      .def("add", &PyChain::add, py::arg("forward"), py::arg("fixed"), py::arg("reads"), py::arg("writes"),
           py::arg("backward").none(true), py::arg("tangents"), py::arg("gradients"))
      .def("step", &PyChain::step, py::arg("values"), py::arg("gradients"), py::arg("loss"), py::arg("loss_gradient"));
}

}  // namespace elaswave

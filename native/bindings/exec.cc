// Python's view of exec/: Engine. Translates tuples and dicts to declarations; the rules are checked in C++.
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>

#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/program.h"
#include "exec/engine.h"
#include "exec/names.h"

namespace py = pybind11;

namespace elaswave {
namespace {

using exec::Binding;
using exec::Engine;
using exec::ExecError;

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const exec::CopyDiffers& error) {
    py::set_error(py::module_::import("elaswave_fx.errors").attr("CopyDiffers"), error.what());
  } catch (const ExecError& error) {
    py::set_error(py::module_::import("elaswave_fx.errors").attr("ExecError"), error.what());
  }
}

// "float32" or torch.float32.
at::ScalarType dtype_of(const py::handle& object) {
  std::string name = py::str(object);
  if (name.starts_with("torch.")) name.erase(0, 6);
  return exec::dtype_from(name);
}

Binding binding_of(const Engine& engine, const py::handle& object) {
  using Kind = Binding::Kind;
  static const std::map<std::string, Kind> kinds = {
      {"none", Kind::kNone},   {"param", Kind::kParam}, {"buffer", Kind::kTable}, {"constant", Kind::kTable},
      {"value", Kind::kValue}, {"input", Kind::kInput}, {"keys", Kind::kKeys},    {"step_keys", Kind::kStepKeys},
      {"loss", Kind::kLoss},   {"count", Kind::kCount}, {"fold", Kind::kFold},
  };
  const auto parts = py::cast<py::sequence>(object);
  const auto name = py::cast<std::string>(parts[0]);
  const auto found = kinds.find(name);
  if (found == kinds.end()) throw ExecError("unit: unknown kind of binding \"" + name + "\"");
  Binding binding;
  binding.kind = found->second;
  const bool named = parts.size() > 1 && py::isinstance<py::str>(parts[1]);
  if (binding.kind == Kind::kInput) {
    binding.name = py::cast<std::string>(parts[1]);
  } else if (binding.kind == Kind::kParam && named) {
    binding.index = engine.find_bucket(py::cast<std::string>(parts[1]));
  } else if (binding.kind == Kind::kTable && named) {
    binding.index = engine.find_table(py::cast<std::string>(parts[1]));
  } else if (parts.size() > 1) {
    binding.index = py::cast<int>(parts[1]);
  }
  if (binding.kind == Kind::kParam) {
    binding.offset = py::cast<std::int64_t>(parts[2]);
    binding.shape = py::cast<std::vector<std::int64_t>>(parts[3]);
    if (parts.size() > 4) binding.strides = py::cast<std::vector<std::int64_t>>(parts[4]);
  }
  if (binding.kind == Kind::kFold) binding.item = parts.size() > 2 ? py::cast<int>(parts[2]) : 0;
  return binding;
}

std::vector<Binding> bindings_of(const Engine& engine, const py::sequence& list) {
  std::vector<Binding> bindings;
  for (const py::handle item : list) bindings.push_back(binding_of(engine, item));
  return bindings;
}

using Spans = std::vector<std::tuple<int, std::int64_t, std::int64_t>>;  // (rank, lo, hi)

std::vector<exec::OwnedSpan> owned_of(const Spans& spans) {
  std::vector<exec::OwnedSpan> owned;
  for (const auto& [rank, lo, hi] : spans) owned.push_back({rank, lo, hi});
  return owned;
}

at::Tensor tensor_or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->detach() : at::Tensor();
}

int add_bucket(Engine& engine, const std::string& name, std::int64_t numel, const std::vector<int>& group,
               const py::object& dtype, int optimizer_program, int hyper_group, const std::optional<at::Tensor>& work) {
  exec::BucketSpec spec;
  spec.name = name;
  spec.numel = numel;
  spec.group = group;
  spec.dtype = dtype_of(dtype);
  spec.work = tensor_or_undefined(work);
  spec.optimizer = optimizer_program;
  spec.hyper_group = hyper_group;
  return engine.add_bucket(std::move(spec));
}

int add_box(Engine& engine, int bucket, std::int64_t lo, std::int64_t hi, int owner, const std::vector<int>& holders) {
  return engine.add_box({bucket, lo, hi, owner, holders});
}

py::object base(const Engine& engine, int box) {
  const exec::Base& found = engine.base(box);
  if (!found.there()) return py::none();
  return py::make_tuple(found.master, found.state);
}

int add_value(Engine& engine, const std::string& name, std::optional<int> sample_axis, const py::object& dtype,
              const std::vector<std::int64_t>& shape, bool has_grad) {
  return engine.add_value({name, sample_axis.value_or(-1), dtype_of(dtype), shape, has_grad});
}

int add_fold(Engine& engine, int program, const std::vector<int>& buffers, const py::sequence& values,
             const Spans& group) {
  exec::FoldSpec spec;
  spec.program = program;
  spec.buffers = buffers;
  spec.group = owned_of(group);
  for (const py::handle item : values) {
    const auto parts = py::cast<py::sequence>(item);
    spec.values.push_back({dtype_of(parts[0]), py::cast<std::vector<std::int64_t>>(parts[1])});
  }
  return engine.add_fold(std::move(spec));
}

void add_unit(Engine& engine, int unit, std::optional<int> forward, std::optional<int> backward,
              std::optional<int> evaluate, const py::sequence& inputs, const py::sequence& outputs,
              const py::sequence& grads, int num_saved, const std::optional<py::sequence>& eval_inputs,
              const std::optional<py::sequence>& eval_outputs,
              const std::optional<std::tuple<double, double, double>>& modelled) {
  exec::UnitSpec spec;
  spec.forward = forward.value_or(-1);
  spec.backward = backward.value_or(-1);
  spec.eval = evaluate.value_or(-1);
  spec.inputs = bindings_of(engine, inputs);
  spec.outputs = bindings_of(engine, outputs);
  spec.grads = bindings_of(engine, grads);
  spec.eval_inputs = eval_inputs ? bindings_of(engine, *eval_inputs) : spec.inputs;
  spec.eval_outputs = eval_outputs ? bindings_of(engine, *eval_outputs) : spec.outputs;
  spec.num_saved = num_saved;
  if (modelled) spec.modelled = {std::get<0>(*modelled), std::get<1>(*modelled), std::get<2>(*modelled)};
  engine.add_unit(unit, std::move(spec));
}

std::vector<exec::Step> steps_of(const py::sequence& list) {
  std::vector<exec::Step> steps;
  for (const py::handle item : list) {
    const auto parts = py::cast<py::sequence>(item);
    std::vector<std::uint64_t> operands;
    for (std::size_t i = 1; i < parts.size(); ++i) operands.push_back(py::cast<std::uint64_t>(parts[i]));
    steps.push_back(exec::parse_step(py::cast<std::string>(parts[0]), operands));
  }
  return steps;
}

void set_schedule(Engine& engine, const py::sequence& train, const py::sequence& evaluate,
                  const std::vector<std::pair<std::int64_t, std::int64_t>>& micro_batches, std::int64_t first_sample) {
  exec::Schedule schedule;
  schedule.train = steps_of(train);
  schedule.eval = steps_of(evaluate);
  for (const auto& [lo, hi] : micro_batches) schedule.micro_batches.push_back({lo, hi});
  schedule.first_sample = first_sample;
  engine.set_schedule(std::move(schedule));
}

py::dict dict_of(const exec::Votes& votes) {
  py::dict data;
  for (const auto& [rank, words] : votes) {
    data[py::int_(rank)] = py::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof words[0]);
  }
  return data;
}

exec::Votes votes_of(const std::map<int, py::bytes>& data) {
  exec::Votes votes;
  for (const auto& [rank, bytes] : data) {
    const std::string_view view = bytes;
    std::vector<std::uint64_t>& words = votes[rank];
    words.resize(view.size() / sizeof words[0]);
    std::memcpy(words.data(), view.data(), words.size() * sizeof words[0]);
  }
  return votes;
}

py::dict dict_of(const exec::StepResult& result) {
  py::dict times;
  for (int code = 0; code < exec::kOpCodes; ++code) {
    const exec::Timing& timing = result.timings[static_cast<std::size_t>(code)];
    if (timing.count == 0) continue;
    py::dict entry;
    entry["count"] = timing.count;
    entry["seconds"] = timing.seconds;
    entry["wait_seconds"] = timing.wait_seconds;
    times[exec::name_of(static_cast<exec::OpCode>(code))] = entry;
  }
  py::dict data;
  data["step"] = result.step;
  data["loss"] = result.loss;
  data["count"] = result.count;
  data["grad_norm"] = result.grad_norm;
  data["scale"] = result.scale;
  data["finite"] = result.finite;
  data["updated"] = result.updated;
  data["version"] = result.version;
  data["stop"] = result.stop;
  data["votes"] = dict_of(result.votes);
  data["memory_bytes"] = result.memory_bytes;
  data["seconds"] = result.seconds;
  data["times"] = times;
  py::dict emulated;
  emulated["kernels"] = result.emulated.kernels;
  emulated["modelled_seconds"] = result.emulated.modelled_s;
  emulated["overslept_seconds"] = result.emulated.overslept_s;
  emulated["span_seconds"] = result.emulated.span_s;
  data["emulated"] = emulated;
  return data;
}

using Content = std::pair<std::uint64_t, std::uint64_t>;
using Fault = std::tuple<std::string, int, int, py::bytes>;  // instruction, signal, where to tell of it, the words

py::dict step(Engine& engine, std::int64_t step_index, const exec::Inputs& inputs,
              const std::vector<std::vector<double>>& hyper, std::optional<double> clip_norm, double deadline_s,
              bool stop_wanted, Content content, const std::optional<Fault>& fault) {
  exec::StepOptions options;
  options.clip_norm = clip_norm;
  options.deadline_s = deadline_s;
  options.stop_wanted = stop_wanted;
  options.content = {content.first, content.second};
  if (fault) {
    options.fault_at = exec::opcode_of(std::get<0>(*fault));
    options.fault_signal = std::get<1>(*fault);
    options.fault_pipe = std::get<2>(*fault);
    options.fault_words = std::get<3>(*fault);
  }
  exec::StepResult result;
  {
    const py::gil_scoped_release release;
    result = engine.step(step_index, inputs, hyper, options);
  }
  return dict_of(result);
}

py::dict commit_pending(Engine& engine, const std::map<int, py::bytes>& data) {
  const exec::Votes votes = votes_of(data);
  exec::StepResult result;
  {
    const py::gil_scoped_release release;
    result = engine.commit_pending(votes);
  }
  return dict_of(result);
}

py::dict evaluate(Engine& engine, std::int64_t step_index, const exec::Inputs& inputs, double deadline_s) {
  exec::EvalResult result;
  {
    const py::gil_scoped_release release;
    result = engine.evaluate(step_index, inputs, deadline_s);
  }
  py::dict data;
  data["loss"] = result.loss;
  data["count"] = result.count;
  data["seconds"] = result.seconds;
  return data;
}

void bind_declarations(py::class_<Engine>& engine) {
  engine
      .def(
          "add_program",
          [](Engine& self, const std::string& name, const py::dict& data) {
            return self.add_program(name, program_of(data));
          },
          py::arg("name"), py::arg("program"))
      .def("add_bucket", &add_bucket, py::kw_only(), py::arg("name"), py::arg("numel"), py::arg("group"),
           py::arg("dtype"), py::arg("optimizer_program"), py::arg("hyper_group"), py::arg("work"),
           "work: the flat working copy, written in place (None outside of the group).")
      .def("add_box", &add_box, py::kw_only(), py::arg("bucket"), py::arg("lo"), py::arg("hi"), py::arg("owner"),
           py::arg("holders"), "A piece of a bucket; every rank declares all, in order. Its base is set by set_base.")
      .def("assign_box", &Engine::assign_box, py::arg("box"), py::arg("owner"), py::arg("holders"))
      .def(
          "set_record_type", [](Engine& self, const py::object& dtype) { self.set_record_type(dtype_of(dtype)); },
          py::arg("dtype"))
      .def(
          "set_copy_mode",
          [](Engine& self, const std::string& mode) {
            if (mode != "log" && mode != "state") throw ExecError("copies are kept by \"log\" or \"state\"");
            self.set_copy_mode(mode == "log" ? exec::CopyMode::kLog : exec::CopyMode::kState);
          },
          py::arg("mode"))
      .def("add_buffer", &Engine::add_table, py::arg("name"), py::arg("tensor"))
      .def("add_constant", &Engine::add_table, py::arg("name"), py::arg("tensor"))
      .def("add_value", &add_value, py::arg("name"), py::arg("sample_axis"), py::arg("dtype"), py::arg("shape"),
           py::arg("has_grad"))
      .def("add_fold", &add_fold, py::kw_only(), py::arg("program"), py::arg("buffers"), py::arg("values"),
           py::arg("group"), "values [(dtype, shape)] of one granule; group [(rank, first sample, last + 1)].")
      .def("add_unit", &add_unit, py::kw_only(), py::arg("unit"), py::arg("forward"), py::arg("backward"),
           py::arg("evaluate"), py::arg("inputs"), py::arg("outputs"), py::arg("grads"), py::arg("num_saved"),
           py::arg("eval_inputs") = py::none(), py::arg("eval_outputs") = py::none(), py::arg("modelled") = py::none(),
           "modelled (forward, backward, fixed): seconds per sample, and per call, that are waited for instead.")
      .def(
          "regroup_fold", [](Engine& self, int fold, const Spans& group) { self.regroup_fold(fold, owned_of(group)); },
          py::arg("fold"), py::arg("group"))
      .def("clear_units", &Engine::clear_units)
      .def("set_world", &Engine::set_world, py::arg("ranks"))
      .def("set_schedule", &set_schedule, py::arg("train"), py::arg("evaluate"), py::arg("micro_batches"),
           py::arg("first_sample"));
}

void bind_state(py::class_<Engine>& engine) {
  using Released = py::call_guard<py::gil_scoped_release>;
  engine.def("base", &base, py::arg("box"), "(master, [state]), the engine's own; None if there is no base here.")
      .def("set_base", &Engine::set_base, py::arg("box"), py::arg("master"), py::arg("state"))
      .def("intact", &Engine::intact, py::arg("box"), Released())
      .def("send_base", &Engine::send_base, py::arg("box"), py::arg("peer"), Released())
      .def("expect_base", &Engine::expect_base, py::arg("box"), py::arg("owner"), Released())
      .def_property_readonly("catching", &Engine::catching)
      .def(
          "digest", [](const Engine& self, int box) { return self.base(box).digest.lo; }, py::arg("box"))
      .def("bucket_work", &Engine::bucket_work, py::arg("name"))
      .def("buffer", &Engine::table, py::arg("name"))
      .def("table", &Engine::table, py::arg("name"))
      .def("set_buffer", &Engine::set_table, py::arg("name"), py::arg("value"))
      .def_property_readonly("stale_buckets", &Engine::stale_buckets)
      .def_property("version", &Engine::version, &Engine::set_version)
      .def_property_readonly("pending", &Engine::pending)
      .def_property_readonly("recorded", &Engine::recorded)
      .def_property_readonly("copied_bytes", &Engine::copied_bytes)
      .def_property_readonly("votes", [](const Engine& self) { return dict_of(self.votes()); })
      .def("commit_pending", &commit_pending, py::arg("votes"))
      .def("drop_pending", &Engine::drop_pending)
      .def_property_readonly("progress",
                             [](const Engine& self) {
                               const exec::Progress progress = self.progress();
                               return py::make_tuple(progress.instruction, progress.number, progress.awaited);
                             })
      .def_property_readonly("last_committed", [](const Engine& self) -> py::object {
        const std::optional<exec::StepResult> result = self.last_committed();
        return result ? py::object(dict_of(*result)) : py::none();
      });
}

}  // namespace

void bind_exec(py::module_& module) {
  py::register_local_exception_translator(&translate);
  bind_program(module);
  py::class_<Engine> engine(module, "Engine",
                            "One rank's state and the interpreter of its step program. One thread at a time.");
  engine.def(py::init<int, std::shared_ptr<comm::Endpoint>, std::int64_t, std::int64_t, std::int64_t>(),
             py::arg("rank"), py::arg("endpoint").none(true), py::arg("seed"), py::arg("global_batch"),
             py::arg("granule") = 1);
  bind_declarations(engine);
  engine
      .def("step", &step, py::arg("step_index"), py::arg("inputs"), py::arg("hyper"), py::arg("clip_norm"),
           py::arg("deadline_s"), py::kw_only(), py::arg("stop_wanted") = false, py::arg("content") = Content(),
           py::arg("fault") = py::none())
      .def("evaluate", &evaluate, py::arg("step_index"), py::arg("inputs"), py::arg("deadline_s"))
      .def("sync", &Engine::sync, py::arg("deadline_s"), py::call_guard<py::gil_scoped_release>())
      .def("refresh_work", &Engine::refresh_work, py::arg("wanted"), py::arg("deadline_s"),
           py::call_guard<py::gil_scoped_release>());
  bind_state(engine);
}

}  // namespace elaswave

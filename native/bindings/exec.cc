// Python's view of exec/: Engine, what it is told and what it says. Translates and decides nothing.
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>

#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/plain_data.h"
#include "exec/program/read_program.h"
#include "exec/step/engine.h"

namespace py = pybind11;

// Strong ids are plain integers in Python.
template <class Tag>
struct pybind11::detail::type_caster<elaswave::Id<Tag>> {
  PYBIND11_TYPE_CASTER(elaswave::Id<Tag>, const_name("int"));
  bool load(handle source, bool convert) {
    make_caster<std::int64_t> number;
    if (!number.load(source, convert)) return false;
    value = elaswave::Id<Tag>(cast_op<std::int64_t>(number));
    return true;
  }
  static handle cast(elaswave::Id<Tag> id, return_value_policy policy, handle parent) {
    return make_caster<std::int64_t>::cast(id.value(), policy, parent);
  }
};

namespace elaswave {
namespace {

using exec::Engine;
using exec::ExecError;
using Released = py::call_guard<py::gil_scoped_release>;

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const exec::ReplicaDiffers& error) {
    py::set_error(py::module_::import("elaswave_fx.errors").attr("ReplicaDiffers"), error.what());
  } catch (const exec::InputsDiffer& error) {
    py::set_error(py::module_::import("elaswave_fx.errors").attr("InputsDiffer"), error.what());
  } catch (const ExecError& error) {
    py::set_error(py::module_::import("elaswave_fx.errors").attr("ExecError"), error.what());
  }
}

std::vector<exec::ProgramSpec> programs_of(const py::dict& named) {
  std::vector<exec::ProgramSpec> programs;
  for (const auto& [name, data] : named) {
    const exec::Data plain = plain_data(data);
    programs.push_back(exec::read_program(exec::Reader(plain, "program")));
    programs.back().name = py::cast<std::string>(name);
  }
  return programs;
}

std::unique_ptr<Engine> make_engine(const py::handle& spec, std::shared_ptr<comm::Endpoint> endpoint,
                                    const py::dict& programs, const exec::Tensors& tensors, std::int64_t version) {
  return std::make_unique<Engine>(plain_data(spec), std::move(endpoint), programs_of(programs), tensors, version);
}

std::unique_ptr<exec::NextSpec> make_next_spec(const py::handle& spec, const std::vector<BucketId>& ahead) {
  exec::Data data = plain_data(spec);
  const py::gil_scoped_release release;
  return std::make_unique<exec::NextSpec>(std::move(data), ahead);
}

// A vote is bytes in Python: only the ledger looks into it.
py::dict bytes_of(const exec::Votes& votes) {
  py::dict data;
  for (const auto& [rank, words] : votes) {
    data[py::int_(rank.value())] =
        py::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof words[0]);
  }
  return data;
}

exec::Votes votes_of(const std::map<RankId, py::bytes>& data) {
  exec::Votes votes;
  for (const auto& [rank, bytes] : data) {
    const std::string_view view = bytes;
    std::vector<std::uint64_t>& words = votes[rank];
    words.resize(view.size() / sizeof words[0]);
    std::memcpy(words.data(), view.data(), words.size() * sizeof words[0]);
  }
  return votes;
}

exec::StepResult finish(Engine& engine, const std::map<RankId, py::bytes>& data) {
  const exec::Votes votes = votes_of(data);
  const py::gil_scoped_release release;
  return engine.finish(votes);
}

std::map<std::string, exec::Timing> timings_of(const exec::StepResult& result) {
  std::map<std::string, exec::Timing> timings;
  for (std::size_t code = 0; code < exec::kOpCodes; ++code) {
    if (result.timings[code].count) timings[exec::name_of(static_cast<exec::OpCode>(code))] = result.timings[code];
  }
  return timings;
}

using Content = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

exec::Content content_of(const Content& words) { return {std::get<0>(words), std::get<1>(words), std::get<2>(words)}; }

exec::StepOptions make_options(double deadline_s, std::optional<double> clip_norm, bool stop_wanted,
                               const Content& content, const std::optional<std::pair<RankId, Content>>& cross_check,
                               std::optional<exec::Fault> fault, double slowdown) {
  std::optional<exec::CrossCheck> check;
  if (cross_check) check = {cross_check->first, content_of(cross_check->second)};
  return {deadline_s, clip_norm, stop_wanted, content_of(content), check, std::move(fault), slowdown};
}

exec::Fault make_fault(const std::string& instruction, int signal, double cut_s, std::optional<int> pipe,
                       const py::bytes& words) {
  return {exec::opcode_of(instruction), signal, cut_s, pipe, words};
}

std::optional<exec::ShardState> read_box(const Engine& engine, BoxId box) {
  const exec::ShardState& state = engine.read(box);
  return state.here() ? std::optional(state) : std::nullopt;
}

std::optional<at::Tensor> read_tensor(const Engine& engine, const std::string& name) {
  const at::Tensor tensor = engine.read(name);
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

void replicate(Engine& engine, const std::vector<std::tuple<BoxId, RankId, RankId>>& tasks) {
  std::vector<exec::ReplicaTransfer> transfers;
  for (const auto& [box, source, target] : tasks) transfers.push_back({box, source, target});
  const py::gil_scoped_release release;
  engine.replicate(transfers);
}

void bind_step(py::module_& module) {
  py::class_<exec::Fault>(module, "Fault",
                          "A signal raised on this process, or a cut, when a step reaches an instruction; for tests.")
      .def(py::init(&make_fault), py::arg("instruction"), py::arg("signal") = 0, py::kw_only(), py::arg("cut_s") = 0.0,
           py::arg("pipe") = py::none(), py::arg("words") = py::bytes());
  py::class_<exec::StepOptions>(module, "StepOptions", "What a step is told beside its inputs.")
      .def(py::init(&make_options), py::arg("deadline_s"), py::arg("clip_norm") = py::none(), py::kw_only(),
           py::arg("stop_wanted") = false, py::arg("content") = Content(), py::arg("cross_check") = py::none(),
           py::arg("fault") = py::none(), py::arg("slowdown") = 1.0);
  py::class_<exec::Timing>(module, "Timing", "How often an instruction ran, how long, and how much of it it waited.")
      .def_readonly("count", &exec::Timing::count)
      .def_readonly("seconds", &exec::Timing::seconds)
      .def_readonly("wait_seconds", &exec::Timing::wait_seconds);
  py::class_<exec::EmulatedTimes>(module, "EmulatedTimes", "Of a step's units with modelled durations, in seconds.")
      .def_readonly("kernels", &exec::EmulatedTimes::kernels)
      .def_readonly("modelled_s", &exec::EmulatedTimes::modelled_s)
      .def_readonly("overslept_s", &exec::EmulatedTimes::overslept_s);
  py::class_<exec::StepResult>(module, "StepResult", "A committed step; see exec/step/engine.h.")
      .def_readonly("step", &exec::StepResult::step)
      .def_readonly("loss", &exec::StepResult::loss)
      .def_readonly("count", &exec::StepResult::count)
      .def_readonly("grad_norm", &exec::StepResult::grad_norm)
      .def_readonly("scale", &exec::StepResult::scale)
      .def_readonly("finite", &exec::StepResult::finite)
      .def_readonly("updated", &exec::StepResult::updated)
      .def_readonly("version", &exec::StepResult::version)
      .def_readonly("stop", &exec::StepResult::stop)
      .def_readonly("memory_bytes", &exec::StepResult::memory_bytes)
      .def_readonly("seconds", &exec::StepResult::seconds)
      .def_readonly("pipeline_seconds", &exec::StepResult::pipeline_seconds)
      .def_readonly("emulated", &exec::StepResult::emulated)
      .def_property_readonly("votes", [](const exec::StepResult& self) { return bytes_of(self.votes); })
      .def_property_readonly("timings", &timings_of, "By instruction.");
  py::class_<exec::EvalResult>(module, "EvalResult", "Sums over the samples of all ranks.")
      .def_readonly("loss", &exec::EvalResult::loss)
      .def_readonly("count", &exec::EvalResult::count)
      .def_readonly("seconds", &exec::EvalResult::seconds);
}

std::pair<std::uint64_t, std::uint64_t> digest_of_words(std::int64_t bucket, const at::Tensor& words) {
  const exec::BoxSpec box{{BucketId(bucket), {}, {}, {}}, 0, words.numel()};
  const exec::Digest digest = exec::make_state(box, {words}).digest;
  return {digest.lo, digest.hi};
}

void bind_state(py::module_& module) {
  using Box = exec::Holdings::Box;
  py::class_<exec::ShardState>(module, "BoxState",
                               "A box's master slice and optimizer state; the engine's own tensors.")
      .def_readonly("master", &exec::ShardState::master)
      .def_readonly("state", &exec::ShardState::optimizer)
      .def_property_readonly("digest",
                             [](const exec::ShardState& self) { return std::pair(self.digest.lo, self.digest.hi); });
  module.def("digest_of_words", &digest_of_words, py::arg("bucket"), py::arg("words"),
             "The digest of the whole state of a bucket of buffers, [words] fp32: as that of a box says it.");
  py::class_<Box>(module, "HeldBox", "A box that has its state here.")
      .def_readonly("box", &Box::box)
      .def_property_readonly("digest", [](const Box& self) { return self.digest.lo; })
      .def_readonly("recorded", &Box::recorded);
  py::class_<exec::Holdings>(module, "Holdings", "What a rank has; see exec/step/engine.h.")
      .def_readonly("version", &exec::Holdings::version)
      .def_readonly("boxes", &exec::Holdings::boxes)
      .def_readonly("syncing", &exec::Holdings::syncing)
      .def_readonly("lagging", &exec::Holdings::lagging)
      .def_readonly("stale_buckets", &exec::Holdings::stale_buckets)
      .def_readonly("pending", &exec::Holdings::pending)
      .def_property_readonly("votes", [](const exec::Holdings& self) { return bytes_of(self.votes); })
      .def_readonly("last_committed", &exec::Holdings::last_committed)
      .def_readonly("copied_bytes", &exec::Holdings::copied_bytes)
      .def_readonly("sent_at_once", &exec::Holdings::sent_at_once)
      .def_readonly("sync_peak", &exec::Holdings::sync_peak);
  py::class_<exec::Progress>(module, "Progress",
                             "Where a step stands; None outside of steps, or while nobody is awaited.")
      .def_property_readonly("instruction",
                             [](const exec::Progress& self) {
                               return self.place ? std::optional(exec::name_of(self.place->instruction)) : std::nullopt;
                             })
      .def_property_readonly(
          "number",
          [](const exec::Progress& self) { return self.place ? std::optional(self.place->number) : std::nullopt; })
      .def_readonly("awaited", &exec::Progress::awaited);
}

void bind_engine(py::module_& module) {
  using State = const std::vector<at::Tensor>&;
  py::class_<exec::NextSpec>(module, "NextSpec",
                             "What an engine goes over to: made by any thread, read between steps, installed once.")
      .def(py::init(&make_next_spec), py::arg("spec"), py::arg("ahead") = std::vector<BucketId>());
  py::class_<Engine>(
      module, "Engine",
      "One rank's state and the interpreter of its step program. One thread at a time; see exec/step/engine.h.")
      .def(py::init(&make_engine), py::arg("spec"), py::arg("endpoint").none(true), py::arg("programs"),
           py::arg("tensors"), py::arg("version") = 0)
      .def("prepare", &Engine::prepare, py::arg("next"), py::arg("tensors") = exec::Tensors())
      .def("install", &Engine::install, py::arg("next"), py::arg("restart_at") = py::none())
      .def("step", &Engine::step, py::arg("step_index"), py::arg("inputs"), py::arg("hyper"), py::arg("options"),
           Released())
      .def("evaluate", &Engine::evaluate, py::arg("step_index"), py::arg("inputs"), py::arg("deadline_s"), Released())
      .def("sync", &Engine::sync, py::arg("deadline_s"), Released())
      .def("refresh", &Engine::refresh, py::arg("wanted"), py::arg("deadline_s"), Released())
      .def("holdings", &Engine::holdings)
      .def("finish", &finish, py::arg("votes"))
      .def("drop", &Engine::drop)
      .def("read", &read_box, py::arg("box"))
      .def("read", &read_tensor, py::arg("name"))
      .def("load", py::overload_cast<BoxId, const at::Tensor&, State>(&Engine::load), py::arg("box"), py::arg("master"),
           py::arg("state"))
      .def("load", py::overload_cast<const std::string&, const at::Tensor&>(&Engine::load), py::arg("name"),
           py::arg("value"))
      .def("intact", &Engine::intact, py::arg("box"), Released())
      .def("replicate", &replicate, py::arg("tasks"))
      .def("progress", &Engine::progress)
      .def_property_readonly("rules_consulted", [](const Engine& self) { return consulted(self.guards()); });
}

}  // namespace

void bind_exec(py::module_& module) {
  py::register_local_exception_translator(&translate);
  bind_step(module);
  bind_state(module);
  bind_engine(module);
}

}  // namespace elaswave

// Python's view of commit/: StepMachine, which the simulator drives by the million. Actions become plain tuples
// (kind, box, peer, version, count) with None for what a kind has not.
#include <pybind11/stl.h>

#include <array>
#include <exception>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "commit/machine.h"

namespace py = pybind11;

namespace elaswave {
namespace {

using commit::Action;
using commit::Actions;
using commit::Digest;
using commit::Guards;
using commit::StateTag;
using commit::StepMachine;

// In the order of Action::Kind.
constexpr const char* kKinds[] = {"send_part",
                                  "expect_part",
                                  "sum",
                                  "send_record",
                                  "expect_record",
                                  "send_catch_up_record",
                                  "send_prompt_record",
                                  "expect_catch_up_record",
                                  "send_vote",
                                  "expect_vote",
                                  "leave_step",
                                  "commit",
                                  "update",
                                  "write_parameters",
                                  "send_parameters",
                                  "expect_parameters",
                                  "send_state",
                                  "expect_state",
                                  "report_nearly_in_sync",
                                  "ask_state",
                                  "drop_state"};
static_assert(std::size(kKinds) == commit::kActionKinds);

py::handle kind_name(Action::Kind kind) {
  static const std::array<PyObject*, commit::kActionKinds> names = [] {
    std::array<PyObject*, commit::kActionKinds> made{};
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = PyUnicode_InternFromString(kKinds[i]);
    return made;
  }();
  return names[static_cast<std::size_t>(kind)];
}

py::object number(const std::optional<std::int64_t>& value) {
  return value ? py::reinterpret_steal<py::object>(PyLong_FromLongLong(*value)) : py::none();
}

template <class Tag>
py::object number(const std::optional<Id<Tag>>& id) {
  return id ? number(std::optional(id->value())) : py::none();
}

py::tuple to_python(const Actions& actions) {
  py::tuple list(actions.size());
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const Action& each = actions[i];
    list[i] =
        py::make_tuple(kind_name(each.kind), number(each.box), number(each.peer), number(each.version), each.count);
  }
  return list;
}

std::vector<RankId> ranks_of(const std::vector<std::int64_t>& numbers) { return {numbers.begin(), numbers.end()}; }

template <class Tag>
std::vector<std::int64_t> numbers_of(const std::vector<Id<Tag>>& ids) {
  std::vector<std::int64_t> numbers;
  for (const Id<Tag> id : ids) numbers.push_back(id.value());
  return numbers;
}

using Roles = std::tuple<std::int64_t, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>>;

py::tuple install(StepMachine& self, std::uint32_t epoch, const std::vector<std::int64_t>& members,
                  const std::vector<Roles>& boxes) {
  std::vector<commit::BoxRoles> roles;
  for (const auto& [bucket, owner, holders, readers] : boxes) {
    roles.push_back({BucketId(bucket), RankId(owner), ranks_of(holders), ranks_of(readers)});
  }
  return to_python(self.install(epoch, ranks_of(members), std::move(roles)));
}

StepMachine make(std::int64_t rank, const std::string& mode, const std::vector<std::string>& without) {
  if (mode != "log" && mode != "state")
    throw commit::ProtocolError("copy mode \"" + mode + "\" is neither log nor state");
  Guards guards;
  for (const std::string& name : without) {
    const auto& all = Guards::all();
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& each) { return name == each.name; });
    if (found == all.end()) throw commit::ProtocolError("there is no guard " + name);
    (guards.*(found->guard)).take_away();
  }
  return StepMachine(RankId(rank), mode == "log" ? commit::CopyMode::kLog : commit::CopyMode::kState, guards);
}

py::object state(const StepMachine& self, std::int64_t box) {
  const auto& found = self.state(BoxId(box));
  if (!found) return py::none();
  return py::make_tuple(found->version, found->digest.lo);
}

py::list holdings(const StepMachine& self) {
  py::list found;
  for (const commit::Holding& each : self.holdings()) {
    found.append(py::make_tuple(each.box.value(), each.state.version, each.state.digest.lo, each.recorded));
  }
  return found;
}

py::str admit(StepMachine& self, std::uint32_t epoch) {
  static constexpr const char* kNames[] = {"drop", "deliver", "hold"};
  return kNames[static_cast<std::size_t>(self.admit(epoch))];
}

void bind_events(py::class_<StepMachine>& machine) {
  using I = std::int64_t;
  using M = StepMachine;
  machine.def("install", &install, py::arg("epoch"), py::arg("members"), py::arg("boxes"))
      .def("restart", [](M& self, I version) { return to_python(self.restart(version)); })
      .def("load_parameters", [](M& self, I bucket) { self.load_parameters(BucketId(bucket)); })
      .def("load", [](M& self, I box, std::uint64_t digest) { self.load(BoxId(box), {digest, 0}); })
      .def("send_state",
           [](M& self, I box, I holder) { return to_python(self.send_state(BoxId(box), RankId(holder))); })
      .def("state_asked",
           [](M& self, I box, I holder) { return to_python(self.state_asked(BoxId(box), RankId(holder))); })
      .def("state_leaves",
           [](M& self, I box, I holder) { return to_python(self.state_leaves(BoxId(box), RankId(holder))); })
      .def("replica_nearly_in_sync",
           [](M& self, I box, I holder) { self.replica_nearly_in_sync(BoxId(box), RankId(holder)); })
      .def("expect_state", [](M& self, I box) { return to_python(self.expect_state(BoxId(box))); })
      .def("refresh",
           [](M& self, I bucket, const std::vector<I>& takers) {
             return to_python(self.refresh(BucketId(bucket), ranks_of(takers)));
           })
      .def("begin_step", [](M& self) { return to_python(self.begin_step()); })
      .def("bucket_reduced", [](M& self, I bucket) { return to_python(self.bucket_reduced(BucketId(bucket))); })
      .def(
          "part_arrived",
          [](M& self, I box, I reader, std::size_t count) {
            return to_python(self.part_arrived({BoxId(box), count}, RankId(reader)));
          },
          py::arg("box"), py::arg("reader"), py::arg("count") = 1)
      .def("record_arrived",
           [](M& self, I box, I version, std::uint64_t digest, bool whole) {
             return to_python(self.record_arrived(BoxId(box), StateTag{version, {digest, 0}}, whole));
           })
      .def("ready_to_vote", &M::ready_to_vote)
      .def("cast_vote", [](M& self) { return to_python(self.cast_vote()); })
      .def("vote_arrived", [](M& self, I member) { return to_python(self.vote_arrived(RankId(member))); })
      .def(
          "commit", [](M& self, bool updates) { return to_python(self.commit(updates)); }, py::arg("updates") = true)
      .def("update_bucket", [](M& self, I bucket) { return to_python(self.update_bucket(BucketId(bucket))); })
      .def("gather", [](M& self, I bucket) { return to_python(self.gather(BucketId(bucket))); })
      .def("update_replicas", [](M& self) { return to_python(self.update_replicas()); })
      .def("end_step", &M::end_step)
      .def("updated",
           [](M& self, I box, std::uint64_t digest) { return to_python(self.updated(BoxId(box), {digest, 0})); })
      .def("update_failed", [](M& self, I box) { return to_python(self.update_failed(BoxId(box))); })
      .def("parameters_arrived", [](M& self, I box) { self.parameters_arrived(BoxId(box)); })
      .def("state_arrived",
           [](M& self, I box, I version, std::uint64_t digest, bool whole) {
             return to_python(self.state_arrived(BoxId(box), StateTag{version, {digest, 0}}, whole));
           })
      .def("catch_up_record_arrived",
           [](M& self, I box, I version, std::uint64_t digest, bool whole, bool prompt) {
             return to_python(self.catch_up_record_arrived(BoxId(box), StateTag{version, {digest, 0}}, whole, prompt));
           })
      .def("leave", [](M& self) { return to_python(self.leave()); })
      .def("finish", [](M& self, const std::vector<I>& voters) { return to_python(self.finish(ranks_of(voters))); })
      .def("drop", &M::drop);
}

void bind_questions(py::class_<StepMachine>& machine) {
  using I = std::int64_t;
  using M = StepMachine;
  machine.def_property_readonly("rank", [](const M& self) { return self.rank().value(); })
      .def_property_readonly("epoch", &M::epoch)
      .def_property_readonly("members", [](const M& self) { return numbers_of(self.members()); })
      .def_property_readonly("version", &M::version)
      .def_property_readonly("pending", &M::pending)
      .def_property_readonly("committed", &M::committed)
      .def("materializes", [](const M& self, I box, I rank) { return self.materializes(BoxId(box), RankId(rank)); })
      .def("state", &state)
      .def("recorded", [](const M& self, I box) { return self.recorded(BoxId(box)); })
      .def("record_awaited", [](const M& self, I box) { return self.record_awaited(BoxId(box)); })
      .def("sync_under_way", [](const M& self, I box) { return self.sync_under_way(BoxId(box)); })
      .def_property_readonly("syncing", [](const M& self) { return numbers_of(self.syncing()); })
      .def_property_readonly("lagging", [](const M& self) { return numbers_of(self.lagging()); })
      .def_property_readonly("holdings", &holdings)
      .def("parameters_ready", [](const M& self, I bucket) { return self.parameters_ready(BucketId(bucket)); })
      .def("stale", [](const M& self, I bucket) { return self.stale(BucketId(bucket)); })
      .def_property_readonly("awaited", [](const M& self) { return number(self.awaited()); })
      .def("admit", &admit)
      .def_property_readonly("consulted", [](const M& self) { return consulted(self.guards()); });
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const commit::ProtocolError& error) {
    py::set_error(py::module_::import("elaswave_fx.errors").attr("ExecError"), error.what());
  }
}

}  // namespace

py::dict consulted(const Guards& guards) {
  py::dict counts;
  for (const auto& [name, guard] : Guards::all()) counts[name] = (guards.*guard).consulted();
  return counts;
}

void bind_commit(py::module_& module) {
  py::register_exception_translator(&translate);
  py::class_<StepMachine> machine(module, "StepMachine");
  machine.def(py::init(&make), py::arg("rank"), py::arg("copy_mode") = "log",
              py::arg("without") = std::vector<std::string>());
  bind_events(machine);
  bind_questions(machine);
}

}  // namespace elaswave

// The engine's state: made of a spec, changed by the next one, read and loaded. The interpreter is in interpreter.cc.
#include "exec/step/engine.h"

#include <algorithm>
#include <functional>

#include "exec/program/below_autograd_guard.h"

namespace elaswave::exec {

namespace {

// Who does what with each box, as the commit machine takes it.
std::vector<commit::BoxRoles> roles_of(const EngineSpec& spec) {
  std::vector<commit::BoxRoles> roles;
  for (const BoxSpec& box : spec.boxes) roles.push_back(box.roles);
  return roles;
}

}  // namespace

Engine::Engine(const Data& spec, std::shared_ptr<comm::Endpoint> endpoint, std::vector<ProgramSpec> programs,
               const Tensors& tensors, std::int64_t version)
    : programs_(std::move(programs)),
      tables_(tensors),
      spec_(read_spec(spec, names())),
      transfers_(spec_.rank, std::move(endpoint)),
      values_(transfers_),
      machine_(spec_.rank, spec_.copy_mode),
      buckets_(machine_, transfers_, spec_.exact),
      shards_(
          machine_, transfers_, buckets_, updates_, std::bind_front(&Engine::update, this),
          [this](const commit::Actions& actions) { perform(actions); }, spec_.exact, spec_.record_dtype),
      replica_sync_(machine_, transfers_, shards_, std::bind_front(&Engine::state_tensors, this),
                    [this](const commit::Actions& actions) { perform(actions); }) {
  link(spec_);
  machine_.restart(version);
  apply(machine_.install(transfers_.generation(), spec_.world, roles_of(spec_)), {});
}

void Engine::prepare(NextSpec& next, const Tensors& tensors) {
  tables_.add(tensors);
  const Data* const unread = next.unread();
  if (unread == nullptr) return;
  EngineSpec spec = read_spec(*unread, names());
  check_successor(spec_, spec);
  link(spec);
  next.set_read(std::move(spec));
}

std::vector<BucketId> Engine::install(NextSpec& next, std::optional<std::int64_t> restart_at) {
  prepare(next, {});
  auto [spec, memories] = next.take();
  const commit::Actions roles = machine_.install(transfers_.generation(), spec.world, roles_of(spec));
  transfers_.drop();  // of syncing replicas
  spec_ = std::move(spec);
  apply(roles, std::move(memories));
  if (restart_at) perform(machine_.restart(*restart_at));
  return machine_.stale_buckets();
}

Names Engine::names() const {
  return {[this](const std::string& name) { return programs_.find(name); },
          [this](ProgramId id) -> const ProgramSpec& { return programs_.spec(id); },
          [this](const std::string& name) { return tables_.find(name); }};
}

void Engine::link(const EngineSpec& spec) {
  for (const BucketSpec& bucket : spec.buckets) {
    if (bucket.optimizer) programs_.linked(*bucket.optimizer);
  }
  for (const BufferUpdateSpec& update : spec.updates) programs_.linked(update.program);
  for (const auto& [id, unit] : spec.units) {
    for (const std::optional<ProgramId>& program :
         {unit.forward, unit.backward, unit.backward_inputs, unit.backward_weights, unit.evaluate}) {
      if (program) programs_.linked(*program);
    }
  }
}

void Engine::apply(const commit::Actions& roles, BucketMemories memories) {
  const BelowAutogradGuard guard;
  transfers_.set_members(spec_.world);
  buckets_.install(spec_.buckets, std::move(memories));
  updates_.install(spec_.buckets, spec_.updates, spec_.granule);
  shards_.install(spec_.boxes);
  replica_sync_.install();
  perform(roles);
  values_.reset(spec_.values, spec_.schedule.micro_batches);
  resolved_.clear();
  for (const auto& [id, unit] : spec_.units) resolved_.emplace(id, resolve(unit));
}

Engine::ResolvedInput Engine::resolve(const InputBinding& input) const {
  if (const auto* parameter = std::get_if<Parameter>(&input)) return c10::IValue(buckets_.parameter(*parameter));
  if (const auto* entry = std::get_if<TableEntry>(&input)) return c10::IValue(tables_.at(entry->table));
  if (const auto* value = std::get_if<BorderValue>(&input)) return *value;
  if (const auto* batch = std::get_if<BatchInput>(&input)) return *batch;
  if (std::holds_alternative<SampleKeys>(input)) return SampleKeys{};
  return StepKeys{};
}

Engine::GradientTarget Engine::resolve(const GradientBinding& gradient) {
  if (const auto* value = std::get_if<BorderValue>(&gradient)) return *value;
  const auto* parameter = std::get_if<Parameter>(&gradient);
  if (parameter == nullptr) return Nothing{};
  return Region{parameter->bucket, buckets_.add_region(*parameter)};
}

Engine::ResolvedUnit Engine::resolve(const UnitSpec& unit) {
  ResolvedUnit resolved;
  for (const InputBinding& input : unit.inputs) resolved.inputs.push_back(resolve(input));
  for (std::size_t i = 0; i < unit.eval_inputs.size(); ++i) {
    const bool same = i < unit.inputs.size() && unit.inputs[i] == unit.eval_inputs[i];
    resolved.eval_inputs.push_back(same ? resolved.inputs[i] : resolve(unit.eval_inputs[i]));
  }
  for (const GradientBinding& gradient : unit.grads) resolved.grads.push_back(resolve(gradient));
  for (const auto* inputs : {&unit.inputs, &unit.eval_inputs}) {
    for (const InputBinding& input : *inputs) {
      if (const auto* parameter = std::get_if<Parameter>(&input)) resolved.buckets.push_back(parameter->bucket);
    }
  }
  std::sort(resolved.buckets.begin(), resolved.buckets.end());
  resolved.buckets.erase(std::unique(resolved.buckets.begin(), resolved.buckets.end()), resolved.buckets.end());
  const auto linked = [this](std::optional<ProgramId> id) { return id ? &programs_.linked(*id) : nullptr; };
  resolved.forward = linked(unit.forward);
  resolved.backward = linked(unit.backward);
  resolved.backward_inputs = linked(unit.backward_inputs);
  resolved.backward_weights = linked(unit.backward_weights);
  resolved.evaluate = linked(unit.evaluate);
  return resolved;
}

void Engine::expect(BoxId box) const {
  if (box.index() >= shards_.size()) throw ExecError("there is no box " + std::to_string(box.value()));
}

std::size_t Engine::state_tensors(const BoxSpec& box) const {
  const std::optional<ProgramId> optimizer = buckets_.spec(box.bucket()).optimizer;
  return optimizer ? programs_.spec(*optimizer).outputs.size() - 1 : 0;
}

void Engine::check_inputs(const Tensors& inputs) const {
  const std::int64_t samples = spec_.schedule.rows.back();
  for (const auto& [name, tensor] : inputs) {
    if (tensor.dim() == 0 || tensor.size(0) < samples) {
      throw ExecError("input " + name + ": holds " + std::to_string(tensor.dim() ? tensor.size(0) : 0) +
                      " samples, the tile has " + std::to_string(samples));
    }
  }
}

Holdings Engine::holdings() const {
  Holdings found;
  found.version = machine_.version();
  for (const commit::Holding& each : machine_.holdings()) {
    found.boxes.push_back({each.box, each.state.digest, each.recorded});
  }
  found.syncing = machine_.syncing();
  found.lagging = machine_.lagging();
  found.stale_buckets = machine_.stale_buckets();
  found.pending = machine_.pending();
  found.votes = votes_;
  found.last_committed = last_committed_;
  found.copied_bytes = replica_sync_.copied_bytes();
  found.sent_at_once = replica_sync_.sent_at_once();
  found.sync_peak = replica_sync_.sync_peak();
  return found;
}

const ShardState& Engine::read(BoxId box) const {
  expect(box);
  return shards_.state(box);
}

at::Tensor Engine::read(const std::string& name) const {
  if (const std::optional<BucketId> bucket = buckets_.find(name)) return buckets_.work(*bucket);
  if (const std::optional<TableId> table = tables_.find(name)) return tables_.at(*table);
  throw ExecError("read: there is no bucket, buffer or constant " + name);
}

void Engine::load(BoxId box, const at::Tensor& master, const std::vector<at::Tensor>& state) {
  const BelowAutogradGuard guard;
  expect(box);
  const std::size_t wanted = state_tensors(shards_.spec(box));
  if (state.size() != wanted) {
    throw ExecError("box " + std::to_string(box.value()) + ": its optimizer has " + std::to_string(wanted) +
                    " state tensors, not " + std::to_string(state.size()));
  }
  shards_.load(box, master, state);
  replica_sync_.forget(box);
}

void Engine::load(const std::string& name, const at::Tensor& value) {
  const BelowAutogradGuard guard;
  if (const std::optional<BucketId> bucket = buckets_.find(name)) return buckets_.set_work(*bucket, value);
  const std::optional<TableId> table = tables_.find(name);
  if (!table) throw ExecError("load: there is no bucket, buffer or constant " + name);
  const at::Tensor& held = tables_.at(*table);
  if (held.sizes() != value.sizes()) throw ExecError("load: the new value of " + name + " has another shape");
  held.copy_(value);
}

bool Engine::intact(BoxId box) const {
  expect(box);
  return shards_.intact(box);
}

void Engine::replicate(const std::vector<ReplicaTransfer>& tasks) {
  for (const ReplicaTransfer& task : tasks) {
    expect(task.box);
    if (task.target == spec_.rank) perform(machine_.expect_state(task.box));
    if (task.source == spec_.rank) perform(machine_.send_state(task.box, task.target));
  }
  replica_sync_.send_states();
}

}  // namespace elaswave::exec

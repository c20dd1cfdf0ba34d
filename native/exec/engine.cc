// Declarations and state of the engine; the interpreter is in interpreter.cc.
#include "engine.h"

#include <algorithm>
#include <cmath>

#include "engine_impl.h"
#include "plain_dispatch.h"

namespace elaswave::exec {
namespace {

std::string unit_place(int unit) { return "unit " + std::to_string(unit); }

std::size_t with_gradient(const std::vector<Binding>& outputs, const std::vector<ValueSpec>& values) {
  return static_cast<std::size_t>(std::count_if(outputs.begin(), outputs.end(), [&](const Binding& output) {
    return output.kind == Binding::Kind::kLoss ||
           (output.kind == Binding::Kind::kValue && values[static_cast<std::size_t>(output.index)].has_grad);
  }));
}

void check_modelled(const std::string& place, const Modelled& modelled) {
  for (const double seconds : {modelled.forward_s, modelled.backward_s, modelled.fixed_s}) {
    if (!std::isfinite(seconds) || seconds < 0.0) {
      throw ExecError(place + ": a modelled duration of " + std::to_string(seconds) +
                      " s; durations are finite and not negative");
    }
  }
}

}  // namespace

Engine::Impl::Impl(int rank, std::shared_ptr<comm::Endpoint> endpoint, std::int64_t seed, std::int64_t global_batch,
                   std::int64_t granule)
    : courier(rank, std::move(endpoint)),
      values(courier),
      buckets(courier),
      boxes(courier, buckets),
      folds(courier, granule),
      seed_(seed),
      global_batch_(global_batch),
      granule_(granule),
      world_{rank} {
  if (granule < 1 || global_batch < 1) throw ExecError("engine: global batch and granule must be at least 1");
}

int Engine::Impl::add_program(const std::string& name, ProgramSpec spec) {
  spec.name = name;
  auto program = std::make_unique<UnitProgram>(std::move(spec));
  ready_ = false;
  for (std::size_t i = 0; i < programs_.size(); ++i) {
    if (programs_[i]->name() == name) {
      optimizers_.erase(static_cast<int>(i));
      programs_[i] = std::move(program);
      return static_cast<int>(i);
    }
  }
  programs_.push_back(std::move(program));
  return static_cast<int>(programs_.size()) - 1;
}

void Engine::Impl::check_program(const std::string& place, int program, std::size_t inputs, std::size_t outputs) const {
  if (program < 0 || program >= static_cast<int>(programs_.size())) {
    throw ExecError(place + ": there is no program " + std::to_string(program));
  }
  const UnitProgram& found = *programs_[static_cast<std::size_t>(program)];
  if (static_cast<std::size_t>(found.num_inputs()) != inputs || found.num_outputs() != outputs) {
    throw ExecError(place + ": program " + found.name() + " has " + std::to_string(found.num_inputs()) +
                    " inputs and " + std::to_string(found.num_outputs()) + " outputs, declared are " +
                    std::to_string(inputs) + " and " + std::to_string(outputs));
  }
}

int Engine::Impl::add_bucket(BucketSpec spec) {
  if (spec.optimizer < 0 || spec.optimizer >= static_cast<int>(programs_.size())) {
    throw ExecError("bucket " + spec.name + ": there is no program " + std::to_string(spec.optimizer));
  }
  ready_ = false;
  return buckets.add(std::move(spec));
}

int Engine::Impl::add_box(BoxSpec spec) {
  ready_ = false;
  return boxes.add(std::move(spec));
}

void Engine::Impl::assign_box(int box, int owner, std::vector<int> holders) {
  ready_ = false;
  boxes.assign(box, owner, std::move(holders));
}

std::size_t Engine::Impl::state_tensors(int box) const {
  const BucketSpec& bucket = buckets.spec(boxes.spec(box).bucket);
  return programs_[static_cast<std::size_t>(bucket.optimizer)]->num_outputs() - 1;
}

int Engine::Impl::add_table(const std::string& name, at::Tensor tensor) {
  ready_ = false;
  const auto found = std::find(table_names_.begin(), table_names_.end(), name);
  if (found != table_names_.end()) {
    table[static_cast<std::size_t>(found - table_names_.begin())] = std::move(tensor);
    return static_cast<int>(found - table_names_.begin());
  }
  table_names_.push_back(name);
  table.push_back(std::move(tensor));
  return static_cast<int>(table.size()) - 1;
}

int Engine::Impl::expect_box(int box) const {
  if (box < 0 || box >= boxes.size()) throw ExecError("there is no box " + std::to_string(box));
  return box;
}

int Engine::Impl::find_table(const std::string& name) const {
  const auto found = std::find(table_names_.begin(), table_names_.end(), name);
  if (found == table_names_.end()) throw ExecError("no buffer or constant " + name);
  return static_cast<int>(found - table_names_.begin());
}

int Engine::Impl::add_value(ValueSpec spec) {
  ready_ = false;
  return values.add(std::move(spec));
}

int Engine::Impl::add_fold(FoldSpec spec) {
  const std::string place = "fold " + std::to_string(folds.size());
  for (const int buffer : spec.buffers) {
    if (buffer < 0 || buffer >= static_cast<int>(table.size())) {
      throw ExecError(place + ": there is no buffer " + std::to_string(buffer));
    }
  }
  check_program(place, spec.program, spec.buffers.size() + spec.values.size(), spec.buffers.size());
  ready_ = false;
  return folds.add(std::move(spec));
}

void Engine::Impl::regroup_fold(int fold, std::vector<OwnedSpan> group) {
  if (fold < 0 || fold >= folds.size()) throw ExecError("there is no fold " + std::to_string(fold));
  folds.regroup(fold, std::move(group));
}

void Engine::Impl::check_bindings(const std::string& place, const std::vector<Binding>& bindings,
                                  bool are_inputs) const {
  const auto limit = [&](const Binding& binding) {
    switch (binding.kind) {
      case Binding::Kind::kParam:
        return buckets.size();
      case Binding::Kind::kTable:
        return static_cast<int>(table.size());
      case Binding::Kind::kValue:
        return static_cast<int>(values.specs().size());
      case Binding::Kind::kFold:
        return folds.size();
      default:
        return 0;
    }
  };
  for (std::size_t i = 0; i < bindings.size(); ++i) {
    const Binding& binding = bindings[i];
    const std::string here = place + " " + std::to_string(i);
    const int count = limit(binding);
    if (count > 0 ? binding.index < 0 || binding.index >= count : binding.index != -1) {
      throw ExecError(here + ": index " + std::to_string(binding.index) + " of " + std::to_string(count));
    }
    if (binding.kind == Binding::Kind::kFold &&
        (binding.item < 0 || binding.item >= static_cast<int>(folds.spec(binding.index).values.size()))) {
      throw ExecError(here + ": fold " + std::to_string(binding.index) + " has no value " +
                      std::to_string(binding.item));
    }
    if (are_inputs && binding.kind == Binding::Kind::kNone) throw ExecError(here + ": an input comes from somewhere");
  }
}

void Engine::Impl::check_unit(const std::string& place, const UnitSpec& spec) const {
  check_bindings(place + ", input", spec.inputs, true);
  check_bindings(place + ", output", spec.outputs, false);
  check_bindings(place + ", gradient", spec.grads, false);
  check_bindings(place + ", eval input", spec.eval_inputs, true);
  check_bindings(place + ", eval output", spec.eval_outputs, false);
  if (spec.modelled) check_modelled(place, *spec.modelled);
  const auto saved = static_cast<std::size_t>(spec.num_saved);
  if (spec.forward != -1) check_program(place, spec.forward, spec.inputs.size(), spec.outputs.size() + saved);
  if (spec.backward != -1) {
    check_program(place, spec.backward, saved + with_gradient(spec.outputs, values.specs()), spec.grads.size());
  }
  if (spec.eval != -1) check_program(place, spec.eval, spec.eval_inputs.size(), spec.eval_outputs.size());
}

void Engine::Impl::add_unit(int unit, UnitSpec spec) {
  check_unit(unit_place(unit), spec);
  ready_ = false;
  units_[unit] = std::move(spec);
}

void Engine::Impl::clear_units() {
  ready_ = false;
  units_.clear();
}

void Engine::Impl::set_world(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  if (!std::binary_search(ranks.begin(), ranks.end(), courier.rank())) {
    throw ExecError("world: rank " + std::to_string(courier.rank()) + " is not in it");
  }
  courier.set_members(ranks);
  world_ = std::move(ranks);
}

Resolved Engine::Impl::resolve_input(const Binding& binding) const {
  Resolved resolved{binding, {}, -1};
  if (binding.kind == Binding::Kind::kParam) resolved.constant = buckets.parameter(binding);
  if (binding.kind == Binding::Kind::kTable) resolved.constant = table[static_cast<std::size_t>(binding.index)];
  return resolved;
}

ResolvedUnit Engine::Impl::resolve(const UnitSpec& spec) {
  ResolvedUnit unit;
  for (const Binding& binding : spec.inputs) unit.inputs.push_back(resolve_input(binding));
  for (const Binding& binding : spec.eval_inputs) unit.eval_inputs.push_back(resolve_input(binding));
  for (const auto* inputs : {&spec.inputs, &spec.eval_inputs}) {
    for (const Binding& binding : *inputs) {
      if (binding.kind == Binding::Kind::kParam) unit.buckets.push_back(binding.index);
    }
  }
  std::sort(unit.buckets.begin(), unit.buckets.end());
  unit.buckets.erase(std::unique(unit.buckets.begin(), unit.buckets.end()), unit.buckets.end());
  for (Binding binding : spec.grads) {
    Resolved resolved{binding, {}, -1};
    if (binding.kind == Binding::Kind::kParam) {
      // A gradient lies in the bucket as its parameter does.
      for (const Binding& input : spec.inputs) {
        const bool same =
            input.kind == Binding::Kind::kParam && input.index == binding.index && input.offset == binding.offset;
        if (same && binding.strides.empty()) binding.strides = input.strides;
      }
      resolved.region = buckets.add_region(binding);
    }
    unit.grads.push_back(std::move(resolved));
  }
  return unit;
}

void Engine::Impl::set_schedule(Schedule schedule) {
  boxes.check();
  const Declared declared{values.specs(), units_, buckets.size()};
  StepList train = check_steps(schedule.train, schedule.micro_batches, declared, StepMode::kTrain);
  StepList eval = check_steps(schedule.eval, schedule.micro_batches, declared, StepMode::kEval);
  ready_ = false;
  // Declarations may have been replaced since their users were checked.
  for (const auto& [index, spec] : units_) check_unit(unit_place(index), spec);
  buckets.forget_regions();
  resolved_.clear();
  for (const auto& [index, spec] : units_) resolved_[index] = resolve(spec);
  train_ = std::move(train);
  eval_ = std::move(eval);
  micro_batches_ = schedule.micro_batches;
  first_sample_ = schedule.first_sample;
  values.reset(std::move(schedule.micro_batches));
  ready_ = true;
}

void Engine::Impl::check_inputs(const Inputs& inputs) const {
  std::int64_t samples = 0;
  for (const SampleSpan& span : micro_batches_) samples = std::max(samples, span.hi - first_sample_);
  for (const auto& [name, tensor] : inputs) {
    if (tensor.dim() == 0 || tensor.size(0) < samples) {
      throw ExecError("input " + name + ": holds " + std::to_string(tensor.dim() ? tensor.size(0) : 0) +
                      " samples, the tile has " + std::to_string(samples));
    }
  }
}

Engine::Engine(int rank, std::shared_ptr<comm::Endpoint> endpoint, std::int64_t seed, std::int64_t global_batch,
               std::int64_t granule)
    : impl_(std::make_unique<Impl>(rank, std::move(endpoint), seed, global_batch, granule)) {}
Engine::~Engine() = default;

int Engine::add_program(const std::string& name, ProgramSpec spec) { return impl_->add_program(name, std::move(spec)); }
int Engine::add_bucket(BucketSpec spec) { return impl_->add_bucket(std::move(spec)); }
int Engine::add_box(BoxSpec spec) { return impl_->add_box(std::move(spec)); }
void Engine::assign_box(int box, int owner, std::vector<int> holders) {
  impl_->assign_box(impl_->expect_box(box), owner, std::move(holders));
}
void Engine::set_record_type(at::ScalarType type) { impl_->boxes.set_record_type(type); }
void Engine::set_copy_mode(CopyMode mode) { impl_->boxes.set_copy_mode(mode); }
int Engine::add_table(const std::string& name, at::Tensor tensor) { return impl_->add_table(name, std::move(tensor)); }
int Engine::add_value(ValueSpec spec) { return impl_->add_value(std::move(spec)); }
void Engine::regroup_fold(int fold, std::vector<OwnedSpan> group) { impl_->regroup_fold(fold, std::move(group)); }
int Engine::add_fold(FoldSpec spec) { return impl_->add_fold(std::move(spec)); }
void Engine::add_unit(int unit, UnitSpec spec) { impl_->add_unit(unit, std::move(spec)); }
void Engine::clear_units() { impl_->clear_units(); }
void Engine::set_world(std::vector<int> ranks) { impl_->set_world(std::move(ranks)); }
void Engine::set_schedule(Schedule schedule) { impl_->set_schedule(std::move(schedule)); }

StepResult Engine::step(std::int64_t step_index, const Inputs& inputs, const std::vector<std::vector<double>>& hyper,
                        const StepOptions& options) {
  return impl_->step(step_index, inputs, hyper, options);
}
EvalResult Engine::evaluate(std::int64_t step_index, const Inputs& inputs, double deadline_s) {
  return impl_->evaluate(step_index, inputs, deadline_s);
}
void Engine::sync(double deadline_s) { impl_->sync(deadline_s); }
void Engine::refresh_work(const std::vector<std::vector<int>>& wanted, double deadline_s) {
  impl_->refresh_work(wanted, deadline_s);
}
bool Engine::pending() const { return impl_->pending; }
std::vector<int> Engine::recorded() const { return impl_->boxes.recorded(); }
std::uint64_t Engine::copied_bytes() const { return impl_->boxes.copied_bytes(); }
const Votes& Engine::votes() const { return impl_->votes; }
StepResult Engine::commit_pending(const Votes& votes) { return impl_->commit_pending(votes); }
void Engine::drop_pending() { impl_->drop_pending(); }

const Base& Engine::base(int box) const { return impl_->boxes.base(impl_->expect_box(box)); }
void Engine::set_base(int box, const at::Tensor& master, const std::vector<at::Tensor>& state) {
  const PlainDispatch plain;
  if (state.size() != impl_->state_tensors(impl_->expect_box(box))) {
    throw ExecError("box " + std::to_string(box) + ": its optimizer has " + std::to_string(impl_->state_tensors(box)) +
                    " state tensors, not " + std::to_string(state.size()));
  }
  impl_->boxes.set_base(box, master, state);
}
bool Engine::intact(int box) const { return impl_->boxes.intact(impl_->expect_box(box)); }
void Engine::send_base(int box, int peer) { impl_->boxes.send_base(impl_->expect_box(box), peer); }
void Engine::expect_base(int box, int owner) {
  impl_->boxes.expect_base(impl_->expect_box(box), owner, impl_->state_tensors(box));
}
std::vector<int> Engine::catching() const { return impl_->boxes.catching(); }
at::Tensor Engine::bucket_work(const std::string& name) const {
  return impl_->buckets.spec(impl_->buckets.find(name)).work;
}
at::Tensor Engine::table(const std::string& name) const {
  return impl_->table[static_cast<std::size_t>(impl_->find_table(name))];
}
void Engine::set_table(const std::string& name, const at::Tensor& value) {
  const PlainDispatch plain;
  const at::Tensor& held = impl_->table[static_cast<std::size_t>(impl_->find_table(name))];
  if (held.sizes() != value.sizes()) throw ExecError("buffer " + name + ": the new value has another shape");
  held.copy_(value);
}
std::vector<std::string> Engine::stale_buckets() const { return impl_->buckets.stale(); }
std::int64_t Engine::version() const { return impl_->version; }
void Engine::set_version(std::int64_t version) { impl_->version = version; }
Progress Engine::progress() const { return impl_->progress(); }
std::optional<StepResult> Engine::last_committed() const { return impl_->last_committed; }
int Engine::find_bucket(const std::string& name) const { return impl_->buckets.find(name); }
int Engine::find_table(const std::string& name) const { return impl_->find_table(name); }

}  // namespace elaswave::exec

#include "values.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <sstream>

#include "program.h"

namespace elaswave::exec {
namespace {

// Samples [lo, hi) of a tensor; a view.
at::Tensor samples_of(const at::Tensor& tensor, const ValueSpec& spec, std::int64_t lo, std::int64_t hi) {
  if (spec.sample_axis == -1) return tensor;
  const std::int64_t period = spec.shape[static_cast<std::size_t>(spec.sample_axis)];
  return tensor.narrow(spec.sample_axis, lo * period, (hi - lo) * period);
}

std::string describe(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::ostringstream text;
  text << dtype << ' ' << sizes;
  return text.str();
}

}  // namespace

int Values::add(ValueSpec spec) {
  const auto dims = static_cast<int>(spec.shape.size());
  if (spec.sample_axis < -1 || spec.sample_axis >= dims) {
    throw ExecError("value " + spec.name + ": sample axis " + std::to_string(spec.sample_axis) + " of " +
                    std::to_string(dims) + " dimensions");
  }
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (specs_[i].name == spec.name) {
      specs_[i] = std::move(spec);
      return static_cast<int>(i);
    }
  }
  specs_.push_back(std::move(spec));
  return static_cast<int>(specs_.size()) - 1;
}

void Values::reset(std::vector<SampleSpan> micro_batches) {
  micro_batches_ = std::move(micro_batches);
  slots_.clear();
  slots_.resize(specs_.size() * micro_batches_.size() * 2);
}

void Values::clear() {
  for (Slot& slot : slots_) slot = Slot();
}

Values::Slot& Values::slot(std::int64_t value, std::int64_t micro_batch, bool grad) {
  const auto index = (value * static_cast<std::int64_t>(micro_batches_.size()) + micro_batch) * 2 + (grad ? 1 : 0);
  return slots_[static_cast<std::size_t>(index)];
}

std::vector<std::int64_t> Values::shape_of(const ValueSpec& spec, std::int64_t samples) const {
  std::vector<std::int64_t> shape = spec.shape;
  if (spec.sample_axis != -1) shape[static_cast<std::size_t>(spec.sample_axis)] *= samples;
  return shape;
}

void Values::post_receive(const Step& step) {
  const ValueSpec& spec = specs_[static_cast<std::size_t>(step.index)];
  const std::int64_t samples = micro_batches_[static_cast<std::size_t>(step.micro_batch)].size();
  Slot& target = slot(step.index, step.micro_batch, step.grad);
  Piece piece{{}, {}, step.lo, step.hi};
  if (spec.sample_axis == -1 && step.grad) {
    // Every reader adds its own summand; the first takes the place of the sum.
    piece.staging = at::empty(spec.shape, spec.dtype);
    piece.transfer = courier_.receive(piece.staging, step.peer, step.tag);
    target.pending.push_back(std::move(piece));
    return;
  }
  if (!target.tensor.defined()) {
    target.tensor = at::empty(shape_of(spec, samples), spec.dtype);
    target.own = true;
  }
  at::Tensor part = samples_of(target.tensor, spec, step.lo, step.hi);
  if (!part.is_contiguous()) part = piece.staging = at::empty(part.sizes(), spec.dtype);
  piece.transfer = courier_.receive(part, step.peer, step.tag);
  target.pending.push_back(std::move(piece));
}

void Values::send(const Step& step) {
  const ValueSpec& spec = specs_[static_cast<std::size_t>(step.index)];
  const at::Tensor whole =
      step.grad ? gradient(step.index, step.micro_batch) : activation(step.index, step.micro_batch);
  courier_.send(samples_of(whole, spec, step.lo, step.hi).contiguous(), step.peer, step.tag);
}

void Values::settle(Slot& slot, const ValueSpec& spec) {
  if (slot.pending.empty()) return;
  std::vector<comm::Transfer> transfers;
  for (const Piece& piece : slot.pending) transfers.push_back(piece.transfer);
  courier_.wait(transfers);
  for (const Piece& piece : slot.pending) {
    if (!piece.staging.defined()) continue;
    if (spec.sample_axis != -1) {
      samples_of(slot.tensor, spec, piece.lo, piece.hi).copy_(piece.staging);
    } else if (slot.tensor.defined()) {
      slot.tensor.add_(piece.staging);
    } else {
      slot.tensor = piece.staging;
      slot.own = true;
    }
  }
  slot.pending.clear();
}

at::Tensor Values::activation(std::int64_t value, std::int64_t micro_batch) {
  const ValueSpec& spec = specs_[static_cast<std::size_t>(value)];
  Slot& held = slot(value, micro_batch, false);
  settle(held, spec);
  if (!held.tensor.defined()) {
    throw ExecError("value " + spec.name + ", micro-batch " + std::to_string(micro_batch) +
                    ": read, but neither produced nor received");
  }
  return held.tensor;
}

void Values::set_activation(std::int64_t value, std::int64_t micro_batch, const at::Tensor& produced) {
  const ValueSpec& spec = specs_[static_cast<std::size_t>(value)];
  const auto shape = shape_of(spec, micro_batches_[static_cast<std::size_t>(micro_batch)].size());
  if (produced.sizes() != at::IntArrayRef(shape) || produced.scalar_type() != spec.dtype) {
    throw ExecError("value " + spec.name + ": was produced as " + describe(produced.sizes(), produced.scalar_type()) +
                    ", declared as " + describe(shape, spec.dtype));
  }
  slot(value, micro_batch, false).tensor = produced.contiguous();
}

at::Tensor Values::gradient(std::int64_t value, std::int64_t micro_batch) {
  const ValueSpec& spec = specs_[static_cast<std::size_t>(value)];
  Slot& held = slot(value, micro_batch, true);
  settle(held, spec);
  return held.tensor.defined() ? held.tensor : zeros(value, micro_batch);
}

at::Tensor Values::zeros(std::int64_t value, std::int64_t micro_batch) const {
  const ValueSpec& spec = specs_[static_cast<std::size_t>(value)];
  return at::zeros(shape_of(spec, micro_batches_[static_cast<std::size_t>(micro_batch)].size()), spec.dtype);
}

void Values::add_gradient(std::int64_t value, std::int64_t micro_batch, const at::Tensor& addend) {
  const ValueSpec& spec = specs_[static_cast<std::size_t>(value)];
  Slot& held = slot(value, micro_batch, true);
  settle(held, spec);
  if (!held.tensor.defined()) {
    // It may be an alias of something else (a tangent handed through), hence not ours to add to.
    held.tensor = addend.contiguous();
    held.own = false;
  } else if (held.own) {
    held.tensor.add_(addend);
  } else {
    held.tensor = at::add(held.tensor, addend);
    held.own = true;
  }
}

void Values::release(std::int64_t value, std::int64_t micro_batch, bool grad) {
  Slot& held = slot(value, micro_batch, grad);
  held.tensor = at::Tensor();
  held.own = false;
  // Pieces that nobody read stay posted with the courier until they arrive; their order on the link must not change.
  held.pending.clear();
}

}  // namespace elaswave::exec

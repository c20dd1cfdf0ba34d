#include "exec/step/values.h"

#include <ATen/ops/add.h>

#include <sstream>

#include "exec/device/memory.h"
#include "exec/program/program.h"

namespace elaswave::exec {
namespace {

// Samples [lo, hi) of a tensor; a view.
at::Tensor samples_of(const at::Tensor& tensor, const ValueSpec& spec, std::int64_t lo, std::int64_t hi) {
  if (!spec.sample_axis) return tensor;
  const std::int64_t period = spec.shape[*spec.sample_axis];
  return tensor.narrow(static_cast<std::int64_t>(*spec.sample_axis), lo * period, (hi - lo) * period);
}

std::string describe(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::ostringstream text;
  text << dtype << ' ' << sizes;
  return text.str();
}

}  // namespace

void Values::reset(std::vector<ValueSpec> specs, std::vector<SampleSpan> micro_batches) {
  specs_ = std::move(specs);
  micro_batches_ = std::move(micro_batches);
  slots_.clear();
  slots_.resize(specs_.size() * micro_batches_.size() * 2);
}

void Values::clear() {
  for (Slot& slot : slots_) slot = Slot();
}

Values::Slot& Values::slot(ValueId value, std::int64_t micro_batch, bool grad) {
  return slots_[(value.index() * micro_batches_.size() + static_cast<std::size_t>(micro_batch)) * 2 + (grad ? 1 : 0)];
}

std::vector<std::int64_t> Values::shape_of(const ValueSpec& spec, std::int64_t samples) const {
  std::vector<std::int64_t> shape = spec.shape;
  if (spec.sample_axis) shape[*spec.sample_axis] *= samples;
  return shape;
}

void Values::post_receive(const Step& step) {
  const ValueSpec& spec = declared(step.value());
  Slot& target = slot(step.value(), step.micro_batch, step.grad);
  Piece piece{{}, {}, step.lo, step.hi};
  if (!spec.sample_axis && step.grad) {
    // Every reader adds its own summand; the first takes the place of the sum.
    piece.staging = device_empty(spec.shape, spec.dtype);
    piece.transfer = transfers_.receive(piece.staging, step.peer, step.tag);
    target.pending.push_back(std::move(piece));
    return;
  }
  if (!target.tensor.defined()) {
    target.tensor = device_empty(shape_of(spec, samples(step.micro_batch)), spec.dtype);
    target.own = true;
  }
  at::Tensor part = samples_of(target.tensor, spec, step.lo, step.hi);
  if (!part.is_contiguous()) part = piece.staging = device_empty(part.sizes(), spec.dtype);
  piece.transfer = transfers_.receive(part, step.peer, step.tag);
  target.pending.push_back(std::move(piece));
}

void Values::send(const Step& step) {
  const ValueSpec& spec = declared(step.value());
  const at::Tensor whole =
      step.grad ? gradient(step.value(), step.micro_batch) : activation(step.value(), step.micro_batch);
  transfers_.send(samples_of(whole, spec, step.lo, step.hi).contiguous(), step.peer, step.tag);
}

void Values::wait_ready(Slot& slot, const ValueSpec& spec) {
  if (slot.pending.empty()) return;
  std::vector<comm::Transfer> transfers;
  for (const Piece& piece : slot.pending) transfers.push_back(piece.transfer);
  transfers_.wait(transfers);
  for (const Piece& piece : slot.pending) {
    if (!piece.staging.defined()) continue;
    if (spec.sample_axis) {
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

at::Tensor Values::activation(ValueId value, std::int64_t micro_batch) {
  const ValueSpec& spec = declared(value);
  Slot& held = slot(value, micro_batch, false);
  wait_ready(held, spec);
  if (!held.tensor.defined()) {
    throw ExecError("value " + spec.name + ", micro-batch " + std::to_string(micro_batch) +
                    ": read, but neither produced nor received");
  }
  return held.tensor;
}

void Values::set_activation(ValueId value, std::int64_t micro_batch, const at::Tensor& produced) {
  const ValueSpec& spec = declared(value);
  const auto shape = shape_of(spec, samples(micro_batch));
  if (produced.sizes() != at::IntArrayRef(shape) || produced.scalar_type() != spec.dtype) {
    throw ExecError("value " + spec.name + ": was produced as " + describe(produced.sizes(), produced.scalar_type()) +
                    ", declared as " + describe(shape, spec.dtype));
  }
  slot(value, micro_batch, false).tensor = produced.contiguous();
}

at::Tensor Values::gradient(ValueId value, std::int64_t micro_batch) {
  const ValueSpec& spec = declared(value);
  Slot& held = slot(value, micro_batch, true);
  wait_ready(held, spec);
  return held.tensor.defined() ? held.tensor : zeros(value, micro_batch);
}

at::Tensor Values::zeros(ValueId value, std::int64_t micro_batch) const {
  const ValueSpec& spec = declared(value);
  return device_zeros(shape_of(spec, samples(micro_batch)), spec.dtype);
}

void Values::add_gradient(ValueId value, std::int64_t micro_batch, const at::Tensor& addend) {
  const ValueSpec& spec = declared(value);
  Slot& held = slot(value, micro_batch, true);
  wait_ready(held, spec);
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

void Values::release(ValueId value, std::int64_t micro_batch, bool grad) {
  Slot& held = slot(value, micro_batch, grad);
  held.tensor = at::Tensor();
  held.own = false;
  // Pieces that nobody read stay posted until they arrive; their order on the link must not change.
  held.pending.clear();
}

}  // namespace elaswave::exec

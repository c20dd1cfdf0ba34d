#include "buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "program.h"

namespace elaswave::exec {
namespace {

// In double, over interleaved partial sums so that the loop is not one long chain of additions; fixed order.
double sum_of_squares(const at::Tensor& tensor) {
  constexpr std::int64_t kLanes = 8;
  double partial[kLanes] = {};
  const float* data = tensor.const_data_ptr<float>();
  const std::int64_t count = tensor.numel();
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = data[i + lane];
      partial[lane] += value * value;
    }
  }
  double total = 0.0;
  for (; i < count; ++i) total += static_cast<double>(data[i]) * static_cast<double>(data[i]);
  for (const double part : partial) total += part;
  return total;
}

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  return numel;
}

// Elements between the first and the last one of a strided parameter; -1 if the strides cannot be.
std::int64_t extent_of(const Binding& binding) {
  if (binding.strides.size() != binding.shape.size()) return -1;
  std::int64_t extent = 1;
  for (std::size_t d = 0; d < binding.shape.size(); ++d) {
    if (binding.strides[d] < 0) return -1;
    extent += (binding.shape[d] - 1) * binding.strides[d];
  }
  return extent;
}

at::Tensor view_of(const at::Tensor& flat, const Binding& binding) {
  if (binding.strides.empty()) {
    return flat.narrow(0, binding.offset, numel_of(binding.shape)).view(binding.shape);
  }
  return flat.as_strided(binding.shape, binding.strides, flat.storage_offset() + binding.offset);
}

void expect_slice(const std::string& name, const char* what, const at::Tensor& tensor, std::int64_t numel) {
  const bool fits = tensor.defined() && tensor.dim() == 1 && tensor.numel() == numel && tensor.is_contiguous();
  if (!fits) {
    throw ExecError("bucket " + name + ": " + what + " must be a contiguous tensor of " + std::to_string(numel) +
                    " elements in one dimension");
  }
}

void expect_float(const std::string& name, const char* what, const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kFloat) throw ExecError("bucket " + name + ": " + what + " must be float32");
}

}  // namespace

int Buckets::add(BucketSpec spec) {
  check(spec);
  Bucket bucket;
  for (const OwnedSpan& span : spec.owners) {
    if (span.rank == courier_.rank() && span.hi > span.lo) bucket.own = span;
  }
  const std::int64_t owned = bucket.own ? bucket.own->hi - bucket.own->lo : 0;
  if (bucket.own) {
    expect_slice(spec.name, "master", spec.master, owned);
    expect_float(spec.name, "master", spec.master);
  }
  for (const at::Tensor& state : spec.state) expect_slice(spec.name, "state", state, owned);
  bucket.spec = std::move(spec);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].spec.name == bucket.spec.name) {
      buckets_[i] = std::move(bucket);
      return static_cast<int>(i);
    }
  }
  buckets_.push_back(std::move(bucket));
  return size() - 1;
}

void Buckets::check(const BucketSpec& spec) const {
  const bool member = std::find(spec.group.begin(), spec.group.end(), courier_.rank()) != spec.group.end();
  if (member) expect_slice(spec.name, "work", spec.work, spec.numel);
  std::int64_t covered = 0;
  for (const OwnedSpan& span : spec.owners) {
    if (span.lo != covered || span.hi < span.lo) {
      throw ExecError("bucket " + spec.name + ": owners must cut [0, " + std::to_string(spec.numel) +
                      ") in order, rank " + std::to_string(span.rank) + " has [" + std::to_string(span.lo) + ", " +
                      std::to_string(span.hi) + ") after " + std::to_string(covered));
    }
    covered = span.hi;
    if (std::find(spec.group.begin(), spec.group.end(), span.rank) == spec.group.end()) {
      throw ExecError("bucket " + spec.name + ": owner " + std::to_string(span.rank) + " is not in its group");
    }
  }
  if (covered != spec.numel) {
    throw ExecError("bucket " + spec.name + ": owners cover " + std::to_string(covered) + " of " +
                    std::to_string(spec.numel) + " elements");
  }
  if (!std::is_sorted(spec.group.begin(), spec.group.end())) {
    throw ExecError("bucket " + spec.name + ": the group's ranks must ascend, sums are formed in their order");
  }
}

void Buckets::expect_held(const BucketSpec& spec) const {
  if (spec.work.defined()) return;
  throw ExecError("bucket " + spec.name + ": rank " + std::to_string(courier_.rank()) + " has no working copy of it");
}

int Buckets::find(const std::string& name) const {
  std::string known;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].spec.name == name) return static_cast<int>(i);
    known += (i ? ", " : "") + buckets_[i].spec.name;
  }
  throw ExecError("no bucket " + name + "; there are: " + known);
}

at::Tensor Buckets::parameter(const Binding& binding) const {
  const Bucket& bucket = at(binding.index);
  expect_held(bucket.spec);
  std::int64_t last = binding.offset + numel_of(binding.shape);
  if (!binding.strides.empty() && extent_of(binding) != numel_of(binding.shape)) {
    throw ExecError("bucket " + bucket.spec.name + ": the strides of the parameter at " +
                    std::to_string(binding.offset) + " do not fill its memory densely");
  }
  if (binding.offset < 0 || last > bucket.spec.numel) {
    throw ExecError("bucket " + bucket.spec.name + ": a parameter at [" + std::to_string(binding.offset) + ", " +
                    std::to_string(last) + ") lies outside its " + std::to_string(bucket.spec.numel) + " elements");
  }
  return view_of(bucket.spec.work, binding);
}

int Buckets::add_region(const Binding& binding) {
  parameter(binding);  // checks the bounds
  Bucket& bucket = at(binding.index);
  const std::int64_t numel = numel_of(binding.shape);
  for (std::size_t i = 0; i < bucket.regions.size(); ++i) {
    const Region& other = bucket.regions[i];
    if (other.binding.offset == binding.offset && other.numel == numel) return static_cast<int>(i);
    if (binding.offset < other.binding.offset + other.numel && other.binding.offset < binding.offset + numel) {
      throw ExecError("bucket " + bucket.spec.name + ": parameters at " + std::to_string(binding.offset) + " and " +
                      std::to_string(other.binding.offset) + " overlap");
    }
  }
  if (!bucket.accumulator.defined()) bucket.accumulator = at::zeros({bucket.spec.numel}, at::kFloat);
  bucket.regions.push_back({binding, numel, view_of(bucket.accumulator, binding)});
  return static_cast<int>(bucket.regions.size()) - 1;
}

void Buckets::forget_regions() {
  for (Bucket& bucket : buckets_) {
    bucket.regions.clear();
    bucket.accumulator = at::Tensor();
  }
}

void Buckets::settle(std::int64_t index) {
  Bucket& bucket = at(index);
  if (bucket.stale) throw ExecError("bucket " + bucket.spec.name + ": its working copy is stale");
  courier_.wait(bucket.gathers);
  bucket.gathers.clear();
}

void Buckets::settle_all() {
  for (int i = 0; i < size(); ++i) {
    if (!at(i).stale) settle(i);
  }
}

void Buckets::accumulate(std::int64_t index, int region, const at::Tensor& gradient) {
  Region& target = at(index).regions[static_cast<std::size_t>(region)];
  if (gradient.sizes() != target.view.sizes()) {
    throw ExecError("bucket " + at(index).spec.name + ": the gradient of the parameter at " +
                    std::to_string(target.binding.offset) + " has another shape than the parameter");
  }
  if (target.written) {
    target.view.add_(gradient);
  } else {
    target.view.copy_(gradient);
    target.written = true;
  }
}

void Buckets::reduce(std::int64_t index) {
  Bucket& bucket = at(index);
  if (!bucket.accumulator.defined()) bucket.accumulator = at::zeros({bucket.spec.numel}, at::kFloat);
  for (Region& region : bucket.regions) {
    if (!region.written) region.view.zero_();
  }
  bucket.reducing = true;
  const std::uint64_t tag = tag_of(kReduceTag, index);
  if (bucket.own) {
    for (const int rank : bucket.spec.group) {
      if (rank == courier_.rank()) continue;
      at::Tensor scratch = at::empty({bucket.own->hi - bucket.own->lo}, at::kFloat);
      bucket.incoming.push_back({rank, courier_.receive(scratch, rank, tag), scratch});
    }
  }
  for (const OwnedSpan& span : bucket.spec.owners) {
    if (span.rank == courier_.rank() || span.hi == span.lo) continue;
    bucket.reduce_sends.push_back(
        courier_.send(bucket.accumulator.narrow(0, span.lo, span.hi - span.lo), span.rank, tag));
  }
}

std::vector<double> Buckets::finish_reductions() {
  std::vector<double> squares;
  for (Bucket& bucket : buckets_) {
    if (bucket.reducing) finish_reduction(bucket);
    squares.push_back(bucket.reducing && bucket.reduced.defined() ? sum_of_squares(bucket.reduced) : 0.0);
  }
  return squares;
}

// Contributions are added in rank order, the own one at its place.
void Buckets::finish_reduction(Bucket& bucket) {
  if (bucket.own) {
    const at::Tensor mine = bucket.accumulator.narrow(0, bucket.own->lo, bucket.own->hi - bucket.own->lo);
    auto next = bucket.incoming.begin();
    for (const int rank : bucket.spec.group) {
      at::Tensor part = mine;
      if (rank != courier_.rank()) {
        courier_.wait({&next->transfer, 1});
        part = (next++)->scratch;
      }
      if (bucket.reduced.defined()) {
        bucket.reduced.add_(part);
      } else {
        bucket.reduced = part;
      }
    }
    bucket.incoming.clear();
  }
  courier_.wait(bucket.reduce_sends);
  bucket.reduce_sends.clear();
}

void Buckets::update(std::int64_t index, UnitProgram& optimizer, std::span<const at::Tensor> hyper) {
  Bucket& bucket = at(index);
  if (!bucket.own || !bucket.reducing) return;
  courier_.wait(bucket.gather_sends);  // they read what is written below
  bucket.gather_sends.clear();
  std::vector<c10::IValue> inputs = {bucket.spec.master, bucket.reduced};
  inputs.insert(inputs.end(), bucket.spec.state.begin(), bucket.spec.state.end());
  inputs.insert(inputs.end(), hyper.begin(), hyper.end());
  const std::vector<c10::IValue> outputs = optimizer.run(std::move(inputs));
  const std::int64_t owned = bucket.own->hi - bucket.own->lo;
  std::vector<at::Tensor> next;
  for (const c10::IValue& output : outputs) {
    at::Tensor tensor = output.toTensor().contiguous();
    expect_slice(bucket.spec.name, "the optimizer's result", tensor, owned);
    // The gradient's memory is written again in the next step; what is kept must not lie in it.
    if (tensor.is_alias_of(bucket.reduced)) tensor = tensor.clone();
    next.push_back(std::move(tensor));
  }
  expect_float(bucket.spec.name, "the optimizer's master", next.at(0));
  bucket.spec.master = next[0];
  bucket.spec.state.assign(next.begin() + 1, next.end());
  write_work(bucket);
}

void Buckets::write_work(Bucket& bucket) {
  bucket.spec.work.narrow(0, bucket.own->lo, bucket.own->hi - bucket.own->lo).copy_(bucket.spec.master);
}

void Buckets::gather(std::int64_t index) {
  Bucket& bucket = at(index);
  const std::uint64_t tag = tag_of(kGatherTag, index);
  const int self = courier_.rank();
  for (const OwnedSpan& span : bucket.spec.owners) {
    if (span.hi == span.lo) continue;
    const at::Tensor part = bucket.spec.work.narrow(0, span.lo, span.hi - span.lo);
    if (span.rank != self) {
      bucket.gathers.push_back(courier_.receive(part, span.rank, tag));
      continue;
    }
    for (const int rank : bucket.spec.group) {
      if (rank != self) bucket.gather_sends.push_back(courier_.send(part, rank, tag));
    }
  }
}

void Buckets::refresh(std::int64_t index) {
  Bucket& bucket = at(index);
  if (!bucket.spec.work.defined()) return;
  courier_.wait(bucket.gather_sends);
  bucket.gather_sends.clear();
  if (bucket.own) write_work(bucket);
  bucket.stale = false;
  gather(index);
}

void Buckets::end_step() {
  for (Bucket& bucket : buckets_) {
    bucket.reducing = false;
    bucket.incoming.clear();
    bucket.reduce_sends.clear();
    bucket.reduced = at::Tensor();
    for (Region& region : bucket.regions) region.written = false;
  }
}

void Buckets::abandon_gathers() {
  for (Bucket& bucket : buckets_) {
    if (!bucket.gathers.empty()) bucket.stale = true;
    bucket.gathers.clear();
    bucket.gather_sends.clear();
  }
}

void Buckets::set_master(std::int64_t index, const at::Tensor& value) {
  if (!owns(index)) {
    throw ExecError("bucket " + at(index).spec.name + ": rank " + std::to_string(courier_.rank()) +
                    " owns nothing of it");
  }
  expect_slice(at(index).spec.name, "master", value, at(index).spec.master.numel());
  expect_float(at(index).spec.name, "master", value);
  at(index).spec.master = value.clone();
}

void Buckets::set_state(std::int64_t index, const std::vector<at::Tensor>& values) {
  Bucket& bucket = at(index);
  if (values.size() != bucket.spec.state.size()) {
    throw ExecError("bucket " + bucket.spec.name + ": has " + std::to_string(bucket.spec.state.size()) +
                    " state tensors, not " + std::to_string(values.size()));
  }
  std::vector<at::Tensor> next;
  for (const at::Tensor& value : values) {
    expect_slice(bucket.spec.name, "state", value, bucket.own ? bucket.own->hi - bucket.own->lo : 0);
    next.push_back(value.clone());
  }
  bucket.spec.state = std::move(next);
}

void Buckets::set_work(std::int64_t index, const at::Tensor& value) {
  Bucket& bucket = at(index);
  expect_held(bucket.spec);
  expect_slice(bucket.spec.name, "work", value, bucket.spec.numel);
  courier_.wait(bucket.gathers);
  courier_.wait(bucket.gather_sends);
  bucket.gathers.clear();
  bucket.gather_sends.clear();
  bucket.spec.work.copy_(value);
  bucket.stale = false;
}

std::vector<std::string> Buckets::stale() const {
  std::vector<std::string> names;
  for (const Bucket& bucket : buckets_) {
    if (bucket.stale) names.push_back(bucket.spec.name);
  }
  return names;
}

}  // namespace elaswave::exec

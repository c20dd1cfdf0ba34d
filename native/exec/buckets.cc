#include "buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "program.h"

namespace elaswave::exec {
namespace {

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

}  // namespace

int Buckets::add(BucketSpec spec) {
  check(spec);
  Bucket bucket;
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
  if (member && spec.work.scalar_type() != spec.dtype) {
    throw ExecError("bucket " + spec.name + ": the working copy is of another dtype than the bucket");
  }
  if (!member && spec.work.defined()) {
    throw ExecError("bucket " + spec.name + ": rank " + std::to_string(courier_.rank()) +
                    " is not in its group and has no use for a working copy");
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

at::Tensor Buckets::gradient(std::int64_t index) {
  Bucket& bucket = at(index);
  if (!bucket.spec.work.defined()) return {};
  if (!bucket.accumulator.defined()) bucket.accumulator = at::zeros({bucket.spec.numel}, at::kFloat);
  for (Region& region : bucket.regions) {
    if (!region.written) region.view.zero_();
  }
  return bucket.accumulator;
}

void Buckets::write(std::int64_t index, std::int64_t lo, const at::Tensor& master) {
  Bucket& bucket = at(index);
  if (bucket.spec.work.defined()) bucket.spec.work.narrow(0, lo, master.numel()).copy_(master);
}

void Buckets::receive_part(std::int64_t index, std::int64_t lo, std::int64_t hi, int owner, std::uint64_t tag) {
  Bucket& bucket = at(index);
  bucket.gathers.push_back(courier_.receive(bucket.spec.work.narrow(0, lo, hi - lo), owner, tag));
}

void Buckets::send_part(std::int64_t index, const at::Tensor& part, int rank, std::uint64_t tag) {
  at(index).gather_sends.push_back(courier_.send(part, rank, tag));
}

void Buckets::wait_sends(std::int64_t index) {
  courier_.wait(at(index).gather_sends);
  at(index).gather_sends.clear();
}

void Buckets::end_step() {
  for (Bucket& bucket : buckets_) {
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

void Buckets::mark_stale(std::int64_t index) {
  if (at(index).spec.work.defined()) at(index).stale = true;
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

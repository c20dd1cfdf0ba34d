#include "exec/state/buckets.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "exec/device/memory.h"
#include "exec/device/tensor_span.h"
#include "exec/program/program.h"
#include "exec/state/parameter_view.h"

namespace elaswave::exec {
namespace {

at::ScalarType sum_dtype(bool exact) { return exact ? at::kDouble : at::kFloat; }

void expect_slice(const std::string& name, const char* what, const at::Tensor& tensor, std::int64_t numel) {
  const bool fits = tensor.defined() && tensor.dim() == 1 && tensor.numel() == numel && tensor.is_contiguous();
  if (!fits) {
    throw ExecError("bucket " + name + ": " + what + " must be a contiguous tensor of " + std::to_string(numel) +
                    " elements in one dimension");
  }
}

}  // namespace

BucketMemory::BucketMemory(std::int64_t numel, at::ScalarType dtype, bool exact)
    : work(device_zeros({numel}, dtype)), accumulator(device_zeros({numel}, sum_dtype(exact))) {}

void Buckets::install(const std::vector<BucketSpec>& specs, BucketMemories memories) {
  buckets_.resize(specs.size());
  for (const BucketId id : all_ids<BucketId>(size())) {
    Bucket& bucket = at(id);
    bucket.spec = specs[id.index()];
    if (!machine_.reads(id)) {
      bucket.memory = BucketMemory();
      bucket.regions.clear();
    } else if (!bucket.memory.work.defined()) {
      const auto made = memories.find(id);
      bucket.memory =
          made != memories.end() ? std::move(made->second) : BucketMemory(bucket.spec.numel, bucket.spec.dtype, exact_);
    }
  }
}

std::optional<BucketId> Buckets::find(const std::string& name) const {
  for (const BucketId bucket : all_ids<BucketId>(size())) {
    if (at(bucket).spec.name == name) return bucket;
  }
  return std::nullopt;
}

at::Tensor Buckets::parameter(const Parameter& parameter) const {
  return parameter_view(work(parameter.bucket), parameter);
}

std::size_t Buckets::add_region(const Parameter& parameter) {
  Bucket& bucket = at(parameter.bucket);
  const std::int64_t offset = parameter.offset, numel = numel_of(parameter.shape);
  for (std::size_t i = 0; i < bucket.regions.size(); ++i) {
    if (bucket.regions[i].offset == offset && bucket.regions[i].numel == numel) return i;
  }
  bucket.regions.push_back({offset, numel, parameter_view(bucket.memory.accumulator, parameter)});
  return bucket.regions.size() - 1;
}

void Buckets::wait_ready(BucketId id) {
  if (machine_.stale(id)) throw ExecError("bucket " + at(id).spec.name + ": its working copy is stale");
  wait_gathers(at(id));
}

void Buckets::wait_all_ready() {
  for (const BucketId bucket : all_ids<BucketId>(size())) {
    if (!machine_.stale(bucket)) wait_gathers(at(bucket));
  }
}

void Buckets::wait_gathers(Bucket& bucket) {
  transfers_.wait(bucket.gathers);
  for (const commit::BoxRange boxes : bucket.gathered) {
    for (const BoxId box : boxes.ids()) machine_.parameters_arrived(box);
  }
  bucket.gathers.clear();
  bucket.gathered.clear();
}

void Buckets::accumulate(BucketId id, std::size_t region, const at::Tensor& gradient) {
  Region& target = at(id).regions[region];
  if (gradient.sizes() != target.view.sizes()) {
    throw ExecError("bucket " + at(id).spec.name + ": the gradient of the parameter at " +
                    std::to_string(target.offset) + " has another shape than the parameter");
  }
  if (!target.written) {
    target.view.copy_(gradient);
    target.written = true;
  } else if (exact_) {
    const at::Tensor values = gradient.to(at::kFloat).contiguous();
    add_exactly(span_of<double>(target.view), span_of<const float>(values), target.offset, at(id).residuals);
  } else {
    target.view.add_(gradient);
  }
}

Residuals Buckets::residuals(BucketId id, std::int64_t lo, std::int64_t hi) const {
  Residuals found;
  std::copy_if(at(id).residuals.begin(), at(id).residuals.end(), std::back_inserter(found),
               [lo, hi](const Residual& residual) { return residual.element >= lo && residual.element < hi; });
  return found;
}

at::Tensor Buckets::gradient(BucketId id) {
  Bucket& bucket = at(id);
  if (!bucket.memory.work.defined()) return {};
  for (Region& region : bucket.regions) {
    if (!region.written) region.view.zero_();
  }
  return bucket.memory.accumulator;
}

void Buckets::write(BucketId id, std::int64_t lo, const at::Tensor& master) {
  Bucket& bucket = at(id);
  if (bucket.memory.work.defined()) bucket.memory.work.narrow(0, lo, master.numel()).copy_(master);
}

void Buckets::receive_part(BucketId id, commit::BoxRange boxes, std::int64_t lo, std::int64_t numel, RankId owner,
                           std::uint64_t tag) {
  Bucket& bucket = at(id);
  bucket.gathers.push_back(transfers_.receive(bucket.memory.work.narrow(0, lo, numel), owner, tag));
  bucket.gathered.push_back(boxes);
}

void Buckets::send_part(BucketId id, const at::Tensor& part, RankId rank, std::uint64_t tag) {
  at(id).gather_sends.push_back(transfers_.send(part, rank, tag));
}

void Buckets::wait_sends(BucketId id) {
  transfers_.wait(at(id).gather_sends);
  at(id).gather_sends.clear();
}

void Buckets::end_step() {
  for (Bucket& bucket : buckets_) {
    for (Region& region : bucket.regions) region.written = false;
    bucket.residuals.clear();
  }
}

void Buckets::abandon_gathers() {
  for (Bucket& bucket : buckets_) {
    bucket.gathers.clear();
    bucket.gathered.clear();
    bucket.gather_sends.clear();
  }
}

void Buckets::set_work(BucketId id, const at::Tensor& value) {
  Bucket& bucket = at(id);
  if (!bucket.memory.work.defined()) {
    throw ExecError("bucket " + bucket.spec.name + ": rank " + std::to_string(transfers_.rank().value()) +
                    " has no working copy of it");
  }
  expect_slice(bucket.spec.name, "work", value, bucket.spec.numel);
  wait_gathers(bucket);
  wait_sends(id);
  bucket.memory.work.copy_(value);
  machine_.load_parameters(id);
}

}  // namespace elaswave::exec

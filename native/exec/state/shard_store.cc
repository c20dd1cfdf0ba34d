#include "exec/state/shard_store.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "exec/device/memory.h"
#include "exec/device/tensor_span.h"
#include "exec/program/program.h"

namespace elaswave::exec {
namespace {

constexpr std::int64_t kResidualWords = 2;
static_assert(sizeof(Residual) == kResidualWords * sizeof(std::int64_t));

at::Tensor packed(const Residuals& residuals) {
  const at::Tensor words = host_empty({static_cast<std::int64_t>(residuals.size()), kResidualWords}, at::kLong);
  std::memcpy(words.mutable_data_ptr(), residuals.data(), words.nbytes());
  return words;
}

void append(Residuals& residuals, const at::Tensor& words) {
  const std::size_t before = residuals.size();
  residuals.resize(before + static_cast<std::size_t>(words.size(0)));
  std::memcpy(residuals.data() + before, words.const_data_ptr(), words.nbytes());
}

}  // namespace

// --- Roles and states

void ShardStore::install(const std::vector<BoxSpec>& specs) {
  boxes_.resize(specs.size());
  std::set<std::pair<RankId, BucketId>> owned;
  owned_buckets_.clear();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const RankId owner = machine_.roles(BoxId::at(i)).owner;
    if (owned.emplace(owner, specs[i].bucket()).second) ++owned_buckets_[owner];
    boxes_[i].spec = specs[i];
  }
  runs_.assign(specs.size(), Run());
  gradients_.assign(buckets_.size(), at::Tensor());
}

std::string ShardStore::place(BoxId id) const {
  const BoxSpec& box = spec(id);
  return "box " + std::to_string(id.value()) + " (bucket " + buckets_.spec(box.bucket()).name + " [" +
         std::to_string(box.lo) + ", " + std::to_string(box.hi) + "))";
}

void ShardStore::load(BoxId id, const at::Tensor& master, const std::vector<at::Tensor>& optimizer) {
  Box& box = at(id);
  std::vector<at::Tensor> tensors = {master.clone()};
  for (const at::Tensor& each : optimizer) tensors.push_back(each.clone());
  ShardState state = make_state(box.spec, std::move(tensors));
  machine_.load(id, state.digest);
  box.state = std::move(state);
}

bool ShardStore::intact(BoxId id) const {
  const Box& box = at(id);
  return box.state.here() && digest_of(box.spec, box.state) == box.state.digest;
}

std::map<BucketId, Digest> ShardStore::owned_digests() const {
  std::map<BucketId, Digest> digests;
  for (const BoxId box : all_ids<BoxId>(size())) {
    if (machine_.owns(box)) digests[spec(box).bucket()] += at(box).state.digest;
  }
  return digests;
}

// --- Gradients: parts, sums

ShardStore::Elements ShardStore::elements_of(commit::BoxRange boxes) const {
  return {spec(boxes.first).bucket(), spec(boxes.first).lo, spec(boxes.last()).hi};
}

at::Tensor ShardStore::own_part(commit::BoxRange boxes) const {
  if (are_buffers(boxes)) return gradients_[spec(boxes.first).bucket().index()];
  const Elements elements = elements_of(boxes);
  return gradients_[elements.bucket.index()].narrow(0, elements.lo, elements.numel());
}

at::Tensor ShardStore::piece(const at::Tensor& tensor, commit::BoxRange boxes, commit::BoxRange some) const {
  if (boxes.count == some.count) return tensor;
  const Elements elements = elements_of(some);
  return tensor.narrow(0, elements.lo - spec(boxes.first).lo, elements.numel());
}

void ShardStore::reduce(BucketId bucket) {
  buckets_.wait_ready(bucket);  // Of buffers that no unit reads, such as a count of steps: nobody has waited yet.
  gradients_[bucket.index()] =
      updates_.changes(bucket) ? updates_.part(bucket, transfers_.rank()) : buckets_.gradient(bucket);
  perform_(machine_.bucket_reduced(bucket));
  take_parts();
}

void ShardStore::send_part(commit::BoxRange boxes, RankId owner) {
  sends_.push_back(transfers_.send(own_part(boxes), owner, tag_of(kReduceTag, boxes.first.index())));
  if (!are_exact(boxes)) return;
  const Elements elements = elements_of(boxes);
  const Residuals residuals = buckets_.residuals(elements.bucket, elements.lo, elements.hi);
  const at::Tensor count = host_empty({1}, at::kLong);
  *count.mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(residuals.size());
  sends_.push_back(transfers_.send(count, owner, tag_of(kResidualCountTag, boxes.first.index())));
  if (residuals.empty()) return;
  sends_.push_back(transfers_.send(packed(residuals), owner, tag_of(kResidualsTag, boxes.first.index())));
}

void ShardStore::expect_part(commit::BoxRange boxes, RankId reader) {
  const std::int64_t numel =
      are_buffers(boxes) ? updates_.words_of(spec(boxes.first).bucket(), reader) : elements_of(boxes).numel();
  Part part{reader, boxes, host_empty({numel}, are_exact(boxes) ? at::kDouble : at::kFloat), {}, {}, {}};
  const auto expect = [&](const at::Tensor& tensor, std::uint64_t kind) {
    part.receives.push_back(transfers_.receive(tensor, reader, tag_of(kind, boxes.first.index())));
  };
  expect(part.tensor, kReduceTag);
  if (are_exact(boxes)) expect(part.count = host_empty({1}, at::kLong), kResidualCountTag);
  parts_.push_back(std::move(part));
}

void ShardStore::take_parts() {
  for (Part& part : parts_) {
    const auto done = [this](const comm::Transfer& each) { return transfers_.test(each); };
    if (!part.here && std::all_of(part.receives.begin(), part.receives.end(), done)) take_part(part);
  }
}

void ShardStore::wait_parts(const std::function<void()>& before_each) {
  for (Part& part : parts_) {
    while (!part.here) {
      transfers_.wait(part.receives);
      before_each();
      take_part(part);
    }
  }
}

// What was awaited of a part is here; residuals follow if there are any.
void ShardStore::take_part(Part& part) {
  if (part.count.defined() && !part.residuals.defined() && *part.count.const_data_ptr<std::int64_t>() > 0) {
    part.residuals = host_empty({*part.count.const_data_ptr<std::int64_t>(), kResidualWords}, at::kLong);
    part.receives = {transfers_.receive(part.residuals, part.reader, tag_of(kResidualsTag, part.boxes.first.index()))};
    return;
  }
  part.here = true;
  if (are_exact(part.boxes)) merge(part);
  perform_(machine_.part_arrived(part.boxes, part.reader));
}

const at::Tensor& ShardStore::part_of(BoxId first, RankId reader) const {
  const auto found = std::find_if(parts_.begin(), parts_.end(),
                                  [&](const Part& part) { return part.boxes.first == first && part.reader == reader; });
  return found->tensor;
}

// Exact sums know no order: a part is added when it comes, and its memory is given back.
void ShardStore::merge(Part& part) {
  Run& run = run_at(part.boxes.first);
  begin_total(part.boxes);
  const at::Tensor arrived = std::exchange(part.tensor, at::Tensor());
  if (run.total.defined()) {
    add_exactly(span_of<double>(run.total), span_of<const double>(arrived), elements_of(part.boxes).lo, run.residuals);
  } else {
    run.total = arrived;
  }
  if (part.residuals.defined()) append(run.residuals, std::exchange(part.residuals, at::Tensor()));
}

// With what this rank has added itself, if it reads the boxes.
void ShardStore::begin_total(commit::BoxRange boxes) {
  Run& run = run_at(boxes.first);
  const std::vector<RankId>& readers = machine_.roles(boxes.first).readers;
  if (run.total.defined() || std::find(readers.begin(), readers.end(), transfers_.rank()) == readers.end()) return;
  const Elements elements = elements_of(boxes);
  run.total = own_part(boxes);
  run.residuals = buckets_.residuals(elements.bucket, elements.lo, elements.hi);
}

at::Tensor ShardStore::exact_total(commit::BoxRange boxes) {
  begin_total(boxes);
  Run& run = run_at(boxes.first);
  const at::Tensor rounded = host_empty({run.total.numel()}, at::kFloat);
  round_exactly(span_of<const double>(run.total), elements_of(boxes).lo, run.residuals, span_of<float>(rounded));
  run.total = at::Tensor();
  run.residuals.clear();
  return rounded;
}

// Contributions are added in rank order, the own one at its place.
at::Tensor ShardStore::ordered_total(commit::BoxRange boxes) const {
  at::Tensor total;
  for (const RankId reader : machine_.roles(boxes.first).readers) {
    const at::Tensor part = reader == transfers_.rank() ? own_part(boxes) : part_of(boxes.first, reader);
    if (total.defined()) {
      total.add_(part);
    } else {
      total = part;
    }
  }
  return total;
}

at::Tensor ShardStore::total_of_granules(commit::BoxRange boxes) const {
  const at::Tensor own = own_part(boxes);
  return updates_.record(spec(boxes.first).bucket(), [&](RankId reader) -> const at::Tensor& {
    return reader == transfers_.rank() ? own : part_of(boxes.first, reader);
  });
}

void ShardStore::sum(commit::BoxRange boxes) {
  const at::Tensor total = are_buffers(boxes) ? total_of_granules(boxes)
                           : exact_           ? exact_total(boxes)
                                              : ordered_total(boxes);
  at::Tensor record = total;
  if (record_type(boxes) != at::kFloat) {
    record = total.to(record_type(boxes));
    total.copy_(record);
  }
  run_at(boxes.first).sum = {boxes, record};
  for (const BoxId box : boxes.ids()) {
    at(box).gradient = piece(total, boxes, box);
    at(box).summed_at = boxes.first;
  }
}

ExactTotal ShardStore::squares() const {
  ExactTotal squares;
  for (const BoxId box : all_ids<BoxId>(size())) {
    if (machine_.owns(box) && machine_.recorded(box) && !are_buffers(box)) {
      squares.add_squares(span_of<const float>(at(box).gradient));
    }
  }
  return squares;
}

void ShardStore::wait_sends() {
  transfers_.wait(sends_);
  sends_.clear();
}

at::Tensor ShardStore::empty_record(commit::BoxRange boxes) const {
  const std::int64_t numel =
      are_buffers(boxes) ? updates_.words_of(spec(boxes.first).bucket()) : elements_of(boxes).numel();
  return host_empty({numel}, record_type(boxes));
}

void ShardStore::end_step() {
  parts_.clear();
  sends_.clear();
  runs_.assign(size(), Run());
  for (at::Tensor& gradient : gradients_) gradient = at::Tensor();
  for (Box& box : boxes_) box.gradient = at::Tensor();
}

void ShardStore::abandon_transfers() {
  parts_.clear();
  sends_.clear();
  for (Run& run : runs_) {
    run.total = at::Tensor();
    run.residuals.clear();
  }
}

// --- Updates and parameters

// Until syncing replicas are in sync, they need those of the steps since; a few numbers each.
void ShardStore::set_hyper(const Hyper& hyper) {
  const bool syncing =
      std::ranges::any_of(all_ids<BoxId>(size()), [this](BoxId box) { return machine_.sync_under_way(box); });
  if (!syncing) hypers_.clear();
  hypers_[machine_.version()] = hyper;
}

void ShardStore::update(BoxId id, std::int64_t version) {
  Box& box = at(id);
  if (machine_.owns(id)) buckets_.wait_sends(box.spec.bucket());  // they read what is written afterwards
  const at::Tensor gradient = std::exchange(box.gradient, at::Tensor());
  try {
    rule_(box.spec, box.state, gradient, hypers_.at(version));
  } catch (const std::exception& error) {
    perform_(machine_.update_failed(id));
    throw ExecError(place(id) + ": its update failed on rank " + std::to_string(transfers_.rank().value()) +
                    ", which drops its state: " + error.what());
  }
  perform_(machine_.updated(id, box.state.digest));
}

void ShardStore::write_parameters(BoxId id) {
  Box& box = at(id);
  if (machine_.owns(id)) buckets_.wait_sends(box.spec.bucket());
  buckets_.write(box.spec.bucket(), box.spec.lo, box.state.master);
}

// The own piece of the working copy, or what it would be.
void ShardStore::send_parameters(commit::BoxRange boxes, RankId reader) {
  const Elements elements = elements_of(boxes);
  const at::Tensor& work = buckets_.work(elements.bucket);
  at::Tensor parameters;
  if (work.defined()) {
    parameters = work.narrow(0, elements.lo, elements.numel());
  } else {
    std::vector<at::Tensor> masters;
    for (const BoxId box : boxes.ids()) masters.push_back(at(box).state.master);
    parameters = at::cat(masters).to(buckets_.spec(elements.bucket).dtype);
  }
  buckets_.send_part(elements.bucket, parameters, reader, tag_of(kGatherTag, boxes.first.index()));
}

void ShardStore::expect_parameters(commit::BoxRange boxes, RankId owner) {
  const Elements elements = elements_of(boxes);
  buckets_.receive_part(elements.bucket, boxes, elements.lo, elements.numel(), owner,
                        tag_of(kGatherTag, boxes.first.index()));
}

}  // namespace elaswave::exec

#include "boxes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "program.h"

namespace elaswave::exec {
namespace {

// A seal's words: the owner's digest of the base, the digest of the record. Of a base on its way: its digest.
constexpr std::int64_t kSealWords = 4;
constexpr std::uint32_t kRecordSalt = 0x5eed;

at::Tensor make_seal(const Digest& base, const Digest& record) {
  at::Tensor seal = at::empty({kSealWords}, at::kLong);
  auto* words = seal.mutable_data_ptr<std::int64_t>();
  words[0] = static_cast<std::int64_t>(base.lo);
  words[1] = static_cast<std::int64_t>(base.hi);
  words[2] = static_cast<std::int64_t>(record.lo);
  words[3] = static_cast<std::int64_t>(record.hi);
  return seal;
}

Digest digest_in(const at::Tensor& seal, std::int64_t first) {
  const auto* words = seal.const_data_ptr<std::int64_t>();
  return {static_cast<std::uint64_t>(words[first]), static_cast<std::uint64_t>(words[first + 1])};
}

// Of a record as it travels; an odd last half-word of bf16 counts as a word of its own.
Digest digest_of_record(const at::Tensor& record) {
  const std::size_t bytes = record.nbytes();
  Digest digest = digest_words(record.const_data_ptr(), bytes / 4, 0, kRecordSalt);
  if (bytes % 4 != 0) {
    const std::uint32_t rest = *(static_cast<const std::uint16_t*>(record.const_data_ptr()) + bytes / 2 - 1);
    digest += digest_words(&rest, 1, bytes / 4, kRecordSalt);
  }
  return digest;
}

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

bool contains(const std::vector<RankId>& ranks, RankId rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::uint64_t part_tag(BoxId box, std::size_t part) { return tag_of(kBaseTag, box.index()) | part; }

}  // namespace

// --- Roles

void Boxes::install(const std::vector<BoxSpec>& specs) {
  boxes_.resize(specs.size());
  of_bucket_.assign(buckets_.size(), {});
  for (std::size_t i = 0; i < specs.size(); ++i) {
    BoxState& box = boxes_[i];
    box.spec = specs[i];
    of_bucket_[box.spec.bucket.index()].push_back(BoxId::at(i));
    box.supplied.clear();
    box.catching.reset();
    box.backlog.clear();
    if (!owns(box) && !holds(box)) box.base = Base();
  }
}

void Boxes::drop_bases() {
  for (BoxState& box : boxes_) box.base = Base();
}

void Boxes::set_base(BoxId index, const at::Tensor& master, const std::vector<at::Tensor>& state) {
  BoxState& box = at(index);
  if (!owns(box) && !holds(box)) {
    throw ExecError(place(box) + ": rank " + std::to_string(transfers_.rank().value()) + " neither owns nor holds it");
  }
  std::vector<at::Tensor> tensors = {master.clone()};
  for (const at::Tensor& each : state) tensors.push_back(each.clone());
  replace(box.spec, box.base, std::move(tensors));
  box.catching.reset();
  box.backlog.clear();
}

void Boxes::check() const {
  for (const BoxState& box : boxes_) {
    if (owns(box) && !box.base.there()) throw ExecError(place(box) + ": its owner has no base of it");
  }
}

bool Boxes::holds(const BoxState& box) const { return contains(box.spec.holders, transfers_.rank()); }

// Owner and holder come to the same answer without talking. A base that is on its way misses steps, so whoever waited
// for one is sent working copies until roles are assigned anew.
bool Boxes::makes_part(const BoxState& box, RankId rank) const {
  return mode_ == CopyMode::kLog && contains(box.spec.holders, rank) && !contains(box.supplied, rank);
}

bool Boxes::makes_all(BucketId bucket) const {
  return std::all_of(of(bucket).begin(), of(bucket).end(), [this](BoxId index) {
    const BoxState& box = at(index);
    return owns(box) || (makes_part(box, transfers_.rank()) && box.base.there());
  });
}

std::string Boxes::place(const BoxState& box) const {
  return "box " + std::to_string(&box - boxes_.data()) + " (bucket " + buckets_.spec(box.spec.bucket).name + " [" +
         std::to_string(box.spec.lo) + ", " + std::to_string(box.spec.hi) + "))";
}

Digest Boxes::state_digest() const {
  Digest digest;
  for (const BoxState& box : boxes_) {
    if (owns(box)) digest += box.base.digest;
  }
  return digest;
}

// --- A step

void Boxes::begin_step() {
  if (mode_ == CopyMode::kState) return;
  for (std::size_t index = 0; index < size(); ++index) {
    BoxState& box = boxes_[index];
    if (owns(box) || !holds(box)) continue;
    if (makes_part(box, transfers_.rank()) && !box.base.there()) {
      throw ExecError(place(box) + ": its holder has no base of it, and none is on its way");
    }
    // A record that waits for its base is still in use.
    const bool reusable =
        box.record.defined() && box.record.use_count() == 1 && box.record.scalar_type() == record_type_;
    if (!reusable) box.record = at::empty({box.spec.numel()}, record_type_);
    if (!box.seal.defined()) box.seal = at::empty({kSealWords}, at::kLong);
    box.receives = {transfers_.receive(box.record, box.spec.owner, tag_of(kRecordTag, index)),
                    transfers_.receive(box.seal, box.spec.owner, tag_of(kSealTag, index))};
  }
}

void Boxes::reduce(BucketId bucket) {
  const at::Tensor sum = buckets_.gradient(bucket);  // undefined outside of the group
  for (const BoxId index : of(bucket)) {
    BoxState& box = at(index);
    const std::uint64_t tag = tag_of(kReduceTag, index.index());
    at::Tensor part;
    if (sum.defined()) part = sum.narrow(0, box.spec.lo, box.spec.numel());
    if (!owns(box)) {
      if (part.defined()) box.sends.push_back(transfers_.send(part, box.spec.owner, tag));
      continue;
    }
    box.reducing = true;
    box.own_part = part;
    for (const RankId rank : buckets_.spec(bucket).group) {
      if (rank == transfers_.rank()) continue;
      at::Tensor scratch = at::empty({box.spec.numel()}, at::kFloat);
      box.incoming.push_back({rank, transfers_.receive(scratch, rank, tag), scratch});
    }
    unsummed_.push_back(index);
  }
  advance();
}

void Boxes::advance() {
  std::erase_if(unsummed_, [this](BoxId index) {
    BoxState& box = at(index);
    const bool here = std::all_of(box.incoming.begin(), box.incoming.end(),
                                  [this](Incoming& each) { return transfers_.test(each.transfer); });
    if (here) sum(box);
    return here;
  });
}

// Contributions are added in rank order, the own one at its place; then the record leaves.
void Boxes::sum(BoxState& box) {
  const auto index = static_cast<std::size_t>(&box - boxes_.data());
  auto next = box.incoming.begin();
  for (const RankId rank : buckets_.spec(box.spec.bucket).group) {
    const at::Tensor part = rank == transfers_.rank() ? box.own_part : (next++)->part;
    if (box.gradient.defined()) {
      box.gradient.add_(part);
    } else {
      box.gradient = part;
    }
  }
  box.incoming.clear();
  at::Tensor record = box.gradient;
  if (record_type_ != at::kFloat) {
    record = box.gradient.to(record_type_);
    box.gradient.copy_(record);
  }
  if (box.spec.holders.empty() || mode_ == CopyMode::kState) return;
  const at::Tensor seal = make_seal(box.base.digest, digest_of_record(record));
  for (const RankId holder : box.spec.holders) {
    box.sends.push_back(send_copy(record, holder, tag_of(kRecordTag, index)));
    box.sends.push_back(send_copy(seal, holder, tag_of(kSealTag, index)));
  }
}

comm::Transfer Boxes::send_copy(const at::Tensor& tensor, RankId holder, std::uint64_t tag) {
  copied_bytes_ += tensor.nbytes();
  return transfers_.send(tensor, holder, tag);
}

std::vector<double> Boxes::finish() {
  for (const BoxId index : unsummed_) {
    for (Incoming& each : at(index).incoming) transfers_.wait({&each.transfer, 1});
    sum(at(index));
  }
  unsummed_.clear();
  std::vector<double> squares(boxes_.size());
  std::string differing;
  // The backward pass goes through buckets from the last to the first: what comes first is looked at first.
  for (std::size_t index = size(); index-- > 0;) {
    BoxState& box = boxes_[index];
    transfers_.wait(box.receives);
    if (!box.receives.empty() && !accept(box)) differing += (differing.empty() ? "" : ", ") + place(box);
    box.receives.clear();
    if (box.catching && mode_ == CopyMode::kState) {
      transfers_.wait(box.catching->transfers);
      take_base(box);
    } else if (box.catching) {
      catch_up(box, nullptr, box.backlog.size() + 1 >= kBacklog);
    }
    if (owns(box) && box.reducing) squares[index] = sum_of_squares(box.gradient);
  }
  // Accumulators are written again in the next step.
  for (BoxState& box : boxes_) {
    transfers_.wait(box.sends);
    box.sends.clear();
  }
  if (!differing.empty()) {
    throw CopyDiffers("rank " + std::to_string(transfers_.rank().value()) + ": copies of " + differing +
                      " differ from their owners'");
  }
  return squares;
}

// A record has arrived: is it whole, and does it belong to the base that is here? A base that differs is dropped, and
// so is what was made from it.
bool Boxes::accept(BoxState& box) {
  const bool whole = digest_of_record(box.record) == digest_in(box.seal, 2);
  const bool fits = !box.base.there() || box.base.digest == digest_in(box.seal, 0);
  if (!fits) {
    box.base = Base();
    if (makes_part(box, transfers_.rank())) buckets_.mark_stale(box.spec.bucket);
  }
  box.gradient = record_type_ == at::kFloat ? box.record : box.record.to(at::kFloat);
  return whole && fits;
}

void Boxes::update_owned(BucketId bucket, const Update& update, const Hyper& hyper) {
  for (const BoxId index : of(bucket)) {
    BoxState& box = at(index);
    if (!owns(box) || !box.reducing || !box.gradient.defined()) continue;
    buckets_.wait_sends(bucket);  // they read what is written below
    update(box.spec, box.base, box.gradient, hyper);
    box.gradient = at::Tensor();
    buckets_.write(bucket, box.spec.lo, box.base.master);
    if (mode_ == CopyMode::kState) {
      for (const RankId holder : box.spec.holders) send_base(index, holder);
    }
  }
}

void Boxes::update_held(const Update& update, const Hyper& hyper,
                        const std::function<std::size_t(BoxId)>& state_tensors) {
  if (mode_ == CopyMode::kState) {
    for (const BoxId index : all_ids<BoxId>(size())) {
      if (!owns(at(index)) && holds(at(index))) expect_base(index, at(index).spec.owner, state_tensors(index));
    }
    return;
  }
  for (BoxState& box : boxes_) {
    if (owns(box) || !box.gradient.defined()) continue;
    if (box.base.there()) {
      update(box.spec, box.base, box.gradient, hyper);
      if (makes_part(box, transfers_.rank())) buckets_.write(box.spec.bucket, box.spec.lo, box.base.master);
    } else if (box.catching) {
      box.backlog.push_back({box.gradient, hyper});
      catch_up(box, &update, false);
    }
    box.gradient = at::Tensor();
  }
}

void Boxes::gather(BucketId bucket) {
  for (const BoxId index : of(bucket)) {
    std::vector<RankId> takers = buckets_.spec(bucket).group;
    std::erase_if(takers, [&](RankId rank) { return makes_part(at(index), rank); });
    publish(index, takers);
  }
}

// The owner's part of the working copy to `ranks`.
void Boxes::publish(BoxId index, const std::vector<RankId>& ranks) {
  BoxState& box = at(index);
  const RankId self = transfers_.rank();
  const std::uint64_t tag = tag_of(kGatherTag, index.index());
  if (!owns(box)) {
    if (contains(ranks, self)) buckets_.receive_part(box.spec.bucket, box.spec.lo, box.spec.hi, box.spec.owner, tag);
    return;
  }
  at::Tensor part;
  for (const RankId rank : ranks) {
    if (rank == self) continue;
    if (!part.defined()) part = part_of(box);
    buckets_.send_part(box.spec.bucket, part, rank, tag);
  }
}

// The own part of the working copy, or what it would be.
at::Tensor Boxes::part_of(BoxState& box) {
  const at::Tensor& work = buckets_.work(box.spec.bucket);
  if (work.defined()) return work.narrow(0, box.spec.lo, box.spec.numel());
  return box.base.master.to(buckets_.spec(box.spec.bucket).dtype);
}

void Boxes::end_step() {
  unsummed_.clear();
  for (BoxState& box : boxes_) {
    box.reducing = false;
    box.incoming.clear();
    box.own_part = box.gradient = at::Tensor();
    box.sends.clear();
    box.receives.clear();
  }
}

// --- Copies on their way

void Boxes::send_base(BoxId index, RankId peer) {
  BoxState& box = at(index);
  if (!box.base.there()) throw ExecError(place(box) + ": there is no base here to send");
  if (!contains(box.supplied, peer)) box.supplied.push_back(peer);
  // Updates leave tensors alone that a transfer still holds.
  send_copy(make_seal(box.base.digest, {}), peer, part_tag(index, 0));
  send_copy(box.base.master, peer, part_tag(index, 1));
  for (std::size_t i = 0; i < box.base.state.size(); ++i) send_copy(box.base.state[i], peer, part_tag(index, i + 2));
}

void Boxes::expect_base(BoxId index, RankId owner, std::size_t state_tensors) {
  BoxState& box = at(index);
  if (!holds(box))
    throw ExecError(place(box) + ": rank " + std::to_string(transfers_.rank().value()) + " does not hold it");
  box.base = Base();
  box.backlog.clear();
  if (!contains(box.supplied, transfers_.rank())) box.supplied.push_back(transfers_.rank());
  Catching catching;
  catching.seal = at::empty({kSealWords}, at::kLong);
  catching.transfers.push_back(transfers_.receive(catching.seal, owner, part_tag(index, 0)));
  for (std::size_t i = 0; i <= state_tensors; ++i) {
    catching.tensors.push_back(at::empty({box.spec.numel()}, at::kFloat));
    catching.transfers.push_back(transfers_.receive(catching.tensors.back(), owner, part_tag(index, i + 1)));
  }
  box.catching = std::move(catching);
}

// What has arrived becomes the base; false if it was damaged on its way, and there is still none.
bool Boxes::take_base(BoxState& box) {
  Catching arrived = *std::exchange(box.catching, std::nullopt);
  const Digest sent = digest_in(arrived.seal, 0);
  replace(box.spec, box.base, std::move(arrived.tensors));
  if (box.base.digest == sent) return true;
  box.base = Base();
  box.backlog.clear();
  return false;
}

// Takes the base once it is here, then the records since. Without `update` nothing is applied yet.
void Boxes::catch_up(BoxState& box, const Update* update, bool wait) {
  Catching& catching = *box.catching;
  if (wait) transfers_.wait(catching.transfers);
  if (!wait) {
    const bool here = std::all_of(catching.transfers.begin(), catching.transfers.end(),
                                  [this](comm::Transfer& each) { return transfers_.test(each); });
    if (!here) return;
  }
  catching.transfers.clear();
  if (update == nullptr) return;
  if (!take_base(box)) return;
  for (const Backlog& entry : box.backlog) (*update)(box.spec, box.base, entry.gradient, entry.hyper);
  box.backlog.clear();
}

std::vector<BoxId> Boxes::catching() const {
  std::vector<BoxId> found;
  for (const BoxId box : all_ids<BoxId>(size())) {
    if ((owns(at(box)) || holds(at(box))) && !at(box).base.there()) found.push_back(box);
  }
  return found;
}

void Boxes::refresh(const std::vector<std::vector<RankId>>& wanted) {
  for (const BucketId bucket : all_ids<BucketId>(buckets_.size())) {
    const std::vector<RankId>& ranks = wanted.at(bucket.index());
    if (ranks.empty()) continue;
    buckets_.wait_sends(bucket);
    for (const BoxId index : of(bucket)) {
      if (owns(at(index))) buckets_.write(bucket, at(index).spec.lo, at(index).base.master);
    }
    for (const BoxId index : of(bucket)) publish(index, ranks);
    if (contains(ranks, transfers_.rank())) buckets_.mark_fresh(bucket);
  }
}

void Boxes::abandon_transfers() {
  for (BoxState& box : boxes_) {
    const auto here = [this](const comm::Transfer& each) { return transfers_.arrived(each); };
    if (box.catching && mode_ == CopyMode::kState &&
        std::all_of(box.catching->transfers.begin(), box.catching->transfers.end(), here)) {
      take_base(box);
    }
    box.catching.reset();
    box.backlog.clear();
    box.receives.clear();
    box.sends.clear();
    box.incoming.clear();
  }
  unsummed_.clear();
}

}  // namespace elaswave::exec

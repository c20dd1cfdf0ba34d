#include "shard_store.h"

#include <algorithm>
#include <utility>

#include "memory.h"
#include "program.h"

namespace elaswave::exec {
namespace {

using commit::Action;
using commit::StateTag;

// The words of a header: version and digest of the state that it belongs to, the digest of the record.
constexpr std::int64_t kHeaderWords = 5;
constexpr std::uint32_t kRecordSalt = 0x5eed;

at::Tensor make_header(const StateTag& state, const Digest& record) {
  at::Tensor header = host_empty({kHeaderWords}, at::kLong);
  auto* words = header.mutable_data_ptr<std::int64_t>();
  words[0] = state.version;
  words[1] = static_cast<std::int64_t>(state.digest.lo);
  words[2] = static_cast<std::int64_t>(state.digest.hi);
  words[3] = static_cast<std::int64_t>(record.lo);
  words[4] = static_cast<std::int64_t>(record.hi);
  return header;
}

Digest digest_in(const at::Tensor& header, std::int64_t first) {
  const auto* words = header.const_data_ptr<std::int64_t>();
  return {static_cast<std::uint64_t>(words[first]), static_cast<std::uint64_t>(words[first + 1])};
}

StateTag tag_in(const at::Tensor& header) { return {*header.const_data_ptr<std::int64_t>(), digest_in(header, 1)}; }

Digest record_digest_in(const at::Tensor& header) { return digest_in(header, 3); }

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

std::uint64_t state_tag(BoxId box, std::size_t part) { return tag_of(kStateTag, box.index()) | part; }

}  // namespace

// --- Roles and states

void ShardStore::install(const std::vector<BoxSpec>& specs) {
  boxes_.resize(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    Box& box = boxes_[i];
    box.spec = specs[i];
    box.coming.reset();
    box.kept.clear();
  }
}

std::string ShardStore::place(BoxId id) const {
  const BoxSpec& box = spec(id);
  return "box " + std::to_string(id.value()) + " (bucket " + buckets_.spec(box.bucket).name + " [" +
         std::to_string(box.lo) + ", " + std::to_string(box.hi) + "))";
}

void ShardStore::load(BoxId id, const at::Tensor& master, const std::vector<at::Tensor>& optimizer) {
  Box& box = at(id);
  std::vector<at::Tensor> tensors = {master.clone()};
  for (const at::Tensor& each : optimizer) tensors.push_back(each.clone());
  ShardState state = make_state(box.spec, std::move(tensors));
  machine_.load(id, state.digest);
  box.state = std::move(state);
  box.coming.reset();
  box.kept.clear();
}

bool ShardStore::intact(BoxId id) const {
  const Box& box = at(id);
  return box.state.here() && digest_of(box.spec, box.state) == box.state.digest;
}

Digest ShardStore::owned_digest() const {
  Digest digest;
  for (const BoxId box : all_ids<BoxId>(size())) {
    if (machine_.owns(box)) digest += at(box).state.digest;
  }
  return digest;
}

void ShardStore::perform(const commit::Actions& actions) {
  for (const Action& action : actions) perform(action);
}

void ShardStore::perform(const Action& action) {
  using Kind = Action::Kind;
  const BoxId box = action.box.value_or(BoxId());
  const RankId peer = action.peer.value_or(RankId());
  switch (action.kind) {
    case Kind::kSendPart:
      return at(box).sends.push_back(transfers_.send(at(box).own_part, peer, tag_of(kReduceTag, box.index())));
    case Kind::kExpectPart:
      return expect_part(box, peer);
    case Kind::kSum:
      return sum(box);
    case Kind::kSendRecord:
      return send_record(box, peer);
    case Kind::kExpectRecord:
      return expect_record(box, peer);
    case Kind::kUpdate:
      return update(box);
    case Kind::kKeepRecord:
      at(box).kept.push_back({std::exchange(at(box).gradient, at::Tensor()), hyper_});
      return;
    case Kind::kWriteParameters:
      return write_parameters(box);
    case Kind::kSendParameters:
      return send_parameters(box, peer);
    case Kind::kExpectParameters:
      return buckets_.receive_part(box, spec(box), peer, tag_of(kGatherTag, box.index()));
    case Kind::kSendState:
      return send_state(box, peer);
    case Kind::kExpectState:
      return expect_state(box, peer);
    case Kind::kDropState:
      return drop_state(box);
    case Kind::kSendVote:
    case Kind::kExpectVote:
    case Kind::kLeaveStep:
    case Kind::kCommit:
      throw ExecError("a vote is not the shard store's to cast");
  }
}

// --- Gradients: parts, sums, records

void ShardStore::reduce(BucketId bucket) {
  const at::Tensor gradient = buckets_.gradient(bucket);  // undefined outside of the group
  for (const BoxId box : machine_.boxes(bucket)) {
    if (gradient.defined()) at(box).own_part = gradient.narrow(0, spec(box).lo, spec(box).numel());
  }
  perform(machine_.bucket_reduced(bucket));
  advance();
}

void ShardStore::expect_part(BoxId id, RankId reader) {
  Box& box = at(id);
  if (box.parts.empty()) unsummed_.push_back(id);
  const at::Tensor part = host_empty({box.spec.numel()}, at::kFloat);
  box.parts.push_back({reader, transfers_.receive(part, reader, tag_of(kReduceTag, id.index())), part});
}

void ShardStore::advance() {
  for (const BoxId box : unsummed_) {
    for (Part& part : at(box).parts) {
      if (!part.here && transfers_.test(part.transfer)) take_part(box, part);
    }
  }
  std::erase_if(unsummed_, [this](BoxId box) { return machine_.recorded(box); });
}

void ShardStore::take_part(BoxId box, Part& part) {
  part.here = true;
  perform(machine_.part_arrived(box, part.reader));
}

// Contributions are added in rank order, the own one at its place.
void ShardStore::sum(BoxId id) {
  Box& box = at(id);
  auto next = box.parts.begin();
  for (const RankId reader : machine_.roles(id).readers) {
    const at::Tensor part = reader == transfers_.rank() ? box.own_part : (next++)->tensor;
    if (box.gradient.defined()) {
      box.gradient.add_(part);
    } else {
      box.gradient = part;
    }
  }
  box.header = at::Tensor();
  box.record = box.gradient;
  if (record_type_ == at::kFloat) return;
  box.record = box.gradient.to(record_type_);
  box.gradient.copy_(box.record);
}

void ShardStore::send_record(BoxId id, RankId holder) {
  Box& box = at(id);
  if (!box.header.defined()) box.header = make_header(*machine_.state(id), digest_of_record(box.record));
  box.sends.push_back(send_copy(box.record, holder, tag_of(kRecordTag, id.index())));
  box.sends.push_back(send_copy(box.header, holder, tag_of(kRecordHeaderTag, id.index())));
}

void ShardStore::expect_record(BoxId id, RankId owner) {
  Box& box = at(id);
  // A record that waits for its state is still in use.
  const bool reusable = box.record.defined() && box.record.use_count() == 1 && box.record.scalar_type() == record_type_;
  if (!reusable) box.record = host_empty({box.spec.numel()}, record_type_);
  if (!box.header.defined()) box.header = host_empty({kHeaderWords}, at::kLong);
  box.receives = {transfers_.receive(box.record, owner, tag_of(kRecordTag, id.index())),
                  transfers_.receive(box.header, owner, tag_of(kRecordHeaderTag, id.index()))};
}

void ShardStore::take_record(BoxId id) {
  Box& box = at(id);
  transfers_.wait(box.receives);
  if (box.receives.empty()) return;
  box.receives.clear();
  const bool whole = digest_of_record(box.record) == record_digest_in(box.header);
  if (whole) box.gradient = record_type_ == at::kFloat ? box.record : box.record.to(at::kFloat);
  perform(machine_.record_arrived(id, tag_in(box.header), whole));
}

std::vector<double> ShardStore::wait_ready() {
  for (const BoxId box : unsummed_) {
    for (Part& part : at(box).parts) {
      if (part.here) continue;
      transfers_.wait({&part.transfer, 1});
      take_part(box, part);
    }
  }
  unsummed_.clear();
  std::vector<double> squares(size());
  // The backward pass goes through buckets from the last to the first: what comes first is looked at first.
  for (std::size_t index = size(); index-- > 0;) {
    const BoxId box = BoxId::at(index);
    take_record(box);
    if (machine_.state_must_come(box)) {
      transfers_.wait(at(box).coming->transfers);
      take_state(box);
    }
    if (machine_.owns(box) && machine_.recorded(box)) squares[index] = sum_of_squares(at(box).gradient);
  }
  // Accumulators are written again in the next step.
  for (Box& box : boxes_) {
    transfers_.wait(box.sends);
    box.sends.clear();
  }
  return squares;
}

void ShardStore::end_step() {
  unsummed_.clear();
  for (const BoxId id : all_ids<BoxId>(size())) {
    Box& box = at(id);
    box.parts.clear();
    box.own_part = box.gradient = box.parameters = at::Tensor();
    box.sends.clear();
    box.receives.clear();
    // What was received into is used again; what was sent belongs to the gradient.
    if (machine_.owns(id)) box.record = box.header = at::Tensor();
  }
}

// --- Updates and parameters

void ShardStore::update(BoxId id) {
  Box& box = at(id);
  if (machine_.owns(id)) buckets_.wait_sends(box.spec.bucket);  // they read what is written afterwards
  std::optional<Kept> kept;
  if (!box.kept.empty()) {
    kept = std::move(box.kept.front());
    box.kept.pop_front();
  }
  const at::Tensor gradient = kept ? kept->gradient : std::exchange(box.gradient, at::Tensor());
  try {
    rule_.apply(box.spec, box.state, gradient, kept ? kept->hyper : hyper_);
  } catch (const std::exception& error) {
    perform(machine_.update_failed(id));
    throw ExecError(place(id) + ": its update failed on rank " + std::to_string(transfers_.rank().value()) +
                    ", which drops its state: " + error.what());
  }
  perform(machine_.updated(id, box.state.digest));
}

void ShardStore::write_parameters(BoxId id) {
  Box& box = at(id);
  if (machine_.owns(id)) buckets_.wait_sends(box.spec.bucket);
  box.parameters = at::Tensor();
  buckets_.write(box.spec.bucket, box.spec.lo, box.state.master);
}

// The own part of the working copy, or what it would be.
void ShardStore::send_parameters(BoxId id, RankId reader) {
  Box& box = at(id);
  if (!box.parameters.defined()) {
    const at::Tensor& work = buckets_.work(box.spec.bucket);
    box.parameters = work.defined() ? work.narrow(0, box.spec.lo, box.spec.numel())
                                    : box.state.master.to(buckets_.spec(box.spec.bucket).dtype);
  }
  buckets_.send_part(box.spec.bucket, box.parameters, reader, tag_of(kGatherTag, id.index()));
}

// --- States on their way

comm::Transfer ShardStore::send_copy(const at::Tensor& tensor, RankId holder, std::uint64_t tag) {
  copied_bytes_ += tensor.nbytes();
  return transfers_.send(tensor, holder, tag);
}

void ShardStore::send_state(BoxId id, RankId holder) {
  const ShardState& state = at(id).state;
  // Updates leave tensors alone that a transfer still holds.
  send_copy(make_header(*machine_.state(id), {}), holder, state_tag(id, 0));
  send_copy(state.master, holder, state_tag(id, 1));
  for (std::size_t i = 0; i < state.optimizer.size(); ++i) send_copy(state.optimizer[i], holder, state_tag(id, i + 2));
}

void ShardStore::expect_state(BoxId id, RankId owner) {
  Box& box = at(id);
  StateOnItsWay coming;
  coming.header = host_empty({kHeaderWords}, at::kLong);
  coming.transfers.push_back(transfers_.receive(coming.header, owner, state_tag(id, 0)));
  for (std::size_t i = 0; i <= rule_.state_tensors(box.spec); ++i) {
    coming.tensors.push_back(host_empty({box.spec.numel()}, at::kFloat));
    coming.transfers.push_back(transfers_.receive(coming.tensors.back(), owner, state_tag(id, i + 1)));
  }
  box.coming = std::move(coming);
}

void ShardStore::take_state(BoxId id) {
  Box& box = at(id);
  StateOnItsWay arrived = *std::exchange(box.coming, std::nullopt);
  const StateTag tag = tag_in(arrived.header);
  box.state = make_state(box.spec, std::move(arrived.tensors));
  perform(machine_.state_arrived(id, tag, box.state.digest == tag.digest));
}

void ShardStore::take_states() {
  for (const BoxId id : all_ids<BoxId>(size())) {
    if (!at(id).coming || machine_.state_must_come(id)) continue;
    std::vector<comm::Transfer>& transfers = at(id).coming->transfers;
    const bool here = std::all_of(transfers.begin(), transfers.end(),
                                  [this](const comm::Transfer& each) { return transfers_.test(each); });
    if (here) take_state(id);
  }
}

void ShardStore::drop_state(BoxId id) {
  Box& box = at(id);
  box.state = ShardState();
  box.coming.reset();
  box.kept.clear();
}

// --- After a failure

void ShardStore::abandon_transfers() {
  for (const BoxId id : all_ids<BoxId>(size())) {
    Box& box = at(id);
    const auto here = [this](const comm::Transfer& each) { return transfers_.arrived(each); };
    // With whole states, what has arrived is the state that the next vote needs, and nothing has to be applied to it.
    if (box.coming && machine_.mode() == commit::CopyMode::kState &&
        std::all_of(box.coming->transfers.begin(), box.coming->transfers.end(), here)) {
      take_state(id);
    }
    box.receives.clear();
    box.sends.clear();
    box.parts.clear();
  }
  unsummed_.clear();
}

}  // namespace elaswave::exec

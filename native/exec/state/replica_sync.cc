#include "exec/state/replica_sync.h"

#include <algorithm>
#include <utility>

#include "exec/device/memory.h"
#include "exec/state/sync_header.h"

namespace elaswave::exec {
namespace {

// States under way to other ranks may have so many bytes in all; one may be larger.
constexpr std::size_t kStateBytesUnderWay = std::size_t{4} << 20;
constexpr std::int64_t kNearlyInSync = 1, kAskedAnew = 2;  // the word on a replica
// Catch-up records may lag so many steps. Each takes memory, so if more might lag, fewer states had room at once. Few
// states are under way at a time: records that lag more wait for a link without room.
constexpr std::int64_t kLagSteps = 4;

std::uint64_t state_tag(BoxId box, std::size_t part) { return tag_of(kStateTag, box.index()) | part; }

}  // namespace

void ReplicaSync::install() {
  incoming_.assign(shards_.size(), Incoming());
  records_.assign(shards_.size(), RecordReceive());
  headers_.clear();
  forget_all();
  sync_peak_ = 0;
  sent_at_once_ = 0;
}

bool ReplicaSync::are_done(const std::vector<comm::Transfer>& transfers) {
  return std::all_of(transfers.begin(), transfers.end(),
                     [this](const comm::Transfer& each) { return transfers_.test(each); });
}

comm::Transfer ReplicaSync::send(const at::Tensor& tensor, RankId holder, std::uint64_t tag, comm::Lane lane) {
  copied_bytes_ += tensor.nbytes();
  return transfers_.send(tensor, holder, tag, lane);
}

// --- Records of the step

const at::Tensor& ReplicaSync::header_of(const ShardStore::Sum& sum) {
  at::Tensor& header = headers_[sum.boxes.first];
  if (header.defined()) return header;
  header = empty_header(sum.boxes.count);
  std::size_t number = 0;
  for (const BoxId box : sum.boxes.ids()) {
    write_header(header, number++, *machine_.state(box), digest_of_record(shards_.piece(sum.record, sum.boxes, box)));
  }
  return header;
}

// A holder that is sent the states of some boxes of a sum gets the record of the others.
void ReplicaSync::send_record(commit::BoxRange boxes, RankId holder) {
  const ShardStore::Sum& sum = shards_.sum_of(boxes.first);
  const at::Tensor& header = header_of(sum);
  const auto send_part = [&](const at::Tensor& tensor, std::uint64_t kind) {
    sends_.push_back(send(tensor, holder, tag_of(kind, boxes.first.index()), comm::Lane::kStep));
  };
  send_part(shards_.piece(sum.record, sum.boxes, boxes), kRecordTag);
  send_part(header_part(header, boxes.first.index() - sum.boxes.first.index(), boxes.count), kRecordHeaderTag);
}

void ReplicaSync::expect_record(commit::BoxRange boxes, RankId owner) {
  RecordReceive& expected = records_[boxes.first.index()];
  // A record that has not been applied is still in use.
  const bool reusable = expected.record.defined() && expected.record.storage().use_count() == 1;
  if (!reusable) expected.record = shards_.empty_record(boxes);
  if (!expected.header.defined()) expected.header = empty_header(boxes.count);
  expected.boxes = boxes;
  expected.transfers = {transfers_.receive(expected.record, owner, tag_of(kRecordTag, boxes.first.index())),
                        transfers_.receive(expected.header, owner, tag_of(kRecordHeaderTag, boxes.first.index()))};
}

// Waits for the record of the run that begins with the box, if one is expected.
void ReplicaSync::take_record(BoxId first) {
  RecordReceive& expected = records_[first.index()];
  if (expected.transfers.empty()) return;
  transfers_.wait(expected.transfers);
  expected.transfers.clear();
  std::size_t number = 0;
  for (const BoxId box : expected.boxes.ids()) {
    const Header header = read_header(expected.header, number++);
    const at::Tensor record = shards_.piece(expected.record, expected.boxes, box);
    const bool whole = digest_of_record(record) == header.record;
    if (whole) shards_.set_gradient(box, shards_.record_type(box) == at::kFloat ? record : record.to(at::kFloat));
    perform_(machine_.record_arrived(box, header.state, whole));
  }
}

void ReplicaSync::wait_records() {
  // The backward pass goes through buckets from the last to the first: what comes first is looked at first.
  for (std::size_t index = shards_.size(); index-- > 0;) {
    const BoxId box = BoxId::at(index);
    take_record(box);
    if (machine_.state_must_come(box)) {
      transfers_.wait(incoming(box).state->transfers);
      take_state(box);
    }
    if (!incoming(box).records.empty() && machine_.record_awaited(box)) {
      transfers_.wait(incoming(box).records.front().transfers);
      take_catch_up(box);
    }
  }
}

void ReplicaSync::wait_sends() {
  transfers_.wait(sends_);
  sends_.clear();
  await_catch_up_sends();
}

void ReplicaSync::end_step() {
  sends_.clear();
  headers_.clear();
  for (RecordReceive& expected : records_) expected.transfers.clear();
}

void ReplicaSync::abandon_transfers() {
  for (const BoxId id : all_ids<BoxId>(shards_.size())) {
    const std::optional<StateTransfer>& coming = incoming(id).state;
    const auto here = [this](const comm::Transfer& each) { return transfers_.arrived(each); };
    // With whole states, what has arrived is the state that the next vote needs, and nothing has to be applied to it.
    if (coming && machine_.mode() == commit::CopyMode::kState &&
        std::all_of(coming->transfers.begin(), coming->transfers.end(), here)) {
      take_state(id);
    }
  }
  forget_all();
  end_step();
}

// --- States

// With whole states the next vote waits for it, and nobody answers.
void ReplicaSync::send_state(BoxId id, RankId holder) {
  Outgoing replica;
  replica.box = id;
  replica.holder = holder;
  if (machine_.mode() == commit::CopyMode::kState) return send_state(replica, comm::Lane::kStep);
  due_.push_back(std::move(replica));
}

void ReplicaSync::send_state(Outgoing& replica, comm::Lane lane) {
  const ShardState& state = shards_.state(replica.box);
  const auto send_part = [&](const at::Tensor& tensor, std::size_t part) {
    replica.sends.push_back(send(tensor, replica.holder, state_tag(replica.box, part), lane));
    if (part > 0) replica.bytes += tensor.nbytes();
  };
  // Updates leave tensors alone that a transfer still holds.
  const at::Tensor header = empty_header(1);
  write_header(header, 0, *machine_.state(replica.box), {});
  send_part(header, 0);
  send_part(state.master, 1);
  for (std::size_t i = 0; i < state.optimizer.size(); ++i) send_part(state.optimizer[i], i + 2);
}

void ReplicaSync::send_states() {
  hear_answers();
  std::size_t under_way = 0;
  for (Outgoing& replica : under_way_) {
    while (!replica.sends.empty() && transfers_.test(replica.sends.back())) replica.sends.pop_back();
    if (!replica.sends.empty()) under_way += replica.bytes;
  }
  while (!due_.empty() && (under_way == 0 || under_way < kStateBytesUnderWay)) {
    Outgoing replica = std::move(due_.front());
    due_.pop_front();
    if (!machine_.state(replica.box)) continue;  // its update has failed since
    const commit::Actions catch_up = machine_.state_leaves(replica.box, replica.holder);
    replica.awaited = machine_.version() - kLagSteps;  // as those before it in the lane, or less
    expect_answer(replica);
    send_state(replica, comm::Lane::kBulk);
    under_way += replica.bytes;
    under_way_.push_back(std::move(replica));
    perform_(catch_up);
  }
  sent_at_once_ = std::max(sent_at_once_, under_way);
}

void ReplicaSync::hear_answers() {
  for (auto replica = under_way_.begin(); replica != under_way_.end();) {
    std::erase_if(replica->catch_up, [this](const auto& record) { return are_done(record.second); });
    if (transfers_.arrived(replica->answered) && transfers_.test(replica->answered)) {  // most never say more
      replica->nearly_in_sync = *replica->answer.const_data_ptr<std::int64_t>() == kNearlyInSync;
      if (!replica->nearly_in_sync) {
        ask_anew(*replica);
        replica = under_way_.erase(replica);
        continue;
      }
      expect_answer(*replica);
    }
    // What is sent with the step would overtake what is still under way in bulk.
    if (replica->nearly_in_sync && replica->unsent.empty() && replica->catch_up.empty())
      machine_.replica_nearly_in_sync(replica->box, replica->holder);
    ++replica;
  }
}

// What was sent after the state before is still before the new one in the lane, and takes places at the holder.
void ReplicaSync::ask_anew(Outgoing& replica) {
  const commit::Actions again = machine_.state_asked(replica.box, replica.holder);
  perform_(again);
  if (!again.empty()) due_.back().catch_up = std::move(replica.catch_up);
}

void ReplicaSync::expect_answer(Outgoing& replica) {
  replica.answer = host_empty({1}, at::kLong);
  replica.answered = transfers_.receive(replica.answer, replica.holder, tag_of(kStateAnswerTag, replica.box.index()));
}

void ReplicaSync::answer(BoxId box, RankId owner, std::int64_t word) {
  const at::Tensor answer = host_empty({1}, at::kLong);
  *answer.mutable_data_ptr<std::int64_t>() = word;
  transfers_.send(answer, owner, tag_of(kStateAnswerTag, box.index()));
}

void ReplicaSync::report_nearly_in_sync(BoxId box, RankId owner) { answer(box, owner, kNearlyInSync); }

void ReplicaSync::ask_state(BoxId box, RankId owner) {
  shards_.set_state(box, {});
  answer(box, owner, kAskedAnew);
}

void ReplicaSync::expect_state(BoxId id, RankId owner) {
  const BoxSpec& box = shards_.spec(id);
  StateTransfer coming;
  coming.header = empty_header(1);
  coming.transfers.push_back(transfers_.receive(coming.header, owner, state_tag(id, 0)));
  for (std::size_t i = 0; i <= state_tensors_(box); ++i) {
    coming.tensors.push_back(host_empty({box.numel()}, at::kFloat));
    coming.transfers.push_back(transfers_.receive(coming.tensors.back(), owner, state_tag(id, i + 1)));
  }
  incoming(id).state = std::move(coming);
}

void ReplicaSync::take_state(BoxId id) {
  StateTransfer arrived = *std::exchange(incoming(id).state, std::nullopt);
  const StateTag tag = read_header(arrived.header, 0).state;
  shards_.set_state(id, make_state(shards_.spec(id), std::move(arrived.tensors)));
  incoming(id).came = true;
  perform_(machine_.state_arrived(id, tag, shards_.state(id).digest == tag.digest));
}

std::uint64_t ReplicaSync::sync_bytes() const {
  std::uint64_t bytes = 0;
  for (const BoxId id : all_ids<BoxId>(shards_.size())) {
    const Incoming& box = incoming_[id.index()];
    const auto bytes_each = static_cast<std::uint64_t>(shards_.spec(id).numel()) * sizeof(float);
    if (box.state) bytes += bytes_each * box.state->tensors.size();
    if (box.came) bytes += bytes_each * (1 + shards_.state(id).optimizer.size());
    for (const CatchUpReceive& each : box.records) bytes += each.record.nbytes();
  }
  return bytes;
}

void ReplicaSync::take_states() {
  sync_peak_ = std::max(sync_peak_, sync_bytes());
  for (const BoxId id : all_ids<BoxId>(shards_.size())) {
    if (machine_.sync_under_way(id) && !machine_.state_must_come(id)) take_what_came(id);
  }
  send_states();
}

void ReplicaSync::take_what_came(BoxId id) {
  Incoming& box = incoming(id);
  // Records are looked for first: if one is here, so is the state before it; without a state, they are those of a
  // replica that was given up. What is ahead of the steps here waits.
  std::size_t records = 0;
  while (records < box.records.size() && are_done(box.records[records].transfers)) ++records;
  if (box.state && are_done(box.state->transfers)) {
    if (read_header(box.state->header, 0).state.version > machine_.version()) return;
    take_state(id);
  }
  for (; records > 0 && machine_.sync_under_way(id); --records) {
    if (read_header(box.records.front().header, 0).state.version >= machine_.version()) return;
    take_catch_up(id);
  }
}

void ReplicaSync::forget(BoxId box) { incoming(box) = Incoming(); }

// --- Catch-up records

// Of its own: that of a run is as large as all its boxes, and the next step writes gradients again.
void ReplicaSync::send_catch_up(BoxId id, RankId holder, comm::Lane lane) {
  const at::Tensor record = shards_.gradient(id).to(shards_.record_type(id), false, /*copy=*/true);
  const at::Tensor header = empty_header(1);
  write_header(header, 0, *machine_.state(id), digest_of_record(record), lane == comm::Lane::kStep);
  if (lane == comm::Lane::kBulk) {
    const auto replica =
        std::ranges::find_if(under_way_, [&](const Outgoing& each) { return each.box == id && each.holder == holder; });
    replica->unsent.push_back({machine_.version() + 1, record, header});
    return;
  }
  const std::uint64_t tag = tag_of(kCatchUpRecordTag, id.index());
  sends_.push_back(send(record, holder, tag, lane));
  sends_.push_back(send(header, holder, tag | 1, lane));
}

// After the step's own messages: on a link of their own they do not overtake these, but share the way out of the host.
void ReplicaSync::send_catch_up_records() {
  for (Outgoing& replica : under_way_) {
    const std::uint64_t tag = tag_of(kCatchUpRecordTag, replica.box.index());
    for (const CatchUpSend& each : std::exchange(replica.unsent, {})) {
      std::vector<comm::Transfer>& sends = replica.catch_up[each.version];
      sends.push_back(send(each.record, replica.holder, tag, comm::Lane::kBulk));
      sends.push_back(send(each.header, replica.holder, tag | 1, comm::Lane::kBulk));
    }
  }
}

void ReplicaSync::expect_catch_up(BoxId id, RankId owner) {
  CatchUpReceive expected{shards_.empty_record(id), empty_header(1), {}};
  const std::uint64_t tag = tag_of(kCatchUpRecordTag, id.index());
  expected.transfers = {transfers_.receive(expected.record, owner, tag),
                        transfers_.receive(expected.header, owner, tag | 1)};
  incoming(id).records.push_back(std::move(expected));
}

// The next one, which is here.
void ReplicaSync::take_catch_up(BoxId id) {
  const CatchUpReceive arrived = std::move(incoming(id).records.front());
  incoming(id).records.pop_front();
  const Header header = read_header(arrived.header, 0);
  const bool whole = digest_of_record(arrived.record) == header.record;
  if (whole) shards_.set_gradient(id, arrived.record.to(at::kFloat));
  if (machine_.record_awaited(id)) return perform_(machine_.record_arrived(id, header.state, whole));
  perform_(machine_.catch_up_record_arrived(id, header.state, whole, header.prompt));
  shards_.set_gradient(id, {});  // if it was not for the state here
}

// Before the vote. What is waited for grows by as many versions as have a place at the holder, which looks after each
// step: else both would wait for each other. Replicas share a lane, in which a record without a place keeps back those
// of others; so it grows for all of them from the same version on. The last record of a replica that is nearly in sync
// is waited for in its own step, if the version has grown so far by then.
void ReplicaSync::await_catch_up_sends() {
  hear_answers();
  send_catch_up_records();
  const bool states =
      !due_.empty() || std::ranges::any_of(under_way_, [](const Outgoing& replica) { return !replica.sends.empty(); });
  for (Outgoing& replica : under_way_) {
    const std::int64_t latest = machine_.version() + 1 - (replica.nearly_in_sync ? 0 : states ? kLagSteps : 1);
    replica.awaited =
        std::max(replica.awaited, std::min(latest, replica.awaited + commit::StepMachine::kExpectedAhead));
    for (auto& [version, transfers] : replica.catch_up) {
      if (version <= replica.awaited) transfers_.wait(transfers);
    }
  }
}

void ReplicaSync::forget_all() {
  for (Incoming& box : incoming_) {
    box.state.reset();
    box.records.clear();
  }
  due_.clear();
  under_way_.clear();
}

}  // namespace elaswave::exec

// States on their way to ranks that shall hold them; see shard_store.h.
#include <algorithm>
#include <utility>

#include "exec/device/memory.h"
#include "exec/state/copy_header.h"
#include "exec/state/shard_store.h"

namespace elaswave::exec {
namespace {

// States under way to other ranks may have so many bytes in all; one may be larger.
constexpr std::size_t kCopiedAtOnce = std::size_t{4} << 20;
constexpr std::int64_t kClose = 1, kAskedAnew = 2;  // the word on a copy
// Records that are sent behind states may be so many steps late. Each takes memory, so if more might be late, fewer
// copies had room at once. Few states are under way at a time: records that are later wait for a link without room.
constexpr std::int64_t kLateSteps = 4;

std::uint64_t state_tag(BoxId box, std::size_t part) { return tag_of(kStateTag, box.index()) | part; }

}  // namespace

// With whole states the next vote waits for it, and nobody answers.
void ShardStore::send_state(BoxId id, RankId holder) {
  Copy copy;
  copy.box = id;
  copy.holder = holder;
  if (machine_.mode() == commit::CopyMode::kState) return send_state(copy, comm::Lane::kStep);
  copies_due_.push_back(std::move(copy));
}

void ShardStore::send_state(Copy& copy, comm::Lane lane) {
  const ShardState& state = at(copy.box).state;
  const auto send = [&](const at::Tensor& tensor, std::size_t part) {
    copy.sends.push_back(send_copy(tensor, copy.holder, state_tag(copy.box, part), lane));
    if (part > 0) copy.bytes += tensor.nbytes();
  };
  // Updates leave tensors alone that a transfer still holds.
  const at::Tensor header = empty_header(1);
  write_header(header, 0, *machine_.state(copy.box), {});
  send(header, 0);
  send(state.master, 1);
  for (std::size_t i = 0; i < state.optimizer.size(); ++i) send(state.optimizer[i], i + 2);
}

void ShardStore::send_states() {
  hear_answers();
  std::size_t under_way = 0;
  for (Copy& copy : copies_under_way_) {
    while (!copy.sends.empty() && transfers_.test(copy.sends.back())) copy.sends.pop_back();
    if (!copy.sends.empty()) under_way += copy.bytes;
  }
  while (!copies_due_.empty() && (under_way == 0 || under_way < kCopiedAtOnce)) {
    Copy copy = std::move(copies_due_.front());
    copies_due_.pop_front();
    if (!machine_.state(copy.box)) continue;  // its update has failed since
    const commit::Actions behind = machine_.state_leaves(copy.box, copy.holder);
    copy.awaited = machine_.version() - kLateSteps;  // as those before it in the lane, or less
    expect_answer(copy);
    send_state(copy, comm::Lane::kBulk);
    under_way += copy.bytes;
    copies_under_way_.push_back(std::move(copy));
    perform(behind);
  }
  sent_at_once_ = std::max(sent_at_once_, under_way);
}

void ShardStore::hear_answers() {
  for (auto copy = copies_under_way_.begin(); copy != copies_under_way_.end();) {
    std::erase_if(copy->late, [this](const auto& record) { return are_done(record.second); });
    if (transfers_.arrived(copy->answered) && transfers_.test(copy->answered)) {  // most never say more
      copy->close = *copy->answer.const_data_ptr<std::int64_t>() == kClose;
      if (!copy->close) {
        ask_anew(*copy);
        copy = copies_under_way_.erase(copy);
        continue;
      }
      expect_answer(*copy);
    }
    // What is sent with the step would overtake what is still under way in bulk.
    if (copy->close && copy->unsent.empty() && copy->late.empty()) machine_.copy_is_close(copy->box, copy->holder);
    ++copy;
  }
}

// What was sent behind the state before is still before the new one in the lane, and takes places at the holder.
void ShardStore::ask_anew(Copy& copy) {
  const commit::Actions again = machine_.state_asked(copy.box, copy.holder);
  perform(again);
  if (!again.empty()) copies_due_.back().late = std::move(copy.late);
}

void ShardStore::expect_answer(Copy& copy) {
  copy.answer = host_empty({1}, at::kLong);
  copy.answered = transfers_.receive(copy.answer, copy.holder, tag_of(kStateAnswerTag, copy.box.index()));
}

void ShardStore::answer(BoxId box, RankId owner, bool close) {
  const at::Tensor word = host_empty({1}, at::kLong);
  *word.mutable_data_ptr<std::int64_t>() = close ? kClose : kAskedAnew;
  transfers_.send(word, owner, tag_of(kStateAnswerTag, box.index()));
}

void ShardStore::expect_state(BoxId id, RankId owner) {
  Box& box = at(id);
  StateOnItsWay coming;
  coming.header = empty_header(1);
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
  const StateTag tag = read_header(arrived.header, 0).state;
  box.state = make_state(box.spec, std::move(arrived.tensors));
  box.came = true;
  perform(machine_.state_arrived(id, tag, box.state.digest == tag.digest));
}

std::uint64_t ShardStore::behind_bytes() const {
  std::uint64_t bytes = 0;
  for (const Box& box : boxes_) {
    const auto bytes_each = static_cast<std::uint64_t>(box.spec.numel()) * sizeof(float);
    if (box.coming) bytes += bytes_each * box.coming->tensors.size();
    if (box.came) bytes += bytes_each * (1 + box.state.optimizer.size());
    for (const LateRecord& late : box.late) bytes += late.record.nbytes();
  }
  return bytes;
}

void ShardStore::take_states() {
  behind_peak_ = std::max(behind_peak_, behind_bytes());
  for (const BoxId id : all_ids<BoxId>(size())) {
    if (machine_.is_behind(id) && !machine_.state_must_come(id)) take_what_came(id);
  }
  send_states();
}

bool ShardStore::are_done(const std::vector<comm::Transfer>& transfers) {
  return std::all_of(transfers.begin(), transfers.end(),
                     [this](const comm::Transfer& each) { return transfers_.test(each); });
}

void ShardStore::take_what_came(BoxId id) {
  Box& box = at(id);
  // Records are looked for first: if one is here, so is the state before it; without a state, they are those of a copy
  // that was given up. What is ahead of the steps here waits.
  std::size_t records = 0;
  while (records < box.late.size() && are_done(box.late[records].transfers)) ++records;
  if (box.coming && are_done(box.coming->transfers)) {
    if (read_header(box.coming->header, 0).state.version > machine_.version()) return;
    take_state(id);
  }
  for (; records > 0 && machine_.is_behind(id); --records) {
    if (read_header(box.late.front().header, 0).state.version >= machine_.version()) return;
    take_late_record(id);
  }
}

void ShardStore::drop_state(BoxId id) {
  Box& box = at(id);
  box.state = ShardState();
  box.came = false;
  box.coming.reset();
  box.late.clear();
}

// --- Records behind states

// Of its own: that of a run is as large as all its boxes, and the next step writes gradients again.
void ShardStore::send_late_record(BoxId id, RankId holder, comm::Lane lane) {
  const at::Tensor record = at(id).gradient.to(record_type(id), false, /*copy=*/true);
  const at::Tensor header = empty_header(1);
  write_header(header, 0, *machine_.state(id), digest_of_record(record), lane == comm::Lane::kStep);
  if (lane == comm::Lane::kBulk) {
    const auto copy = std::ranges::find_if(copies_under_way_,
                                           [&](const Copy& each) { return each.box == id && each.holder == holder; });
    copy->unsent.push_back({machine_.version() + 1, record, header});
    return;
  }
  const std::uint64_t tag = tag_of(kLateRecordTag, id.index());
  sends_.push_back(send_copy(record, holder, tag, lane));
  sends_.push_back(send_copy(header, holder, tag | 1, lane));
}

// After the step's own messages: on a link of their own they do not overtake these, but share the way out of the host.
void ShardStore::send_records_behind() {
  for (Copy& copy : copies_under_way_) {
    const std::uint64_t tag = tag_of(kLateRecordTag, copy.box.index());
    for (const RecordBehind& each : std::exchange(copy.unsent, {})) {
      std::vector<comm::Transfer>& late = copy.late[each.version];
      late.push_back(send_copy(each.record, copy.holder, tag, comm::Lane::kBulk));
      late.push_back(send_copy(each.header, copy.holder, tag | 1, comm::Lane::kBulk));
    }
  }
}

void ShardStore::expect_late_record(BoxId id, RankId owner) {
  const std::int64_t numel = are_buffers(id) ? updates_.words_of(spec(id).bucket) : spec(id).numel();
  LateRecord late{host_empty({numel}, record_type(id)), empty_header(1), {}};
  const std::uint64_t tag = tag_of(kLateRecordTag, id.index());
  late.transfers = {transfers_.receive(late.record, owner, tag), transfers_.receive(late.header, owner, tag | 1)};
  at(id).late.push_back(std::move(late));
}

// The next one, which is here.
void ShardStore::take_late_record(BoxId id) {
  Box& box = at(id);
  const LateRecord late = std::move(box.late.front());
  box.late.pop_front();
  const Header header = read_header(late.header, 0);
  const bool whole = digest_of_record(late.record) == header.record;
  if (whole) box.gradient = late.record.to(at::kFloat);
  if (machine_.record_awaited(id)) return perform(machine_.record_arrived(id, header.state, whole));
  perform(machine_.late_record_arrived(id, header.state, whole, header.prompt));
  box.gradient = at::Tensor();  // if it was not for the state here
}

// Before the vote. What is waited for grows by as many versions as have a place at the holder, which looks after each
// step: else both would wait for each other. Copies share a lane, in which a record without a place keeps back those of
// other copies; so it grows for all of them from the same version on. The last record of a copy that is close is waited
// for in its own step, if the version has grown so far by then.
void ShardStore::await_late_sends() {
  hear_answers();
  send_records_behind();
  const bool states = !copies_due_.empty() ||
                      std::ranges::any_of(copies_under_way_, [](const Copy& copy) { return !copy.sends.empty(); });
  for (Copy& copy : copies_under_way_) {
    const std::int64_t latest = machine_.version() + 1 - (copy.close ? 0 : states ? kLateSteps : 1);
    copy.awaited = std::max(copy.awaited, std::min(latest, copy.awaited + commit::StepMachine::kExpectedAhead));
    for (auto& [version, transfers] : copy.late) {
      if (version <= copy.awaited) transfers_.wait(transfers);
    }
  }
}

void ShardStore::forget_copies() {
  for (Box& box : boxes_) {
    box.coming.reset();
    box.late.clear();
  }
  copies_due_.clear();
  copies_under_way_.clear();
}

}  // namespace elaswave::exec

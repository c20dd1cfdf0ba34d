// States on their way to ranks that shall hold them; see shard_store.h.
#include <algorithm>
#include <utility>

#include "copy_header.h"
#include "memory.h"
#include "shard_store.h"

namespace elaswave::exec {
namespace {

// States under way to other ranks may have so many bytes in all; one may be larger.
constexpr std::size_t kCopiedAtOnce = std::size_t{4} << 20;
constexpr std::int64_t kTaken = 1, kAskedAnew = 2;  // the word on a state that was sent

std::uint64_t state_tag(BoxId box, std::size_t part) { return tag_of(kStateTag, box.index()) | part; }

}  // namespace

// With whole states the next vote waits for it, and nobody answers.
void ShardStore::send_state(BoxId id, RankId holder) {
  Copy copy{id, holder, {}, 0, {}, {}};
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
  if (!copies_under_way_.empty()) hear_answers();
  std::size_t under_way = 0;
  for (Copy& copy : copies_under_way_) {
    while (!copy.sends.empty() && transfers_.test(copy.sends.back())) copy.sends.pop_back();
    if (!copy.sends.empty()) under_way += copy.bytes;
  }
  while (!copies_due_.empty() && (under_way == 0 || under_way < kCopiedAtOnce)) {
    Copy copy = std::move(copies_due_.front());
    copies_due_.pop_front();
    if (!machine_.state(copy.box)) continue;  // its update has failed since
    copy.answer = host_empty({1}, at::kLong);
    copy.answered = transfers_.receive(copy.answer, copy.holder, tag_of(kStateAnswerTag, copy.box.index()));
    send_state(copy, comm::Lane::kBulk);
    under_way += copy.bytes;
    copies_under_way_.push_back(std::move(copy));
  }
  sent_at_once_ = std::max(sent_at_once_, under_way);
}

void ShardStore::hear_answers() {
  for (auto copy = copies_under_way_.begin(); copy != copies_under_way_.end();) {
    if (!transfers_.test(copy->answered)) {
      ++copy;
      continue;
    }
    const bool again = *copy->answer.const_data_ptr<std::int64_t>() == kAskedAnew;
    if (again) perform(machine_.state_asked(copy->box, copy->holder));
    copy = copies_under_way_.erase(copy);
  }
}

void ShardStore::answer(BoxId box, RankId owner, bool taken) {
  const at::Tensor word = host_empty({1}, at::kLong);
  *word.mutable_data_ptr<std::int64_t>() = taken ? kTaken : kAskedAnew;
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
    for (const Kept& kept : box.kept) bytes += kept.gradient.nbytes();
  }
  return bytes;
}

void ShardStore::take_states() {
  behind_peak_ = std::max(behind_peak_, behind_bytes());
  for (const BoxId id : all_ids<BoxId>(size())) {
    if (!at(id).coming || machine_.state_must_come(id)) continue;
    std::vector<comm::Transfer>& transfers = at(id).coming->transfers;
    const bool here = std::all_of(transfers.begin(), transfers.end(),
                                  [this](const comm::Transfer& each) { return transfers_.test(each); });
    if (here) take_state(id);
  }
  send_states();
}

void ShardStore::drop_state(BoxId id) {
  Box& box = at(id);
  box.state = ShardState();
  box.came = false;
  box.coming.reset();
  box.kept.clear();
}

}  // namespace elaswave::exec

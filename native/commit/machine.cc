// The commit machine: what happens between steps, in a step, and after a failure; see machine.h.
#include "commit/machine.h"

#include <algorithm>
#include <utility>

#include "commit/internal.h"

namespace elaswave::commit {
namespace {

using Kind = Action::Kind;

void append(Actions& actions, Actions more) { actions.insert(actions.end(), more.begin(), more.end()); }

void check_roles(std::size_t number, const BoxRoles& roles) {
  if (contains(roles.holders, roles.owner)) {
    throw ProtocolError(text(BoxId(static_cast<std::int64_t>(number))) + ": its owner, " + text(roles.owner) +
                        ", cannot hold it too");
  }
}

}  // namespace

// --- Between steps

Actions StepMachine::install(std::uint32_t epoch, std::vector<RankId> members, std::vector<BoxRoles> roles) {
  expect_phase(Phase::kIdle, "install");
  if (!contains(members, rank_)) throw ProtocolError(self() + ": is no member of epoch " + std::to_string(epoch));
  if (!boxes_.empty() && roles.size() != boxes_.size()) {
    throw ProtocolError(self() + ": the roles of " + std::to_string(roles.size()) + " boxes for " +
                        std::to_string(boxes_.size()) + "; how state is cut does not change");
  }
  for (std::size_t i = 0; i < roles.size(); ++i) check_roles(i, roles[i]);
  Actions actions;
  boxes_.resize(roles.size());
  epoch_ = epoch;
  members_ = std::move(members);
  for (Bucket& bucket : buckets_) bucket.boxes.clear();
  for (std::size_t i = 0; i < roles.size(); ++i) {
    Box& box = boxes_[i];
    const bool read = contains(box.roles.readers, rank_);
    box.roles = std::move(roles[i]);
    const std::size_t bucket = box.roles.bucket.index();
    const bool alike = i > 0 && boxes_[i - 1].roles == box.roles;
    box.run = i == 0 ? 0 : boxes_[i - 1].run + (alike ? 0 : 1);
    if (bucket >= buckets_.size()) buckets_.resize(bucket + 1);
    buckets_[bucket].boxes.push_back(id_of(box));
    if (!read && contains(box.roles.readers, rank_) && guards_.old_parameters_are_stale.demands()) {
      buckets_[bucket].stale = true;
    }
    if (lacks_records(box) || !keeps(box)) drop_state(actions, box);
    box.replicas.clear();
  }
  unchanged_.clear();
  for (Bucket& bucket : buckets_) {
    bucket.stale = bucket.stale && reads_any(bucket);
    if (bucket.stale && has_all(bucket)) {
      for (const BoxId box : bucket.boxes) act(actions, Kind::kWriteParameters, at(box));
      bucket.stale = false;
    }
  }
  return actions;
}

Actions StepMachine::restart(std::int64_t version) {
  expect_phase(Phase::kIdle, "restart");
  Actions actions;
  version_ = version;
  for (Box& box : boxes_) drop_state(actions, box);
  for (Bucket& bucket : buckets_) bucket.stale = reads_any(bucket);
  return actions;
}

void StepMachine::load(BoxId id, Digest digest) {
  Box& box = at(id);
  if (!keeps(box)) throw ProtocolError(text(id) + ": " + self() + " neither owns nor holds it");
  box.state = StateTag{version_, digest};
  std::erase_if(box.replicas, [this](const Replica& replica) { return replica.holder == rank_; });
}

void StepMachine::load_parameters(BucketId bucket) { at(bucket).stale = false; }

Actions StepMachine::refresh(BucketId bucket, std::span<const RankId> takers) {
  expect_phase(Phase::kIdle, "refresh");
  Actions actions;
  if (takers.empty()) return actions;
  for (const BoxId box : at(bucket).boxes) {
    if (owns(box)) expect_state_of(at(box));
  }
  for (const BoxId box : at(bucket).boxes) {
    if (owns(box)) act(actions, Kind::kWriteParameters, at(box));
  }
  Actions parameters;
  for (const BoxId box : at(bucket).boxes) {
    std::vector<RankId> readers = roles(box).readers;
    std::erase_if(readers, [&](RankId rank) { return !contains(takers, rank); });
    publish(parameters, at(box), readers);
  }
  append(actions, merged(parameters));
  if (contains(takers, rank_)) at(bucket).stale = false;
  return actions;
}

// --- A step, up to the vote

Actions StepMachine::begin_step() {
  expect_phase(Phase::kIdle, "begin_step");
  Actions actions;
  for (const Box& box : boxes_) expect_state_of(box);
  forget_step();
  phase_ = Phase::kComputing;
  if (mode_ == CopyMode::kState) return actions;
  for (Box& box : boxes_) {
    if (!holds(id_of(box))) continue;
    vouch_if_in_sync(box);
    if (replica_of(box, rank_) == nullptr) {
      box.record_awaited = true;
      act(actions, Kind::kExpectRecord, box, box.roles.owner);
    } else if (is_in(box, Stage::kNearlyInSync)) {
      box.record_awaited = true;  // it is expected already
    }
  }
  actions = merged(actions);
  for (Box& box : boxes_) {
    if (is_in(box, Stage::kLost)) drop_state(actions, box);
  }
  report_to_owners(actions);
  return actions;
}

Actions StepMachine::bucket_reduced(BucketId id) {
  expect_phase(Phase::kComputing, "bucket_reduced");
  Bucket& bucket = at(id);
  if (bucket.reduced) throw ProtocolError("bucket " + std::to_string(id.value()) + ": was reduced in this step");
  bucket.reduced = true;
  Actions actions;
  for (const BoxId number : bucket.boxes) {
    Box& box = at(number);
    if (!owns(number)) {
      if (reads(number)) act(actions, Kind::kSendPart, box, box.roles.owner);
      continue;
    }
    for (const RankId reader : box.roles.readers) {
      if (reader == rank_) continue;
      box.parts_awaited.push_back(reader);
      act(actions, Kind::kExpectPart, box, reader);
    }
    if (box.parts_awaited.empty()) sum(actions, box);
  }
  return merged(actions);
}

Actions StepMachine::part_arrived(BoxRange boxes, RankId reader) {
  for (const BoxId id : boxes.ids()) {
    if (contains(at(id).parts_awaited, reader)) continue;
    throw ProtocolError(text(id) + ": a part of " + text(reader) + ", which is not awaited");
  }
  Actions actions;
  for (const BoxId id : boxes.ids()) {
    Box& box = at(id);
    std::erase(box.parts_awaited, reader);
    if (box.parts_awaited.empty()) sum(actions, box);
  }
  return merged(actions);
}

void StepMachine::sum(Actions& actions, Box& box) const {
  box.record = true;
  act(actions, Kind::kSum, box);
  if (mode_ == CopyMode::kState) return;
  for (const RankId holder : box.roles.holders) {
    const Replica* const replica = replica_of(box, holder);
    if (replica == nullptr) {
      act(actions, Kind::kSendRecord, box, holder);
    } else if (replica->stage == Stage::kSyncing) {
      act(actions, Kind::kSendCatchUpRecord, box, holder);
    } else if (replica->stage == Stage::kNearlyInSync) {
      act(actions, Kind::kSendPromptRecord, box, holder);
    }
  }
}

Actions StepMachine::record_arrived(BoxId id, const StateTag& owners, bool whole) {
  Box& box = at(id);
  if (!box.record_awaited) throw ProtocolError(text(id) + ": a record, which is not awaited");
  if (owners.version != version_) {
    throw ProtocolError(text(id) + ": a record for the state at version " + std::to_string(owners.version) +
                        " in the step after version " + std::to_string(version_));
  }
  box.record_awaited = false;
  box.record = whole;
  box.wrong = !whole;
  Actions actions;
  if (box.state && box.state->version == owners.version && !agrees(box, owners)) {
    box.wrong = true;
    if (materializes(id, rank_)) at(box.roles.bucket).stale = true;
    drop_state(actions, box);
  }
  if (is_in(box, Stage::kNearlyInSync)) act(actions, Kind::kExpectCatchUpRecord, box, box.roles.owner);
  return actions;
}

// Whether the state here is what the owner's was.
bool StepMachine::agrees(const Box& box, const StateTag& owners) {
  return guards_.digests_are_compared.allows(box.state->digest == owners.digest);
}

// A replica that was found to be wrong in this step is not vouched for: the step is not voted for at all.
bool StepMachine::vouches_for(const Box& box) const {
  if (!keeps(box) || box.wrong || is_in(box, Stage::kSyncing)) return false;
  return box.state || box.roles.owner == rank_ || materializes(id_of(box), rank_);
}

bool StepMachine::is_complete(const Box& box) const {
  const bool needs_record = box.roles.owner == rank_ || mode_ == CopyMode::kLog;
  return box.state && box.state->version == version_ && (box.record || !needs_record);
}

bool StepMachine::ready_to_vote() {
  if (phase_ != Phase::kComputing) return false;
  const bool computed = std::all_of(buckets_.begin(), buckets_.end(),
                                    [this](const Bucket& bucket) { return bucket.reduced || !reads_any(bucket); });
  if (!computed) return false;
  return std::all_of(boxes_.begin(), boxes_.end(), [this](const Box& box) {
    if (state_must_come(id_of(box))) return false;
    const bool here = !box.record_awaited && (!vouches_for(box) || is_complete(box));
    return guards_.vote_needs_state_and_record.allows(here);
  });
}

Actions StepMachine::cast_vote() {
  expect_phase(Phase::kComputing, "cast_vote");
  if (!ready_to_vote()) {
    const auto lacking = std::find_if(boxes_.begin(), boxes_.end(), [this](const Box& box) {
      return box.record_awaited || state_must_come(id_of(box)) || (vouches_for(box) && !is_complete(box));
    });
    const std::string what =
        lacking == boxes_.end() ? "the gradient of a bucket" : "state or record of " + text(id_of(*lacking));
    throw ProtocolError(self() + ": " + what + " for version " + std::to_string(version_ + 1) +
                        " is not here; a rank votes only for what it has");
  }
  Actions actions;
  const bool right = std::none_of(boxes_.begin(), boxes_.end(), [](const Box& box) { return box.wrong; });
  if (!guards_.wrong_replica_ends_step.allows(right)) {
    for (const Box& box : boxes_) {
      if (box.wrong) act(actions, Kind::kLeaveStep, box);
    }
    return actions;
  }
  phase_ = Phase::kVoted;
  votes_ = {rank_};
  for (const RankId member : members_) {
    if (member != rank_) actions.push_back({Kind::kSendVote, std::nullopt, member, std::nullopt});
  }
  for (const RankId member : members_) {
    if (member != rank_) actions.push_back({Kind::kExpectVote, std::nullopt, member, std::nullopt});
  }
  if (votes_suffice()) actions.push_back({Kind::kCommit, std::nullopt, std::nullopt, std::nullopt});
  return actions;
}

bool StepMachine::votes_suffice() {
  const bool all =
      std::all_of(members_.begin(), members_.end(), [this](RankId rank) { return contains(votes_, rank); });
  return guards_.commit_needs_all_votes.allows(all);
}

Actions StepMachine::vote_arrived(RankId member) {
  expect_phase(Phase::kVoted, "vote_arrived");
  if (!contains(members_, member) || contains(votes_, member)) {
    throw ProtocolError(self() + ": a vote of " + text(member) + ", which is not awaited");
  }
  votes_.push_back(member);
  Actions actions;
  if (votes_suffice()) actions.push_back({Kind::kCommit, std::nullopt, std::nullopt, std::nullopt});
  return actions;
}

// --- A step, from the commit on

Actions StepMachine::commit(bool updates) {
  expect_phase(Phase::kVoted, "commit");
  if (!votes_suffice()) throw ProtocolError(self() + ": a commit without the votes of all members");
  phase_ = Phase::kCommitted;
  ++version_;
  updates_ = updates;
  Actions actions;
  if (!updates_) {
    unchanged_.insert(version_);
    for (Box& box : boxes_) {
      box.record = false;
      if (box.state && box.state->version + 1 == version_) ++box.state->version;
    }
  } else if (left_) {
    finish_updates(actions);
  }
  return actions;
}

Actions StepMachine::update_bucket(BucketId bucket) {
  expect_phase(Phase::kCommitted, "update_bucket");
  Actions actions;
  for (const BoxId number : at(bucket).boxes) {
    Box& box = at(number);
    if (owns(number) && box.record && box.state && !box.update_due) update(actions, box, version_);
  }
  return actions;
}

Actions StepMachine::update_replicas() {
  expect_phase(Phase::kCommitted, "update_replicas");
  Actions actions;
  for (Box& box : boxes_) {
    if (!updates_ || !holds(id_of(box))) continue;
    if (mode_ == CopyMode::kState) {
      await_state(actions, box);
    } else if (box.record && box.state && !box.update_due) {
      if (guards_.replicas_are_updated.demands()) {
        update(actions, box, version_);
      } else {
        box.state->version = version_;
      }
    }
  }
  return actions;
}

Actions StepMachine::updated(BoxId id, Digest digest) {
  Box& box = at(id);
  if (!box.update_due || !box.state) throw ProtocolError(text(id) + ": an update that was not to be done");
  box.state = StateTag{*std::exchange(box.update_due, std::nullopt), digest};
  Actions actions;
  box.record = false;
  if (owns(id) || materializes(id, rank_)) act(actions, Kind::kWriteParameters, box);
  if (owns(id) && mode_ == CopyMode::kState && !left_) {
    for (const RankId holder : box.roles.holders) append(actions, send_state(id, holder));
  }
  return actions;
}

Actions StepMachine::update_failed(BoxId id) {
  Box& box = at(id);
  if (!box.update_due || !box.state) throw ProtocolError(text(id) + ": an update that was not to be done");
  if (!guards_.failed_update_drops_state.demands()) return updated(id, box.state->digest);
  Actions actions;
  drop_state(actions, box);
  box.record = false;
  if (reads(id) && (owns(id) || materializes(id, rank_))) at(box.roles.bucket).stale = true;
  return actions;
}

Actions StepMachine::gather(BucketId id) {
  expect_phase(Phase::kCommitted, "gather");
  Actions actions;
  if (!updates_) return actions;
  at(id).gathered = true;
  for (const BoxId number : at(id).boxes) {
    std::vector<RankId> takers = roles(number).readers;
    std::erase_if(takers, [&](RankId rank) { return materializes(number, rank); });
    publish(actions, at(number), takers);
  }
  return merged(actions);
}

void StepMachine::publish(Actions& actions, Box& box, std::span<const RankId> takers) {
  if (keeps(box) && guards_.only_owner_publishes.allows(box.roles.owner == rank_)) {
    for (const RankId taker : takers) {
      if (taker != rank_) act(actions, Kind::kSendParameters, box, taker);
    }
  } else if (contains(takers, rank_)) {
    box.parameters_awaited = true;
    act(actions, Kind::kExpectParameters, box, box.roles.owner);
  }
}

Actions StepMachine::parameters_arrived(BoxId id) {
  if (!std::exchange(at(id).parameters_awaited, false)) {
    throw ProtocolError(text(id) + ": parameters, which are not awaited");
  }
  return {};
}

void StepMachine::end_step() {
  expect_phase(Phase::kCommitted, "end_step");
  phase_ = Phase::kIdle;
  forget_step();
}

// --- After a failure

Actions StepMachine::leave() {
  Actions actions;
  lose_replicas(actions);
  for (Box& box : boxes_) {
    if (std::exchange(box.parameters_awaited, false)) at(box.roles.bucket).stale = true;
    box.parts_awaited.clear();
    box.record_awaited = false;
  }
  if (phase_ == Phase::kCommitted) {
    left_ = true;
    if (updates_) finish_updates(actions);
  } else if (phase_ == Phase::kVoted) {
    phase_ = Phase::kPending;
  } else if (phase_ == Phase::kComputing) {
    phase_ = Phase::kIdle;
    forget_step();
  }
  return actions;
}

Actions StepMachine::finish(std::span<const RankId> voters) {
  expect_phase(Phase::kPending, "finish");
  const std::vector<RankId> before = std::exchange(votes_, {voters.begin(), voters.end()});
  if (!votes_suffice()) {
    votes_ = before;
    const auto missing =
        std::find_if(members_.begin(), members_.end(), [&](RankId rank) { return !contains(voters, rank); });
    throw ProtocolError(self() + ": the vote of " + text(*missing) +
                        " is missing; a step is finished with the votes of all");
  }
  phase_ = Phase::kVoted;
  left_ = true;
  return {{Kind::kCommit, std::nullopt, std::nullopt, std::nullopt}};
}

// What is left of a committed step: updates need no other rank, parameters that others make do.
void StepMachine::finish_updates(Actions& actions) {
  for (Box& box : boxes_) {
    if (mode_ == CopyMode::kState && holds(id_of(box))) {
      if (box.state && box.state->version != version_) drop_state(actions, box);
    } else if (box.state && box.record) {
      update(actions, box, version_);
    } else if (is_in(box, Stage::kLost) && box.state && box.state->version != version_) {
      drop_state(actions, box);  // its record has not come
    }
  }
  for (Bucket& bucket : buckets_) {
    const bool missed = !bucket.gathered && reads_any(bucket) && !makes_all(bucket);
    if (missed && guards_.old_parameters_are_stale.demands()) bucket.stale = true;
  }
}

void StepMachine::drop() {
  if (phase_ == Phase::kIdle) return;
  expect_phase(Phase::kPending, "drop");
  phase_ = Phase::kIdle;
  forget_step();
}

void StepMachine::forget_step() {
  votes_.clear();
  updates_ = left_ = false;
  for (Bucket& bucket : buckets_) bucket.reduced = bucket.gathered = false;
  for (Box& box : boxes_) {
    box.parts_awaited.clear();
    box.record_awaited = box.record = box.wrong = false;
    box.update_due.reset();
  }
}

}  // namespace elaswave::commit

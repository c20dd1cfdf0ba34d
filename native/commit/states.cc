// Replica sync: a state, the records that follow it, and when the replica counts; see machine.h.
#include <algorithm>
#include <utility>

#include "commit/internal.h"
#include "commit/machine.h"

namespace elaswave::commit {

using Kind = Action::Kind;

// --- At the owner

Actions StepMachine::send_state(BoxId id, RankId holder) {
  Box& box = at(id);
  if (!box.state) throw ProtocolError(text(id) + ": " + self() + " has no state of it to send");
  begin_sync(box, holder);
  Actions actions;
  act(actions, Kind::kSendState, box, holder);
  return actions;
}

Actions StepMachine::state_leaves(BoxId id, RankId holder) {
  Box& box = at(id);
  Replica* const replica = replica_of(box, holder);
  if (replica == nullptr || replica->stage != Stage::kDue) {
    throw ProtocolError(text(id) + ": its state is not due at " + text(holder));
  }
  if (!box.state || box.state->version != version_ || box.update_due || left_ || phase_ == Phase::kPending) {
    throw ProtocolError(text(id) + ": its state cannot leave before it is that after version " +
                        std::to_string(version_));
  }
  replica->stage = Stage::kSyncing;
  Actions actions;
  if (box.record) act(actions, Kind::kSendCatchUpRecord, box, holder);  // the holder is sent all that follow
  return actions;
}

Actions StepMachine::state_asked(BoxId id, RankId holder) { return at(id).state ? send_state(id, holder) : Actions(); }

void StepMachine::replica_nearly_in_sync(BoxId id, RankId holder) {
  Replica* const replica = replica_of(at(id), holder);
  if (replica != nullptr && replica->stage == Stage::kSyncing) replica->stage = Stage::kNearlyInSync;
}

// --- At the holder

Actions StepMachine::expect_state(BoxId id) {
  Box& box = at(id);
  if (!holds(id)) throw ProtocolError(text(id) + ": " + self() + " does not hold it");
  Actions actions;
  await_state(actions, box);
  if (mode_ == CopyMode::kLog) {
    for (int i = 0; i < kExpectedAhead; ++i) act(actions, Kind::kExpectCatchUpRecord, box, box.roles.owner);
  }
  return actions;
}

void StepMachine::await_state(Actions& actions, Box& box) const {
  drop_state(actions, box);
  begin_sync(box, rank_);
  act(actions, Kind::kExpectState, box, box.roles.owner);
}

Actions StepMachine::state_arrived(BoxId id, const StateTag& tag, bool whole) {
  Box& box = at(id);
  Replica* const replica = replica_of(box, rank_);
  if (replica == nullptr || replica->stage != Stage::kDue)
    throw ProtocolError(text(id) + ": a state, which is not awaited");
  if (tag.version > version_) {
    throw ProtocolError(text(id) + ": a state at version " + std::to_string(tag.version) + ", which " + self() +
                        " has not committed");
  }
  Actions actions;
  const bool log = mode_ == CopyMode::kLog;
  if (whole && (log || tag.version == version_)) {
    box.state = tag;
    replica->stage = log ? Stage::kSyncing : Stage::kNearlyInSync;
    replica->since = version_;
  } else if (log) {
    ask_anew(actions, box, *replica);
  } else {
    drop_state(actions, box);
  }
  return actions;
}

Actions StepMachine::catch_up_record_arrived(BoxId id, const StateTag& owners, bool whole, bool prompt) {
  Box& box = at(id);
  Replica* const replica = replica_of(box, rank_);
  if (replica == nullptr || box.update_due || !(replica->stage == Stage::kDue || replica->stage == Stage::kSyncing)) {
    throw ProtocolError(text(id) + ": a catch-up record, which is not awaited");
  }
  const std::int64_t version = owners.version + 1;  // what the record leads to
  if (version > version_) {
    throw ProtocolError(text(id) + ": a catch-up record of version " + std::to_string(version) + ", which " + self() +
                        " has not committed");
  }
  Actions actions;
  // One before the state is of a replica that was given up, or of a step without an update.
  if (box.state && owners.version >= box.state->version) {
    if (!whole || owners.version > box.state->version || !agrees(box, owners)) {
      ask_anew(actions, box, *replica);
    } else if (unchanged_.contains(version)) {
      box.state->version = version;
    } else {
      update(actions, box, version);
    }
  }
  // One that was sent before may be for a replica that was given up.
  replica->prompt = prompt && replica->reported && box.state;
  act(actions, Kind::kExpectCatchUpRecord, box, box.roles.owner);
  return actions;
}

void StepMachine::ask_anew(Actions& actions, Box& box, Replica& replica) const {
  box.state.reset();
  replica = Replica{rank_};
  act(actions, Kind::kExpectState, box, box.roles.owner);
  act(actions, Kind::kExpectCatchUpRecord, box, box.roles.owner);  // the record of the step in flight comes once more
  act(actions, Kind::kAskState, box, box.roles.owner);
}

bool StepMachine::lacks_records(const Box& box) const {
  return is_in(box, Stage::kSyncing) && box.state->version != version_;
}

bool StepMachine::is_in_sync(const Box& box) const {
  return is_in(box, Stage::kSyncing) && replica_of(box, rank_)->prompt && !lacks_records(box);
}

// Whether this rank, which keeps the box, will not vouch for it in the next step.
bool StepMachine::is_syncing(const Box& box) const {
  return keeps(box) && !(box.state && (!sync_under_way(id_of(box)) || is_in_sync(box)));
}

// Between two steps.
void StepMachine::vouch_if_in_sync(Box& box) {
  if (!is_in(box, Stage::kSyncing) || !guards_.replica_in_sync.allows(is_in_sync(box))) return;
  replica_of(box, rank_)->stage = Stage::kNearlyInSync;
  box.state->version = version_;  // from here on it counts as the owner's
}

// Between two steps: of the replicas that are nearly in sync, if votes may begin to wait for their records.
void StepMachine::report_to_owners(Actions& actions) {
  const bool all = all_came();
  for (Box& box : boxes_) {
    if (!is_nearly_in_sync(box, all)) continue;
    Replica& replica = *replica_of(box, rank_);
    if (replica.reported) continue;
    replica.reported = true;
    act(actions, Kind::kReportNearlyInSync, box, box.roles.owner);
  }
}

bool StepMachine::all_came() const {
  return std::none_of(boxes_.begin(), boxes_.end(), [this](const Box& box) { return is_in(box, Stage::kDue); });
}

// Whether its owner was notified that the replica is nearly in sync, or is at the beginning of the next step.
bool StepMachine::is_nearly_in_sync(const Box& box, bool all) const {
  if (!is_in(box, Stage::kSyncing)) return false;
  const Replica& replica = *replica_of(box, rank_);
  return replica.reported || (box.state->version + 1 >= version_ && (all || version_ - replica.since >= kApart));
}

// --- At both ends

// What has not all committed records is of no use any more, for nobody sends what it lacks.
void StepMachine::lose_replicas(Actions& actions) {
  for (Box& box : boxes_) {
    if (lacks_records(box) || is_in(box, Stage::kDue)) drop_state(actions, box);
    if (mode_ != CopyMode::kLog) continue;
    for (Replica& replica : box.replicas) replica.stage = Stage::kLost;
  }
}

const StepMachine::Replica* StepMachine::replica_of(const Box& box, RankId holder) {
  const auto found = std::find_if(box.replicas.begin(), box.replicas.end(),
                                  [&](const Replica& replica) { return replica.holder == holder; });
  return found == box.replicas.end() ? nullptr : &*found;
}

StepMachine::Replica* StepMachine::replica_of(Box& box, RankId holder) {
  return const_cast<Replica*>(replica_of(std::as_const(box), holder));
}

void StepMachine::begin_sync(Box& box, RankId holder) {
  std::erase_if(box.replicas, [&](const Replica& replica) { return replica.holder == holder; });
  box.replicas.push_back(Replica{holder});
}

// Of the replica that this rank syncs.
bool StepMachine::is_in(const Box& box, Stage stage) const {
  const Replica* const replica = replica_of(box, rank_);
  return replica != nullptr && replica->stage == stage;
}

}  // namespace elaswave::commit

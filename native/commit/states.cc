// Copies on their way to new holders: a state, the records that follow it, and when the copy counts; see machine.h.
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
  begin_copy(box, holder);
  Actions actions;
  act(actions, Kind::kSendState, box, holder);
  return actions;
}

Actions StepMachine::state_leaves(BoxId id, RankId holder) {
  Box& box = at(id);
  Copy* const copy = copy_of(box, holder);
  if (copy == nullptr || copy->stage != Stage::kDue) {
    throw ProtocolError(text(id) + ": its state is not due at " + text(holder));
  }
  if (!box.state || box.state->version != version_ || box.update_due || left_ || phase_ == Phase::kPending) {
    throw ProtocolError(text(id) + ": its state cannot leave before it is that after version " +
                        std::to_string(version_));
  }
  copy->stage = Stage::kBehind;
  Actions actions;
  if (box.record) act(actions, Kind::kSendLateRecord, box, holder);  // the holder is sent all that follow
  return actions;
}

Actions StepMachine::state_asked(BoxId id, RankId holder) { return at(id).state ? send_state(id, holder) : Actions(); }

void StepMachine::copy_is_close(BoxId id, RankId holder) {
  Copy* const copy = copy_of(at(id), holder);
  if (copy != nullptr && copy->stage == Stage::kBehind) copy->stage = Stage::kClose;
}

// --- At the holder

Actions StepMachine::expect_state(BoxId id) {
  Box& box = at(id);
  if (!holds(id)) throw ProtocolError(text(id) + ": " + self() + " does not hold it");
  Actions actions;
  await_state(actions, box);
  if (mode_ == CopyMode::kLog) {
    for (int i = 0; i < kExpectedAhead; ++i) act(actions, Kind::kExpectLateRecord, box, box.roles.owner);
  }
  return actions;
}

void StepMachine::await_state(Actions& actions, Box& box) const {
  drop_state(actions, box);
  begin_copy(box, rank_);
  act(actions, Kind::kExpectState, box, box.roles.owner);
}

Actions StepMachine::state_arrived(BoxId id, const StateTag& tag, bool whole) {
  Box& box = at(id);
  Copy* const copy = copy_of(box, rank_);
  if (copy == nullptr || copy->stage != Stage::kDue) throw ProtocolError(text(id) + ": a state, which is not awaited");
  if (tag.version > version_) {
    throw ProtocolError(text(id) + ": a state at version " + std::to_string(tag.version) + ", which " + self() +
                        " has not committed");
  }
  Actions actions;
  const bool log = mode_ == CopyMode::kLog;
  if (whole && (log || tag.version == version_)) {
    box.state = tag;
    copy->stage = log ? Stage::kBehind : Stage::kClose;
    copy->since = version_;
  } else if (log) {
    ask_anew(actions, box, *copy);
  } else {
    drop_state(actions, box);
  }
  return actions;
}

Actions StepMachine::late_record_arrived(BoxId id, const StateTag& owners, bool whole, bool prompt) {
  Box& box = at(id);
  Copy* const copy = copy_of(box, rank_);
  if (copy == nullptr || box.update_due || !(copy->stage == Stage::kDue || copy->stage == Stage::kBehind)) {
    throw ProtocolError(text(id) + ": a late record, which is not awaited");
  }
  const std::int64_t version = owners.version + 1;  // what the record leads to
  if (version > version_) {
    throw ProtocolError(text(id) + ": a late record of version " + std::to_string(version) + ", which " + self() +
                        " has not committed");
  }
  Actions actions;
  // One before the state is of a copy that was given up, or of a step without an update.
  if (box.state && owners.version >= box.state->version) {
    if (!whole || owners.version > box.state->version || !agrees(box, owners)) {
      ask_anew(actions, box, *copy);
    } else if (unchanged_.contains(version)) {
      box.state->version = version;
    } else {
      update(actions, box, version);
    }
  }
  copy->prompt = prompt && copy->told && box.state;  // one that was sent before may be for a copy that was given up
  act(actions, Kind::kExpectLateRecord, box, box.roles.owner);
  return actions;
}

void StepMachine::ask_anew(Actions& actions, Box& box, Copy& copy) const {
  box.state.reset();
  copy = Copy{rank_};
  act(actions, Kind::kExpectState, box, box.roles.owner);
  act(actions, Kind::kExpectLateRecord, box, box.roles.owner);  // the record of the step in flight comes once more
  act(actions, Kind::kAskState, box, box.roles.owner);
}

bool StepMachine::lacks_records(const Box& box) const {
  return is_in(box, Stage::kBehind) && box.state->version != version_;
}

bool StepMachine::has_caught_up(const Box& box) const {
  return is_in(box, Stage::kBehind) && copy_of(box, rank_)->prompt && !lacks_records(box);
}

// Whether this rank, which keeps the box, will not vouch for it in the next step.
bool StepMachine::is_catching_up(const Box& box) const {
  return keeps(box) && !(box.state && (!is_behind(id_of(box)) || has_caught_up(box)));
}

// Between two steps.
void StepMachine::vouch_if_caught_up(Box& box) {
  if (!is_in(box, Stage::kBehind) || !guards_.copy_has_caught_up.allows(has_caught_up(box))) return;
  copy_of(box, rank_)->stage = Stage::kClose;
  box.state->version = version_;  // from here on it counts as the owner's
}

// Between two steps: of the copies that are close behind, if votes may begin to wait for their records.
void StepMachine::tell_owners(Actions& actions) {
  const bool all = all_came();
  for (Box& box : boxes_) {
    if (!is_close(box, all)) continue;
    Copy& copy = *copy_of(box, rank_);
    if (copy.told) continue;
    copy.told = true;
    act(actions, Kind::kTellClose, box, box.roles.owner);
  }
}

bool StepMachine::all_came() const {
  return std::none_of(boxes_.begin(), boxes_.end(), [this](const Box& box) { return is_in(box, Stage::kDue); });
}

// Whether its owner has been told that the copy is close, or is told at the beginning of the next step.
bool StepMachine::is_close(const Box& box, bool all) const {
  if (!is_in(box, Stage::kBehind)) return false;
  const Copy& copy = *copy_of(box, rank_);
  return copy.told || (box.state->version + 1 >= version_ && (all || version_ - copy.since >= kApart));
}

// --- At both ends

// What has not all committed records is of no use any more, for nobody sends what it lacks.
void StepMachine::lose_copies(Actions& actions) {
  for (Box& box : boxes_) {
    if (lacks_records(box) || is_in(box, Stage::kDue)) drop_state(actions, box);
    if (mode_ != CopyMode::kLog) continue;
    for (Copy& copy : box.copies) copy.stage = Stage::kLost;
  }
}

const StepMachine::Copy* StepMachine::copy_of(const Box& box, RankId holder) {
  const auto found =
      std::find_if(box.copies.begin(), box.copies.end(), [&](const Copy& copy) { return copy.holder == holder; });
  return found == box.copies.end() ? nullptr : &*found;
}

StepMachine::Copy* StepMachine::copy_of(Box& box, RankId holder) {
  return const_cast<Copy*>(copy_of(std::as_const(box), holder));
}

void StepMachine::begin_copy(Box& box, RankId holder) {
  std::erase_if(box.copies, [&](const Copy& copy) { return copy.holder == holder; });
  box.copies.push_back(Copy{holder});
}

// Of the copy that this rank gets.
bool StepMachine::is_in(const Box& box, Stage stage) const {
  const Copy* const copy = copy_of(box, rank_);
  return copy != nullptr && copy->stage == stage;
}

}  // namespace elaswave::commit

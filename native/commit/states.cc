// States on their way to new holders: sent, awaited, brought up to date by the records that came before them; see
// machine.h.
#include <algorithm>

#include "commit/internal.h"
#include "commit/machine.h"

namespace elaswave::commit {

using Kind = Action::Kind;

Actions StepMachine::send_state(BoxId id, RankId holder) {
  Box& box = at(id);
  if (!box.state) throw ProtocolError(text(id) + ": " + self() + " has no state of it to send");
  Actions actions;
  if (!contains(box.state_sent_to, holder)) box.state_sent_to.push_back(holder);
  act(actions, Kind::kSendState, box, holder);
  return actions;
}

Actions StepMachine::expect_state(BoxId id) {
  Box& box = at(id);
  if (!holds(id)) throw ProtocolError(text(id) + ": " + self() + " does not hold it");
  Actions actions;
  await_state(actions, box);
  return actions;
}

Actions StepMachine::state_asked(BoxId id, RankId holder) { return at(id).state ? send_state(id, holder) : Actions(); }

void StepMachine::await_state(Actions& actions, Box& box) const {
  drop_state(actions, box);
  if (!contains(box.state_sent_to, rank_)) box.state_sent_to.push_back(rank_);
  box.state_awaited = true;
  act(actions, Kind::kExpectState, box, box.roles.owner);
}

void StepMachine::keep_record(Actions& actions, Box& box, bool updates) const {
  // While one is being applied, none may go: it is the first of them.
  if (box.kept.size() >= box.backlog && !box.update_due) {
    if (box.kept.front().updates) act(actions, Kind::kForgetRecord, box);
    box.kept.pop_front();
  }
  box.kept.push_back({version_, updates});
  if (!updates) return;
  act(actions, Kind::kKeepRecord, box);
  actions.back().version = version_;
}

Actions StepMachine::state_arrived(BoxId id, const StateTag& tag, bool whole) {
  Box& box = at(id);
  if (!box.state_awaited) throw ProtocolError(text(id) + ": a state, which is not awaited");
  Actions actions;
  if (whole && guards_.late_state_has_no_gap.allows(leads_here(box, tag.version))) {
    box.state_awaited = false;
    box.state = tag;
    if (mode_ == CopyMode::kLog) act(actions, Kind::kTakeState, box, box.roles.owner);
    catch_up(actions, box);
  } else if (mode_ == CopyMode::kLog) {
    box.backlog = std::min(2 * box.backlog, kMostBacklog);
    act(actions, Kind::kExpectState, box, box.roles.owner);
    act(actions, Kind::kAskState, box, box.roles.owner);
  } else {
    drop_state(actions, box);
  }
  return actions;
}

// Whether a state of that version is today's, or becomes it by the records that are here.
bool StepMachine::leads_here(const Box& box, std::int64_t version) const {
  if (version > version_) return false;
  for (const Kept& kept : box.kept) {
    if (kept.version == version + 1) ++version;
  }
  const bool record_follows = phase_ == Phase::kCommitted && updates_ && box.record;
  return version >= version_ - (record_follows ? 1 : 0);
}

// The next of the records that were kept; those of steps before the state are passed over.
void StepMachine::catch_up(Actions& actions, Box& box) {
  for (; !box.kept.empty(); box.kept.pop_front()) {
    const Kept next = box.kept.front();
    if (next.version <= box.state->version) {
      if (next.updates) act(actions, Kind::kForgetRecord, box);
    } else if (next.updates) {
      return update(actions, box, next.version);
    } else {
      box.state->version = next.version;
    }
  }
  compare(actions, box);
}

}  // namespace elaswave::commit

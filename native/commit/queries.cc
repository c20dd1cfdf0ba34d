// The questions that the commit machine answers; see machine.h.
#include <algorithm>
#include <utility>

#include "commit/internal.h"
#include "commit/machine.h"

namespace elaswave::commit {

using Kind = Action::Kind;

bool StepMachine::holds(BoxId box) const { return contains(at(box).roles.holders, rank_); }

bool StepMachine::reads(BoxId box) const { return contains(at(box).roles.readers, rank_); }

bool StepMachine::keeps(const Box& box) const { return box.roles.owner == rank_ || contains(box.roles.holders, rank_); }

bool StepMachine::materializes(BoxId id, RankId rank) const {
  const Box& box = at(id);
  return mode_ == CopyMode::kLog && contains(box.roles.holders, rank) && replica_of(box, rank) == nullptr;
}

bool StepMachine::state_must_come(BoxId id) const { return mode_ == CopyMode::kState && is_in(at(id), Stage::kDue); }

bool StepMachine::sync_under_way(BoxId id) const {
  return is_in(at(id), Stage::kDue) || is_in(at(id), Stage::kSyncing);
}

std::vector<BoxId> StepMachine::syncing() const {
  std::vector<BoxId> found;
  for (const Box& box : boxes_) {
    if (is_syncing(box)) found.push_back(id_of(box));
  }
  return found;
}

std::vector<BoxId> StepMachine::lagging() const {
  const bool all = all_came();
  std::vector<BoxId> found;
  for (const Box& box : boxes_) {
    if (is_syncing(box) && !is_nearly_in_sync(box, all)) found.push_back(id_of(box));
  }
  return found;
}

std::vector<Holding> StepMachine::holdings() const {
  std::vector<Holding> found;
  for (const Box& box : boxes_) {
    if (!box.state || lacks_records(box)) continue;
    found.push_back({id_of(box), *box.state, box.record});
  }
  return found;
}

bool StepMachine::parameters_ready(BucketId id) const {
  const Bucket& bucket = at(id);
  return !bucket.stale && std::none_of(bucket.boxes.begin(), bucket.boxes.end(),
                                       [this](BoxId box) { return at(box).parameters_awaited; });
}

std::vector<BucketId> StepMachine::stale_buckets() const {
  std::vector<BucketId> found;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].stale) found.push_back(BucketId(static_cast<std::int64_t>(i)));
  }
  return found;
}

std::optional<RankId> StepMachine::awaited() const {
  if (phase_ == Phase::kVoted) {
    const auto missing =
        std::find_if(members_.begin(), members_.end(), [this](RankId rank) { return !contains(votes_, rank); });
    return missing == members_.end() ? std::nullopt : std::optional(*missing);
  }
  for (const Box& box : boxes_) {
    if (box.parameters_awaited) return box.roles.owner;
  }
  const bool computes = std::any_of(buckets_.begin(), buckets_.end(),
                                    [this](const Bucket& bucket) { return !bucket.reduced && reads_any(bucket); });
  if (phase_ != Phase::kComputing || computes) return std::nullopt;
  for (const Box& box : boxes_) {
    if (!box.parts_awaited.empty()) return box.parts_awaited.front();
    if (box.record_awaited || state_must_come(id_of(box))) return box.roles.owner;
  }
  return std::nullopt;
}

// --- Parts

StepMachine::Box& StepMachine::at(BoxId box) { return const_cast<Box&>(std::as_const(*this).at(box)); }

const StepMachine::Box& StepMachine::at(BoxId box) const {
  if (box.index() >= boxes_.size()) throw ProtocolError("there is no " + text(box));
  return boxes_[box.index()];
}

StepMachine::Bucket& StepMachine::at(BucketId bucket) { return const_cast<Bucket&>(std::as_const(*this).at(bucket)); }

const StepMachine::Bucket& StepMachine::at(BucketId bucket) const {
  if (bucket.index() >= buckets_.size()) throw ProtocolError("there is no bucket " + std::to_string(bucket.value()));
  return buckets_[bucket.index()];
}

void StepMachine::expect_phase(Phase phase, const char* event) const {
  static const char* const kNames[] = {"between steps", "computing", "waiting for votes", "committed", "pending"};
  if (phase_ == phase) return;
  throw ProtocolError(self() + ": " + event + " while its step is " + kNames[static_cast<std::size_t>(phase_)] +
                      "; it comes when it is " + kNames[static_cast<std::size_t>(phase)]);
}

// Owners need their states, and so do holders who make parameters from them.
void StepMachine::expect_state_of(const Box& box) const {
  const bool owned = box.roles.owner == rank_;
  if (box.state || !(owned || materializes(id_of(box), rank_))) return;
  throw ProtocolError(text(id_of(box)) + ": " + self() + (owned ? " owns" : " holds") +
                      " it, has no state of it, and none is on its way");
}

bool StepMachine::reads_any(const Bucket& bucket) const {
  return std::any_of(bucket.boxes.begin(), bucket.boxes.end(), [this](BoxId box) { return reads(box); });
}

// Whether the working copy of the bucket needs nothing of other ranks.
bool StepMachine::makes_all(const Bucket& bucket) const {
  return std::all_of(bucket.boxes.begin(), bucket.boxes.end(), [this](BoxId box) {
    return !reads(box) || owns(box) || (materializes(box, rank_) && at(box).state);
  });
}

// Whether every box of the bucket has a state here that is compared with its owner's, or is the owner's.
bool StepMachine::has_all(const Bucket& bucket) const {
  return mode_ == CopyMode::kLog &&
         std::all_of(bucket.boxes.begin(), bucket.boxes.end(), [this](BoxId box) { return at(box).state.has_value(); });
}

namespace {

// Records of syncing replicas travel box by box, for each is in sync at a time of its own.
bool shares_messages(Kind kind) { return kind != Kind::kSendCatchUpRecord && kind != Kind::kSendPromptRecord; }

}  // namespace

// Neighbours with equal roles do the same at once: one action, at the place of the first, stands for theirs.
Actions StepMachine::merged(const Actions& actions) const {
  Actions result;
  std::size_t open = 0;  // the first action of the run
  for (const Action& next : actions) {
    if (open < result.size() && at(*result[open].box).run != at(*next.box).run) open = result.size();
    const auto alike = std::find_if(result.begin() + static_cast<std::ptrdiff_t>(open), result.end(), [&](Action& one) {
      return shares_messages(one.kind) && one.kind == next.kind && one.peer == next.peer &&
             one.boxes().last().value() + 1 == next.box->value();
    });
    if (alike == result.end()) {
      result.push_back(next);
    } else {
      ++alike->count;
    }
  }
  return result;
}

void StepMachine::act(Actions& actions, Kind kind, const Box& box, std::optional<RankId> peer) const {
  actions.push_back({kind, id_of(box), peer, std::nullopt});
}

void StepMachine::update(Actions& actions, Box& box, std::int64_t version) const {
  box.update_due = version;
  actions.push_back({Kind::kUpdate, id_of(box), std::nullopt, version});
}

void StepMachine::drop_state(Actions& actions, Box& box) const {
  if (box.state || is_in(box, Stage::kDue)) act(actions, Kind::kDropState, box);
  box.state.reset();
  box.update_due.reset();
  if (Replica* const replica = replica_of(box, rank_)) replica->stage = Stage::kLost;
}

}  // namespace elaswave::commit

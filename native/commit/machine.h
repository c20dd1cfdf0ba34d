// The commit machine of one rank: which gradients, records, states, votes and parameters go where, and when a step is
// committed. It holds no tensors and does nothing itself: it is told what has happened and answers with what is to be
// done. The engine runs it (exec/step/perform.cc), the simulator drives it (bindings/commit.cc); it is the same
// code.
//
// The life of a step, as the engine and any other caller walks through it. Every event returns actions, which the
// caller performs one after the other; `->` is the event that tells of the outcome.
//
//   begin_step()            expect the records of held boxes
//   bucket_reduced(bucket)  own gradient done: send parts, expect parts -> part_arrived -> sum, send records
//   record_arrived(box)     compare the digest of the own state with the owner's
//   ready_to_vote()         all sums and records are here; else awaited() says whom this rank waits for
//   cast_vote()             send votes, expect votes -> vote_arrived -> kCommit; or kLeaveStep, if a replica was wrong
//   commit(updates)         this version is the one that counts; `updates`: the sums of the votes say that there is one
//   update_bucket(bucket)   update own boxes -> updated -> write parameters (with CopyMode::kState: send the state)
//   gather(bucket)          send parameters to, expect them from -> parameters_arrived, whoever has no state to make
//                           them from; a reader waits for parameters_ready(bucket) before it computes the next step
//   update_replicas()       update held boxes -> updated; keep the records of replicas whose state is on its way
//   end_step()
//
// A step may be left at any point, because of an error or of others: leave(). All that was expected is off by then.
//   Before the own vote: nothing is left of the step, and it may be run again.
//   After it (pending()): sums and records are kept until finish(voters), which commits, or drop().
//   After the commit: the updates that are still to be done are the actions of leave(); parameters that would have come
//   from others are stale. Then end_step().
//
// Replica sync: of a box that this rank shall hold and has no state of, expect_state() here, send_state() at the owner,
// between steps. The state travels in bulk beside the steps, as it is when its turn comes; then the records of the
// steps after it, one by one in the same order, and no vote waits for any of that. The stages of a replica, at either
// end:
//   due             its state has not been sent, or has not come: no record of it travels yet
//   syncing         the state was sent, or has come: catch-up records follow it, and are applied when they are here and
//                   committed
//   nearly in sync  the holder has reported it, so records come with the step; the holder vouches for the box from the
//                   step on before which the last record has come so, and all committed ones are in the state
//   lost            the step was left: nothing of it travels any more
// A holder reports that a replica is nearly in sync when no other state of its own is due, so that votes wait for
// records as few steps as can be, or kApart steps after the state has come. What does not follow the state without a
// gap, or is damaged, is of no use: the owner is asked for another state. With CopyMode::kState votes do wait, for the
// state is what comes in place of a record.
//
// A holder that reads a box makes the parameters from its state and is not sent them: the record has replaced them.
// Whoever was sent a state under these roles misses steps, so it is sent the parameters until the roles change.
//
// An update that fails takes the state with it: it is dropped, and its parameters are stale. The caller raises that.
//
// Threads: one at a time. Errors: ProtocolError, and the machine is as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "commit/admission.h"
#include "commit/guards.h"
#include "commit/types.h"

namespace elaswave::commit {

class StepMachine {
 public:
  // So many records of a syncing replica are expected at once: what the owner has sent by its vote has a place.
  static constexpr int kExpectedAhead = 2;
  static constexpr std::int64_t kApart = 16;

  explicit StepMachine(RankId rank, CopyMode mode = CopyMode::kLog, Guards guards = {})
      : rank_(rank), mode_(mode), guards_(guards), members_{rank} {}

  // --- Between steps

  // New members and roles: every box in the same order at every rank, and as many each time. States without a role are
  // dropped. Parameters that a rank has not read before are made from its states, if it has those of all boxes of the
  // bucket; else they are stale until they are loaded or refreshed.
  Actions install(std::uint32_t epoch, std::vector<RankId> members, std::vector<BoxRoles> boxes);
  // All states go, and all parameters are stale: what is loaded from now on is that after `version` committed steps.
  Actions restart(std::int64_t version);
  // A state has come from a checkpoint, or from the beginning: it stands at version().
  void load(BoxId box, Digest digest);
  void load_parameters(BucketId bucket);
  // Both ends of a state's way to a new holder.
  Actions send_state(BoxId box, RankId holder);
  Actions expect_state(BoxId box);
  // At the owner: the state goes now, as it is after version(); at any time but for that between a commit and the
  // update. The actions come after it.
  Actions state_leaves(BoxId box, RankId holder);
  // At the owner: what was sent to `holder` was of no use; or its replica is nearly in sync. At any time.
  Actions state_asked(BoxId box, RankId holder);
  void replica_nearly_in_sync(BoxId box, RankId holder);
  // Parameters of the bucket from its owners' states, at those of `takers`; every rank is told the same.
  Actions refresh(BucketId bucket, std::span<const RankId> takers);

  // --- A step

  Actions begin_step();
  Actions bucket_reduced(BucketId bucket);
  Actions part_arrived(BoxRange boxes, RankId reader);
  // `owners`: the tag that the record came with. `whole`: its bytes are what was sent.
  Actions record_arrived(BoxId box, const StateTag& owners, bool whole);
  bool ready_to_vote();
  Actions cast_vote();
  Actions vote_arrived(RankId member);
  Actions commit(bool updates);
  Actions update_bucket(BucketId bucket);
  Actions gather(BucketId bucket);
  Actions update_replicas();
  void end_step();

  Actions updated(BoxId box, Digest digest);
  Actions update_failed(BoxId box);
  Actions parameters_arrived(BoxId box);
  // `tag`: what the state came with. `whole`: its bytes have the tag's digest. Its step has to be committed here.
  Actions state_arrived(BoxId box, const StateTag& tag, bool whole);
  // As record_arrived, of a syncing replica and a committed step. `prompt`: it came with the messages of the step.
  Actions catch_up_record_arrived(BoxId box, const StateTag& owners, bool whole, bool prompt);

  // --- After a failure

  Actions leave();
  bool pending() const { return phase_ == Phase::kPending; }
  // As if the votes of `voters` had come; needs no other rank. Then commit(), whose actions are the updates,
  // end_step().
  Actions finish(std::span<const RankId> voters);
  void drop();  // of a step that is not pending: nothing

  // --- Questions

  RankId rank() const { return rank_; }
  std::uint32_t epoch() const { return epoch_; }
  CopyMode mode() const { return mode_; }
  const std::vector<RankId>& members() const { return members_; }
  std::size_t num_boxes() const { return boxes_.size(); }
  const std::vector<BoxId>& boxes(BucketId bucket) const { return at(bucket).boxes; }
  const BoxRoles& roles(BoxId box) const { return at(box).roles; }
  // Steps committed before the one in flight, this one included once it is committed.
  std::int64_t version() const { return version_; }
  bool committed() const { return phase_ == Phase::kCommitted; }
  bool owns(BoxId box) const { return at(box).roles.owner == rank_; }
  bool holds(BoxId box) const;
  bool reads(BoxId box) const;
  bool reads(BucketId bucket) const { return reads_any(at(bucket)); }  // any box of it
  // Whether `rank`, a holder, makes the parameters of the box from its state. Owner and holder know it without talking.
  bool materializes(BoxId box, RankId rank) const;
  const std::optional<StateTag>& state(BoxId box) const { return at(box).state; }
  bool recorded(BoxId box) const { return at(box).record; }
  // The vote waits for it.
  bool record_awaited(BoxId box) const { return at(box).record_awaited; }
  bool state_must_come(BoxId box) const;
  // Whether the state of the box is on its way, or records are that are still lacking.
  bool sync_under_way(BoxId box) const;
  // Boxes that this rank owns or holds and will not vouch for in the next step; and those of them that lag more: for
  // them it will not in the step after that either, for their owners receive no report in the next one that the
  // replicas are nearly in sync. For the others it may, if the owners receive it before they sum, and nothing is late.
  std::vector<BoxId> syncing() const;
  std::vector<BoxId> lagging() const;
  std::vector<Holding> holdings() const;
  // Whether the working copy is that of version(): not stale, and nothing of it on its way.
  bool parameters_ready(BucketId bucket) const;
  bool stale(BucketId bucket) const { return at(bucket).stale; }
  std::vector<BucketId> stale_buckets() const;
  // The member that the step cannot go on without; nobody while this rank itself has something to do.
  std::optional<RankId> awaited() const;
  Admission admit(std::uint32_t frame_epoch) {
    return commit::admit(frame_epoch, epoch_, guards_.older_frames_are_dropped);
  }
  const Guards& guards() const { return guards_; }

 private:
  enum class Phase { kIdle, kComputing, kVoted, kCommitted, kPending };

  // Of a replica that this rank syncs, or that `holder` syncs from it.
  enum class Stage { kDue, kSyncing, kNearlyInSync, kLost };
  struct Replica {
    RankId holder;
    Stage stage = Stage::kDue;
    // At the holder: the version at which the state came; the last record came with a step; the owner was notified.
    std::int64_t since = 0;
    bool prompt = false, reported = false;
  };
  struct Box {
    BoxRoles roles;
    std::size_t run = 0;  // neighbours with equal roles have the same
    std::optional<StateTag> state;
    // Of the step in flight.
    std::vector<RankId> parts_awaited;
    bool record_awaited = false;
    bool record = false;                     // the sum, at the owner; the record, at holders
    bool wrong = false;                      // the replica or the record was
    std::optional<std::int64_t> update_due;  // the version that an update which runs leads to
    // Across steps.
    bool parameters_awaited = false;
    std::vector<Replica> replicas;  // made since the roles were assigned, as owner or holder know
  };
  struct Bucket {
    std::vector<BoxId> boxes;
    bool reduced = false;
    bool gathered = false;
    bool stale = false;
  };

  Box& at(BoxId box);
  const Box& at(BoxId box) const;
  Bucket& at(BucketId bucket);
  const Bucket& at(BucketId bucket) const;
  BoxId id_of(const Box& box) const { return BoxId(&box - boxes_.data()); }
  std::string self() const { return "rank " + std::to_string(rank_.value()); }
  void expect_phase(Phase phase, const char* event) const;
  void expect_state_of(const Box& box) const;
  bool keeps(const Box& box) const;
  static const Replica* replica_of(const Box& box, RankId holder);
  static Replica* replica_of(Box& box, RankId holder);
  static void begin_sync(Box& box, RankId holder);
  bool is_in(const Box& box, Stage stage) const;
  bool is_complete(const Box& box) const;
  bool vouches_for(const Box& box) const;
  bool reads_any(const Bucket& bucket) const;
  bool makes_all(const Bucket& bucket) const;
  bool has_all(const Bucket& bucket) const;
  bool votes_suffice();
  Actions merged(const Actions& actions) const;
  void act(Actions& actions, Action::Kind kind, const Box& box, std::optional<RankId> peer = {}) const;
  void update(Actions& actions, Box& box, std::int64_t version) const;
  void sum(Actions& actions, Box& box) const;
  void drop_state(Actions& actions, Box& box) const;
  void await_state(Actions& actions, Box& box) const;
  void ask_anew(Actions& actions, Box& box, Replica& replica) const;
  bool agrees(const Box& box, const StateTag& owners);
  bool is_in_sync(const Box& box) const;
  bool is_syncing(const Box& box) const;
  bool is_nearly_in_sync(const Box& box, bool all) const;
  bool all_came() const;
  bool lacks_records(const Box& box) const;
  void vouch_if_in_sync(Box& box);
  void report_to_owners(Actions& actions);
  void lose_replicas(Actions& actions);
  void publish(Actions& actions, Box& box, std::span<const RankId> takers);
  void finish_updates(Actions& actions);
  void forget_step();

  RankId rank_;
  CopyMode mode_;
  Guards guards_;
  std::uint32_t epoch_ = 0;
  std::vector<RankId> members_;
  std::vector<Box> boxes_;
  std::vector<Bucket> buckets_;
  std::int64_t version_ = 0;
  Phase phase_ = Phase::kIdle;
  bool updates_ = false;  // the step that is committed changes the states
  bool left_ = false;     // and nothing is sent or expected any more
  std::vector<RankId> votes_;
  std::set<std::int64_t> unchanged_;  // since the roles were assigned: versions of steps without an update
};

}  // namespace elaswave::commit

// The commit machine: a replica that one rank syncs from another, from its state to the vote that counts it.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "check.h"
#include "commit_cluster.h"

using namespace elaswave;
using namespace elaswave::commit;

namespace {

// A pair in which rank 1 syncs a replica of the box that rank 0 owns; what travels in bulk can be held.
struct Syncing {
  Cluster cluster;
  StepMachine& owner = cluster.at(rank(0));
  StepMachine& holder = cluster.at(rank(1));

  explicit Syncing(Guards guards = {}) : Syncing({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}}, guards) {}
  explicit Syncing(std::vector<BoxRoles> roles, Guards guards = {})
      : cluster(std::move(roles), 2, CopyMode::kLog, guards) {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(owner.num_boxes()); ++i) {
      cluster.replicate(box(i), rank(0), rank(1));
    }
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) cluster.step();
  }
  // Steps until the holder vouches for its replica.
  int steps_until_in_sync() {
    for (int steps = 0; steps < 10; ++steps, cluster.step()) {
      if (holder.syncing().empty()) return steps;
    }
    return -1;
  }
  int count(Kind kind) const {
    return static_cast<int>(std::count_if(cluster.done.begin(), cluster.done.end(),
                                          [&](const auto& each) { return each.second.kind == kind; }));
  }
  bool equal() const { return holder.state(box(0)) && holder.state(box(0)) == owner.state(box(0)); }
};

// Of two boxes, the second of which does not come, so that the first is not reported to be nearly in sync. It has the
// record of the one step that was taken, if it `has_all`.
struct LaggingReplica : Syncing {
  explicit LaggingReplica(bool has_all)
      : Syncing({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(1), rank(0), ranks({1}), ranks({0, 1})}}) {
    cluster.bulk_is_held = true;
    const StateTag tag = *owner.state(box(0));
    cluster.perform(rank(1), holder.state_arrived(box(0), tag, true));
    steps(1);
    if (has_all) cluster.perform(rank(1), holder.catch_up_record_arrived(box(0), tag, true, false));
  }
};

}  // namespace

TEST(a_new_holder_syncs_beside_the_steps) {
  Syncing sync;
  CHECK(!sync.holder.materializes(box(0), rank(1)) && !sync.owner.materializes(box(0), rank(1)));
  sync.cluster.bulk_is_held = true;
  sync.steps(5);
  CHECK(!sync.holder.state(box(0)) && sync.holder.syncing() == std::vector{box(0)});
  CHECK(sync.holder.lagging() == sync.holder.syncing());
  CHECK_EQUAL(sync.count(Kind::kSendCatchUpRecord), 5);
  sync.cluster.bulk_is_held = false;
  sync.cluster.deliver();
  CHECK(sync.equal() && sync.holder.sync_under_way(box(0)));
  CHECK(sync.holder.syncing() == std::vector{box(0)});  // no vote of its own has said so yet
  CHECK(sync.holder.lagging().empty());                 // but it may after the next step
  // One step at whose begin it reports that it is nearly in sync, and whose record comes promptly. From the next on it
  // vouches.
  CHECK_EQUAL(sync.steps_until_in_sync(), 1);
  CHECK(sync.equal() && sync.count(Kind::kReportNearlyInSync) == 1 && sync.count(Kind::kAskState) == 0);
  sync.steps(2);
  CHECK(sync.equal());
}

TEST(a_prompt_record_counts_only_after_the_report_that_the_replica_is_nearly_in_sync) {
  Syncing sync;
  sync.cluster.bulk_is_held = true;
  const StateTag tag = *sync.owner.state(box(0));
  sync.steps(1);
  sync.cluster.perform(rank(1), sync.holder.state_arrived(box(0), tag, true));
  // It was sent for a replica that had been nearly in sync before this one was asked for.
  sync.cluster.perform(rank(1), sync.holder.catch_up_record_arrived(box(0), tag, true, true));
  CHECK(sync.equal());
  sync.steps(1);
  CHECK(sync.holder.sync_under_way(box(0)) && sync.holder.syncing() == std::vector{box(0)});
  CHECK_EQUAL(sync.count(Kind::kReportNearlyInSync), 1);
}

TEST(records_of_syncing_neighbours_travel_one_by_one) {
  Syncing sync({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(0), rank(0), ranks({1}), ranks({0, 1})}});
  sync.steps(3);
  CHECK(sync.count(Kind::kSendCatchUpRecord) + sync.count(Kind::kSendPromptRecord) == 6 &&
        sync.count(Kind::kSendPart) == 3);
  CHECK(sync.holder.syncing().empty() && sync.equal());
}

TEST(a_vote_waits_for_the_record_of_a_replica_that_is_in_sync) {
  Syncing sync;
  CHECK(sync.steps_until_in_sync() > 0);
  sync.cluster.bulk_is_held = true;  // what is sent by itself, here
  for (const RankId each : sync.cluster.members()) sync.cluster.compute(each);
  sync.cluster.deliver();
  CHECK(sync.holder.record_awaited(box(0)) && sync.holder.awaited() == rank(0) && !sync.holder.ready_to_vote());
  sync.cluster.bulk_is_held = false;
  sync.cluster.deliver();
  CHECK(sync.holder.ready_to_vote() && sync.holder.recorded(box(0)));
}

// So that votes wait for the records of none while another is on its way; but not for ever.
TEST(a_holder_reports_that_it_is_nearly_in_sync_when_all_its_states_have_come_or_much_later) {
  for (const bool comes : {true, false}) {
    Syncing sync({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(0), rank(0), ranks({1}), ranks({0, 1})}});
    // The state of box 1 does not come; that of box 0 does, and its records.
    sync.cluster.bulk_is_held = true;
    const StateTag tag = *sync.owner.state(box(0));
    sync.cluster.perform(rank(1), sync.holder.state_arrived(box(0), tag, true));
    const auto step = [&] {
      const StateTag before = *sync.owner.state(box(0));
      sync.steps(1);
      if (sync.holder.syncing().size() == 2) {
        sync.cluster.perform(rank(1), sync.holder.catch_up_record_arrived(box(0), before, true, false));
      }
    };
    for (int i = 0; i < 8; ++i) step();
    CHECK_EQUAL(sync.count(Kind::kReportNearlyInSync), 0);
    CHECK(sync.holder.lagging().size() == 2);
    if (comes) {
      sync.cluster.perform(rank(1), sync.holder.state_arrived(box(1), *sync.owner.state(box(1)), true));
      CHECK(sync.holder.lagging().empty());
      step();
      CHECK_EQUAL(sync.count(Kind::kReportNearlyInSync), 2);
    } else {
      for (int i = 0; i < StepMachine::kApart - 8; ++i) step();
      CHECK_EQUAL(sync.count(Kind::kReportNearlyInSync), 0);
      CHECK(sync.holder.lagging() == std::vector{box(1)});
      step();
      CHECK_EQUAL(sync.count(Kind::kReportNearlyInSync), 1);
    }
  }
}

TEST(what_does_not_follow_a_state_is_of_no_use) {
  enum class Trouble { kState, kRecord, kGap, kDigest };
  for (const Trouble trouble : {Trouble::kState, Trouble::kRecord, Trouble::kGap, Trouble::kDigest}) {
    Syncing sync;
    sync.cluster.bulk_is_held = true;
    const StateTag tag = *sync.owner.state(box(0));
    sync.steps(1);
    const StateTag next = *sync.owner.state(box(0));
    sync.steps(2);
    Actions actions = sync.holder.state_arrived(box(0), tag, trouble != Trouble::kState);
    if (trouble == Trouble::kRecord) actions = sync.holder.catch_up_record_arrived(box(0), tag, false, false);
    if (trouble == Trouble::kGap) actions = sync.holder.catch_up_record_arrived(box(0), next, true, false);
    if (trouble == Trouble::kDigest) actions = sync.holder.catch_up_record_arrived(box(0), {0, {9, 9}}, true, false);
    CHECK(has(actions, Kind::kAskState) && has(actions, Kind::kExpectState) && !has(actions, Kind::kUpdate));
    CHECK(!sync.holder.state(box(0)) && sync.holder.sync_under_way(box(0)));
    // The owner sends the record of the step in flight once more after the state.
    CHECK_EQUAL(std::ranges::count(actions, Kind::kExpectCatchUpRecord, &Action::kind),
                trouble == Trouble::kState ? 1 : 2);
    // Records that had been sent before the owner was asked are passed over; the rest follows the next state.
    CHECK(!has(sync.holder.catch_up_record_arrived(box(0), next, true, false), Kind::kUpdate));
    sync.cluster.forget_messages();
    sync.cluster.perform(rank(1), actions);
    sync.cluster.bulk_is_held = false;
    for (int i = 0; i < 2; ++i) {
      sync.cluster.perform(rank(1), {{Kind::kExpectCatchUpRecord, box(0), rank(0), {}}});
    }
    CHECK(sync.steps_until_in_sync() > 0 && sync.equal());
  }
}

TEST(a_record_that_the_state_has_already_is_passed_over) {
  Syncing sync;
  sync.cluster.bulk_is_held = true;
  const StateTag before = *sync.owner.state(box(0));
  sync.steps(1);
  sync.cluster.perform(rank(1), sync.holder.state_arrived(box(0), *sync.owner.state(box(0)), true));
  const Actions actions = sync.holder.catch_up_record_arrived(box(0), before, true, false);
  CHECK(actions.size() == 1 && actions[0].kind == Kind::kExpectCatchUpRecord && sync.equal());
}

// Its step may still be dropped here: nothing of it may be left then.
TEST(what_is_of_a_step_that_is_not_committed_here_is_refused) {
  Syncing sync;
  CHECK_THROWS(ProtocolError, "box 0: a state at version 1, which rank 1 has not committed",
               sync.holder.state_arrived(box(0), {1, {0, 0}}, true));
  sync.cluster.deliver();
  CHECK_THROWS(ProtocolError, "box 0: a catch-up record of version 1, which rank 1 has not committed",
               sync.holder.catch_up_record_arrived(box(0), *sync.owner.state(box(0)), true, false));
  CHECK_THROWS(ProtocolError, "box 0: a state, which is not awaited",
               sync.holder.state_arrived(box(0), *sync.owner.state(box(0)), true));
  CHECK_THROWS(ProtocolError, "box 0: a catch-up record, which is not awaited",
               sync.owner.catch_up_record_arrived(box(0), {0, {0, 0}}, true, false));
}

TEST(a_state_leaves_when_it_is_up_to_date) {
  Syncing sync;
  CHECK_THROWS(ProtocolError, "box 0: its state is not due at rank 1", sync.owner.state_leaves(box(0), rank(1)));
  Cluster& cluster = sync.cluster;
  for (const RankId each : cluster.members()) cluster.compute(each);
  // Before the sum of the box, whose record then follows by itself, or after it.
  sync.owner.send_state(box(0), rank(1));
  CHECK(sync.owner.state_leaves(box(0), rank(1)).empty());
  cluster.deliver();
  sync.owner.send_state(box(0), rank(1));
  const Actions catch_up = sync.owner.state_leaves(box(0), rank(1));
  CHECK(catch_up.size() == 1 && catch_up[0].kind == Kind::kSendCatchUpRecord && catch_up[0].peer == rank(1));
  sync.owner.send_state(box(0), rank(1));
  for (const RankId each : cluster.members()) cluster.vote(each);
  cluster.deliver();
  CHECK_THROWS(ProtocolError, "box 0: its state cannot leave before it is that after version 1",
               sync.owner.state_leaves(box(0), rank(1)));
}

TEST(a_step_without_an_update_is_one_to_sync) {
  Syncing sync;
  sync.cluster.bulk_is_held = true;
  for (const bool updates : {true, false, false, true, false}) {
    sync.cluster.updates = updates;
    sync.steps(1);
  }
  sync.cluster.bulk_is_held = false;
  sync.cluster.deliver();
  CHECK(sync.equal() && sync.holder.state(box(0))->version == 5 && sync.count(Kind::kAskState) == 0);
  CHECK(sync.steps_until_in_sync() > 0 && sync.equal());
}

// What lacks a record then is never sent it: only what has all committed ones is a replica.
TEST(of_a_step_that_is_left_a_replica_remains_that_has_all_committed_records) {
  for (const bool has_all : {true, false}) {
    LaggingReplica sync(has_all);
    CHECK_EQUAL(sync.holder.holdings().size(), has_all ? std::size_t{1} : std::size_t{0});
    for (const RankId each : sync.cluster.members()) sync.cluster.compute(each);
    for (const RankId each : sync.cluster.members()) sync.cluster.leave(each);
    sync.cluster.forget_messages();
    CHECK_EQUAL(sync.holder.state(box(0)).has_value(), has_all);
    CHECK_EQUAL(sync.equal(), has_all);
    // Under the same roles no record of it travels: what there is gets old.
    sync.cluster.done.clear();
    sync.steps(1);
    CHECK(sync.count(Kind::kSendRecord) + sync.count(Kind::kSendCatchUpRecord) + sync.count(Kind::kSendPromptRecord) ==
          0);
    CHECK(!sync.holder.state(box(0)));
  }
}

TEST(under_new_roles_a_replica_remains_that_has_all_committed_records) {
  for (const bool has_all : {true, false}) {
    LaggingReplica sync(has_all);
    sync.cluster.set_roles({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(1), rank(0), {}, ranks({0, 1})}});
    for (const RankId each : sync.cluster.members()) sync.cluster.install(each, 1);
    CHECK_EQUAL(sync.holder.state(box(0)).has_value(), has_all);
    if (has_all) sync.steps(2);
    CHECK(sync.equal() == has_all);
  }
}

// The step was voted for without a record that had yet to come.
TEST(a_step_that_is_finished_takes_a_replica_with_it_whose_record_did_not_come) {
  for (const bool updates : {true, false}) {
    LaggingReplica sync(true);
    for (const RankId each : sync.cluster.members()) sync.cluster.compute(each);
    sync.cluster.deliver();
    sync.cluster.vote(rank(1));
    sync.cluster.leave(rank(1));
    CHECK(sync.holder.pending() && sync.holder.state(box(0)));
    sync.cluster.updates = updates;
    sync.cluster.perform(rank(1), sync.holder.finish(sync.cluster.members()));
    sync.holder.end_step();
    CHECK_EQUAL(sync.holder.state(box(0)).has_value(), !updates);
  }
}

// An old base counts as the state of now. The next comparison finds it; without that too it is voted for.
TEST(without_the_rule_of_sync_an_old_base_is_vouched_for) {
  for (const bool compares : {true, false}) {
    Guards guards;
    guards.replica_in_sync.take_away();
    if (!compares) guards.digests_are_compared.take_away();
    Syncing sync(guards);
    sync.cluster.bulk_is_held = true;
    const StateTag old = *sync.owner.state(box(0));
    sync.steps(2);
    sync.cluster.perform(rank(1), sync.holder.state_arrived(box(0), old, true));
    for (const RankId each : sync.cluster.members()) sync.cluster.compute(each);
    CHECK_EQUAL(sync.holder.state(box(0))->version, sync.owner.state(box(0))->version);
    CHECK(!sync.equal());
    sync.cluster.deliver();
    sync.cluster.perform(rank(1), sync.holder.record_arrived(box(0), *sync.owner.state(box(0)), true));
    CHECK_EQUAL(sync.holder.state(box(0)).has_value(), !compares);
    CHECK_EQUAL(has(sync.holder.cast_vote(), Kind::kSendVote), !compares);
  }
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

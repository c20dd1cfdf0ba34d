// The commit machine: a copy that one rank gets of another's box, from its state to the vote that counts it.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "check.h"
#include "commit_cluster.h"

using namespace elaswave;
using namespace elaswave::commit;

namespace {

// A pair in which rank 1 gets a copy of the box that rank 0 owns; what travels in bulk can be held.
struct Late {
  Cluster cluster;
  StepMachine& owner = cluster.at(rank(0));
  StepMachine& holder = cluster.at(rank(1));

  explicit Late(Guards guards = {}) : Late({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}}, guards) {}
  explicit Late(std::vector<BoxRoles> roles, Guards guards = {})
      : cluster(std::move(roles), 2, CopyMode::kLog, guards) {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(owner.num_boxes()); ++i) {
      cluster.copy(box(i), rank(0), rank(1));
    }
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) cluster.step();
  }
  // Steps until the holder vouches for its copy.
  int steps_until_caught_up() {
    for (int steps = 0; steps < 10; ++steps, cluster.step()) {
      if (holder.catching_up().empty()) return steps;
    }
    return -1;
  }
  int count(Kind kind) const {
    return static_cast<int>(std::count_if(cluster.done.begin(), cluster.done.end(),
                                          [&](const auto& each) { return each.second.kind == kind; }));
  }
  bool equal() const { return holder.state(box(0)) && holder.state(box(0)) == owner.state(box(0)); }
};

// Of two boxes, the second of which does not come, so that the first stays behind. It has the record of the one step
// that was taken, if it `has_all`.
struct Behind : Late {
  explicit Behind(bool has_all)
      : Late({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(1), rank(0), ranks({1}), ranks({0, 1})}}) {
    cluster.bulk_is_held = true;
    const StateTag tag = *owner.state(box(0));
    cluster.perform(rank(1), holder.state_arrived(box(0), tag, true));
    steps(1);
    if (has_all) cluster.perform(rank(1), holder.late_record_arrived(box(0), tag, true, false));
  }
};

}  // namespace

TEST(a_new_holder_catches_up_behind_the_steps) {
  Late late;
  CHECK(!late.holder.materializes(box(0), rank(1)) && !late.owner.materializes(box(0), rank(1)));
  late.cluster.bulk_is_held = true;
  late.steps(5);
  CHECK(!late.holder.state(box(0)) && late.holder.catching_up() == std::vector{box(0)});
  CHECK(late.holder.far_behind() == late.holder.catching_up());
  CHECK_EQUAL(late.count(Kind::kSendLateRecord), 5);
  late.cluster.bulk_is_held = false;
  late.cluster.deliver();
  CHECK(late.equal() && late.holder.is_behind(box(0)));
  CHECK(late.holder.catching_up() == std::vector{box(0)});  // no vote of its own has said so yet
  CHECK(late.holder.far_behind().empty());                  // but it may after the next step
  // One step at whose begin it says that it is close, and whose record comes promptly. From the next on it vouches.
  CHECK_EQUAL(late.steps_until_caught_up(), 1);
  CHECK(late.equal() && late.count(Kind::kTellClose) == 1 && late.count(Kind::kAskState) == 0);
  late.steps(2);
  CHECK(late.equal());
}

TEST(a_prompt_record_counts_only_after_the_owner_was_told_that_the_copy_is_close) {
  Late late;
  late.cluster.bulk_is_held = true;
  const StateTag tag = *late.owner.state(box(0));
  late.steps(1);
  late.cluster.perform(rank(1), late.holder.state_arrived(box(0), tag, true));
  // It was sent for a copy that had been close before this one was asked for.
  late.cluster.perform(rank(1), late.holder.late_record_arrived(box(0), tag, true, true));
  CHECK(late.equal());
  late.steps(1);
  CHECK(late.holder.is_behind(box(0)) && late.holder.catching_up() == std::vector{box(0)});
  CHECK_EQUAL(late.count(Kind::kTellClose), 1);
}

TEST(records_of_neighbours_that_catch_up_travel_one_by_one) {
  Late late({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(0), rank(0), ranks({1}), ranks({0, 1})}});
  late.steps(3);
  CHECK(late.count(Kind::kSendLateRecord) + late.count(Kind::kSendPromptRecord) == 6 &&
        late.count(Kind::kSendPart) == 3);
  CHECK(late.holder.catching_up().empty() && late.equal());
}

TEST(a_vote_waits_for_the_record_of_a_copy_that_has_caught_up) {
  Late late;
  CHECK(late.steps_until_caught_up() > 0);
  late.cluster.bulk_is_held = true;  // what is sent by itself, here
  for (const RankId each : late.cluster.members()) late.cluster.compute(each);
  late.cluster.deliver();
  CHECK(late.holder.record_awaited(box(0)) && late.holder.awaited() == rank(0) && !late.holder.ready_to_vote());
  late.cluster.bulk_is_held = false;
  late.cluster.deliver();
  CHECK(late.holder.ready_to_vote() && late.holder.recorded(box(0)));
}

// So that votes wait for the records of none while another is on its way; but not for ever.
TEST(a_holder_says_that_it_is_close_when_all_its_states_have_come_or_much_later) {
  for (const bool comes : {true, false}) {
    Late late({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(0), rank(0), ranks({1}), ranks({0, 1})}});
    // The state of box 1 does not come; that of box 0 does, and its records.
    late.cluster.bulk_is_held = true;
    const StateTag tag = *late.owner.state(box(0));
    late.cluster.perform(rank(1), late.holder.state_arrived(box(0), tag, true));
    const auto step = [&] {
      const StateTag before = *late.owner.state(box(0));
      late.steps(1);
      if (late.holder.catching_up().size() == 2) {
        late.cluster.perform(rank(1), late.holder.late_record_arrived(box(0), before, true, false));
      }
    };
    for (int i = 0; i < 8; ++i) step();
    CHECK_EQUAL(late.count(Kind::kTellClose), 0);
    CHECK(late.holder.far_behind().size() == 2);
    if (comes) {
      late.cluster.perform(rank(1), late.holder.state_arrived(box(1), *late.owner.state(box(1)), true));
      CHECK(late.holder.far_behind().empty());
      step();
      CHECK_EQUAL(late.count(Kind::kTellClose), 2);
    } else {
      for (int i = 0; i < StepMachine::kApart - 8; ++i) step();
      CHECK_EQUAL(late.count(Kind::kTellClose), 0);
      CHECK(late.holder.far_behind() == std::vector{box(1)});
      step();
      CHECK_EQUAL(late.count(Kind::kTellClose), 1);
    }
  }
}

TEST(what_does_not_follow_a_state_is_of_no_use) {
  enum class Trouble { kState, kRecord, kGap, kDigest };
  for (const Trouble trouble : {Trouble::kState, Trouble::kRecord, Trouble::kGap, Trouble::kDigest}) {
    Late late;
    late.cluster.bulk_is_held = true;
    const StateTag tag = *late.owner.state(box(0));
    late.steps(1);
    const StateTag next = *late.owner.state(box(0));
    late.steps(2);
    Actions actions = late.holder.state_arrived(box(0), tag, trouble != Trouble::kState);
    if (trouble == Trouble::kRecord) actions = late.holder.late_record_arrived(box(0), tag, false, false);
    if (trouble == Trouble::kGap) actions = late.holder.late_record_arrived(box(0), next, true, false);
    if (trouble == Trouble::kDigest) actions = late.holder.late_record_arrived(box(0), {0, {9, 9}}, true, false);
    CHECK(has(actions, Kind::kAskState) && has(actions, Kind::kExpectState) && !has(actions, Kind::kUpdate));
    CHECK(!late.holder.state(box(0)) && late.holder.is_behind(box(0)));
    // The owner sends the record of the step in flight once more behind the state.
    CHECK_EQUAL(std::ranges::count(actions, Kind::kExpectLateRecord, &Action::kind),
                trouble == Trouble::kState ? 1 : 2);
    // Records that had been sent before the owner was asked are passed over; the rest follows the next state.
    CHECK(!has(late.holder.late_record_arrived(box(0), next, true, false), Kind::kUpdate));
    late.cluster.forget_messages();
    late.cluster.perform(rank(1), actions);
    late.cluster.bulk_is_held = false;
    for (int i = 0; i < 2; ++i) {
      late.cluster.perform(rank(1), {{Kind::kExpectLateRecord, box(0), rank(0), {}}});
    }
    CHECK(late.steps_until_caught_up() > 0 && late.equal());
  }
}

TEST(a_record_that_the_state_has_already_is_passed_over) {
  Late late;
  late.cluster.bulk_is_held = true;
  const StateTag before = *late.owner.state(box(0));
  late.steps(1);
  late.cluster.perform(rank(1), late.holder.state_arrived(box(0), *late.owner.state(box(0)), true));
  const Actions actions = late.holder.late_record_arrived(box(0), before, true, false);
  CHECK(actions.size() == 1 && actions[0].kind == Kind::kExpectLateRecord && late.equal());
}

// Its step may still be dropped here: nothing of it may be left then.
TEST(what_is_of_a_step_that_is_not_committed_here_is_refused) {
  Late late;
  CHECK_THROWS(ProtocolError, "box 0: a state at version 1, which rank 1 has not committed",
               late.holder.state_arrived(box(0), {1, {0, 0}}, true));
  late.cluster.deliver();
  CHECK_THROWS(ProtocolError, "box 0: a late record of version 1, which rank 1 has not committed",
               late.holder.late_record_arrived(box(0), *late.owner.state(box(0)), true, false));
  CHECK_THROWS(ProtocolError, "box 0: a state, which is not awaited",
               late.holder.state_arrived(box(0), *late.owner.state(box(0)), true));
  CHECK_THROWS(ProtocolError, "box 0: a late record, which is not awaited",
               late.owner.late_record_arrived(box(0), {0, {0, 0}}, true, false));
}

TEST(a_state_leaves_when_it_is_up_to_date) {
  Late late;
  CHECK_THROWS(ProtocolError, "box 0: its state is not due at rank 1", late.owner.state_leaves(box(0), rank(1)));
  Cluster& cluster = late.cluster;
  for (const RankId each : cluster.members()) cluster.compute(each);
  // Before the sum of the box, whose record then follows by itself, or after it.
  late.owner.send_state(box(0), rank(1));
  CHECK(late.owner.state_leaves(box(0), rank(1)).empty());
  cluster.deliver();
  late.owner.send_state(box(0), rank(1));
  const Actions behind = late.owner.state_leaves(box(0), rank(1));
  CHECK(behind.size() == 1 && behind[0].kind == Kind::kSendLateRecord && behind[0].peer == rank(1));
  late.owner.send_state(box(0), rank(1));
  for (const RankId each : cluster.members()) cluster.vote(each);
  cluster.deliver();
  CHECK_THROWS(ProtocolError, "box 0: its state cannot leave before it is that after version 1",
               late.owner.state_leaves(box(0), rank(1)));
}

TEST(a_step_without_an_update_is_one_to_catch_up_with) {
  Late late;
  late.cluster.bulk_is_held = true;
  for (const bool updates : {true, false, false, true, false}) {
    late.cluster.updates = updates;
    late.steps(1);
  }
  late.cluster.bulk_is_held = false;
  late.cluster.deliver();
  CHECK(late.equal() && late.holder.state(box(0))->version == 5 && late.count(Kind::kAskState) == 0);
  CHECK(late.steps_until_caught_up() > 0 && late.equal());
}

// What lacks a record then is never sent it: only what has all committed ones is a copy.
TEST(of_a_step_that_is_left_a_copy_remains_that_has_all_committed_records) {
  for (const bool has_all : {true, false}) {
    Behind late(has_all);
    CHECK_EQUAL(late.holder.holdings().size(), has_all ? std::size_t{1} : std::size_t{0});
    for (const RankId each : late.cluster.members()) late.cluster.compute(each);
    for (const RankId each : late.cluster.members()) late.cluster.leave(each);
    late.cluster.forget_messages();
    CHECK_EQUAL(late.holder.state(box(0)).has_value(), has_all);
    CHECK_EQUAL(late.equal(), has_all);
    // Under the same roles no record of it travels: what there is gets old.
    late.cluster.done.clear();
    late.steps(1);
    CHECK(late.count(Kind::kSendRecord) + late.count(Kind::kSendLateRecord) + late.count(Kind::kSendPromptRecord) == 0);
    CHECK(!late.holder.state(box(0)));
  }
}

TEST(under_new_roles_a_copy_remains_that_has_all_committed_records) {
  for (const bool has_all : {true, false}) {
    Behind late(has_all);
    late.cluster.set_roles({{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(1), rank(0), {}, ranks({0, 1})}});
    for (const RankId each : late.cluster.members()) late.cluster.install(each, 1);
    CHECK_EQUAL(late.holder.state(box(0)).has_value(), has_all);
    if (has_all) late.steps(2);
    CHECK(late.equal() == has_all);
  }
}

// The step was voted for without a record that had yet to come.
TEST(a_step_that_is_finished_takes_a_copy_with_it_whose_record_did_not_come) {
  for (const bool updates : {true, false}) {
    Behind late(true);
    for (const RankId each : late.cluster.members()) late.cluster.compute(each);
    late.cluster.deliver();
    late.cluster.vote(rank(1));
    late.cluster.leave(rank(1));
    CHECK(late.holder.pending() && late.holder.state(box(0)));
    late.cluster.updates = updates;
    late.cluster.perform(rank(1), late.holder.finish(late.cluster.members()));
    late.holder.end_step();
    CHECK_EQUAL(late.holder.state(box(0)).has_value(), !updates);
  }
}

// An old base counts as the state of now. The next comparison finds it; without that too it is voted for.
TEST(without_the_rule_of_catching_up_an_old_base_is_vouched_for) {
  for (const bool compares : {true, false}) {
    Guards guards;
    guards.copy_has_caught_up.take_away();
    if (!compares) guards.digests_are_compared.take_away();
    Late late(guards);
    late.cluster.bulk_is_held = true;
    const StateTag old = *late.owner.state(box(0));
    late.steps(2);
    late.cluster.perform(rank(1), late.holder.state_arrived(box(0), old, true));
    for (const RankId each : late.cluster.members()) late.cluster.compute(each);
    CHECK_EQUAL(late.holder.state(box(0))->version, late.owner.state(box(0))->version);
    CHECK(!late.equal());
    late.cluster.deliver();
    late.cluster.perform(rank(1), late.holder.record_arrived(box(0), *late.owner.state(box(0)), true));
    CHECK_EQUAL(late.holder.state(box(0)).has_value(), !compares);
    CHECK_EQUAL(has(late.holder.cast_vote(), Kind::kSendVote), !compares);
  }
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

// The commit machine: several of them over a queue that loses nothing, then what each rule refuses.
#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "commit_cluster.h"

using namespace elaswave;
using namespace elaswave::commit;

namespace {

// Two boxes of one bucket that both ranks read; each owns one and holds the other.
std::vector<BoxRoles> pair_roles() {
  return {{bucket(0), rank(0), ranks({1}), ranks({0, 1})}, {bucket(0), rank(1), ranks({0}), ranks({0, 1})}};
}

// Three ranks; box 0 is owned by rank 0, held by rank 1 and read by all, box 1 is rank 2's and held by nobody.
std::vector<BoxRoles> three_roles() {
  return {{bucket(0), rank(0), ranks({1}), ranks({0, 1, 2})}, {bucket(1), rank(2), {}, ranks({0, 2})}};
}

}  // namespace

TEST(owners_and_holders_stay_equal) {
  Cluster cluster(three_roles(), 3);
  for (int i = 0; i < 4; ++i) cluster.step();
  for (const RankId each : cluster.members()) CHECK_EQUAL(cluster.at(each).version(), 4);
  CHECK(cluster.at(rank(0)).state(box(0)) == cluster.at(rank(1)).state(box(0)));
  CHECK_EQUAL(cluster.at(rank(1)).state(box(0))->version, 4);
  CHECK(!cluster.at(rank(2)).state(box(0)));
  for (const RankId each : cluster.members()) {
    CHECK(cluster.at(each).parameters_ready(bucket(0)));
    CHECK(!cluster.at(each).awaited());
    for (const auto& [name, guard] : Guards::all()) {
      const bool used = (cluster.at(each).guards().*guard).consulted() > 0;
      const std::string rule = name;
      const bool rest = rule == "older_frames_are_dropped" || rule == "failed_update_drops_state" ||
                        rule == "replica_in_sync" || each != rank(1);
      CHECK(used || rest);
    }
  }
}

// The messages of a kind, as (from, to, first box, boxes).
using Message = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::size_t>;
std::vector<Message> messages(const Cluster& cluster, Kind kind) {
  std::vector<Message> found;
  for (const auto& [self, action] : cluster.done) {
    if (action.kind == kind) found.emplace_back(self.value(), action.peer->value(), action.box->value(), action.count);
  }
  return found;
}

TEST(neighbours_with_equal_roles_share_messages) {
  const BoxRoles first{bucket(0), rank(0), ranks({1}), ranks({0, 1, 2})};
  const BoxRoles second{bucket(0), rank(0), ranks({2}), ranks({0, 1, 2})};  // another holder
  const BoxRoles third{bucket(0), rank(0), ranks({2}), ranks({0, 2})};      // and other readers
  BoxRoles next = third;                                                    // and of another bucket
  next.bucket = bucket(1);
  Cluster cluster({first, first, second, second, third, next, next}, 3);
  cluster.step();
  for (const RankId each : cluster.members()) CHECK_EQUAL(cluster.at(each).version(), 1);
  CHECK((messages(cluster, Kind::kSendPart) ==
         std::vector<Message>{{1, 0, 0, 2}, {1, 0, 2, 2}, {2, 0, 0, 2}, {2, 0, 2, 2}, {2, 0, 4, 1}, {2, 0, 5, 2}}));
  std::vector<Message> records = messages(cluster, Kind::kSendRecord);
  std::sort(records.begin(), records.end());  // they come in the order in which the parts have
  CHECK((records == std::vector<Message>{{0, 1, 0, 2}, {0, 2, 2, 2}, {0, 2, 4, 1}, {0, 2, 5, 2}}));
  CHECK((messages(cluster, Kind::kSendParameters) == std::vector<Message>{{0, 2, 0, 2}, {0, 1, 2, 2}}));
  // A syncing replica makes no parameters: what its holder is sent is a message of its own.
  cluster.replicate(box(1), rank(0), rank(1));
  cluster.done.clear();
  cluster.step();
  CHECK((messages(cluster, Kind::kSendParameters) == std::vector<Message>{{0, 2, 0, 2}, {0, 1, 1, 1}, {0, 1, 2, 2}}));
  CHECK_THROWS(ProtocolError, "box 2: a part of rank 1, which is not awaited",
               cluster.at(rank(0)).part_arrived({box(2), 2}, rank(1)));
}

TEST(holders_make_their_parameters_and_are_not_sent_them) {
  Cluster cluster(three_roles(), 3);
  cluster.step();
  std::vector<std::pair<RankId, RankId>> sent;
  for (const auto& [self, action] : cluster.done) {
    if (action.kind == Kind::kSendParameters && action.box == box(0)) sent.emplace_back(self, *action.peer);
  }
  CHECK(sent == (std::vector{std::pair(rank(0), rank(2))}));
}

TEST(with_whole_states_holders_lag_until_the_next_vote) {
  Cluster cluster(pair_roles(), 2, CopyMode::kState);
  cluster.step();
  CHECK(cluster.at(rank(1)).state(box(0)) == cluster.at(rank(0)).state(box(0)));  // delivered since
  cluster.compute(rank(0));
  cluster.compute(rank(1));
  cluster.deliver();
  cluster.vote(rank(0));
  cluster.vote(rank(1));
  cluster.deliver();
  cluster.after_commit(rank(1));
  CHECK(!cluster.at(rank(1)).state(box(0)));
  CHECK(cluster.at(rank(1)).state_must_come(box(0)));
}

TEST(a_vote_waits_for_sums_and_records) {
  Cluster cluster(three_roles(), 3);
  for (const RankId each : cluster.members()) cluster.compute(each);
  CHECK(!cluster.at(rank(0)).ready_to_vote());
  CHECK(cluster.at(rank(0)).awaited() == rank(1));  // its part of box 0
  CHECK(cluster.at(rank(1)).awaited() == rank(0));  // its record of box 0
  CHECK_THROWS(ProtocolError, "rank 1: state or record of box 0 for version 1 is not here", cluster.vote(rank(1)));
  cluster.deliver();
  for (const RankId each : cluster.members()) CHECK(cluster.at(each).ready_to_vote());
}

TEST(a_commit_needs_the_votes_of_all) {
  Cluster cluster(three_roles(), 3);
  for (const RankId each : cluster.members()) cluster.compute(each);
  cluster.deliver();
  cluster.vote(rank(0));
  cluster.vote(rank(1));
  cluster.deliver();
  CHECK(!cluster.at(rank(0)).committed());
  CHECK(cluster.at(rank(0)).awaited() == rank(2));
  CHECK_THROWS(ProtocolError, "rank 0: a commit without the votes of all", cluster.at(rank(0)).commit(true));
  CHECK_THROWS(ProtocolError, "update_bucket while its step is waiting for votes",
               cluster.at(rank(0)).update_bucket(bucket(0)));
  CHECK_THROWS(ProtocolError, "a vote of rank 1, which is not awaited", cluster.at(rank(0)).vote_arrived(rank(1)));
  CHECK_THROWS(ProtocolError, "a vote of rank 7, which is not awaited", cluster.at(rank(0)).vote_arrived(rank(7)));
  cluster.vote(rank(2));
  cluster.deliver();
  for (const RankId each : cluster.members()) CHECK(cluster.at(each).committed());
}

TEST(a_step_left_after_the_vote_is_finished_with_all_votes_or_dropped) {
  Cluster cluster(three_roles(), 3);
  for (const RankId each : cluster.members()) cluster.compute(each);
  cluster.deliver();
  cluster.vote(rank(0));
  cluster.vote(rank(1));
  cluster.deliver();
  cluster.leave(rank(0));
  cluster.leave(rank(1));
  StepMachine& first = cluster.at(rank(0));
  CHECK(first.pending() && first.recorded(box(0)));
  CHECK_EQUAL(first.holdings().size(), std::size_t{1});
  CHECK_THROWS(ProtocolError, "the vote of rank 2 is missing", first.finish(ranks({0, 1})));
  cluster.perform(rank(0), first.finish(ranks({0, 1, 2})));
  first.end_step();
  CHECK(first.state(box(0))->version == 1 && first.version() == 1);
  CHECK(first.stale(bucket(1)) && !first.stale(bucket(0)));  // box 1 is rank 2's to send
  cluster.at(rank(1)).drop();
  CHECK(cluster.at(rank(1)).state(box(0))->version == 0 && !cluster.at(rank(1)).recorded(box(0)));
}

TEST(a_step_left_before_the_vote_leaves_nothing) {
  Cluster cluster(pair_roles());
  cluster.compute(rank(0));
  cluster.leave(rank(0));
  CHECK(!cluster.at(rank(0)).pending());
  CHECK(cluster.at(rank(0)).begin_step().size() == 1);
}

TEST(a_step_left_after_the_commit_is_finished) {
  Cluster cluster(pair_roles());
  cluster.compute(rank(0));
  cluster.compute(rank(1));
  cluster.deliver();
  cluster.vote(rank(0));
  cluster.vote(rank(1));
  cluster.deliver();
  cluster.leave(rank(0));
  cluster.at(rank(0)).end_step();
  CHECK_EQUAL(cluster.at(rank(0)).state(box(0))->version, 1);
  CHECK_EQUAL(cluster.at(rank(0)).state(box(1))->version, 1);
  CHECK(!cluster.at(rank(0)).stale(bucket(0)));  // all of it is made here
}

TEST(an_update_that_fails_takes_the_state_with_it_and_no_other) {
  Cluster cluster(pair_roles());
  cluster.compute(rank(0));
  cluster.compute(rank(1));
  cluster.deliver();
  cluster.vote(rank(0));
  cluster.vote(rank(1));
  cluster.deliver();
  cluster.updates_failing[{rank(0), box(0)}] = 1;
  cluster.perform(rank(0), cluster.at(rank(0)).update_bucket(bucket(0)));
  cluster.leave(rank(0));
  cluster.at(rank(0)).end_step();
  CHECK(!cluster.at(rank(0)).state(box(0)));
  CHECK(cluster.at(rank(0)).syncing() == std::vector{box(0)});
  CHECK_EQUAL(cluster.at(rank(0)).state(box(1))->version, 1);
  CHECK(cluster.at(rank(0)).stale(bucket(0)));
  cluster.after_commit(rank(1));
  CHECK_EQUAL(cluster.at(rank(1)).state(box(0))->version, 1);
}

TEST(a_replica_that_differs_is_dropped_and_ends_the_step) {
  Cluster cluster(pair_roles());
  cluster.step();
  cluster.at(rank(1)).load(box(0), {99, 99});
  cluster.compute(rank(0));
  cluster.compute(rank(1));
  cluster.deliver();
  CHECK(cluster.at(rank(1)).ready_to_vote());
  const Actions actions = cluster.at(rank(1)).cast_vote();
  CHECK_EQUAL(actions.size(), std::size_t{1});
  CHECK(actions[0].kind == Kind::kLeaveStep && actions[0].box == box(0));
  cluster.leave(rank(1));
  CHECK(!cluster.at(rank(1)).state(box(0)) && !cluster.at(rank(1)).pending());
  CHECK(cluster.at(rank(1)).stale(bucket(0)));
  CHECK_THROWS(ProtocolError, "box 0: rank 1 holds it, has no state of it, and none is on its way",
               cluster.at(rank(1)).begin_step());
  cluster.leave(rank(0));
  cluster.at(rank(0)).restart(4);
  CHECK_THROWS(ProtocolError, "box 0: rank 0 owns it, has no state of it", cluster.at(rank(0)).begin_step());
  CHECK(cluster.at(rank(0)).stale_buckets() == std::vector{bucket(0)} && cluster.at(rank(0)).version() == 4);
}

TEST(a_damaged_record_ends_the_step_and_spares_the_replica) {
  Cluster cluster(pair_roles());
  cluster.perform(rank(1), cluster.at(rank(1)).begin_step());
  cluster.at(rank(1)).record_arrived(box(0), {0, {0, 0}}, false);
  CHECK(cluster.at(rank(1)).state(box(0)) && !cluster.at(rank(1)).recorded(box(0)));
}

TEST(a_record_of_another_version_is_refused) {
  Cluster cluster(pair_roles());
  cluster.perform(rank(1), cluster.at(rank(1)).begin_step());
  CHECK_THROWS(ProtocolError, "box 0: a record for the state at version 3 in the step after version 0",
               cluster.at(rank(1)).record_arrived(box(0), {3, {0, 0}}, true));
  CHECK_THROWS(ProtocolError, "box 1: a record, which is not awaited",
               cluster.at(rank(1)).record_arrived(box(1), {0, {0, 0}}, true));
}

TEST(a_step_without_an_update_counts_and_changes_nothing) {
  Cluster cluster(pair_roles());
  for (const RankId each : cluster.members()) cluster.compute(each);
  cluster.deliver();
  Guards guards;
  const Digest before = cluster.at(rank(0)).state(box(0))->digest;
  CHECK(!has(cluster.at(rank(0)).cast_vote(), Kind::kCommit));
  CHECK(has(cluster.at(rank(0)).vote_arrived(rank(1)), Kind::kCommit));
  CHECK(cluster.at(rank(0)).commit(false).empty());
  CHECK(cluster.at(rank(0)).update_bucket(bucket(0)).empty() && cluster.at(rank(0)).gather(bucket(0)).empty());
  CHECK(cluster.at(rank(0)).update_replicas().empty());
  cluster.at(rank(0)).end_step();
  CHECK(*cluster.at(rank(0)).state(box(0)) == (StateTag{1, before}));
}

TEST(who_reads_a_bucket_for_the_first_time_has_stale_parameters) {
  std::vector<BoxRoles> roles = {{bucket(0), rank(0), {}, ranks({0})}};
  Cluster cluster(roles);
  roles[0].readers = ranks({0, 1});
  cluster.set_roles(roles);
  for (const RankId each : cluster.members()) cluster.install(each, 1);
  CHECK(cluster.at(rank(1)).stale(bucket(0)) && !cluster.at(rank(0)).stale(bucket(0)));
  for (const RankId each : cluster.members()) cluster.perform(each, cluster.at(each).refresh(bucket(0), ranks({1})));
  CHECK(!cluster.at(rank(1)).parameters_ready(bucket(0)) && cluster.at(rank(1)).awaited() == rank(0));
  cluster.deliver();
  CHECK(cluster.at(rank(1)).parameters_ready(bucket(0)));
}

TEST(a_rank_with_replicas_of_a_bucket_makes_the_parameters_that_it_reads_for_the_first_time) {
  std::vector<BoxRoles> roles = {{bucket(0), rank(0), ranks({1}), ranks({0})}, {bucket(0), rank(0), {}, ranks({0})}};
  for (const bool all : {true, false}) {
    roles[1].holders = all ? ranks({1}) : ranks({});
    for (BoxRoles& each : roles) each.readers = ranks({0});
    Cluster cluster(roles);
    cluster.step();
    for (BoxRoles& each : roles) each.readers = ranks({0, 1});
    const Actions actions = cluster.at(rank(1)).install(1, ranks({0, 1}), roles);
    CHECK_EQUAL(has(actions, Kind::kWriteParameters), all);
    CHECK_EQUAL(cluster.at(rank(1)).stale(bucket(0)), !all);
  }
}

TEST(frames_are_admitted_by_their_epoch) {
  Guard guard, taken_away;
  taken_away.take_away();
  CHECK(admit(3, 3, guard) == Admission::kDeliver);
  CHECK(admit(2, 3, guard) == Admission::kDrop);
  CHECK(admit(4, 3, guard) == Admission::kHold);
  CHECK(admit(2, 3, taken_away) == Admission::kDeliver);
  CHECK_EQUAL(guard.consulted(), std::uint64_t{2});
}

// --- What each guard keeps from happening

TEST(without_all_votes_one_is_enough) {
  Guards guards;
  guards.commit_needs_all_votes.take_away();
  Cluster cluster(pair_roles(), 2, CopyMode::kLog, guards);
  for (const RankId each : cluster.members()) cluster.compute(each);
  cluster.deliver();
  cluster.vote(rank(0));
  CHECK(cluster.at(rank(0)).committed());
}

TEST(without_the_rule_of_votes_a_holder_votes_without_its_record) {
  Guards guards;
  guards.vote_needs_state_and_record.take_away();
  Cluster cluster(pair_roles(), 2, CopyMode::kLog, guards);
  cluster.compute(rank(1));
  CHECK(has(cluster.at(rank(1)).cast_vote(), Kind::kSendVote));
}

TEST(without_comparing_a_wrong_replica_is_voted_for) {
  for (const bool compares : {true, false}) {
    Guards guards;
    (compares ? guards.wrong_replica_ends_step : guards.digests_are_compared).take_away();
    Cluster cluster(pair_roles(), 2, CopyMode::kLog, guards);
    cluster.at(rank(1)).load(box(0), {99, 99});
    for (const RankId each : cluster.members()) cluster.compute(each);
    cluster.deliver();
    CHECK(has(cluster.at(rank(1)).cast_vote(), Kind::kSendVote));
    CHECK_EQUAL(cluster.at(rank(1)).state(box(0)).has_value(), !compares);
  }
}

TEST(without_the_rule_of_old_parameters_a_new_reader_computes_with_those_it_had) {
  for (const bool asks : {true, false}) {
    Guards guards;
    if (!asks) guards.old_parameters_are_stale.take_away();
    std::vector<BoxRoles> roles = {{bucket(0), rank(0), {}, ranks({0})}};
    Cluster cluster(roles, 2, CopyMode::kLog, guards);
    cluster.step();
    roles[0].readers = ranks({0, 1});
    cluster.set_roles(roles);
    for (const RankId each : cluster.members()) cluster.install(each, 1);
    CHECK_EQUAL(cluster.at(rank(1)).parameters_ready(bucket(0)), !asks);
  }
}

TEST(without_the_rule_of_replicas_a_holder_believes_that_it_is_up_to_date) {
  Guards guards;
  guards.replicas_are_updated.take_away();
  Cluster cluster(pair_roles(), 2, CopyMode::kLog, guards);
  cluster.step();
  CHECK(*cluster.at(rank(1)).state(box(0)) == (StateTag{1, {0, 0}}));
  CHECK(cluster.at(rank(0)).state(box(0)) != cluster.at(rank(1)).state(box(0)));
}

TEST(without_the_rule_of_owners_two_publish) {
  Guards guards;
  guards.only_owner_publishes.take_away();
  Cluster cluster(three_roles(), 3, CopyMode::kLog, guards);
  cluster.step();
  std::set<RankId> publishers;
  for (const auto& [self, action] : cluster.done) {
    if (action.kind == Kind::kSendParameters && action.box == box(0)) publishers.insert(self);
  }
  CHECK(publishers == (std::set{rank(0), rank(1)}));
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

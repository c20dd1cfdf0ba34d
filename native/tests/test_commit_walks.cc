// The commit machine in any order of events, with steps that are left anywhere.
#include <exception>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "commit_cluster.h"

using namespace elaswave;
using namespace elaswave::commit;

namespace {

// Three ranks walk through steps, each at its own pace, and leave them when chance says so. What is decided then is
// what a coordinator decides: if a rank has committed, the others finish the step; if not, it is dropped.
class Walk {
 public:
  explicit Walk(std::uint32_t seed, Guards guards = {})
      : random_(seed), cluster_(roles(), 3, CopyMode::kLog, guards), at_(3, 0) {}

  void run() {
    for (int turn = 0; turn < 600; ++turn) {
      if (random_() % 97 == 0) {
        new_epoch();
      } else if (random_() % 2 == 0) {
        cluster_.deliver_one(random_);
      } else {
        advance(RankId(random_() % 3));
      }
      check();
    }
    CHECK(committed_ > 0);
  }

  int states_taken = 0;

 private:
  static constexpr int kStages = 9;

  // Every box has an owner and a holder, and all ranks read the first bucket.
  std::vector<BoxRoles> roles() {
    std::vector<BoxRoles> made;
    for (std::int64_t i = 0; i < 4; ++i) {
      const auto owner = static_cast<std::int64_t>(random_() % 3);
      const std::vector<RankId> readers = i < 2 ? ranks({0, 1, 2}) : ranks({0, 2});
      made.push_back({bucket(i / 2), rank(owner), {rank((owner + 1) % 3)}, readers});
    }
    return made;
  }

  void advance(RankId self) {
    StepMachine& machine = cluster_.at(self);
    int& stage = at_[self.index()];
    const auto step_on = [&](const Actions& actions) {
      cluster_.perform(self, actions);
      ++stage;
    };
    const bool ready = machine.parameters_ready(bucket(0)) && machine.parameters_ready(bucket(1));
    if (stage == 0) return step_on(machine.begin_step());
    if (stage == 1 && ready) return step_on(machine.bucket_reduced(bucket(1)));
    if (stage == 2) return step_on(machine.bucket_reduced(bucket(0)));
    if (stage == 3 && machine.ready_to_vote()) {
      voted_.insert({machine.version() + 1, self});
      return step_on(machine.cast_vote());
    }
    if (stage < 4 || !machine.committed()) return;
    if (stage == 4 || stage == 5) return step_on(machine.update_bucket(bucket(stage - 4)));
    if (stage == 6 || stage == 7) return step_on(machine.gather(bucket(stage - 6)));
    step_on(machine.update_replicas());
    cluster_.send_states(self);
    machine.end_step();
    stage = stage % kStages;
  }

  void new_epoch() {
    std::int64_t newest = 0;
    for (const RankId each : cluster_.members()) {
      StepMachine& machine = cluster_.at(each);
      cluster_.leave(each);
      if (machine.committed()) machine.end_step();
      newest = std::max(newest, machine.version());
    }
    cluster_.forget_messages();
    for (const RankId each : cluster_.members()) {
      StepMachine& machine = cluster_.at(each);
      if (machine.version() < newest) {
        cluster_.perform(each, machine.finish(cluster_.members()));
        machine.end_step();
      } else {
        machine.drop();
      }
      at_[each.index()] = 0;
    }
    voted_.clear();  // of a step that is dropped, no vote counts
    for (const RankId each : cluster_.members()) cluster_.install(each, ++epoch_);
    for (const RankId each : cluster_.members()) {
      for (const std::int64_t number : {0, 1}) {
        const std::vector<RankId> takers = number == 0 ? ranks({0, 1, 2}) : ranks({0, 2});
        cluster_.perform(each, cluster_.at(each).refresh(bucket(number), takers));
      }
    }
    // Replicas that were syncing, and one more, are synced anew beside the steps.
    const auto one = static_cast<std::int64_t>(random_() % 4);
    for (std::int64_t i = 0; i < 4; ++i) {
      const BoxRoles replica = cluster_.at(rank(0)).roles(box(i));
      const RankId holder = replica.holders[0];
      if (i != one && cluster_.at(holder).state(box(i))) continue;
      cluster_.replicate(box(i), replica.owner, holder);
    }
  }

  void check() {
    for (const auto& [self, action] : std::exchange(cluster_.done, {})) {
      const std::int64_t version = cluster_.at(self).version();
      if (action.kind == Kind::kUpdate) CHECK(*action.version <= version);
      if (action.kind == Kind::kReportNearlyInSync) ++states_taken;
      if (action.kind == Kind::kSendParameters) CHECK(cluster_.at(self).owns(*action.box));
      if (action.kind == Kind::kCommit && !cluster_.at(self).pending() && version > committed_) {
        for (const RankId each : cluster_.members()) CHECK(voted_.empty() || voted_.contains({version, each}));
        committed_ = version;
      }
    }
    std::map<std::pair<BoxId, std::int64_t>, Digest> seen;
    for (const RankId each : cluster_.members()) {
      for (const Holding& held : cluster_.at(each).holdings()) {
        const Digest& digest = seen.try_emplace({held.box, held.state.version}, held.state.digest).first->second;
        CHECK(digest == held.state.digest);
        CHECK(held.state.version <= cluster_.at(each).version());
        CHECK(held.state.version + 1 >= cluster_.at(each).version());
      }
    }
  }

  std::mt19937 random_;
  Cluster cluster_;
  std::vector<int> at_;
  std::set<std::pair<std::int64_t, RankId>> voted_;
  std::int64_t committed_ = 0;
  std::uint32_t epoch_ = 0;
};

}  // namespace

TEST(in_any_order_nothing_is_committed_without_all_votes_and_replicas_stay_equal) {
  int states_taken = 0;
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    try {
      Walk walk(seed);
      walk.run();
      states_taken += walk.states_taken;
    } catch (const std::exception& error) {
      throw std::logic_error("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  CHECK(states_taken > 300);
}

TEST(in_any_order_a_rule_that_is_taken_away_is_missed) {
  for (Guard Guards::* const rule : {&Guards::commit_needs_all_votes, &Guards::vote_needs_state_and_record,
                                     &Guards::replicas_are_updated, &Guards::only_owner_publishes}) {
    Guards guards;
    (guards.*rule).take_away();
    int missed = 0;
    for (std::uint32_t seed = 0; seed < 20; ++seed) {
      try {
        Walk(seed, guards).run();
      } catch (const std::exception&) {
        ++missed;
      }
    }
    CHECK(missed > 0);
  }
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

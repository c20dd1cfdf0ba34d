// Commit machines of several ranks over a queue that loses nothing. What a machine says is done at once; when what was
// sent arrives, is the test's to choose.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "commit/machine.h"

namespace elaswave::commit {

using Kind = Action::Kind;

inline RankId rank(std::int64_t number) { return RankId(number); }
inline BoxId box(std::int64_t number) { return BoxId(number); }
inline BucketId bucket(std::int64_t number) { return BucketId(number); }

inline std::vector<RankId> ranks(std::initializer_list<std::int64_t> numbers) {
  return {numbers.begin(), numbers.end()};
}

inline bool has(const Actions& actions, Kind kind) {
  for (const Action& each : actions) {
    if (each.kind == kind) return true;
  }
  return false;
}

// What an update makes of a state: a function of the state and of the version that it leads to.
inline Digest next(const StateTag& state) {
  return {state.digest.lo * 31 + static_cast<std::uint64_t>(state.version) + 1, 7};
}

// Ranks whose messages arrive in any order but, between two ranks, in that in which they were sent and expected.
class Cluster {
 public:
  explicit Cluster(std::vector<BoxRoles> roles, std::size_t size = 2, CopyMode mode = CopyMode::kLog,
                   Guards guards = {})
      : roles_(std::move(roles)) {
    for (std::size_t i = 0; i < size; ++i) members_.push_back(RankId(static_cast<std::int64_t>(i)));
    for (const RankId each : members_) {
      machines_.emplace_back(each, mode, guards);
      install(each, 0);
      for (const BoxRoles& box : roles_) at(each).load_parameters(box.bucket);
      for (std::size_t i = 0; i < roles_.size(); ++i) {
        const BoxId id(static_cast<std::int64_t>(i));
        if (at(each).owns(id) || at(each).holds(id)) at(each).load(id, {i, i});
      }
    }
  }

  StepMachine& at(RankId rank) { return machines_[rank.index()]; }
  const std::vector<RankId>& members() const { return members_; }

  void install(RankId rank, std::uint32_t epoch) { perform(rank, at(rank).install(epoch, members_, roles_)); }
  void set_roles(std::vector<BoxRoles> roles) { roles_ = std::move(roles); }

  // Everything of a step up to the votes being cast; deliver() brings them home.
  void compute(RankId rank) {
    perform(rank, at(rank).begin_step());
    for (std::int64_t i = 0; i < buckets(); ++i) perform(rank, at(rank).bucket_reduced(bucket(i)));
  }

  void vote(RankId rank) { perform(rank, at(rank).cast_vote()); }

  void after_commit(RankId rank) {
    for (std::int64_t i = 0; i < buckets(); ++i) perform(rank, at(rank).update_bucket(bucket(i)));
    for (std::int64_t i = 0; i < buckets(); ++i) perform(rank, at(rank).gather(bucket(i)));
    perform(rank, at(rank).update_replicas());
    send_states(rank);
    at(rank).end_step();
  }

  // Those whose turn it was to be sent before.
  void send_states(RankId self) {
    for (const Action& due : std::exchange(states_due_[self], {})) {
      if (!at(self).state(*due.box)) continue;
      const Actions catch_up = at(self).state_leaves(*due.box, *due.peer);
      send(self, due);
      perform(self, catch_up);
    }
  }

  // Both ends of a new replica, between steps.
  void replicate(BoxId box, RankId owner, RankId holder) {
    perform(owner, at(owner).send_state(box, holder));
    send_states(owner);
    perform(holder, at(holder).expect_state(box));
  }

  void step() {
    for (const RankId each : members_) compute(each);
    deliver();
    for (const RankId each : members_) vote(each);
    deliver();
    for (const RankId each : members_) after_commit(each);
    deliver();
  }

  // Hands over all that was sent and is expected.
  void deliver() {
    for (std::vector<Way> ready = ways(); !ready.empty(); ready = ways()) arrive(ready.front());
  }

  // One of it, if there is any.
  void deliver_one(std::mt19937& random) {
    std::vector<Way> ready = ways();
    if (random() % 4 > 0) std::erase_if(ready, &is_bulk);
    if (!ready.empty()) arrive(ready[random() % ready.size()]);
  }

  void forget_messages() {
    sent_.clear();
    expected_.clear();
    states_due_.clear();
  }

  void perform(RankId self, const Actions& actions) {
    for (const Action& each : actions) perform(self, each);
  }

  // A rank leaves its step: what it expected is off.
  void leave(RankId self) {
    for (auto& [way, count] : expected_) {
      if (way.to == self) count = 0;
    }
    perform(self, at(self).leave());
  }

  std::map<std::pair<RankId, BoxId>, int> updates_failing;
  bool bulk_is_held = false;
  bool updates = true;  // commits have them
  std::vector<std::pair<RankId, Action>> done;

 private:
  struct Way {
    Kind kind;  // of the sending action
    RankId from, to;
    std::optional<BoxId> box;
    std::size_t count;
    auto operator<=>(const Way&) const = default;
  };
  struct Message {
    std::vector<StateTag> tags;  // of the states of its boxes
    bool prompt = false;
  };

  static bool is_bulk(const Way& way) { return way.kind == Kind::kSendState || way.kind == Kind::kSendCatchUpRecord; }

  std::vector<Way> ways() {
    std::vector<Way> ready;
    for (auto& [way, sent] : sent_) {
      if (!sent.empty() && expected_[way] > 0 && may_arrive(way, sent.front())) ready.push_back(way);
    }
    return ready;
  }

  // What is sent in bulk comes in order, and is looked at when its step is committed.
  bool may_arrive(const Way& way, const Message& message) {
    if (!is_bulk(way)) return true;
    if (bulk_is_held) return false;
    const StepMachine& machine = at(way.to);
    const std::int64_t version = message.tags.front().version;
    if (way.kind == Kind::kSendState) return version <= machine.version();
    if (machine.record_awaited(*way.box)) return true;
    const bool state_first = !sent_[{Kind::kSendState, way.from, way.to, way.box, way.count}].empty();
    return machine.sync_under_way(*way.box) && !state_first && version < machine.version();
  }

  std::int64_t buckets() const {
    std::int64_t most = 0;
    for (const BoxRoles& each : roles_) most = std::max(most, each.bucket.value() + 1);
    return most;
  }

  void perform(RankId self, const Action& action) {
    done.emplace_back(self, action);
    switch (action.kind) {
      case Kind::kSendPart:
      case Kind::kSendRecord:
      case Kind::kSendVote:
      case Kind::kSendParameters:
      case Kind::kSendCatchUpRecord:
        return send(self, action);
      case Kind::kSendPromptRecord:  // one way: it does not overtake
        return send(self, {Kind::kSendCatchUpRecord, action.box, action.peer, {}}, true);
      case Kind::kSendState:
        return states_due_[self].push_back(action);
      case Kind::kExpectPart:
        return expect(Kind::kSendPart, self, action);
      case Kind::kExpectRecord:
        return expect(Kind::kSendRecord, self, action);
      case Kind::kExpectVote:
        return expect(Kind::kSendVote, self, action);
      case Kind::kExpectParameters:
        return expect(Kind::kSendParameters, self, action);
      case Kind::kExpectState:
        return expect(Kind::kSendState, self, action);
      case Kind::kExpectCatchUpRecord:
        return expect(Kind::kSendCatchUpRecord, self, action);
      case Kind::kReportNearlyInSync:
        return at(*action.peer).replica_nearly_in_sync(*action.box, self);
      case Kind::kAskState:
        return perform(*action.peer, at(*action.peer).state_asked(*action.box, self));
      case Kind::kCommit:
        return perform(self, at(self).commit(updates));
      case Kind::kUpdate:
        if (updates_failing.contains({self, *action.box})) return perform(self, at(self).update_failed(*action.box));
        return perform(self, at(self).updated(*action.box, next(*at(self).state(*action.box))));
      default:
        return;
    }
  }

  void send(RankId self, const Action& action, bool prompt = false) {
    std::vector<StateTag> tags(action.count);
    for (std::size_t i = 0; action.box && i < action.count; ++i) {
      tags[i] = at(self).state(BoxId::at(action.box->index() + i)).value_or(StateTag());
    }
    sent_[{action.kind, self, *action.peer, action.box, action.count}].push_back({std::move(tags), prompt});
  }

  void expect(Kind kind, RankId self, const Action& action) {
    ++expected_[{kind, *action.peer, self, action.box, action.count}];
  }

  void arrive(Way way) {
    const auto [tags, prompt] = sent_[way].front();
    sent_[way].pop_front();
    --expected_[way];
    StepMachine& machine = at(way.to);
    switch (way.kind) {
      case Kind::kSendPart:
        return perform(way.to, machine.part_arrived({*way.box, way.count}, way.from));
      case Kind::kSendRecord:
        for (std::size_t i = 0; i < way.count; ++i) {
          perform(way.to, machine.record_arrived(BoxId::at(way.box->index() + i), tags[i], true));
        }
        return;
      case Kind::kSendVote:
        return perform(way.to, machine.vote_arrived(way.from));
      case Kind::kSendParameters:
        for (const BoxId box : BoxRange(*way.box, way.count).ids()) perform(way.to, machine.parameters_arrived(box));
        return;
      case Kind::kSendCatchUpRecord:
        return perform(way.to, machine.record_awaited(*way.box)
                                   ? machine.record_arrived(*way.box, tags.front(), true)
                                   : machine.catch_up_record_arrived(*way.box, tags.front(), true, prompt));
      default:
        return perform(way.to, machine.state_arrived(*way.box, tags.front(), true));
    }
  }

  std::vector<BoxRoles> roles_;
  std::vector<RankId> members_;
  std::vector<StepMachine> machines_;
  std::map<Way, std::deque<Message>> sent_;
  std::map<RankId, std::vector<Action>> states_due_;
  std::map<Way, int> expected_;
};

}  // namespace elaswave::commit

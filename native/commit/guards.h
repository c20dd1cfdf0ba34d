// The safety rules of the commit machine, each as a value that can be taken away, so that a simulator can plant a bug
// in the code that a real run enters and must then find it. A real run leaves all of them on.
#pragma once

#include <array>
#include <cstdint>

namespace elaswave::commit {

class Guard {
 public:
  // Whether the rule lets something pass of which `fact` must hold. A rule that was taken away lets everything pass.
  bool allows(bool fact) {
    ++consulted_;
    return fact || !on_;
  }
  // The same question of a rule that says what must be done, not what may be.
  bool demands() {
    ++consulted_;
    return on_;
  }
  void take_away() { on_ = false; }
  bool on() const { return on_; }
  std::uint64_t consulted() const { return consulted_; }

 private:
  bool on_ = true;
  std::uint64_t consulted_ = 0;
};

struct Guards {
  Guard commit_needs_all_votes;       // a step is committed when the votes of all members are here
  Guard vote_needs_state_and_record;  // a rank votes for v with every box it vouches for at v-1, its record of v here
  Guard digests_are_compared;         // a holder's state has the digest of its owner's, or it is dropped
  Guard replica_in_sync;              // a replica that was synced is vouched for when all committed records are in it
  Guard wrong_replica_ends_step;      // a step in which a replica turned out to be wrong is not voted for
  Guard replicas_are_updated;         // holders apply the record, too
  Guard failed_update_drops_state;    // a state whose update failed is not taken for the next one
  Guard old_parameters_are_stale;     // who comes to read a bucket, or missed its update, asks for its parameters
  Guard only_owner_publishes;         // the owner's parameters are the box's, nobody else sends any
  Guard older_frames_are_dropped;     // what was sent in an older epoch is not delivered

  struct Named {
    const char* name;
    Guard Guards::* guard;
  };
  static const std::array<Named, 10>& all() {
    static const std::array<Named, 10> named = {{
        {"commit_needs_all_votes", &Guards::commit_needs_all_votes},
        {"vote_needs_state_and_record", &Guards::vote_needs_state_and_record},
        {"digests_are_compared", &Guards::digests_are_compared},
        {"replica_in_sync", &Guards::replica_in_sync},
        {"wrong_replica_ends_step", &Guards::wrong_replica_ends_step},
        {"replicas_are_updated", &Guards::replicas_are_updated},
        {"failed_update_drops_state", &Guards::failed_update_drops_state},
        {"old_parameters_are_stale", &Guards::old_parameters_are_stale},
        {"only_owner_publishes", &Guards::only_owner_publishes},
        {"older_frames_are_dropped", &Guards::older_frames_are_dropped},
    }};
    return named;
  }
};

}  // namespace elaswave::commit

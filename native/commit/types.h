// The words of the commit machine. No torch in here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ranges>
#include <stdexcept>
#include <vector>

#include "ids.h"

namespace elaswave::commit {

// The machine was told something that cannot be, or asked for what a rule forbids. The message names the rank or the
// box, the fact and the rule. The machine is as it was before.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A sum over the bytes of a state; see exec/exact/digest.h. Equal bytes have equal digests, and sums of parts add up.
struct Digest {
  std::uint64_t lo = 0, hi = 0;
  bool operator==(const Digest&) const = default;
  Digest& operator+=(const Digest& other) {
    lo += other.lo;
    hi += other.hi;
    return *this;
  }
};

// Which state of a box: that after `version` committed steps, with these bytes. A state travels with its own tag, the
// record of version v with the tag of the owner's state at v-1, to which it belongs.
struct StateTag {
  std::int64_t version = 0;
  Digest digest;
  bool operator==(const StateTag&) const = default;
};

// What keeps replicas in sync: the owner's records, or its whole state after every update (to compare with).
enum class CopyMode { kLog, kState };

// Who does what with a box: a piece of a bucket's parameters with the optimizer's state of it.
//   owner    sums the gradient, updates the state, and sends the parameters that come out of it
//   holders  keep the same state, and bring it up to date from the owner's records
//   readers  compute with the parameters, ascending; they contribute to the gradient
struct BoxRoles {
  BucketId bucket;
  RankId owner;
  std::vector<RankId> holders;
  std::vector<RankId> readers;
  bool operator==(const BoxRoles&) const = default;
};

// Neighbours: `count` boxes from `first` on.
struct BoxRange {
  BoxId first;
  std::size_t count = 1;
  BoxRange(BoxId box) : first(box) {}  // NOLINT: one box is a range
  BoxRange(BoxId box, std::size_t boxes) : first(box), count(boxes) {}
  BoxId last() const { return BoxId::at(first.index() + count - 1); }
  // for (const BoxId box : range.ids())
  auto ids() const {
    return std::views::iota(first.index(), first.index() + count) | std::views::transform(&BoxId::at);
  }
  bool operator==(const BoxRange&) const = default;
};

// A state that is here; `recorded`: the sum or the record of the step in flight is here, too.
struct Holding {
  BoxId box;
  StateTag state;
  bool recorded = false;
};

// What the caller is to do. `Send` and `Expect` come in pairs at the two ends; what is expected may come at any time
// and is told to the machine when it is wholly here. Neighbours with equal roles share a message, and the sum that it
// is made of: parts, sums, records and parameters are those of `count` boxes. Both ends count alike.
struct Action {
  enum class Kind {
    kSendPart,             // to the owner `peer`: this rank's gradient of the box
    kExpectPart,           // from the reader `peer` -> part_arrived
    kSum,                  // the parts are all here: add them in the order of the readers; the sum is the record
    kSendRecord,           // to the holder `peer`: the record, with the tag of the state here
    kExpectRecord,         // from the owner `peer` -> record_arrived
    kSendCatchUpRecord,    // the same in bulk, by itself: the replica is syncing, and no vote waits for it
    kSendPromptRecord,     // the same by itself, but with the messages of the step, and it says so
    kExpectCatchUpRecord,  // from the owner `peer`: the next of either -> catch_up_record_arrived, or record_arrived if
                           // awaited
    kSendVote,             // to the member `peer`
    kExpectVote,           // from the member `peer` -> vote_arrived
    kLeaveStep,            // the replica was wrong or its record damaged, and no vote was cast: leave()
    kCommit,               // the votes suffice: add them up -> commit()
    kUpdate,               // apply the record of `version` to the state -> updated, update_failed
    kWriteParameters,      // the state is new: write the box's parameters into the working copy here, if there is one
    kSendParameters,       // to the reader `peer`, from the state
    kExpectParameters,     // from the owner `peer` -> parameters_arrived
    kSendState,            // to the holder `peer`: the state when its turn comes, with its tag -> state_leaves
    kExpectState,          // from the owner `peer` -> state_arrived
    kReportNearlyInSync,   // to the owner `peer` -> replica_nearly_in_sync there
    kAskState,             // to the owner `peer`: the replica is of no use, another state is wanted -> state_asked
    kDropState,            // the state here is of no use any more
  };
  Kind kind;
  std::optional<BoxId> box;  // of all but votes and kCommit
  std::optional<RankId> peer;
  std::optional<std::int64_t> version;  // of kUpdate
  std::size_t count = 1;                // of boxes, `box` the first
  BoxRange boxes() const { return {*box, count}; }

  bool operator==(const Action&) const = default;
};
inline constexpr std::size_t kActionKinds = 21;

// In the order in which they are to be done; what is told to the machine meanwhile may add more, which come first.
using Actions = std::vector<Action>;

}  // namespace elaswave::commit

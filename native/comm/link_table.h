// The links of one endpoint, by rank, and what all of them are told: the generation and an abort. Private to comm/.
//
// Any thread may call any method. The lock is taken before a link's own, never after it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "comm/deadline.h"
#include "comm/link.h"

namespace elaswave::comm {

class LinkTable {
 public:
  using LinkPtr = std::shared_ptr<Link>;

  // A lost link stays until its rank comes back. Null: the rank was never linked.
  LinkPtr find(int peer) const;
  bool has_live(int peer) const;
  std::map<int, LinkPtr> links() const;
  std::vector<int> lost() const;  // ranks whose link is lost, ascending

  // Takes the place of a former link to that rank, and is told what all others were told. False, and nothing done, if
  // that link is not lost.
  bool put(const LinkPtr& link);
  // Returns at the next `put` or `notify`, at the deadline, or spuriously.
  void wait_for_change(Deadline deadline) const;
  void notify() { changed_.notify_all(); }

  std::uint32_t generation() const { return generation_.load(); }
  // Moves all links to a newer generation and ends an abort. False, and nothing done, if `generation` is older.
  bool advance(std::uint32_t generation);

  // Ends what is under way on all links with `failure`, until `advance`. Later aborts change nothing.
  void abort(const FailurePtr& failure);
  bool is_aborted() const { return is_aborted_.load(); }
  FailurePtr aborted() const;  // null when nothing is aborted
  // Ends what is under way as `abort` does, and chooses the links of `own_rank` that are to tell it on: the peers 1, 2,
  // 4, ... places further in the ring of those that are left. Each tells its own, so all n hear of it after log n hops
  // at most, by n log n frames where everybody telling everybody would take n * n. Empty if they were told before in
  // this generation. Nothing is done if that is over.
  std::vector<LinkPtr> broadcast_abort(const FailurePtr& failure, std::uint32_t generation, int own_rank);

 private:
  void abort_links(const FailurePtr& failure);

  mutable std::shared_mutex mutex_;
  mutable std::condition_variable_any changed_;
  std::map<int, LinkPtr> table_;
  std::atomic<std::uint32_t> generation_{0};
  FailurePtr aborted_;
  std::atomic<bool> is_aborted_{false};                // aborted_ is set
  std::optional<std::uint32_t> broadcast_generation_;  // the newest whose abort the peers were told of
};

}  // namespace elaswave::comm

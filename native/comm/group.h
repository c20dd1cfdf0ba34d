// An ordered view on some ranks of an endpoint, with its own space of tags: a barrier and an all-gather of small
// tensors, for what ranks agree on between steps. A step's own transfers are the engine's, on the endpoint directly.
//
// A group opens nothing and owns no link: making one is free, and an edited membership is simply another group with a
// newer generation. Members are numbered 0..size-1 in the order of `ranks`; every member must build the group with the
// same id, ranks and generation and call the same collectives in the same order.
//
// Threads: one thread at a time calls a group; different groups (different ids) of one endpoint are independent.
//
// Failures: a collective throws like `Endpoint::wait` (PeerLost for any lost member, DeadlineExceeded, Aborted,
// CommError); its buffers are free again, outputs are undefined, and the group must not be used any further: build one
// of a newer generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "endpoint.h"

namespace elaswave::comm {

// [lo, hi) in bytes of the whole buffer.
struct Interval {
  std::size_t lo = 0;
  std::size_t hi = 0;
  std::size_t size() const { return hi - lo; }
};

class Group {
 public:
  // `id` below 2^23. Throws CommError unless `ranks` are distinct and contain the endpoint's own. The endpoint must
  // outlive the group.
  Group(Endpoint& endpoint, std::uint32_t id, std::vector<int> ranks, std::uint32_t generation);

  int size() const { return static_cast<int>(ranks_.size()); }
  int index() const { return index_; }
  const std::vector<int>& ranks() const { return ranks_; }
  std::uint32_t id() const { return id_; }
  std::uint32_t generation() const { return generation_; }

  // Member m's interval of `data` (bytes) is filled from member m's; the own interval must be in place. A member sends
  // and receives about log2(size) messages, and keeps a copy of all intervals meanwhile.
  void all_gather(void* data, std::span<const Interval> intervals, Deadline deadline);
  // Returns once every member has entered it.
  void barrier(Deadline deadline);

 private:
  class Batch;  // the transfers of one collective

  std::uint64_t next_tag();
  void check_intervals(std::span<const Interval> intervals) const;

  Endpoint* endpoint_;
  std::uint32_t id_;
  std::vector<int> ranks_;
  std::uint32_t generation_;
  int index_;
  std::uint32_t sequence_ = 0;
};

}  // namespace elaswave::comm

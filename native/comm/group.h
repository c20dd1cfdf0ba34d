// An ordered view on some ranks of an endpoint, with its own space of tags: collectives and box routes.
//
// A group opens nothing and owns no link: making one is free, and an edited membership is simply another group with a
// newer generation. Members are numbered 0..size-1 in the order of `ranks`; every member must build the group with the
// same id, ranks and generation and call the same collectives in the same order.
//
// Threads: one thread at a time calls a group; different groups (different ids) of one endpoint are independent, four
// of them in collectives at a time (more is a CommError).
//
// Sums are formed in member order whatever arrives first: the same inputs give the same bits, on all members.
//
// Failures: a collective throws like `Endpoint::wait` (PeerLost for any lost member, DeadlineExceeded, Aborted,
// CommError); its buffers are free again, outputs are undefined, and the group must not be used any further: build one
// of a newer generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "endpoint.h"

namespace elaswave::comm {

// [lo, hi) in elements (reduce_scatter) or bytes (all_gather) of the whole buffer.
struct Interval {
  std::size_t lo = 0;
  std::size_t hi = 0;
  std::size_t size() const { return hi - lo; }
};

// One contiguous message of a box route. `member` may be the caller itself: then the piece is copied, and its other
// half must be in the same call.
struct SendPiece {
  int member;
  std::uint32_t tag;
  const void* data;
  std::size_t bytes;
};
struct RecvPiece {
  int member;
  std::uint32_t tag;
  void* data;
  std::size_t bytes;
};

class Group {
 public:
  // `id` below 2^23. Throws CommError unless `ranks` are distinct and contain the endpoint's own. The endpoint must
  // outlive the group.
  Group(Endpoint& endpoint, std::uint32_t id, std::vector<int> ranks, std::uint32_t generation);

  int size() const { return static_cast<int>(ranks_.size()); }
  int index() const { return index_; }
  int rank_of(int member) const { return ranks_.at(static_cast<std::size_t>(member)); }
  const std::vector<int>& ranks() const { return ranks_; }
  std::uint32_t id() const { return id_; }
  std::uint32_t generation() const { return generation_; }
  Endpoint& endpoint() const { return *endpoint_; }

  // Point to point by member number; `tag` is the caller's and apart from those of collectives.
  Transfer send(int member, std::uint32_t tag, const void* data, std::size_t bytes);
  Transfer recv(int member, std::uint32_t tag, void* data, std::size_t bytes);

  // The forms with a type take float, double and std::int64_t.

  // data[i] := sum over members, in place.
  template <typename T>
  void all_reduce(T* data, std::size_t count, Deadline deadline);
  // output[0, own size) := sum over members of input[own interval]; one interval per member, any lengths, empty too.
  // `output` may be the own part of `input` itself.
  template <typename T>
  void reduce_scatter(const T* input, std::span<const Interval> intervals, T* output, Deadline deadline);
  // Member m's interval of `data` (bytes) is filled from member m's; the own interval must be in place.
  void all_gather(void* data, std::span<const Interval> intervals, Deadline deadline);
  void broadcast(int root, void* data, std::size_t bytes, Deadline deadline);
  // Returns once every member has entered it.
  void barrier(Deadline deadline);
  // Posts all receives, then all sends, and waits for them. Several pieces between two members with one tag match in
  // the order of the lists.
  void route(std::span<const SendPiece> sends, std::span<const RecvPiece> receives, Deadline deadline);

 private:
  class Batch;    // the transfers of one collective
  class Windows;  // the members' windows during one collective

  std::uint64_t next_tag();
  std::size_t member_at(int member) const;
  void check_intervals(std::span<const Interval> intervals) const;
  template <typename T>
  void all_reduce_small(T* data, std::size_t count, Deadline deadline);
  template <typename T>
  void all_reduce_large(T* data, std::size_t count, Deadline deadline);
  template <typename T>
  void reduce_own_slice(const T* input, std::span<const Interval> intervals, T* output, Batch& batch, Deadline deadline,
                        const std::function<void(Interval)>& finished);
  // Whether all members read each other's windows; they agree on it once.
  bool on_one_host(Deadline deadline);
  template <typename T>
  void reduce_on_host(const T* input, std::span<const Interval> intervals, T* output, T* everywhere, Deadline deadline);
  void gather_on_host(std::byte* data, std::span<const Interval> intervals, Deadline deadline);
  void copy_own_pieces(std::span<const SendPiece> sends, std::span<const RecvPiece> receives) const;

  Endpoint* endpoint_;
  std::uint32_t id_;
  std::vector<int> ranks_;
  std::uint32_t generation_;
  int index_;
  std::uint32_t sequence_ = 0;
  std::optional<bool> on_one_host_;
  std::vector<std::byte> scratch_;  // incoming summands; grows to the largest call
};

}  // namespace elaswave::comm

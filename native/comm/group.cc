#include "comm/group.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "comm/errors.h"
#include "comm/group_batch.h"
#include "comm/sums.h"

namespace elaswave::comm {

namespace {

// Tags of groups have the top bit set: | 1 | id 23 bits | sequence or the caller's tag 32 bits | phase 8 bits |.
constexpr std::uint64_t kGroupBit = std::uint64_t{1} << 63;
constexpr int kIdShift = 40;
constexpr int kSequenceShift = 8;
constexpr std::uint32_t kIdBound = 1u << 23;
constexpr std::uint64_t kPointPhase = 0xff;

// Up to this, time goes by messages and not by bytes.
constexpr std::size_t kSmallBytes = std::size_t{8} << 10;
// Up to so many members, one round in which everybody sends everything beats two rounds with fewer messages.
constexpr int kOneRoundMembers = 4;
// Slices travel in chunks, so that adding one chunk overlaps the transfer of the next.
constexpr std::size_t kChunkBytes = std::size_t{512} << 10;

bool is_large(std::span<const Interval> intervals, std::size_t element_bytes) {
  std::size_t elements = 0;
  for (const Interval& interval : intervals) elements += interval.size();
  return elements * element_bytes > kSmallBytes;
}

std::vector<Interval> chunks_of(Interval whole, std::size_t step) {
  std::vector<Interval> chunks;
  for (std::size_t lo = whole.lo; lo < whole.hi; lo += step) chunks.push_back({lo, std::min(whole.hi, lo + step)});
  return chunks;
}

}  // namespace

Group::Group(Endpoint& endpoint, std::uint32_t id, std::vector<int> ranks, std::uint32_t generation)
    : endpoint_(&endpoint), id_(id), ranks_(std::move(ranks)), generation_(generation), index_(-1) {
  const std::string name = "group " + std::to_string(id);
  if (id >= kIdBound) throw CommError(name + ": ids are below " + std::to_string(kIdBound));
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (std::find(ranks_.begin(), ranks_.begin() + static_cast<std::ptrdiff_t>(i), ranks_[i]) !=
        ranks_.begin() + static_cast<std::ptrdiff_t>(i)) {
      throw CommError(name + ": rank " + std::to_string(ranks_[i]) + " is in it twice");
    }
    if (ranks_[i] == endpoint.rank()) index_ = static_cast<int>(i);
  }
  if (index_ < 0) throw CommError(name + ": rank " + std::to_string(endpoint.rank()) + " is not in it");
}

std::uint64_t Group::next_tag() {
  return kGroupBit | std::uint64_t{id_} << kIdShift | std::uint64_t{sequence_++} << kSequenceShift;
}

void Group::check_intervals(std::span<const Interval> intervals) const {
  if (intervals.size() != ranks_.size()) {
    throw CommError("group " + std::to_string(id_) + " has " + std::to_string(ranks_.size()) + " members but got " +
                    std::to_string(intervals.size()) + " intervals");
  }
  for (const Interval& interval : intervals) {
    if (interval.lo > interval.hi) {
      throw CommError("group " + std::to_string(id_) + ": interval [" + std::to_string(interval.lo) + ", " +
                      std::to_string(interval.hi) + ") runs backwards");
    }
  }
}

std::size_t Group::member_at(int member) const {
  if (member < 0 || member >= size()) {
    throw CommError("group " + std::to_string(id_) + " of " + std::to_string(size()) + " has no member " +
                    std::to_string(member));
  }
  return static_cast<std::size_t>(member);
}

Transfer Group::send(int member, std::uint32_t tag, const void* data, std::size_t bytes) {
  const std::uint64_t full =
      kGroupBit | std::uint64_t{id_} << kIdShift | std::uint64_t{tag} << kSequenceShift | kPointPhase;
  return endpoint_->send(ranks_[member_at(member)], full, data, bytes, generation_);
}

Transfer Group::recv(int member, std::uint32_t tag, void* data, std::size_t bytes) {
  const std::uint64_t full =
      kGroupBit | std::uint64_t{id_} << kIdShift | std::uint64_t{tag} << kSequenceShift | kPointPhase;
  return endpoint_->recv(ranks_[member_at(member)], full, data, bytes, generation_);
}

// ---- reductions -------------------------------------------------------------------------------------------------

template <typename T>
void Group::all_reduce(T* data, std::size_t count, Deadline deadline) {
  if (size() == 1 || count == 0) return;
  if (count * sizeof(T) <= kSmallBytes) {
    all_reduce_small(data, count, deadline);
  } else {
    all_reduce_large(data, count, deadline);
  }
}

// Few members send everything to everybody, and each adds for itself. Of many, the first adds and hands out the sum:
// 2 (n - 1) messages, of which all but the first member have two.
template <typename T>
void Group::all_reduce_small(T* data, std::size_t count, Deadline deadline) {
  std::vector<T> incoming;  // outlives the batch, which takes back what is under way
  Batch batch(*this, next_tag());
  const std::size_t bytes = count * sizeof(T);
  const bool everybody_adds = size() <= kOneRoundMembers;
  if (!everybody_adds && index_ != 0) {
    // The sum may come into its place: the first member can only send it after it has got our part of it.
    batch.recv(0, kGatherPhase, data, bytes);
    batch.send(0, kReducePhase, data, bytes);
    return batch.wait(deadline);
  }
  incoming.resize(count * ranks_.size());
  std::vector<const T*> inputs;
  for (int m = 0; m < size(); ++m) {
    T* place = incoming.data() + static_cast<std::size_t>(m) * count;
    inputs.push_back(m == index_ ? data : place);
    if (m == index_) continue;
    batch.recv(m, kReducePhase, place, bytes);
    if (everybody_adds) batch.send(m, kReducePhase, data, bytes);
  }
  batch.wait(deadline);
  sum_in_order<T>(inputs, data, count);
  if (everybody_adds) return;
  for (int m = 1; m < size(); ++m) batch.send(m, kGatherPhase, data, bytes);
  batch.wait(deadline);
}

// Every member owns an even slice: it gets everybody's part of it, adds, and hands the sum to everybody.
template <typename T>
void Group::all_reduce_large(T* data, std::size_t count, Deadline deadline) {
  const std::size_t members = ranks_.size();
  std::vector<Interval> slices;
  for (std::size_t m = 0; m < members; ++m) slices.push_back({count * m / members, count * (m + 1) / members});
  if (on_one_host(deadline)) {
    return reduce_on_host<T>(data, slices, data + slices[static_cast<std::size_t>(index_)].lo, data, deadline);
  }
  Batch batch(*this, next_tag());
  // A sum may come into its place as early as it likes: its owner can only send it after it has got our part of it.
  for (int m = 0; m < size(); ++m) {
    if (m == index_) continue;
    for (const Interval chunk : chunks_of(slices[static_cast<std::size_t>(m)], kChunkBytes / sizeof(T))) {
      batch.recv(m, kGatherPhase, data + chunk.lo, chunk.size() * sizeof(T));
    }
  }
  const Interval own = slices[static_cast<std::size_t>(index_)];
  const auto pass_on = [&](Interval chunk) {
    for (int m = 0; m < size(); ++m) {
      if (m != index_) batch.send(m, kGatherPhase, data + chunk.lo, chunk.size() * sizeof(T));
    }
  };
  reduce_own_slice<T>(data, slices, data + own.lo, batch, deadline, pass_on);
  batch.wait(deadline);
}

template <typename T>
void Group::reduce_scatter(const T* input, std::span<const Interval> intervals, T* output, Deadline deadline) {
  check_intervals(intervals);
  if (is_large(intervals, sizeof(T)) && on_one_host(deadline)) {
    return reduce_on_host<T>(input, intervals, output, nullptr, deadline);
  }
  Batch batch(*this, next_tag());
  reduce_own_slice<T>(input, intervals, output, batch, deadline, [](Interval) {});
  batch.wait(deadline);
}

// Sends the other members their intervals of `input` and sums the own one into `output`, chunk by chunk; calls
// `finished` with each chunk (in elements of `input`) whose sum stands.
template <typename T>
void Group::reduce_own_slice(const T* input, std::span<const Interval> intervals, T* output, Batch& batch,
                             Deadline deadline, const std::function<void(Interval)>& finished) {
  const std::size_t step = kChunkBytes / sizeof(T);
  const Interval own = intervals[static_cast<std::size_t>(index_)];
  const std::vector<Interval> own_chunks = chunks_of(own, step);
  const std::size_t needed = own.size() * sizeof(T) * (ranks_.size() - 1);
  if (scratch_.size() < needed) scratch_.resize(needed);
  auto* scratch = reinterpret_cast<T*>(scratch_.data());

  std::vector<const T*> parts;  // where each member's part of the own slice lies, shifted to index like `input`
  std::vector<std::vector<Transfer>> arrivals(own_chunks.size());
  for (int m = 0; m < size(); ++m) {
    if (m == index_) {
      parts.push_back(input + own.lo);
      continue;
    }
    for (std::size_t c = 0; c < own_chunks.size(); ++c) {
      batch.recv(m, kReducePhase, scratch + (own_chunks[c].lo - own.lo), own_chunks[c].size() * sizeof(T));
      arrivals[c].push_back(batch.last());
    }
    parts.push_back(scratch);
    scratch += own.size();
  }
  for (int m = 0; m < size(); ++m) {
    if (m == index_) continue;
    for (const Interval chunk : chunks_of(intervals[static_cast<std::size_t>(m)], step)) {
      batch.send(m, kReducePhase, input + chunk.lo, chunk.size() * sizeof(T));
    }
  }
  for (std::size_t c = 0; c < own_chunks.size(); ++c) {
    batch.wait(arrivals[c], deadline);
    const std::size_t at = own_chunks[c].lo - own.lo;
    std::vector<const T*> inputs;
    for (const T* part : parts) inputs.push_back(part + at);
    sum_in_order<T>(inputs, output + at, own_chunks[c].size());
    finished(own_chunks[c]);
  }
}

// ---- copies -----------------------------------------------------------------------------------------------------

void Group::all_gather(void* data, std::span<const Interval> intervals, Deadline deadline) {
  check_intervals(intervals);
  if (is_large(intervals, 1) && on_one_host(deadline)) {
    return gather_on_host(static_cast<std::byte*>(data), intervals, deadline);
  }
  Batch batch(*this, next_tag());
  auto* bytes = static_cast<std::byte*>(data);
  const Interval own = intervals[static_cast<std::size_t>(index_)];
  for (int m = 0; m < size(); ++m) {
    const Interval theirs = intervals[static_cast<std::size_t>(m)];
    if (m != index_ && theirs.size() > 0) batch.recv(m, kGatherPhase, bytes + theirs.lo, theirs.size());
  }
  for (int m = 0; m < size(); ++m) {
    if (m != index_ && own.size() > 0) batch.send(m, kGatherPhase, bytes + own.lo, own.size());
  }
  batch.wait(deadline);
}

void Group::broadcast(int root, void* data, std::size_t bytes, Deadline deadline) {
  member_at(root);
  Batch batch(*this, next_tag());
  if (root != index_) {
    batch.recv(root, kGatherPhase, data, bytes);
  } else {
    for (int m = 0; m < size(); ++m) {
      if (m != index_) batch.send(m, kGatherPhase, data, bytes);
    }
  }
  batch.wait(deadline);
}

void Group::barrier(Deadline deadline) {
  Batch batch(*this, next_tag());
  for (int m = 0; m < size(); ++m) {
    if (m == index_) continue;
    batch.recv(m, kGatherPhase, nullptr, 0);
    batch.send(m, kGatherPhase, nullptr, 0);
  }
  batch.wait(deadline);
}

void Group::route(std::span<const SendPiece> sends, std::span<const RecvPiece> receives, Deadline deadline) {
  for (const SendPiece& piece : sends) member_at(piece.member);
  for (const RecvPiece& piece : receives) member_at(piece.member);
  Batch batch(*this, 0);
  for (const RecvPiece& piece : receives) {
    if (piece.member != index_) batch.add(recv(piece.member, piece.tag, piece.data, piece.bytes));
  }
  for (const SendPiece& piece : sends) {
    if (piece.member != index_) batch.add(send(piece.member, piece.tag, piece.data, piece.bytes));
  }
  copy_own_pieces(sends, receives);
  batch.wait(deadline);
}

// The pieces from the caller to itself: the n-th send of a tag goes to the n-th receive of it.
void Group::copy_own_pieces(std::span<const SendPiece> sends, std::span<const RecvPiece> receives) const {
  std::vector<const RecvPiece*> open;
  for (const RecvPiece& piece : receives) {
    if (piece.member == index_) open.push_back(&piece);
  }
  const auto complain = [&](std::uint32_t tag, const std::string& fact) {
    throw CommError("group " + std::to_string(id_) + ": a route from member " + std::to_string(index_) +
                    " to itself, tag " + std::to_string(tag) + ": " + fact);
  };
  for (const SendPiece& piece : sends) {
    if (piece.member != index_) continue;
    const auto match = std::find_if(open.begin(), open.end(), [&](const RecvPiece* r) { return r->tag == piece.tag; });
    if (match == open.end()) complain(piece.tag, "nothing receives it");
    if ((*match)->bytes != piece.bytes) {
      complain(piece.tag, std::to_string(piece.bytes) + " bytes sent, " + std::to_string((*match)->bytes) +
                              " bytes received; both must be equal");
    }
    if (piece.bytes > 0) std::memmove((*match)->data, piece.data, piece.bytes);
    open.erase(match);
  }
  if (!open.empty()) complain(open.front()->tag, "nothing is sent to it");
}

template void Group::all_reduce(float*, std::size_t, Deadline);
template void Group::all_reduce(double*, std::size_t, Deadline);
template void Group::all_reduce(std::int64_t*, std::size_t, Deadline);
template void Group::reduce_scatter(const float*, std::span<const Interval>, float*, Deadline);
template void Group::reduce_scatter(const double*, std::span<const Interval>, double*, Deadline);
template void Group::reduce_scatter(const std::int64_t*, std::span<const Interval>, std::int64_t*, Deadline);

}  // namespace elaswave::comm

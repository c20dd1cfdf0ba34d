// Buffers that training changes, such as running statistics. A bucket of them is one box like any other: it has an
// owner, holders, readers, a version and a digest. What differs is what it is made of:
//
//   master    the bytes of its buffers; no optimizer's state
//   part      what the units of a reader have yielded for its granules
//   record    the parts of all readers, granule by granule in the order of the samples
//   update    one run of each buffer's program per granule, in that order
//
// All of these are tensors of 32-bit words, declared as fp32 and only ever copied. A granule's words: for each update
// of the bucket its values, each padded to 8 bytes; at least 8 bytes. Private to exec/; same thread as the engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "exec/program/program_library.h"
#include "exec/spec/declarations.h"
#include "exec/state/shard_state.h"

namespace elaswave::exec {

class BufferUpdates {
 public:
  // Drops what was collected. `granule` in samples.
  void install(const std::vector<BucketSpec>& buckets, std::vector<BufferUpdateSpec> specs, std::int64_t granule);
  const BufferUpdateSpec& spec(BufferUpdateId update) const { return specs_[update.index()]; }
  // Whether it is a bucket of buffers.
  bool changes(BucketId bucket) const { return !buckets_[bucket.index()].updates.empty(); }

  // What a unit yielded for the granule that starts at sample `first`. Throws ExecError for another shape or dtype than
  // declared.
  void collect(const UpdateValue& binding, std::int64_t first, const at::Tensor& value);
  // The part of this rank. Throws ExecError if a value of its own spans is missing.
  at::Tensor part(BucketId bucket, RankId rank) const;
  // How many words a reader's part has, and the record.
  std::int64_t words_of(BucketId bucket, RankId reader) const;
  std::int64_t words_of(BucketId bucket) const;
  // The record made of all parts.
  at::Tensor record(BucketId bucket, const std::function<const at::Tensor&(RankId)>& part_of) const;
  // The state after the step. Throws what an operator throws, and the state is as it was.
  void apply(ProgramLibrary& programs, const BoxSpec& box, ShardState& state, const at::Tensor& record) const;
  void clear() { granules_.clear(); }

 private:
  struct Bucket {
    std::vector<BufferUpdateId> updates;
    std::vector<OwnedSpan> group;
    std::int64_t words = 0;  // of a granule
  };

  const Bucket& at(BucketId bucket) const { return buckets_[bucket.index()]; }
  std::int64_t granules_in(const OwnedSpan& span) const { return (span.hi - span.lo) / granule_; }
  void pack_granule(const Bucket& bucket, std::int64_t first, std::uint8_t* out) const;

  std::int64_t granule_ = 1;
  std::vector<BufferUpdateSpec> specs_;
  std::vector<Bucket> buckets_;
  // (update, first sample) -> values
  std::map<std::pair<BufferUpdateId, std::int64_t>, std::vector<at::Tensor>> granules_;
};

}  // namespace elaswave::exec

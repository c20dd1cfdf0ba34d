// Buckets: what ranks compute with - the working copies of parameters and the sums of their gradients, which are fp32
// in the order of the micro-batches or, if the sums are to be exact, doubles with residuals (exact_sum.h). Their state
// is in the shard store; whether a working copy is whole is the commit machine's to know. Private to exec/.
//
//   backward units -> accumulate -> gradient (the flat sum) ... write, receive_part (new working copy) -> wait_ready
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "commit/machine.h"
#include "exec/device/tensor_transfers.h"
#include "exec/exact/exact_sum.h"
#include "exec/spec/declarations.h"

namespace elaswave::exec {

// What a rank computes with of a bucket that it reads, written once, for the pages of fresh memory come one by one, and
// that takes the longer the more a rank is given. So any thread may make it before the rank reads it (next_spec.h).
struct BucketMemory {
  BucketMemory() = default;
  BucketMemory(std::int64_t numel, at::ScalarType dtype, bool exact);
  at::Tensor work;         // the working copy, flat, in the bucket's type
  at::Tensor accumulator;  // of gradients, flat
};
using BucketMemories = std::map<BucketId, BucketMemory>;

class Buckets {
 public:
  Buckets(commit::StepMachine& machine, TensorTransfers& transfers, bool exact)
      : machine_(machine), transfers_(transfers), exact_(exact) {}

  // The same buckets with the roles of now, which the machine has taken over. There is a working copy of what this rank
  // reads any box of; one that was there before stays, a new one has no content. Regions stay with it: those that are
  // prepared for no more are zero in every sum. `memories`: of new ones, made for these specs; it is made for others.
  void install(const std::vector<BucketSpec>& specs, BucketMemories memories);
  std::size_t size() const { return buckets_.size(); }
  std::optional<BucketId> find(const std::string& name) const;
  const BucketSpec& spec(BucketId bucket) const { return at(bucket).spec; }
  // The whole working copy, flat, written in place; undefined where no box of it is read.
  const at::Tensor& work(BucketId bucket) const { return at(bucket).memory.work; }

  // The parameter as a view of the working copy.
  at::Tensor parameter(const Parameter& parameter) const;
  // Prepares accumulation into a parameter's gradient; the number is for `accumulate`.
  std::size_t add_region(const Parameter& parameter);

  // Waits until the working copy is whole. Throws ExecError if it is stale.
  void wait_ready(BucketId bucket);
  void wait_all_ready();
  // The first contribution of a step is copied, later ones are added.
  void accumulate(BucketId bucket, std::size_t region, const at::Tensor& gradient);
  // The step's sum so far, flat; zero where nothing was added. Undefined where this rank reads no box of it.
  at::Tensor gradient(BucketId bucket);
  // What the sums of the elements [lo, hi) lack, if they are exact.
  Residuals residuals(BucketId bucket, std::int64_t lo, std::int64_t hi) const;

  // Pieces of the next working copy. `write` puts one that is made here in place, if there is a working copy here.
  void write(BucketId bucket, std::int64_t lo, const at::Tensor& master);
  void receive_part(BucketId bucket, commit::BoxRange boxes, std::int64_t lo, std::int64_t numel, RankId owner,
                    std::uint64_t tag);
  void send_part(BucketId bucket, const at::Tensor& part, RankId rank, std::uint64_t tag);
  // Pieces that are still being sent are read until then.
  void wait_sends(BucketId bucket);

  // After a failure or at the end of a step: nothing of the step is kept. All transfers must be over.
  void end_step();
  // After `TensorTransfers::drop`: no piece is under way any more.
  void abandon_gathers();

  // Gives a working copy its content. Throws ExecError for another shape, or if there is none here.
  void set_work(BucketId bucket, const at::Tensor& value);

 private:
  struct Region {
    std::int64_t offset, numel;
    at::Tensor view;  // of the accumulator
    bool written = false;
  };
  struct Bucket {
    BucketSpec spec;
    BucketMemory memory;  // in the sum, parameters without a region stay zero
    Residuals residuals;
    std::vector<Region> regions;
    std::vector<comm::Transfer> gathers, gather_sends;
    std::vector<commit::BoxRange> gathered;  // of each of `gathers`
  };

  Bucket& at(BucketId bucket) { return buckets_[bucket.index()]; }
  const Bucket& at(BucketId bucket) const { return buckets_[bucket.index()]; }
  void wait_gathers(Bucket& bucket);

  commit::StepMachine& machine_;
  TensorTransfers& transfers_;
  bool exact_;
  std::vector<Bucket> buckets_;
};

}  // namespace elaswave::exec

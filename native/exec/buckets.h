// Parameters: working copies, gradient accumulators, and the sharded fp32 master with its optimizer state (ZeRO-1).
// Private to exec/.
//
//   backward units -> accumulate -> reduce (post) -> finish_reductions (sum in rank order, norm) -> update -> gather
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "courier.h"
#include "declarations.h"
#include "unit_program.h"

namespace elaswave::exec {

class Buckets {
 public:
  explicit Buckets(Courier& courier) : courier_(courier) {}

  // The index of the new bucket, or of the one of that name that it replaces. Throws ExecError.
  int add(BucketSpec spec);
  int size() const { return static_cast<int>(buckets_.size()); }
  int find(const std::string& name) const;  // throws ExecError that lists what there is
  const BucketSpec& spec(std::int64_t index) const { return at(index).spec; }
  bool owns(std::int64_t index) const { return at(index).own.has_value(); }

  // The parameter as a view of the working copy. Throws ExecError if it does not lie inside the bucket.
  at::Tensor parameter(const Binding& binding) const;
  // Prepares accumulation into a parameter's gradient; the number is for `accumulate`. Throws ExecError if it overlaps
  // another parameter partly.
  int add_region(const Binding& binding);
  void forget_regions();

  // Waits until the working copy is whole. Throws ExecError if it is stale.
  void settle(std::int64_t index);
  void settle_all();
  // The first contribution of a step is copied, later ones are added in order.
  void accumulate(std::int64_t index, int region, const at::Tensor& gradient);
  void reduce(std::int64_t index);

  // Waits for all contributions and adds them. The sum of squares of the own slice of every bucket, 0 where there is
  // none: one number each, so that the norm can be summed in an order that does not know who owns what.
  std::vector<double> finish_reductions();

  // Own slice: runs the optimizer program on [master, gradient, *state, *hyper], then writes the working copy's part.
  void update(std::int64_t index, UnitProgram& optimizer, std::span<const at::Tensor> hyper);
  // Sends the own part of the working copy, posts receives for the others.
  void gather(std::int64_t index);
  // Working copy := master for the own part, then gather; for loading.
  void refresh(std::int64_t index);

  // After a failure or at the end of a step: nothing of the step is kept. The courier's transfers must be over.
  void end_step();
  // After `Courier::drop`: gathers under way did not finish.
  void abandon_gathers();
  void mark_stale(std::int64_t index) { at(index).stale = at(index).spec.owners.size() > 1 || !owns(index); }

  at::Tensor master(std::int64_t index) const { return at(index).spec.master; }
  const std::vector<at::Tensor>& state(std::int64_t index) const { return at(index).spec.state; }
  void set_master(std::int64_t index, const at::Tensor& value);
  void set_state(std::int64_t index, const std::vector<at::Tensor>& values);
  void set_work(std::int64_t index, const at::Tensor& value);
  std::vector<std::string> stale() const;

 private:
  struct Region {
    Binding binding;
    std::int64_t numel;
    at::Tensor view;  // of the accumulator
    bool written = false;
  };
  struct Incoming {
    int rank;
    comm::Transfer transfer;
    at::Tensor scratch;
  };
  struct Bucket {
    BucketSpec spec;
    std::optional<OwnedSpan> own;
    at::Tensor accumulator;  // fp32, flat; parameters without a region stay zero
    std::vector<Region> regions;
    bool reducing = false;
    std::vector<Incoming> incoming;
    std::vector<comm::Transfer> reduce_sends;
    at::Tensor reduced;  // own slice of the sum
    std::vector<comm::Transfer> gathers, gather_sends;
    bool stale = false;
  };

  Bucket& at(std::int64_t index) { return buckets_[static_cast<std::size_t>(index)]; }
  const Bucket& at(std::int64_t index) const { return buckets_[static_cast<std::size_t>(index)]; }
  void check(const BucketSpec& spec) const;
  void expect_held(const BucketSpec& spec) const;
  void finish_reduction(Bucket& bucket);
  void write_work(Bucket& bucket);

  Courier& courier_;
  std::vector<Bucket> buckets_;
};

}  // namespace elaswave::exec

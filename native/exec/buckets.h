// Buckets: what ranks compute with - the working copies of parameters and the sums of their gradients. Who keeps their
// state is boxes.h's. Private to exec/.
//
//   backward units -> accumulate -> gradient (the flat sum) ... write, receive_part (new working copy) -> settle
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "courier.h"
#include "declarations.h"

namespace elaswave::exec {

class Buckets {
 public:
  explicit Buckets(Courier& courier) : courier_(courier) {}

  // The index of the new bucket, or of the one of that name that it replaces. Throws ExecError.
  int add(BucketSpec spec);
  int size() const { return static_cast<int>(buckets_.size()); }
  int find(const std::string& name) const;  // throws ExecError that lists what there is
  const BucketSpec& spec(std::int64_t index) const { return at(index).spec; }

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
  // The step's sum so far, flat; zero where nothing was added. Undefined where this rank is not in the group.
  at::Tensor gradient(std::int64_t index);

  // Pieces of the next working copy. `write` puts one that is made here in place, if there is a working copy here.
  void write(std::int64_t index, std::int64_t lo, const at::Tensor& master);
  void receive_part(std::int64_t index, std::int64_t lo, std::int64_t hi, int owner, std::uint64_t tag);
  void send_part(std::int64_t index, const at::Tensor& part, int rank, std::uint64_t tag);
  // Pieces that are still being sent are read until then.
  void wait_sends(std::int64_t index);

  // After a failure or at the end of a step: nothing of the step is kept. The courier's transfers must be over.
  void end_step();
  // After `Courier::drop`: pieces under way did not arrive.
  void abandon_gathers();
  void mark_stale(std::int64_t index);
  void mark_fresh(std::int64_t index) { at(index).stale = false; }

  void set_work(std::int64_t index, const at::Tensor& value);
  std::vector<std::string> stale() const;

 private:
  struct Region {
    Binding binding;
    std::int64_t numel;
    at::Tensor view;  // of the accumulator
    bool written = false;
  };
  struct Bucket {
    BucketSpec spec;
    at::Tensor accumulator;  // fp32, flat; parameters without a region stay zero
    std::vector<Region> regions;
    std::vector<comm::Transfer> gathers, gather_sends;
    bool stale = false;
  };

  Bucket& at(std::int64_t index) { return buckets_[static_cast<std::size_t>(index)]; }
  const Bucket& at(std::int64_t index) const { return buckets_[static_cast<std::size_t>(index)]; }
  void check(const BucketSpec& spec) const;
  void expect_held(const BucketSpec& spec) const;

  Courier& courier_;
  std::vector<Bucket> buckets_;
};

}  // namespace elaswave::exec

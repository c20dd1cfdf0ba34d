// Boxes: the sharded fp32 state (ZeRO-1) with its redo log. Private to exec/.
//
//   reduce -> (sum at the owner, record to the holders, under the backward pass) -> finish (all is here) -> vote
//          -> update_owned, gather (working copies) -> update_held
//
// A box's base is its master slice and optimizer state. Owner and holders have the same base and apply the same record
// (the summed gradient), so they stay equal; the record's seal carries the owner's digest of the base, which every
// holder compares with its own before it lets its rank vote. A holder that is still to get its base keeps the records
// meanwhile.
//
// A holder that reads the bucket makes its part of the working copy from its base, and nobody sends it: the record has
// replaced it. Were the base wrong, the next seal would say so before the step that read it is committed; a rank that
// loses the base before that has its working copy refreshed.
//
// With CopyMode::kState there are no records: the owner sends its base after every update, three times the bytes with
// AdamW, and its holders have none until it has arrived, which their next vote waits for. An owner that is lost in
// between takes the box with it. It exists to be compared with.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base.h"
#include "buckets.h"
#include "declarations.h"
#include "tensor_transfers.h"

namespace elaswave::exec {

// Per hyper group: the optimizer program's inputs after the state, grad_scale first.
using Hyper = std::vector<std::vector<at::Tensor>>;

class Boxes {
 public:
  // The optimizer: makes a base the next one.
  using Update = std::function<void(const BoxSpec&, Base&, const at::Tensor& gradient, const Hyper&)>;

  // Records kept for a base that is on its way; at the bound the vote waits for it.
  static constexpr std::size_t kBacklog = 8;

  Boxes(TensorTransfers& transfers, Buckets& buckets) : transfers_(transfers), buckets_(buckets) {}

  // The same boxes with their roles of now. A base that this rank has no role for any more is dropped.
  void install(const std::vector<BoxSpec>& specs);
  void drop_bases();
  std::size_t size() const { return boxes_.size(); }
  const BoxSpec& spec(BoxId box) const { return at(box).spec; }
  // Copies; sizes are checked. The digest is made anew.
  void set_base(BoxId box, const at::Tensor& master, const std::vector<at::Tensor>& state);
  const Base& base(BoxId box) const { return at(box).base; }
  // Whether a base still has the bytes that its last update wrote. Reads all of it.
  bool intact(BoxId box) const {
    const BoxState& found = at(box);
    return found.base.there() && digest_of(found.spec, found.base) == found.base.digest;
  }
  // What `records` are rounded to, at the owner and at the holders alike: kFloat or kBFloat16.
  void set_record_type(at::ScalarType type) { record_type_ = type; }
  void set_copy_mode(CopyMode mode) { mode_ = mode; }
  // Whether the sum or the record of the step is here.
  bool recorded(BoxId box) const { return at(box).gradient.defined(); }
  // Throws ExecError if an owner has no base.
  void check() const;

  // A step. `begin_step` posts the receives of records, `reduce` sends a bucket's gradient to its owners.
  void begin_step();
  void reduce(BucketId bucket);
  // Sums what has arrived and sends its records; never blocks.
  void advance();
  // Waits for all sums and records. Per box the sum of squares if this rank owns it, else 0: in an order that does not
  // know who owns what. Throws CopyDiffers, after dropping them, if bases differ from their owners'.
  std::vector<double> finish();
  void update_owned(BucketId bucket, const Update& update, const Hyper& hyper);
  // Writes the parts of the working copy that this rank makes as a holder, too. `state_tensors`: of a box's optimizer.
  void update_held(const Update& update, const Hyper& hyper, const std::function<std::size_t(BoxId)>& state_tensors);
  // Sends the own parts of the working copy to those of the group who do not make them themselves; posts receives.
  void gather(BucketId bucket);
  void end_step();

  // Copies on their way: the owner sends its base as it is now, the holder waits for it behind its steps.
  void send_base(BoxId box, RankId peer);
  void expect_base(BoxId box, RankId owner, std::size_t state_tensors);
  std::vector<BoxId> catching() const;  // boxes that this rank shall keep and has no base of

  // Working copy := master, at the ranks that want it (bucket by bucket); everybody calls it with the same lists.
  void refresh(const std::vector<std::vector<RankId>>& wanted);

  // After `TensorTransfers::drop`: bases under way did not arrive. Records of the step stay until `end_step`.
  void abandon_transfers();
  // Whether the working copy needs nothing of other ranks.
  bool makes_all(BucketId bucket) const;
  Digest state_digest() const;  // of all owned boxes
  // Handed to the links for copies so far: records, bases and their seals.
  std::uint64_t copied_bytes() const { return copied_bytes_; }

 private:
  struct Incoming {
    RankId rank;
    comm::Transfer transfer;
    at::Tensor part;
  };
  struct Backlog {
    at::Tensor gradient;
    Hyper hyper;
  };
  struct Catching {
    std::vector<comm::Transfer> transfers;
    std::vector<at::Tensor> tensors;  // master, state...
    at::Tensor seal;
  };
  struct BoxState {
    BoxSpec spec;
    Base base;
    // Of the step.
    bool reducing = false;
    std::vector<Incoming> incoming;
    at::Tensor own_part;
    at::Tensor gradient;  // fp32: the sum, at the owner; the record, at holders
    std::vector<comm::Transfer> sends;
    at::Tensor record, seal;  // as they are received
    std::vector<comm::Transfer> receives;
    // Across steps.
    std::vector<RankId> supplied;  // holders whose base was sent since the roles were assigned, as owner or holder know
    std::optional<Catching> catching;
    std::deque<Backlog> backlog;
  };

  BoxState& at(BoxId box) { return boxes_[box.index()]; }
  const BoxState& at(BoxId box) const { return boxes_[box.index()]; }
  bool owns(const BoxState& box) const { return box.spec.owner == transfers_.rank(); }
  bool holds(const BoxState& box) const;
  bool makes_part(const BoxState& box, RankId rank) const;
  const std::vector<BoxId>& of(BucketId bucket) const { return of_bucket_[bucket.index()]; }
  std::string place(const BoxState& box) const;
  void sum(BoxState& box);
  bool accept(BoxState& box);
  bool take_base(BoxState& box);
  void catch_up(BoxState& box, const Update* update, bool wait);
  comm::Transfer send_copy(const at::Tensor& tensor, RankId holder, std::uint64_t tag);
  void publish(BoxId box, const std::vector<RankId>& ranks);
  at::Tensor part_of(BoxState& box);

  TensorTransfers& transfers_;
  Buckets& buckets_;
  at::ScalarType record_type_ = at::kFloat;
  CopyMode mode_ = CopyMode::kLog;
  std::vector<BoxState> boxes_;
  std::vector<std::vector<BoxId>> of_bucket_;
  std::vector<BoxId> unsummed_;
  std::uint64_t copied_bytes_ = 0;
};

}  // namespace elaswave::exec

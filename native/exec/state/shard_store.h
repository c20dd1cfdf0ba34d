// The shard store: the tensors of the boxes that this rank keeps (ZeRO-1's sharded fp32 state), and what a step makes
// of them. Parts of gradients are sent and summed, states are updated, parameters are written and published. How the
// replicas of a box are kept equal is replica_sync.h's. The store decides nothing: commit/machine.h says what is
// summed, updated and dropped, the engine hands its actions to the class whose job each is, and the store tells the
// machine how it went. Private to exec/.
//
//   reduce(bucket) -> take_parts ... -> wait_parts -> squares -> wait_sends -> (votes, commit)
//     -> set_hyper -> update, write_parameters, send_parameters -> end_step
//
// The sum of gradients, or of buffers what all granules have yielded, is the record that holders are sent. Parts,
// records and parameters of a run, which are neighbours with equal roles, share a message, whose tag names the first
// box.
//
// Threads: the engine's, and no other. After a failure (what transfers throw, ExecError) states are those of their last
// update, and sums stay until `end_step`, so that a pending step can be finished. The engine calls `abandon_transfers`
// once it has cancelled all transfers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "commit/machine.h"
#include "exec/device/tensor_transfers.h"
#include "exec/exact/exact_sum.h"
#include "exec/spec/declarations.h"
#include "exec/state/buckets.h"
#include "exec/state/buffer_updates.h"
#include "exec/state/shard_state.h"

namespace elaswave::exec {

// Per hyper group: the optimizer program's inputs after the state, grad_scale first.
using Hyper = std::vector<std::vector<at::Tensor>>;

// The optimizer, as the store calls it: makes a state the next one.
using UpdateRule = std::function<void(const BoxSpec&, ShardState&, const at::Tensor& gradient, const Hyper&)>;

// Does what the machine says after it was told something: the engine's.
using Perform = std::function<void(const commit::Actions&)>;

class ShardStore {
 public:
  // Boxes that were added up together, and their sum as it travels to holders.
  struct Sum {
    commit::BoxRange boxes{BoxId()};
    at::Tensor record;
  };

  // `exact`: gradients of ranks are added without regard to order, and without loss. `record_type`: what records are
  // rounded to, at the owner and at the holders alike; kFloat or kBFloat16.
  ShardStore(commit::StepMachine& machine, TensorTransfers& transfers, Buckets& buckets, BufferUpdates& updates,
             UpdateRule rule, Perform perform, bool exact, at::ScalarType record_type)
      : machine_(machine),
        transfers_(transfers),
        buckets_(buckets),
        updates_(updates),
        rule_(std::move(rule)),
        perform_(std::move(perform)),
        exact_(exact),
        record_type_(record_type) {}

  // --- Boxes

  // The same boxes with their roles of now, which the machine has taken over.
  void install(const std::vector<BoxSpec>& specs);
  std::size_t size() const { return boxes_.size(); }
  const BoxSpec& spec(BoxId box) const { return at(box).spec; }
  std::string place(BoxId box) const;
  // Of how many buckets a rank owns a box.
  std::size_t owned_buckets(RankId rank) const { return owned_buckets_.contains(rank) ? owned_buckets_.at(rank) : 0; }

  // Copies; sizes are checked. The digest is made anew. Throws ExecError.
  void load(BoxId box, const at::Tensor& master, const std::vector<at::Tensor>& state);
  const ShardState& state(BoxId box) const { return at(box).state; }
  // A state that has come; an empty one drops what is here.
  void set_state(BoxId box, ShardState state) { at(box).state = std::move(state); }
  // Whether a state still has the bytes that its last update wrote. Reads all of it.
  bool intact(BoxId box) const;
  // Of the boxes that this rank owns: the sums of the digests of their states, by bucket.
  std::map<BucketId, Digest> owned_digests() const;

  // --- Gradients

  void reduce(BucketId bucket);
  // Takes the parts that have arrived; never blocks.
  void take_parts();
  // Waits for all parts; calls `before_each` before it takes one.
  void wait_parts(const std::function<void()>& before_each);
  // The sum of squares of the gradient of the boxes that this rank owns, all of which are summed.
  ExactTotal squares() const;
  // Waits until the parts of this rank are sent.
  void wait_sends();
  // Of the machine's actions:
  void send_part(commit::BoxRange boxes, RankId owner);
  void expect_part(commit::BoxRange boxes, RankId reader);
  void sum(commit::BoxRange boxes);

  // --- Records

  // Of the step, fp32: the sum, at the owner; the record, at holders.
  const at::Tensor& gradient(BoxId box) const { return at(box).gradient; }
  // A record that has come, which the next update applies; or none.
  void set_gradient(BoxId box, at::Tensor gradient) { at(box).gradient = std::move(gradient); }
  // The sum that the box, which this rank owns, is part of.
  const Sum& sum_of(BoxId box) const { return runs_[at(box).summed_at.index()].sum; }
  at::ScalarType record_type(commit::BoxRange boxes) const { return are_buffers(boxes) ? at::kFloat : record_type_; }
  at::Tensor empty_record(commit::BoxRange boxes) const;
  // The piece of `some` of the `boxes` of a tensor of all of them.
  at::Tensor piece(const at::Tensor& tensor, commit::BoxRange boxes, commit::BoxRange some) const;

  // --- Updates and parameters

  // For the updates of the step that was committed.
  void set_hyper(const Hyper& hyper);
  // Of the machine's actions. An update that fails costs the box its state, and is an ExecError that names box and
  // rank.
  void update(BoxId box, std::int64_t version);
  void write_parameters(BoxId box);
  void send_parameters(commit::BoxRange boxes, RankId reader);
  void expect_parameters(commit::BoxRange boxes, RankId owner);

  void end_step();
  // After `TensorTransfers::drop`: nothing is under way any more.
  void abandon_transfers();

 private:
  struct Part {  // of another reader
    RankId reader;
    commit::BoxRange boxes;
    at::Tensor tensor;            // until it was merged
    at::Tensor count, residuals;  // of exact sums: their number, then they themselves
    std::vector<comm::Transfer> receives;
    bool here = false;
  };
  struct Run {         // of the step; at its first box
    at::Tensor total;  // of exact sums: of the parts that are here, with residuals
    Residuals residuals;
    Sum sum;
  };
  struct Elements {
    BucketId bucket;
    std::int64_t lo = 0, hi = 0;
    std::int64_t numel() const { return hi - lo; }
  };
  struct Box {
    BoxSpec spec;
    ShardState state;
    at::Tensor gradient;  // see above
    BoxId summed_at;      // the first box of the run with which it was summed
  };

  Box& at(BoxId box) { return boxes_[box.index()]; }
  const Box& at(BoxId box) const { return boxes_[box.index()]; }
  Run& run_at(BoxId first) { return runs_[first.index()]; }
  Elements elements_of(commit::BoxRange boxes) const;
  // Whether they are buffers, of which ranks contribute what their granules yield (buffer_updates.h), and no gradient.
  bool are_buffers(commit::BoxRange boxes) const { return updates_.changes(spec(boxes.first).bucket()); }
  bool are_exact(commit::BoxRange boxes) const { return exact_ && !are_buffers(boxes); }
  at::Tensor own_part(commit::BoxRange boxes) const;
  void take_part(Part& part);
  const at::Tensor& part_of(BoxId first, RankId reader) const;
  void merge(Part& part);
  void begin_total(commit::BoxRange boxes);
  at::Tensor exact_total(commit::BoxRange boxes);
  at::Tensor ordered_total(commit::BoxRange boxes) const;
  at::Tensor total_of_granules(commit::BoxRange boxes) const;

  commit::StepMachine& machine_;
  TensorTransfers& transfers_;
  Buckets& buckets_;
  BufferUpdates& updates_;
  UpdateRule rule_;
  Perform perform_;
  bool exact_;
  at::ScalarType record_type_;
  std::map<std::int64_t, Hyper> hypers_;  // by the version that updates lead to: the newest, and for catch-up records
  std::vector<Box> boxes_;
  std::map<RankId, std::size_t> owned_buckets_;
  // Of the step.
  std::vector<Run> runs_;  // one for each box, used of those that are first
  std::vector<Part> parts_;
  std::vector<at::Tensor> gradients_;  // per bucket, this rank's own part; undefined where it reads nothing
  std::vector<comm::Transfer> sends_;  // of gradients, which the next step writes again
};

}  // namespace elaswave::exec

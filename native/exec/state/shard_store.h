// The shard store: the tensors of the boxes that this rank owns or holds (ZeRO-1's sharded fp32 state), and of what is
// on its way for them. It decides nothing: commit/machine.h says what is summed, sent, awaited, updated and dropped;
// the store does it and tells the machine how it went. Private to exec/; same thread as the engine.
//
//   begin_step -> reduce(bucket) ... advance -> wait_ready -> (votes, commit) -> perform(updates, gathers) -> end_step
//
// A record is the summed gradient, or of buffers what all granules have yielded; it travels with a header: per box, the
// tag of the owner's state that it belongs to, and its own digest. A state travels with its tag. Parts, records and
// parameters of a run, which are neighbours with equal roles, share a message, whose tag names the first box; records
// of copies that were sent a state travel box by box. What travels in bulk is looked at once after each step, and a
// record that an owner sends so is at most kLateSteps steps late, or one if no state is on its way: else its vote
// waits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
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

// The optimizer, as the store calls it.
struct UpdateRule {
  // Makes a state the next one.
  std::function<void(const BoxSpec&, ShardState&, const at::Tensor& gradient, const Hyper&)> apply;
  // How many tensors the optimizer keeps beside the master of a box.
  std::function<std::size_t(const BoxSpec&)> state_tensors;
};

class ShardStore {
 public:
  // `exact`: gradients of ranks are added without regard to order, and without loss.
  ShardStore(commit::StepMachine& machine, TensorTransfers& transfers, Buckets& buckets, BufferUpdates& updates,
             UpdateRule rule, bool exact)
      : machine_(machine),
        transfers_(transfers),
        buckets_(buckets),
        updates_(updates),
        rule_(std::move(rule)),
        exact_(exact) {}

  // The same boxes with their roles of now, which the machine has taken over.
  void install(const std::vector<BoxSpec>& specs);
  std::size_t size() const { return boxes_.size(); }
  const BoxSpec& spec(BoxId box) const { return at(box).spec; }
  std::string place(BoxId box) const;
  // What records are rounded to, at the owner and at the holders alike: kFloat or kBFloat16.
  void set_record_type(at::ScalarType type) { record_type_ = type; }

  // Copies; sizes are checked. The digest is made anew. Throws ExecError.
  void load(BoxId box, const at::Tensor& master, const std::vector<at::Tensor>& state);
  const ShardState& state(BoxId box) const { return at(box).state; }
  // Whether a state still has the bytes that its last update wrote. Reads all of it.
  bool intact(BoxId box) const;
  // Of the boxes that this rank owns: the sums of the digests of their states, by bucket.
  std::map<BucketId, Digest> owned_digests() const;
  // Of how many buckets a rank owns a box.
  std::size_t owned_buckets(RankId rank) const { return owned_buckets_.contains(rank) ? owned_buckets_.at(rank) : 0; }

  // Does what the machine says, one after the other; votes and the commit are the engine's. Throws as transfers do; an
  // update that fails costs the box its state and is an ExecError that names box and rank.
  void perform(const commit::Actions& actions);
  // For the updates of the step that was committed.
  void set_hyper(const Hyper& hyper);

  void reduce(BucketId bucket);
  // Takes what has arrived of gradients, and sends states; never blocks.
  void advance();
  // Waits for all sums and records. Returns the sum of squares of the gradient of the boxes that this rank owns.
  ExactTotal wait_ready();
  // Takes the states that have arrived, and the records behind them, but for those that the next vote waits for. After
  // the updates of a step; never blocks.
  void take_states();
  void end_step();
  // States that others shall hold: sends those whose turn has come, and hears what became of them; never blocks.
  void send_states();

  // After `TensorTransfers::drop`: nothing is under way any more. Sums and records stay until `end_step`.
  void abandon_transfers();
  // Handed to the links for copies so far: records, states and their headers.
  std::uint64_t copied_bytes() const { return copied_bytes_; }
  // Since the roles were installed, at most at once: states that others were sent, and were still being sent; and, with
  // the records of the steps until they are here, states that come or have come.
  std::uint64_t sent_at_once() const { return sent_at_once_; }
  std::uint64_t behind_peak() const { return behind_peak_; }

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
    at::Tensor record, header;        // as they travel
    commit::BoxRange boxes{BoxId()};  // of the record
    std::vector<comm::Transfer> receives;
  };
  struct Elements {
    BucketId bucket;
    std::int64_t lo = 0, hi = 0;
    std::int64_t numel() const { return hi - lo; }
  };
  struct LateRecord {  // that is awaited, of a box that is behind
    at::Tensor record, header;
    std::vector<comm::Transfer> transfers;
  };
  struct RecordBehind {  // to be sent in bulk, of the step that leads to `version`
    std::int64_t version;
    at::Tensor record, header;
  };
  // A state that another rank shall hold. In bulk, one after the other, each as it is when its turn comes: so what is
  // held for them here is bounded, and few records are made while one is under way.
  struct Copy {
    BoxId box;
    RankId holder;
    std::vector<comm::Transfer> sends;
    std::size_t bytes = 0;
    at::Tensor answer;  // a word, of the holder
    comm::Transfer answered;
    bool close = false;                // said the last answer
    std::vector<RecordBehind> unsent;  // of the step, until its own messages have been sent
    // The records behind it that are under way, by the version that they lead to, until they were sent; votes have
    // waited for those up to `awaited`.
    std::map<std::int64_t, std::vector<comm::Transfer>> late;
    std::int64_t awaited = 0;
  };
  struct StateOnItsWay {
    std::vector<comm::Transfer> transfers;
    at::Tensor header;
    std::vector<at::Tensor> tensors;  // master, state...
  };
  struct Box {
    BoxSpec spec;
    ShardState state;
    at::Tensor gradient;  // of the step, fp32: the sum, at the owner; the record, at holders
    BoxId summed_at;      // the first box of the run with which it was summed
    std::optional<StateOnItsWay> coming;
    std::deque<LateRecord> late;
    bool came = false;  // since the roles were installed
  };

  Box& at(BoxId box) { return boxes_[box.index()]; }
  const Box& at(BoxId box) const { return boxes_[box.index()]; }
  Run& run_at(BoxId first) { return runs_[first.index()]; }
  Elements elements_of(commit::BoxRange boxes) const;
  // Whether they are buffers, of which ranks contribute what their granules yield (buffer_updates.h), and no gradient.
  bool are_buffers(commit::BoxRange boxes) const { return updates_.changes(spec(boxes.first).bucket); }
  bool are_exact(commit::BoxRange boxes) const { return exact_ && !are_buffers(boxes); }
  at::ScalarType record_type(commit::BoxRange boxes) const { return are_buffers(boxes) ? at::kFloat : record_type_; }
  at::Tensor own_part(commit::BoxRange boxes) const;
  // The piece of `some` of the `boxes` of a tensor of all of them.
  at::Tensor piece(const at::Tensor& tensor, commit::BoxRange boxes, commit::BoxRange some) const;
  void perform(const commit::Action& action);
  void send_part(commit::BoxRange boxes, RankId owner);
  void expect_part(commit::BoxRange boxes, RankId reader);
  void take_parts();
  void take_part(Part& part);
  const at::Tensor& part_of(BoxId first, RankId reader) const;
  void merge(Part& part);
  void begin_total(commit::BoxRange boxes);
  at::Tensor exact_total(commit::BoxRange boxes);
  at::Tensor ordered_total(commit::BoxRange boxes) const;
  at::Tensor total_of_granules(commit::BoxRange boxes) const;
  void sum(commit::BoxRange boxes);
  void send_record(commit::BoxRange boxes, RankId holder);
  void expect_record(commit::BoxRange boxes, RankId owner);
  void take_record(BoxId first);
  void forget_transfers();
  void update(BoxId box, std::int64_t version);
  void write_parameters(BoxId box);
  void send_parameters(commit::BoxRange boxes, RankId reader);
  void expect_parameters(commit::BoxRange boxes, RankId owner);
  void send_state(BoxId box, RankId holder);
  void send_state(Copy& copy, comm::Lane lane);
  void hear_answers();
  void ask_anew(Copy& copy);
  void expect_answer(Copy& copy);
  void answer(BoxId box, RankId owner, bool taken);
  void expect_state(BoxId box, RankId owner);
  void take_state(BoxId box);
  void take_what_came(BoxId box);
  bool are_done(const std::vector<comm::Transfer>& transfers);
  void send_late_record(BoxId box, RankId holder, comm::Lane lane);
  void expect_late_record(BoxId box, RankId owner);
  void take_late_record(BoxId box);
  void send_records_behind();
  void await_late_sends();
  void forget_copies();
  void drop_state(BoxId box);
  std::uint64_t behind_bytes() const;
  comm::Transfer send_copy(const at::Tensor& tensor, RankId holder, std::uint64_t tag, comm::Lane lane);

  commit::StepMachine& machine_;
  TensorTransfers& transfers_;
  Buckets& buckets_;
  BufferUpdates& updates_;
  UpdateRule rule_;
  bool exact_;
  at::ScalarType record_type_ = at::kFloat;
  std::map<std::int64_t, Hyper> hypers_;  // by the version that updates lead to: the newest, and what late records need
  std::vector<Box> boxes_;
  std::map<RankId, std::size_t> owned_buckets_;
  // Of the step.
  std::vector<Run> runs_;  // one for each box, used of those that are first
  std::vector<Part> parts_;
  std::vector<at::Tensor> gradients_;  // per bucket, this rank's own part; undefined where it reads nothing
  std::vector<comm::Transfer> sends_;  // of gradients, which the next step writes again
  std::uint64_t copied_bytes_ = 0;
  std::uint64_t sent_at_once_ = 0, behind_peak_ = 0;
  std::deque<Copy> copies_due_;
  std::list<Copy> copies_under_way_;  // until they are asked for anew, or the roles change
};

}  // namespace elaswave::exec

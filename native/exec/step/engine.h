// The engine: one rank's state and the interpreter of its step program.
//
// Made of one value, the spec (spec.h), and what travels beside it by name: programs and tensors. `install` takes
// another spec over when the plan changes. Then `step`, once per step. An instruction never blocks unless it must have
// what it waits for; transfers go on behind the arithmetic.
//
// Threads: one thread at a time calls an engine; `progress` may be read by any. The endpoint may be shared.
//
// After a failure of `step` (PeerLost, DeadlineExceeded, Aborted, CommError, ReplicaDiffers, ExecError): all transfers
// are cancelled, the peers are told to leave the step too, activations and saved tensors are gone. Then either
//   - the step was committed (every rank's vote was here): the rest of the rank's updates has been done all the same,
//     and the version counts the step. Buckets whose working copy is not wholly there are stale; running a unit that
//     reads one is an ExecError until `refresh`. An update that fails is an ExecError that names the box, whose state
//     is gone then: it is half done, or not of this version. Its other replicas are not touched.
//   - or this rank had voted (pending): sums, records and the votes that came are kept, so that the step can be
//     finished with the votes of all (`finish`) or given up (`drop`; the next step does so too). Nothing that lasts has
//     changed.
//   - or it had not: nothing of the step is left, nothing that lasts has changed. The same step may be run again; but
//     after ReplicaDiffers a replica is gone, and what was made from it is stale: it has to be sent first.
// What peers sent for a step that was given up is still on the links: advance the endpoint's generation before the next
// step, so that it is dropped.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "comm/endpoint.h"
#include "commit/machine.h"
#include "exec/device/emulation.h"
#include "exec/device/tensor_transfers.h"
#include "exec/exact/exact_sum.h"
#include "exec/exact/vote.h"
#include "exec/program/program_library.h"
#include "exec/spec/declarations.h"
#include "exec/spec/spec.h"
#include "exec/state/buckets.h"
#include "exec/state/buffer_updates.h"
#include "exec/state/optimizer.h"
#include "exec/state/replica_sync.h"
#include "exec/state/shard_store.h"
#include "exec/state/tables.h"
#include "exec/step/next_spec.h"
#include "exec/step/values.h"

namespace elaswave::exec {

struct Timing {
  std::int64_t count = 0;
  double seconds = 0.0;       // whole time in the instruction
  double wait_seconds = 0.0;  // of it, blocked on transfers
};

struct StepResult {
  std::int64_t step = 0;
  double loss = 0.0;              // sum over the step's samples, all ranks
  double count = 0.0;             // what the loss is to be divided by
  double grad_norm = 0.0;         // of the mean gradient, before clipping
  double scale = 0.0;             // what gradients were multiplied by: clip coefficient / count
  bool finite = true;             // false: the norm or the loss is not finite
  bool updated = false;           // false: not finite, or count is 0; no rank updated anything, buffers included
  std::int64_t version = 0;       // steps committed by this engine
  bool stop = false;              // some rank wants the run to end after this step
  std::int64_t memory_bytes = 0;  // largest resident set of any rank so far
  Votes votes;                    // of all ranks, as they were cast
  double seconds = 0.0;
  double pipeline_seconds = 0.0;           // from the begin of the first unit, inputs there, to the end of the last one
  std::array<Timing, kOpCodes> timings{};  // by OpCode
  EmulatedTimes emulated;                  // of the units with modelled durations; only of steps that ran to their end
};

struct EvalResult {
  double loss = 0.0;
  double count = 0.0;
  double seconds = 0.0;
};

// A signal that is raised on this process, or a cut of its endpoint, when the step reaches a phase, or the end if it
// has none such: for tests of what comes after.
struct Fault {
  OpCode at = OpCode::kSnapshot;
  int signal = 0;
  double cut_s = 0.0;       // above 0: instead of the signal
  std::optional<int> pipe;  // where `words` are written just before
  std::string words;
};

// What a step is told beside its inputs.
struct StepOptions {
  double deadline_s = 0.0;
  std::optional<double> clip_norm;
  bool stop_wanted = false;               // for the vote
  Content content;                        // of the inputs, for the vote
  std::optional<CrossCheck> cross_check;  // for the vote
  std::optional<Fault> fault;
  double slowdown = 1.0;  // units take so many times as long: for tests of what comes of slow ranks; at least 1
};

// What a rank has, for whoever decides what comes after a failure.
struct Holdings {
  struct Box {
    BoxId box;
    Digest digest;          // of its state, as of the last update
    bool recorded = false;  // the sum or the record of the step in flight is here
  };
  std::int64_t version = 0;             // steps committed
  std::vector<Box> boxes;               // that have their state here
  std::vector<BoxId> syncing;           // not in sync: this rank shall keep them, and does not vouch for them yet
  std::vector<BoxId> lagging;           // those of them for which it will not after the next step either
  std::vector<BucketId> stale_buckets;  // whose working copy is not whole
  bool pending = false;                 // a step was left after this rank had voted
  Votes votes;  // of the step that was left last: the own one, if it was cast, and those that came
  std::optional<StepResult> last_committed;  // also when `step` threw after it committed (its timings end there)
  std::uint64_t copied_bytes = 0;            // sent for replicas so far: records, states, their headers
  std::uint64_t sent_at_once = 0;            // since `install`: bytes of states under way to others, at most
  std::uint64_t sync_peak = 0;               // and of states that come, with their records; see replica_sync.h
};

// Where a step stands.
struct Progress {
  struct Place {
    OpCode instruction;
    std::size_t number = 0;  // of the list
  };
  std::optional<Place> place;     // none: outside of steps
  std::optional<RankId> awaited;  // the rank that is waited for
};

// A box's state goes from its owner to a rank that shall hold it.
struct ReplicaTransfer {
  BoxId box;
  RankId source, target;
};

using Hypers = std::vector<std::vector<double>>;

class Engine {
 public:
  // `endpoint` may be null if the rank is alone. `programs` are all of the job, linked when they are first needed;
  // `tensors` the tables that this rank's units and updates name. `version` counts the steps committed before. Boxes
  // have no state and working copies no content until they are loaded or refreshed. Throws ExecError.
  Engine(const Data& spec, std::shared_ptr<comm::Endpoint> endpoint, std::vector<ProgramSpec> programs,
         const Tensors& tensors, std::int64_t version);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Reads and checks what `install` will take over, and links its programs; between steps. `tensors`: tables that were
  // not given before. Nothing that computes changes; what was read before is left alone. Throws ExecError for a spec,
  // or a program, that breaks a rule.
  void prepare(NextSpec& next, const Tensors& tensors);
  // Another plan, between steps, with no transfer of a step under way and no step pending: roles, groups, units,
  // schedule. Syncing replicas are given up. What stays as it was is left alone; a state without a role is dropped.
  // `next`: is prepared if it was not. `restart_at`: all state goes, to be loaded as it was after so many steps.
  // Returns the buckets whose working copy is stale or new. Throws ExecError, and nothing has changed, for a spec that
  // breaks a rule or was taken over before.
  std::vector<BucketId> install(NextSpec& next, std::optional<std::int64_t> restart_at);

  // One step. `inputs` hold the tile's samples along dimension 0; `hyper` has, per group, the optimizer program's
  // inputs after grad_scale. Throws as said above.
  StepResult step(std::int64_t step_index, const Tensors& inputs, const Hypers& hyper, const StepOptions& options);
  // The forward-only list with the eval programs. Changes nothing that lasts.
  EvalResult evaluate(std::int64_t step_index, const Tensors& inputs, double deadline_s);
  // Waits for the gathers of the last step, so that working copies may be read.
  void sync(double deadline_s);
  // Working copies from masters, at the ranks that want them, bucket by bucket: owners send their parts. Every rank
  // calls it with the same lists, in no step: after states were loaded, or for ranks whose copy is stale or new.
  void refresh(const std::vector<std::vector<RankId>>& wanted, double deadline_s);

  Holdings holdings() const;
  // Finishes the pending step as if `votes`, of all ranks of the world, had come. Needs no other rank; working copies
  // of which a part would have come from others are stale.
  StepResult finish(const Votes& votes);
  // Gives the pending step up; does nothing if there is none.
  void drop();

  // State. Tensors that are read are the engine's own: do not write to them. `load` copies, and checks sizes.
  const ShardState& read(BoxId box) const;         // without a master if there is none here
  at::Tensor read(const std::string& name) const;  // a working copy (undefined if none is here) or a table
  void load(BoxId box, const at::Tensor& master, const std::vector<at::Tensor>& state);
  void load(const std::string& name, const at::Tensor& value);
  bool intact(BoxId box) const;  // whether a state still has the bytes that its last update wrote; reads all of it
  // Replicas for new holders: sent in bulk beside the coming steps, box by box, each as it is then; the holders take
  // records from now on. Tasks of other ranks are left to them.
  void replicate(const std::vector<ReplicaTransfer>& tasks);

  Progress progress() const;
  // The safety rules of commits, and how often each was asked.
  const commit::Guards& guards() const { return machine_.guards(); }

 private:
  // What an input is at each FORWARD: a tensor that stays, or where to look.
  using ResolvedInput = std::variant<c10::IValue, BorderValue, BatchInput, SampleKeys, StepKeys>;
  // Where a gradient goes: nowhere, into a bucket, or to the value's producer.
  struct Region {
    BucketId bucket;
    std::size_t number = 0;
  };
  using GradientTarget = std::variant<Nothing, Region, BorderValue>;
  struct ResolvedUnit {
    std::vector<ResolvedInput> inputs, eval_inputs;
    std::vector<GradientTarget> grads;
    std::vector<BucketId> buckets;  // whose working copies the unit reads
    UnitProgram *forward = nullptr, *backward = nullptr, *evaluate = nullptr;
    UnitProgram *backward_inputs = nullptr, *backward_weights = nullptr;
  };

  // perform.cc
  void perform(const commit::Actions& actions);
  void perform(const commit::Action& action);

  // engine.cc
  Names names() const;
  void link(const EngineSpec& spec);
  void apply(const commit::Actions& roles, BucketMemories memories);
  ResolvedUnit resolve(const UnitSpec& unit);
  ResolvedInput resolve(const InputBinding& input) const;
  GradientTarget resolve(const GradientBinding& gradient);
  void expect(BoxId box) const;
  std::size_t state_tensors(const BoxSpec& box) const;
  void check_inputs(const Tensors& inputs) const;
  const SampleSpan& micro_batch(std::int64_t index) const {
    return spec_.schedule.micro_batches[static_cast<std::size_t>(index)];
  }

  // units.cc
  void forward(const Step& step, bool train);
  void keep_outputs(const Step& step, const std::vector<OutputBinding>& bindings, std::vector<c10::IValue>& outputs);
  void keep_gradients(const Step& step, const std::vector<GradientTarget>& targets,
                      const std::vector<c10::IValue>& gradients);
  void backward(const Step& step);
  void backward_inputs(const Step& step);
  void backward_weights(const Step& step);
  // What was saved, and the gradients of the unit's results. They are this caller's alone.
  std::vector<c10::IValue> backward_arguments(const Step& step);
  c10::IValue input_of(const ResolvedInput& input, const Step& step);
  at::Tensor keys(const ResolvedInput& input, const Step& step);
  at::Tensor batch_input(const std::string& name, std::int64_t micro_batch) const;
  void emulate(double seconds_per_sample, const Step& step, double share = 1.0);
  // Outputs of the declared shapes of a unit that was not computed.
  std::vector<c10::IValue> zero_outputs(const std::vector<OutputBinding>& bindings, const Step& step);

  // interpreter.cc
  void begin(std::int64_t step_index, const Tensors& inputs, double deadline_s);
  void run(const StepList& list, StepResult* result);
  void execute(const Step& step, bool train);
  ExactTotal wait_ready();
  void vote();
  void check_replicas(const commit::Actions& cast) const;
  void all_gather_votes(const std::vector<std::uint64_t>& words, const std::map<RankId, std::size_t>& peers,
                        std::size_t channel);
  commit::Actions commit(const std::vector<Vote>& votes);
  void check_contents(const std::vector<Vote>& votes) const;
  void sum_votes(const std::vector<Vote>& votes);
  void compute_clip(double square);
  void update(const BoxSpec& box, ShardState& state, const at::Tensor& gradient, const Hyper& hyper);
  void check_hyper(const Hypers& hyper) const;
  void fault_if_due(std::optional<OpCode> next);
  void busy(double seconds);
  std::exception_ptr finish_updates(commit::Actions updates);
  std::exception_ptr recover() noexcept;
  [[noreturn]] void leave_step();
  void end_step();
  void drop_transients() noexcept;

  static constexpr std::uint64_t kNoPlace = ~std::uint64_t{0};

  ProgramLibrary programs_;
  Tables tables_;
  EngineSpec spec_;
  TensorTransfers transfers_;
  Values values_;
  commit::StepMachine machine_;
  Buckets buckets_;
  BufferUpdates updates_;
  ShardStore shards_;
  ReplicaSync replica_sync_;
  std::map<ProgramId, Optimizer> optimizers_;  // made when they are used
  std::map<UnitId, ResolvedUnit> resolved_;
  // A lost rank and an abort end a step between two operators: a unit takes milliseconds.
  const std::function<void()> stop_if_interrupted_ = [this] { transfers_.check_members(); };
  EmulatedDevice device_;
  double busy_seconds_ = 0.0;  // in which units of this step computed
  std::optional<StepResult> last_committed_;
  Votes votes_;

  // Of the step that runs.
  std::int64_t step_index_ = 0;
  const Tensors* inputs_ = nullptr;
  Hyper hyper_;  // per group: grad_scale, then the caller's
  StepOptions options_;
  ExactTotal loss_, count_;
  std::uint64_t keys_ = 0;  // the sum of those that were drawn with; a step's key counts for each sample
  Consumed consumed_;
  at::ScalarType loss_dtype_ = at::kFloat;
  StepResult result_;
  std::atomic<std::uint64_t> place_{kNoPlace};  // opcode and number of the instruction that runs
  std::map<std::pair<UnitId, std::int64_t>, std::vector<c10::IValue>> saved_;  // (unit, micro-batch), or what is held
};

}  // namespace elaswave::exec

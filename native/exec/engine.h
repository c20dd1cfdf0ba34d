// The engine: one rank's state and the interpreter of its step program.
//
// Declare programs, buckets, boxes, tables, values, folds and units; set the schedule and the world; then call `step`
// once per step. An instruction never blocks unless it must have what it waits for; transfers go on behind the
// arithmetic.
//
// Threads: one thread at a time calls an engine; `progress` may be read by any. The endpoint may be shared.
//
// After a failure of `step` (PeerLost, DeadlineExceeded, Aborted, CommError, CopyDiffers, ExecError): all transfers are
// cancelled, the peers are told to leave the step too, activations and saved tensors are gone. Then either
//   - the step was committed (every rank's vote was here): the rest of the rank's updates has been done all the same,
//     `version` counts the step. Buckets whose working copy is not wholly there are listed by `stale_buckets`; running
//     a unit that reads one is an ExecError until `refresh_work`.
//   - or this rank had voted (`pending`): sums, records and the votes that came are kept, so that the step can be
//     finished with the votes of all (`commit_pending`) or given up (`drop_pending`; the next step does so too).
//     Nothing that lasts has changed.
//   - or it had not: nothing of the step is left, nothing that lasts has changed. The same step may be run again; but
//     after CopyDiffers a copy is gone, and what was made from it is stale: it has to be sent first.
// What peers sent for a step that was given up is still on the links: advance the endpoint's generation before the next
// step, so that it is dropped.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "boxes.h"
#include "comm/endpoint.h"
#include "declarations.h"
#include "emulation.h"
#include "unit_program.h"
#include "vote.h"

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
  std::array<Timing, kOpCodes> timings{};
  EmulatedTimes emulated;  // of the units with modelled durations; only of steps that ran to their end
};

struct EvalResult {
  double loss = 0.0;
  double count = 0.0;
  double seconds = 0.0;
};

// What a step is told beside its inputs.
struct StepOptions {
  std::optional<double> clip_norm;
  double deadline_s = 0.0;
  bool stop_wanted = false;  // for the vote
  Digest content;            // of the inputs, for the vote
  // Raised on this process when the step reaches the phase (an OpCode), or the end if it has none such: for tests of
  // what comes after.
  std::optional<OpCode> fault_at;
  int fault_signal = 0;
  int fault_pipe = -1;  // where `fault_words` are written just before
  std::string fault_words;
};

// Where a step stands.
struct Progress {
  const char* instruction = "";
  std::int64_t number = -1;  // of the list; -1: outside of steps
  int awaited = -1;          // the rank that is waited for; -1: none
};

using Inputs = std::map<std::string, at::Tensor>;

class Engine {
 public:
  // `endpoint` may be null if the rank is alone. Keys are made of `seed` and global positions step * global_batch + i.
  // `granule` in samples: what a micro-batch holds where folds are used.
  Engine(int rank, std::shared_ptr<comm::Endpoint> endpoint, std::int64_t seed, std::int64_t global_batch,
         std::int64_t granule);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Declarations. Each checks what it is given against what was declared before and throws ExecError. A declaration of
  // the same name or index replaces the former one (a unit that moved in, a bucket with new owners).
  int add_program(const std::string& name, ProgramSpec spec);
  int add_bucket(BucketSpec spec);
  int add_box(BoxSpec spec);  // every rank declares every box, in the same order, so that the vote has a place for each
  void assign_box(int box, int owner, std::vector<int> holders);  // new roles; drops a base without a role
  void set_record_type(at::ScalarType type);                      // kFloat or kBFloat16, on all ranks alike
  void set_copy_mode(CopyMode mode);                              // on all ranks alike
  int add_table(const std::string& name, at::Tensor tensor);      // mutable buffers, constants
  int add_value(ValueSpec spec);
  int add_fold(FoldSpec spec);
  void regroup_fold(int fold, std::vector<OwnedSpan> group);  // other samples for the ranks
  void add_unit(int unit, UnitSpec spec);
  void clear_units();  // before the units of another tile are added
  // All ranks of the vote, ascending, this one included. A new engine is alone.
  void set_world(std::vector<int> ranks);
  // Checks both lists against the declarations. Comes after them and before steps; again after any of them changed.
  void set_schedule(Schedule schedule);

  // One step. `inputs` hold the tile's samples along dimension 0; `hyper` has, per group, the optimizer program's
  // inputs after grad_scale. Throws as said above.
  StepResult step(std::int64_t step_index, const Inputs& inputs, const std::vector<std::vector<double>>& hyper,
                  const StepOptions& options);
  // The forward-only list with the eval programs. Changes nothing that lasts.
  EvalResult evaluate(std::int64_t step_index, const Inputs& inputs, double deadline_s);
  // Waits for the gathers of the last step, so that working copies may be read.
  void sync(double deadline_s);
  // Working copies from masters, at the ranks that want them, bucket by bucket: owners send their parts. Every rank
  // calls it with the same lists, in no step: after bases were set, or for ranks whose copy is stale or new.
  void refresh_work(const std::vector<std::vector<int>>& wanted, double deadline_s);

  // A step that was left after this rank had voted; see above.
  bool pending() const;
  std::vector<int> recorded() const;   // boxes whose sum or record of that step is here
  std::uint64_t copied_bytes() const;  // sent for copies so far: records, bases, their seals
  const Votes& votes() const;  // of the step that was left last: the own one, if it was cast, and those that came
  // Finishes it as if `votes`, of all ranks of the world, had come. Needs no other rank; working copies of which a part
  // would have come from others are stale.
  StepResult commit_pending(const Votes& votes);
  void drop_pending();

  // State, for reading and loading. Tensors are the engine's own: do not write to them. `set_*` copy, and check sizes.
  const Base& base(int box) const;  // without a master if there is none here
  void set_base(int box, const at::Tensor& master, const std::vector<at::Tensor>& state);
  bool intact(int box) const;  // whether a base still has the bytes that its last update wrote; reads all of it
  // A copy for a new holder: sent as it is now, behind the coming steps; the holder takes records from now on.
  void send_base(int box, int peer);
  void expect_base(int box, int owner);
  std::vector<int> catching() const;                      // boxes that this rank shall keep, but has no base of yet
  at::Tensor bucket_work(const std::string& name) const;  // after `sync`
  at::Tensor table(const std::string& name) const;
  void set_table(const std::string& name, const at::Tensor& value);
  std::vector<std::string> stale_buckets() const;
  std::int64_t version() const;
  void set_version(std::int64_t version);  // steps committed before, by whoever made the bases
  Progress progress() const;
  // Of the last committed step: also when `step` threw after it committed (its timings are incomplete then).
  std::optional<StepResult> last_committed() const;
  int find_bucket(const std::string& name) const;  // index; throws ExecError that lists what there is
  int find_table(const std::string& name) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace elaswave::exec

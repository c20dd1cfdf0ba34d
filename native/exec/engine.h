// The engine: one rank's state and the interpreter of its step program.
//
// Declare programs, buckets, tables, values, folds and units; set the schedule and the world; then call `step` once per
// step. An instruction never blocks unless it must have what it waits for; transfers go on behind the arithmetic.
//
// Threads: one thread at a time calls an engine. The endpoint may be shared.
//
// After a failure of `step` (PeerLost, DeadlineExceeded, Aborted, CommError, ExecError): all transfers are cancelled,
// activations, saved tensors, gradients and reductions of the step are gone.
//   - Thrown before the step committed (the vote was not complete): masters, states, buffers, working copies and
//     `version` are those of the step before. The same step may be run again.
//   - Thrown after it: the rank's remaining updates have been done all the same, `version` counts the step, masters,
//     states and buffers are its result. Buckets whose working copy is not wholly there are listed by `stale_buckets`;
//     running a unit that reads one is an ExecError until `set_bucket_work`.
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

#include "comm/endpoint.h"
#include "declarations.h"
#include "unit_program.h"

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
  std::int64_t memory_bytes = 0;  // largest resident set of any rank so far
  double seconds = 0.0;
  std::array<Timing, kOpCodes> timings{};
};

struct EvalResult {
  double loss = 0.0;
  double count = 0.0;
  double seconds = 0.0;
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
  int add_bucket(BucketSpec spec);  // every rank declares every bucket, so that the vote has a place for each
  int add_table(const std::string& name, at::Tensor tensor);  // mutable buffers, constants
  int add_value(ValueSpec spec);
  int add_fold(FoldSpec spec);
  void add_unit(int unit, UnitSpec spec);
  // All ranks of the vote, ascending, this one included. A new engine is alone.
  void set_world(std::vector<int> ranks);
  // Checks both lists against the declarations. Comes after them and before steps; again after any of them changed.
  void set_schedule(Schedule schedule);

  // One step. `inputs` hold the tile's samples along dimension 0; `hyper` has, per group, the optimizer program's
  // inputs after grad_scale. Throws as said above.
  StepResult step(std::int64_t step_index, const Inputs& inputs, const std::vector<std::vector<double>>& hyper,
                  std::optional<double> clip_norm, double deadline_s);
  // The forward-only list with the eval programs. Changes nothing that lasts.
  EvalResult evaluate(std::int64_t step_index, const Inputs& inputs, double deadline_s);
  // Waits for the gathers of the last step, so that working copies may be read.
  void sync(double deadline_s);
  // Working copies from masters: each owner writes its own part and sends it to the group. All ranks of the groups call
  // it, in no step: after masters were set, or to repair stale buckets.
  void refresh_work(double deadline_s);

  // State, for reading and loading. Tensors are the engine's own: do not write to them. `set_*` copy, and check sizes.
  at::Tensor bucket_master(const std::string& name) const;
  std::vector<at::Tensor> bucket_state(const std::string& name) const;
  at::Tensor bucket_work(const std::string& name) const;  // after `sync`
  at::Tensor table(const std::string& name) const;
  void set_bucket_master(const std::string& name, const at::Tensor& value);
  void set_bucket_state(const std::string& name, const std::vector<at::Tensor>& values);
  void set_bucket_work(const std::string& name, const at::Tensor& value);
  void set_table(const std::string& name, const at::Tensor& value);
  std::vector<std::string> stale_buckets() const;
  std::int64_t version() const;
  // Of the last committed step: also when `step` threw after it committed (its timings are incomplete then).
  std::optional<StepResult> last_committed() const;
  int find_bucket(const std::string& name) const;  // index; throws ExecError that lists what there is
  int find_table(const std::string& name) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace elaswave::exec

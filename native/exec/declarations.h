// What an engine is told before it runs: values, buckets, folds, units, and the step program. Plain data; indices are
// those of the workload's tuples, ranks are world ranks, samples count within the step.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "commit/types.h"

namespace elaswave::exec {

// Where an input of a unit comes from, where an output or a gradient goes.
struct Binding {
  enum class Kind { kNone, kParam, kTable, kValue, kInput, kKeys, kStepKeys, kLoss, kCount, kFold };
  Kind kind = Kind::kNone;
  int index = -1;                     // bucket, table entry, value or fold
  int item = 0;                       // kFold: which of the fold's values
  std::int64_t offset = 0;            // kParam: first element in the bucket
  std::vector<std::int64_t> shape;    // kParam
  std::vector<std::int64_t> strides;  // kParam; row-major unless given
  std::string name;                   // kInput
};

// An activation that crosses a unit border.
struct ValueSpec {
  std::string name;
  int sample_axis = -1;  // -1: none
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;  // of one sample; the sample axis holds how many entries a sample has there
  bool has_grad = false;
};

struct OwnedSpan {
  int rank;
  std::int64_t lo, hi;
};

// The flat parameters of one unit and one optimizer group, as units compute with them.
struct BucketSpec {
  std::string name;
  std::int64_t numel = 0;
  std::vector<int> group;             // ranks that hold a user unit, ascending
  at::ScalarType dtype = at::kFloat;  // of the working copy
  at::Tensor work;                    // the whole working copy, flat, written in place; undefined outside of the group
  int optimizer = -1;                 // program id
  int hyper_group = 0;
};

// A piece of a bucket. Its owner sums the gradient, updates master and optimizer state and publishes the parameters;
// its holders keep the same base up to date from the owner's records. The owner need not be in the bucket's group.
struct BoxSpec {
  int bucket = -1;
  std::int64_t lo = 0, hi = 0;
  int owner = -1;
  std::vector<int> holders;
  std::int64_t numel() const { return hi - lo; }
};

using commit::CopyMode;

struct FoldValue {
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
};

// Updates of mutable buffers. Units yield `values` per granule; every holder of the unit applies
//   program(*buffers, *values of the granule) -> *new buffers
// once per granule of the step, in granule order.
struct FoldSpec {
  int program = -1;
  std::vector<int> buffers;  // table entries that are replaced
  std::vector<FoldValue> values;
  std::vector<OwnedSpan> group;  // samples of each rank that holds the unit, together the step's; empty for the others
};

// How long a unit takes on the device that is emulated: seconds per sample, and per FORWARD or BACKWARD.
struct Modelled {
  double forward_s = 0.0, backward_s = 0.0, fixed_s = 0.0;
};

struct UnitSpec {
  int forward = -1, backward = -1, eval = -1;  // program ids; -1: none (no backward: nothing needs a gradient)
  std::vector<Binding> inputs, outputs, grads;
  std::vector<Binding> eval_inputs, eval_outputs;
  int num_saved = 0;
  // Given: the unit is not computed. It waits as long, makes zeros of the declared shapes, a loss and a count of one
  // per sample, and no gradients.
  std::optional<Modelled> modelled;
};

enum class OpCode { kRecv, kSend, kForward, kBackward, kReduce, kFold, kVote, kUpdate, kGather, kSnapshot };
inline constexpr int kOpCodes = 10;
const char* name_of(OpCode code);
OpCode opcode_of(const std::string& name);  // throws ExecError for an unknown one

struct Step {
  OpCode code = OpCode::kSnapshot;
  std::int64_t index = 0;  // value, unit or bucket
  std::int64_t micro_batch = 0;
  int peer = -1;
  std::uint64_t tag = 0;
  std::int64_t lo = 0, hi = 0;  // samples relative to the micro-batch
  bool grad = false;
};

// From an instruction as Python writes it. Throws ExecError for an unknown opcode or a wrong number of operands.
Step parse_step(const std::string& opcode, const std::vector<std::uint64_t>& operands);

struct SampleSpan {
  std::int64_t lo, hi;
  std::int64_t size() const { return hi - lo; }
};

struct Schedule {
  std::vector<Step> train, eval;
  std::vector<SampleSpan> micro_batches;  // in step coordinates
  std::int64_t first_sample = 0;          // of the rank's tile
};

}  // namespace elaswave::exec

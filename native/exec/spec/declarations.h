// What an engine is told: values, buckets, boxes, buffer updates, units, and the step program. Plain data; spec.h reads
// and checks it. Ranks are world ranks, samples count within the step.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "commit/types.h"
#include "ids.h"

namespace elaswave::exec {

// Where an input of a unit comes from, where an output or a gradient goes.
struct Nothing {};
struct Parameter {
  BucketId bucket;
  std::int64_t offset = 0;  // its first element in the bucket
  std::vector<std::int64_t> shape;
  // Of a mutable buffer, whose bytes lie in the bucket from that element on; a parameter has the bucket's.
  std::optional<c10::ScalarType> dtype;
  bool operator==(const Parameter&) const = default;
};
struct TableEntry {  // a constant, frozen parameter, or buffer that nothing changes
  TableId table;
  bool operator==(const TableEntry&) const = default;
};
struct BorderValue {
  ValueId value;
  bool operator==(const BorderValue&) const = default;
};
struct BatchInput {
  std::string name;
  bool operator==(const BatchInput&) const = default;
};
struct SampleKeys {
  bool operator==(const SampleKeys&) const = default;
};
struct StepKeys {
  bool operator==(const StepKeys&) const = default;
};
struct Loss {};
struct Count {};
struct UpdateValue {
  BufferUpdateId update;
  std::size_t number = 0;  // which of the update's values
};
using InputBinding = std::variant<Parameter, TableEntry, BorderValue, BatchInput, SampleKeys, StepKeys>;
using OutputBinding = std::variant<Nothing, BorderValue, Loss, Count, UpdateValue>;
using GradientBinding = std::variant<Nothing, Parameter, BorderValue>;

// Where the keys of random draws come from: sample i of step s has that at position s * per_step + i - first.
struct KeyStream {
  std::int64_t seed = 0;
  std::int64_t per_step = 0;
  std::vector<std::int64_t> starts;  // of each micro-batch, within a step of the stream
};

// An activation that crosses a unit border.
struct ValueSpec {
  std::string name;
  std::optional<std::size_t> sample_axis;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<std::int64_t> shape;  // of one sample; the sample axis holds how many entries a sample has there
  bool has_grad = false;
};

struct OwnedSpan {
  RankId rank;
  std::int64_t lo = 0, hi = 0;
};

// The bytes in an element of a bucket of buffers, which are declared as fp32.
inline constexpr std::int64_t kWordBytes = 4;

// The flat parameters of one unit and one optimizer group, as units compute with them. Or the buffers of a unit that
// training changes: those have no optimizer but updates, and are one box.
struct BucketSpec {
  std::string name;
  std::int64_t numel = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;  // of the working copy
  std::optional<ProgramId> optimizer;
  std::size_t hyper_group = 0;
  // Of buffers: the spans of samples of each rank that runs the unit, ascending.
  std::vector<OwnedSpan> group;
};

// A piece of a bucket. Its owner sums the gradient, updates master and optimizer state and publishes the parameters;
// its holders keep the same base up to date from the owner's records. The readers, ascending, have a working copy of it
// and contribute to its gradient; the owner need not be one of them.
struct BoxSpec {
  commit::BoxRoles roles;
  std::int64_t lo = 0, hi = 0;
  BucketId bucket() const { return roles.bucket; }
  std::int64_t numel() const { return hi - lo; }
};

using commit::CopyMode;

struct GranuleValue {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<std::int64_t> shape;
};

// The update of a mutable buffer. A unit yields `values` per granule; who keeps the buffer's box applies
//   program(buffer, *values of the granule) -> new buffer
// once per granule of the step, in granule order.
struct BufferUpdateSpec {
  ProgramId program;
  Parameter buffer;
  std::vector<GranuleValue> values;
};

// How long a unit takes on the device that is emulated: seconds per sample, and per FORWARD or BACKWARD; and the part
// of a BACKWARD that gradients of parameters take.
struct Modelled {
  double forward_s = 0.0, backward_s = 0.0, fixed_s = 0.0, weights_share = 0.0;
};

struct UnitSpec {
  std::optional<ProgramId> forward, backward, evaluate;  // no backward: nothing needs a gradient
  // The backward program in two. The first half takes what it does, returns the gradients that go to values and what is
  // held for the second, which returns those that go to parameters. No second half: there are none.
  std::optional<ProgramId> backward_inputs, backward_weights;
  std::vector<InputBinding> inputs, eval_inputs;
  std::vector<OutputBinding> outputs, eval_outputs;
  std::vector<GradientBinding> grads;
  std::size_t num_saved = 0, num_held = 0;
  // Given: the unit is not computed. It waits as long, makes zeros of the declared shapes, a loss and a count of one
  // per sample, and no gradients.
  std::optional<Modelled> modelled;
};
using Units = std::map<UnitId, UnitSpec>;

enum class OpCode {
  kRecv,
  kSend,
  kForward,
  kBackward,
  kBackwardInputs,
  kBackwardWeights,
  kReduce,
  kVote,
  kUpdate,
  kGather,
  kSnapshot
};
inline constexpr std::size_t kOpCodes = 11;
const char* name_of(OpCode code);
OpCode opcode_of(const std::string& name);  // throws ExecError for an unknown one

struct Step {
  OpCode code = OpCode::kSnapshot;
  std::int64_t index = 0;  // of a value, unit or bucket
  std::int64_t micro_batch = 0;
  RankId peer;
  std::uint64_t tag = 0;
  std::int64_t lo = 0, hi = 0;  // samples relative to the micro-batch
  bool grad = false;
  ValueId value() const { return ValueId(index); }
  UnitId unit() const { return UnitId(index); }
  BucketId bucket() const { return BucketId(index); }
};

struct SampleSpan {
  std::int64_t lo = 0, hi = 0;
  std::int64_t size() const { return hi - lo; }
};

// An activation (or its gradient) of one micro-batch.
struct ActivationRef {
  ValueId value;
  std::int64_t micro_batch = 0;
  bool grad = false;
  auto operator<=>(const ActivationRef&) const = default;
};

struct StepList {
  std::vector<Step> steps;
  // After step i, these are read by nobody any more.
  std::vector<std::vector<ActivationRef>> releases;
};

struct Schedule {
  StepList train, evaluate;
  std::vector<SampleSpan> micro_batches;  // in step coordinates
  std::vector<std::int64_t> rows;         // of the rank's inputs: the first of each micro-batch, and the end
};

}  // namespace elaswave::exec

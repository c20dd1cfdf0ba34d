#include "exec/spec/schedule.h"

#include <map>
#include <set>
#include <string>
#include <utility>

#include "exec/program/program.h"

namespace elaswave::exec {
namespace {

struct OpCodeInfo {
  const char* name;
  std::size_t operands;
};
// In the order of OpCode.
constexpr OpCodeInfo kOpCodeInfo[kOpCodes] = {
    {"RECV", 7},   {"SEND", 7}, {"FORWARD", 2}, {"BACKWARD", 2}, {"BACKWARD_INPUTS", 2}, {"BACKWARD_WEIGHTS", 2},
    {"REDUCE", 1}, {"VOTE", 0}, {"UPDATE", 1},  {"GATHER", 1},   {"SNAPSHOT", 0},
};

class StepCheck {
 public:
  StepCheck(const std::vector<Step>& steps, const std::vector<SampleSpan>& micro_batches, const Declared& declared,
            StepMode mode)
      : steps_(steps), micro_batches_(micro_batches), declared_(declared), mode_(mode) {}

  StepList run() {
    for (at_ = 0; at_ < steps_.size(); ++at_) check(steps_[at_]);
    at_ = steps_.size();
    for (const auto& [ref, held] : held_) {
      if (!held.read && !held.local && held.pieces > 0) fail(describe(ref) + " is received, but nobody reads it");
    }
    if (mode_ == StepMode::kTrain && !voted_ && !steps_.empty()) fail("a step has one VOTE");
    StepList list{steps_, std::vector<std::vector<ActivationRef>>(steps_.size())};
    for (const auto& [ref, held] : held_) list.releases[held.last_use].push_back(ref);
    return list;
  }

 private:
  struct Held {
    std::int64_t covered = 0;  // samples received
    int pieces = 0;
    bool local = false;  // produced here, or added to here
    bool read = false;
    std::size_t last_use = 0;
  };

  [[noreturn]] void fail(const std::string& fact) const {
    std::string place = mode_ == StepMode::kTrain ? "train list" : "eval list";
    if (at_ < steps_.size()) place += ", instruction " + std::to_string(at_) + " (" + name_of(steps_[at_].code) + ")";
    throw ExecError(place + ": " + fact);
  }

  std::string describe(const ActivationRef& ref) const {
    return std::string(ref.grad ? "the gradient of value " : "value ") + declared_.values[ref.value.index()].name +
           " of micro-batch " + std::to_string(ref.micro_batch);
  }

  const ValueSpec& value(ValueId id) const {
    if (id.index() >= declared_.values.size()) fail("there is no value " + std::to_string(id.value()));
    return declared_.values[id.index()];
  }

  std::int64_t samples(std::int64_t micro_batch) const {
    if (micro_batch < 0 || micro_batch >= static_cast<std::int64_t>(micro_batches_.size())) {
      fail("there is no micro-batch " + std::to_string(micro_batch));
    }
    return micro_batches_[static_cast<std::size_t>(micro_batch)].size();
  }

  const UnitSpec& unit(UnitId id) const {
    const auto found = declared_.units.find(id);
    if (found == declared_.units.end()) fail("unit " + std::to_string(id.value()) + " was not declared on this rank");
    return found->second;
  }

  void check(const Step& step) {
    switch (step.code) {
      case OpCode::kRecv:
        return check_receive(step);
      case OpCode::kSend:
        return check_send(step);
      case OpCode::kForward:
        return check_forward(step);
      case OpCode::kBackward:
        check_backward(step);
        return check_sums(step);
      case OpCode::kBackwardInputs:
        check_backward(step);
        expect_halves(step);
        waiting_.insert({step.unit(), step.micro_batch});
        return;
      case OpCode::kBackwardWeights:
        check_weights(step);
        return check_sums(step);
      case OpCode::kReduce:
      case OpCode::kUpdate:
      case OpCode::kGather:
        return check_bucket(step);
      case OpCode::kVote:
        if (voted_) fail("a step has one VOTE");
        train_only();
        if (!waiting_.empty()) {
          const auto& [unit, micro_batch] = *waiting_.begin();
          fail("unit " + std::to_string(unit.value()) + " has yet to run BACKWARD_WEIGHTS of micro-batch " +
               std::to_string(micro_batch));
        }
        voted_ = true;
        return;
      case OpCode::kSnapshot:
        return train_only();
    }
  }

  void train_only() const {
    if (mode_ == StepMode::kEval) fail("evaluation only receives, sends and runs units forward");
  }

  void check_piece(const Step& step) const {
    const ValueSpec& spec = value(step.value());
    const std::int64_t count = samples(step.micro_batch);
    if (step.grad && (mode_ == StepMode::kEval || !spec.has_grad)) fail("value " + spec.name + " has no gradient here");
    if (step.lo < 0 || step.hi <= step.lo || step.hi > count) {
      fail("samples [" + std::to_string(step.lo) + ", " + std::to_string(step.hi) + ") of a micro-batch of " +
           std::to_string(count));
    }
  }

  void check_receive(const Step& step) {
    check_piece(step);
    const ActivationRef ref{step.value(), step.micro_batch, step.grad};
    Held& held = touch(ref);
    if (held.local) fail(describe(ref) + " is received after this rank's own part of it");
    if (held.read) fail(describe(ref) + " is received after it was read");
    if (!value(step.value()).sample_axis && !step.grad && held.pieces > 0) {
      fail(describe(ref) + " has no sample axis and is received twice");
    }
    held.covered += step.hi - step.lo;
    ++held.pieces;
  }

  void check_send(const Step& step) {
    check_piece(step);
    read({step.value(), step.micro_batch, step.grad});
  }

  // Pieces must cover the micro-batch by the time it is read; a gradient without any is zero.
  void read(const ActivationRef& ref) {
    Held& held = touch(ref);
    held.read = true;
    if (held.pieces > 0) {
      check_covered(ref, held);
    } else if (!held.local && !ref.grad) {
      fail("reads " + describe(ref) + ", which is neither produced nor received before");
    }
  }

  void check_covered(const ActivationRef& ref, const Held& held) const {
    const std::int64_t count = samples(ref.micro_batch);
    if (!value(ref.value).sample_axis || held.covered == count) return;
    fail("received pieces of " + describe(ref) + " cover " + std::to_string(held.covered) + " of " +
         std::to_string(count) + " samples");
  }

  Held& touch(const ActivationRef& ref) {
    Held& held = held_[ref];
    held.last_use = at_;
    return held;
  }

  void check_forward(const Step& step) {
    const UnitSpec& spec = unit(step.unit());
    samples(step.micro_batch);
    const bool train = mode_ == StepMode::kTrain;
    if (!(train ? spec.forward : spec.evaluate)) fail("unit " + std::to_string(step.index) + " has no such program");
    for (const InputBinding& input : train ? spec.inputs : spec.eval_inputs) {
      if (const auto* bound = std::get_if<BorderValue>(&input)) read({bound->value, step.micro_batch, false});
    }
    for (const OutputBinding& output : train ? spec.outputs : spec.eval_outputs) {
      if (const auto* bound = std::get_if<BorderValue>(&output)) {
        touch({bound->value, step.micro_batch, false}).local = true;
      }
    }
    if (train && !forward_.insert({step.unit(), step.micro_batch}).second) fail("runs a second time");
  }

  void check_backward(const Step& step) {
    train_only();
    const UnitSpec& spec = unit(step.unit());
    if (voted_) fail("comes after VOTE");
    if (!forward_.contains({step.unit(), step.micro_batch})) fail("has no FORWARD before it");
    if (!backward_.insert({step.unit(), step.micro_batch}).second) fail("runs a second time");
    for (const OutputBinding& output : spec.outputs) {
      const auto* bound = std::get_if<BorderValue>(&output);
      if (bound && value(bound->value).has_grad) read({bound->value, step.micro_batch, true});
    }
    for (const GradientBinding& grad : spec.grads) {
      if (const auto* bound = std::get_if<BorderValue>(&grad)) add({bound->value, step.micro_batch, true});
    }
  }

  void expect_halves(const Step& step) const {
    const UnitSpec& spec = unit(step.unit());
    if (spec.backward && !spec.backward_inputs) fail("unit " + std::to_string(step.index) + " has no such program");
  }

  void check_weights(const Step& step) {
    train_only();
    if (voted_) fail("comes after VOTE");
    if (waiting_.erase({step.unit(), step.micro_batch}) == 0) fail("has no BACKWARD_INPUTS before it");
  }

  // Nothing is added to a bucket once it was reduced.
  void check_sums(const Step& step) const {
    for (const GradientBinding& grad : unit(step.unit()).grads) {
      const auto* parameter = std::get_if<Parameter>(&grad);
      if (parameter && reduced_.contains(parameter->bucket)) {
        fail("adds to bucket " + std::to_string(parameter->bucket.value()) + ", which was reduced before");
      }
    }
  }

  void add(const ActivationRef& ref) {
    Held& held = touch(ref);
    if (held.read) fail("adds to " + describe(ref) + ", which was read before");
    if (held.pieces > 0) check_covered(ref, held);  // adding waits for them
    held.local = true;
  }

  void check_bucket(const Step& step) {
    train_only();
    const std::string named = "bucket " + std::to_string(step.index);
    if (step.bucket().index() >= declared_.buckets) fail("there is no " + named);
    if (step.code == OpCode::kReduce) {
      if (voted_) fail("comes after VOTE");
      if (!reduced_.insert(step.bucket()).second) fail("reduces " + named + " twice");
    } else if (!voted_) {
      fail("comes before VOTE, which decides whether there is an update");
    } else if (step.code == OpCode::kUpdate && !reduced_.contains(step.bucket())) {
      fail("updates " + named + ", which was not reduced");
    }
  }

  const std::vector<Step>& steps_;
  const std::vector<SampleSpan>& micro_batches_;
  const Declared& declared_;
  StepMode mode_;
  std::size_t at_ = 0;
  std::map<ActivationRef, Held> held_;
  std::set<std::pair<UnitId, std::int64_t>> forward_, backward_;
  std::set<std::pair<UnitId, std::int64_t>> waiting_;  // between their halves
  std::set<BucketId> reduced_;
  bool voted_ = false;
};

}  // namespace

const char* name_of(OpCode code) { return kOpCodeInfo[static_cast<std::size_t>(code)].name; }

OpCode opcode_of(const std::string& name) {
  for (std::size_t code = 0; code < kOpCodes; ++code) {
    if (name == kOpCodeInfo[code].name) return static_cast<OpCode>(code);
  }
  throw ExecError("unknown instruction " + name);
}

Step parse_step(const std::string& opcode, const std::vector<std::int64_t>& operands) {
  Step step;
  step.code = opcode_of(opcode);
  const std::size_t expected = kOpCodeInfo[static_cast<std::size_t>(step.code)].operands;
  if (operands.size() != expected) {
    throw ExecError(opcode + " takes " + std::to_string(expected) + " operands, not " +
                    std::to_string(operands.size()));
  }
  if (expected > 0) step.index = operands[0];
  if (expected > 1) step.micro_batch = operands[1];
  if (expected == 7) {
    step.peer = RankId(operands[2]);
    step.tag = static_cast<std::uint64_t>(operands[3]);
    step.lo = operands[4];
    step.hi = operands[5];
    step.grad = operands[6] != 0;
  }
  return step;
}

StepList check_steps(const std::vector<Step>& steps, const std::vector<SampleSpan>& micro_batches,
                     const Declared& declared, StepMode mode) {
  return StepCheck(steps, micro_batches, declared, mode).run();
}

}  // namespace elaswave::exec

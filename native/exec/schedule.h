// The step program: its instructions, the check that they can run, and when activations die. Private to exec/.
#pragma once

#include <map>
#include <vector>

#include "declarations.h"

namespace elaswave::exec {

// An activation (or its gradient) of one micro-batch.
struct ActivationRef {
  std::int64_t value = 0;
  std::int64_t micro_batch = 0;
  bool grad = false;
  auto operator<=>(const ActivationRef&) const = default;
};

struct StepList {
  std::vector<Step> steps;
  // After step i, these are read by nobody any more.
  std::vector<std::vector<ActivationRef>> releases;
};

struct Declared {
  const std::vector<ValueSpec>& values;
  const std::map<int, UnitSpec>& units;
  int buckets;
};

enum class StepMode { kTrain, kEval };

// Checks that every instruction finds what it reads, that received pieces cover the micro-batch, that gradients from
// later stages come before local ones are added, and that VOTE stands between REDUCE and UPDATE. Throws ExecError that
// names the instruction's number and the rule.
StepList check_steps(const std::vector<Step>& steps, const std::vector<SampleSpan>& micro_batches,
                     const Declared& declared, StepMode kind);

}  // namespace elaswave::exec

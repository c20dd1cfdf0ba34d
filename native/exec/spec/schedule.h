// The step program: its instructions, the check that they can run, and when activations die. Private to exec/.
#pragma once

#include <string>
#include <vector>

#include "exec/spec/declarations.h"

namespace elaswave::exec {

struct Declared {
  const std::vector<ValueSpec>& values;
  const Units& units;
  std::size_t buckets;
};

enum class StepMode { kTrain, kEval };

// From an instruction as Python writes it. Throws ExecError for an unknown opcode or a wrong number of operands.
Step parse_step(const std::string& opcode, const std::vector<std::int64_t>& operands);

// Checks that every instruction finds what it reads, that received pieces cover the micro-batch, that gradients from
// later stages come before local ones are added, that both halves of a backward program run, and that VOTE stands
// between REDUCE and UPDATE. Throws ExecError that names the instruction's number and the rule.
StepList check_steps(const std::vector<Step>& steps, const std::vector<SampleSpan>& micro_batches,
                     const Declared& declared, StepMode mode);

}  // namespace elaswave::exec

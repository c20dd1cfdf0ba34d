// The unit program, ready to run: a verified list of pre-resolved operators over slots.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <vector>

#include "exec/program/link_operators.h"
#include "exec/program/program.h"

namespace elaswave::exec {

// One thread at a time may run a program; slots and stack are kept between runs. Runs without the GIL, below autograd.
class UnitProgram {
 public:
  // Verifies and links. Throws ExecError.
  explicit UnitProgram(ProgramSpec spec);

  const ProgramSpec& spec() const { return spec_; }
  const std::string& name() const { return spec_.name; }
  int num_inputs() const { return spec_.num_inputs; }
  std::size_t num_outputs() const { return spec_.outputs.size(); }

  // Runs all instructions on `inputs` (tensors, numbers) and returns the outputs, None for -1. An output may be a view
  // of an input, or an input itself. Throws ExecError that names the instruction and the operator that failed; all
  // slots are empty then, and the program can be run again. The same holds for what `check` throws, which is called
  // before each instruction and may end the run for a reason of its own.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs, const std::function<void()>& check = {});

 private:
  void clear();
  void execute(const Linked& linked);
  bool view(const Linked& linked);
  void call(const Linked& linked);
  void push(const Operand& operand);

  ProgramSpec spec_;
  std::vector<Linked> linked_;
  std::vector<c10::IValue> slots_;
  std::vector<c10::IValue> stack_;
  std::vector<std::int64_t> sizes_;
};

}  // namespace elaswave::exec

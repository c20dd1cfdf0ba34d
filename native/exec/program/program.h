// A unit program as plain data: what lowering wrote, before anything is looked up. No torch in here.
//
// A program is a straight list of operator calls over numbered slots. Slots 0 .. num_inputs-1 hold the inputs; every
// other slot is written once or more by instructions and emptied by the `frees` of the instruction after which nobody
// reads it. Arguments are positional and complete.
//
//   inputs x, w                            slot 0, 1
//   aten::mm(slot 0, slot 1) -> slot 2     frees slot 0
//   aten::relu(slot 2) -> slot 3           frees slot 2
//   outputs slot 3
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace elaswave::exec {

// A program or a step list breaks a rule, or an operator failed while it ran. The message names the program (or unit),
// the instruction, the operator and the rule.
class ExecError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Replicas differ from their owners' states. They were dropped, and the step was left before its commit.
class ReplicaDiffers : public ExecError {
 public:
  using ExecError::ExecError;
};

// A rank has read other samples than the rank that fed them to the step, which was left before its commit.
class InputsDiffer : public ExecError {
 public:
  using ExecError::ExecError;
};

struct Arg {
  enum class Kind { kSlot, kNone, kBool, kInt, kReal, kString, kDtype, kDevice, kLayout, kMemoryFormat, kList };
  Kind kind = Kind::kNone;
  std::int64_t integer = 0;  // slot number, integer, or 0/1
  double real = 0.0;
  std::string text;  // string, or the name of a dtype, device, layout, memory format
  std::vector<Arg> items;
};

struct Instruction {
  std::string op;        // "aten::addmm", or a built-in on numbers such as "int::mul"
  std::string overload;  // "" for the default one
  std::vector<Arg> args;
  std::vector<int> outs;   // a slot per returned value, -1: not kept
  std::vector<int> frees;  // slots nobody reads after this instruction
  bool unpack = false;     // the operator returns one Tensor[]: `outs` has a slot per element
};

struct ProgramSpec {
  std::string name;
  int num_inputs = 0;
  int num_slots = 0;
  std::vector<int> outputs;  // slots, -1: None
  std::vector<Instruction> instructions;
};

// Checks the use of slots: every number in range, written before it is read, not read after it was freed. Throws
// ExecError. Whether operators exist and arguments fit them is checked when the program is linked.
void verify_slots(const ProgramSpec& spec);

// "program NAME, instruction 7 (aten::addmm.out)", the place that opens every message about an instruction.
std::string place_of(const ProgramSpec& spec, std::size_t instruction);

}  // namespace elaswave::exec

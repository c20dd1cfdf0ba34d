#include "exec/program/program.h"

namespace elaswave::exec {
namespace {

enum class SlotState : std::uint8_t { kEmpty, kFull, kFreed };

class SlotCheck {
 public:
  explicit SlotCheck(const ProgramSpec& spec) : spec_(spec) {
    if (spec.num_inputs < 0 || spec.num_slots < spec.num_inputs) {
      throw ExecError("program " + spec.name + ": " + std::to_string(spec.num_slots) + " slots cannot hold " +
                      std::to_string(spec.num_inputs) + " inputs");
    }
    states_.assign(static_cast<std::size_t>(spec.num_slots), SlotState::kEmpty);
    for (int i = 0; i < spec.num_inputs; ++i) states_[static_cast<std::size_t>(i)] = SlotState::kFull;
  }

  void run() {
    for (std::size_t i = 0; i < spec_.instructions.size(); ++i) {
      place_ = place_of(spec_, i);
      const Instruction& instruction = spec_.instructions[i];
      for (const Arg& arg : instruction.args) read(arg);
      for (const int slot : instruction.outs) {
        if (slot != -1) state(slot, "writes") = SlotState::kFull;
      }
      for (const int slot : instruction.frees) {
        if (state(slot, "frees") != SlotState::kFull) fail("frees slot " + std::to_string(slot) + ", which is empty");
        state(slot, "frees") = SlotState::kFreed;
      }
    }
    place_ = "program " + spec_.name + ", outputs";
    for (const int slot : spec_.outputs) {
      if (slot != -1) read_slot(slot);
    }
  }

 private:
  [[noreturn]] void fail(const std::string& fact) const { throw ExecError(place_ + ": " + fact); }

  SlotState& state(std::int64_t slot, const char* verb) {
    if (slot < 0 || slot >= spec_.num_slots) {
      fail(std::string(verb) + " slot " + std::to_string(slot) + ", but there are only " +
           std::to_string(spec_.num_slots));
    }
    return states_[static_cast<std::size_t>(slot)];
  }

  void read_slot(std::int64_t slot) {
    switch (state(slot, "reads")) {
      case SlotState::kFull:
        return;
      case SlotState::kEmpty:
        fail("reads slot " + std::to_string(slot) + " before anything was written to it");
      case SlotState::kFreed:
        fail("reads slot " + std::to_string(slot) + " after it was freed");
    }
  }

  void read(const Arg& arg) {
    if (arg.kind == Arg::Kind::kSlot) read_slot(arg.integer);
    for (const Arg& item : arg.items) read(item);
  }

  const ProgramSpec& spec_;
  std::vector<SlotState> states_;
  std::string place_;
};

}  // namespace

std::string place_of(const ProgramSpec& spec, std::size_t instruction) {
  const Instruction& at = spec.instructions[instruction];
  return "program " + spec.name + ", instruction " + std::to_string(instruction) + " (" + at.op +
         (at.overload.empty() ? "" : "." + at.overload) + ")";
}

void verify_slots(const ProgramSpec& spec) { SlotCheck(spec).run(); }

}  // namespace elaswave::exec

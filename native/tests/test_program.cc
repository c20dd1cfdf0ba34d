// The rules about slots, each with the message that a broken one gives.
#include "check.h"
#include "exec/program/program.h"

using namespace elaswave::exec;

namespace {

Arg slot(int number) {
  Arg arg;
  arg.kind = Arg::Kind::kSlot;
  arg.integer = number;
  return arg;
}

Arg list(std::vector<Arg> items) {
  Arg arg;
  arg.kind = Arg::Kind::kList;
  arg.items = std::move(items);
  return arg;
}

// relu(0) -> 1, free 0; add(1, 1) -> 2, free 1; output 2.
ProgramSpec small() {
  ProgramSpec spec{"small", 1, 3, {2}, {}};
  spec.instructions.push_back({"aten::relu", "", {slot(0)}, {1}, {0}, false});
  spec.instructions.push_back({"aten::add", "Tensor", {slot(1), slot(1)}, {2}, {1}, false});
  return spec;
}

}  // namespace

TEST(a_sound_program_passes) { verify_slots(small()); }

TEST(reads_before_writes_are_refused) {
  ProgramSpec spec = small();
  spec.instructions[0].args[0] = slot(2);
  CHECK_THROWS(ExecError, "program small, instruction 0 (aten::relu): reads slot 2 before anything was written to it",
               verify_slots(spec));
}

TEST(reads_inside_lists_are_seen) {
  ProgramSpec spec = small();
  spec.instructions[1].args = {list({slot(1), list({slot(0)})})};
  CHECK_THROWS(ExecError, "instruction 1 (aten::add.Tensor): reads slot 0 after it was freed", verify_slots(spec));
}

TEST(outputs_must_be_there) {
  ProgramSpec spec = small();
  spec.outputs = {2, -1, 1};
  CHECK_THROWS(ExecError, "program small, outputs: reads slot 1 after it was freed", verify_slots(spec));
}

TEST(slots_have_a_range) {
  ProgramSpec spec = small();
  spec.instructions[1].outs = {3};
  CHECK_THROWS(ExecError, "writes slot 3, but there are only 3", verify_slots(spec));
  spec = small();
  spec.instructions[1].args[0] = slot(-2);
  CHECK_THROWS(ExecError, "reads slot -2", verify_slots(spec));
}

TEST(only_full_slots_are_freed) {
  ProgramSpec spec = small();
  spec.instructions[1].frees = {0};
  CHECK_THROWS(ExecError, "frees slot 0, which is empty", verify_slots(spec));
}

TEST(inputs_need_slots) {
  ProgramSpec spec = small();
  spec.num_inputs = 4;
  CHECK_THROWS(ExecError, "program small: 3 slots cannot hold 4 inputs", verify_slots(spec));
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

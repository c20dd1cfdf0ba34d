// Linking: from a program's data to operators that can be called. Private to exec/.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

#include "exec/program/program.h"
#include "exec/program/views.h"

namespace elaswave::exec {

// Operations on plain numbers, for sizes that depend on the batch.
enum class Builtin {
  kNone,
  kSize,
  kNumel,
  kIntAdd,
  kIntSub,
  kIntMul,
  kIntFloorDiv,
  kIntMod,
  kIntPow,
  kIntNeg,
  kIntMin,
  kIntMax,
  kIntEq,
  kIntNe,
  kIntLt,
  kIntLe,
  kIntGt,
  kIntGe,
  kFloatAdd,
  kFloatSub,
  kFloatMul,
  kFloatTrueDiv,
  kFloatPow,
  kFloatNeg,
  kFloatFromInt,
  kIntFromFloat,
};

enum class ListKind { kTensor, kOptionalTensor, kInt, kReal, kBool, kNumber };

// How one argument gets onto the stack.
struct Operand {
  enum class Kind {
    kConstant,  // a copy of `constant`
    kSlot,      // a copy of the slot
    kMove,      // the slot's content: this is its last use
    kReal,      // the slot as a float, whatever number it holds
    kList,      // a list made of `items`
  };
  Kind kind = Kind::kConstant;
  int slot = -1;
  ListKind list = ListKind::kTensor;
  c10::IValue constant;
  std::vector<Operand> items;
};

struct Linked {
  std::optional<c10::OperatorHandle> handle;  // none: a built-in
  Builtin builtin = Builtin::kNone;
  std::vector<Operand> operands;
  std::vector<int> outs;
  std::vector<int> frees;
  bool unpack = false;
  View view = View::kNone;  // tried before the operator
  std::vector<Size> sizes;  // of the view
};

// Looks up every operator and checks arguments and results against its schema. `spec` has passed verify_slots. Throws
// ExecError that names program, instruction, operator and argument.
std::vector<Linked> link(const ProgramSpec& spec);

}  // namespace elaswave::exec

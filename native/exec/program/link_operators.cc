#include "exec/program/link_operators.h"

#include <ATen/core/jit_type.h>
#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "exec/spec/names.h"

namespace elaswave::exec {
namespace {

using c10::TypeKind;

// What is known about a slot's content while linking.
enum class Content { kUnknown, kTensor, kInt, kReal, kBool, kList, kOther };

struct BuiltinInfo {
  Builtin builtin;
  std::size_t arguments;
  Content result;
};

const std::map<std::string_view, BuiltinInfo>& builtins() {
  using enum Builtin;
  static const std::map<std::string_view, BuiltinInfo> table = {
      {"int::size", {kSize, 2, Content::kInt}},
      {"int::numel", {kNumel, 1, Content::kInt}},
      {"int::add", {kIntAdd, 2, Content::kInt}},
      {"int::sub", {kIntSub, 2, Content::kInt}},
      {"int::mul", {kIntMul, 2, Content::kInt}},
      {"int::floordiv", {kIntFloorDiv, 2, Content::kInt}},
      {"int::mod", {kIntMod, 2, Content::kInt}},
      {"int::pow", {kIntPow, 2, Content::kInt}},
      {"int::neg", {kIntNeg, 1, Content::kInt}},
      {"int::min", {kIntMin, 2, Content::kInt}},
      {"int::max", {kIntMax, 2, Content::kInt}},
      {"int::eq", {kIntEq, 2, Content::kBool}},
      {"int::ne", {kIntNe, 2, Content::kBool}},
      {"int::lt", {kIntLt, 2, Content::kBool}},
      {"int::le", {kIntLe, 2, Content::kBool}},
      {"int::gt", {kIntGt, 2, Content::kBool}},
      {"int::ge", {kIntGe, 2, Content::kBool}},
      {"int::from_float", {kIntFromFloat, 1, Content::kInt}},
      {"float::add", {kFloatAdd, 2, Content::kReal}},
      {"float::sub", {kFloatSub, 2, Content::kReal}},
      {"float::mul", {kFloatMul, 2, Content::kReal}},
      {"float::truediv", {kFloatTrueDiv, 2, Content::kReal}},
      {"float::pow", {kFloatPow, 2, Content::kReal}},
      {"float::neg", {kFloatNeg, 1, Content::kReal}},
      {"float::from_int", {kFloatFromInt, 1, Content::kReal}},
  };
  return table;
}

Content content_of(const c10::Type& type) {
  switch (type.kind()) {
    case TypeKind::TensorType:
      return Content::kTensor;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return Content::kInt;
    case TypeKind::FloatType:
    case TypeKind::SymFloatType:
      return Content::kReal;
    case TypeKind::BoolType:
    case TypeKind::SymBoolType:
      return Content::kBool;
    case TypeKind::ListType:
      return Content::kList;
    default:
      return Content::kOther;
  }
}

const char* describe(const Arg& arg) {
  switch (arg.kind) {
    case Arg::Kind::kSlot:
      return "a slot";
    case Arg::Kind::kNone:
      return "None";
    case Arg::Kind::kBool:
      return "a bool";
    case Arg::Kind::kInt:
      return "an int";
    case Arg::Kind::kReal:
      return "a float";
    case Arg::Kind::kString:
      return "a string";
    case Arg::Kind::kDtype:
      return "a dtype";
    case Arg::Kind::kDevice:
      return "a device";
    case Arg::Kind::kLayout:
      return "a layout";
    case Arg::Kind::kMemoryFormat:
      return "a memory format";
    case Arg::Kind::kList:
      return "a list";
  }
  return "?";
}

const char* describe(Content content) {
  switch (content) {
    case Content::kTensor:
      return "a tensor";
    case Content::kInt:
      return "an int";
    case Content::kReal:
      return "a float";
    case Content::kBool:
      return "a bool";
    case Content::kList:
      return "a list";
    default:
      return "something else";
  }
}

class Linker {
 public:
  explicit Linker(const ProgramSpec& spec)
      : spec_(spec), contents_(static_cast<std::size_t>(spec.num_slots), Content::kUnknown) {}

  std::vector<Linked> run() {
    std::vector<Linked> list;
    list.reserve(spec_.instructions.size());
    for (std::size_t i = 0; i < spec_.instructions.size(); ++i) {
      place_ = place_of(spec_, i);
      try {
        list.push_back(link_one(spec_.instructions[i]));
      } catch (const UnknownName& error) {
        fail(error.what());
      }
    }
    return list;
  }

 private:
  [[noreturn]] void fail(const std::string& fact) const { throw ExecError(place_ + ": " + fact); }

  Linked link_one(const Instruction& instruction) {
    Linked linked;
    linked.outs = instruction.outs;
    linked.frees = instruction.frees;
    linked.unpack = instruction.unpack;
    const auto builtin = builtins().find(instruction.op);
    if (builtin != builtins().end()) {
      link_builtin(instruction, builtin->second, linked);
    } else {
      link_operator(instruction, linked);
    }
    move_last_uses(linked);
    return linked;
  }

  void link_builtin(const Instruction& instruction, const BuiltinInfo& info, Linked& linked) {
    if (instruction.args.size() != info.arguments) {
      fail("has " + std::to_string(instruction.args.size()) + " arguments, takes " + std::to_string(info.arguments));
    }
    if (instruction.outs.size() != 1) fail("returns one value");
    linked.builtin = info.builtin;
    for (const Arg& arg : instruction.args) linked.operands.push_back(number(arg));
    set_content(instruction.outs[0], info.result);
  }

  // A slot or a number as it is.
  Operand number(const Arg& arg) {
    Operand operand;
    switch (arg.kind) {
      case Arg::Kind::kSlot:
        return slot_operand(arg);
      case Arg::Kind::kInt:
        operand.constant = arg.integer;
        return operand;
      case Arg::Kind::kReal:
        operand.constant = arg.real;
        return operand;
      case Arg::Kind::kBool:
        operand.constant = arg.integer != 0;
        return operand;
      default:
        fail(std::string("takes slots and numbers, not ") + describe(arg));
    }
  }

  void link_operator(const Instruction& instruction, Linked& linked) {
    linked.handle = c10::Dispatcher::singleton().findSchema({instruction.op, instruction.overload});
    if (!linked.handle) fail("no such operator");
    const c10::FunctionSchema& schema = linked.handle->schema();
    const auto& parameters = schema.arguments();
    if (parameters.size() != instruction.args.size()) {
      fail("has " + std::to_string(instruction.args.size()) + " arguments, its schema takes " +
           std::to_string(parameters.size()));
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      linked.operands.push_back(convert(instruction.args[i], *parameters[i].type(), parameters[i]));
    }
    check_results(instruction, schema);
    linked.view = view_of(instruction, linked.sizes);
  }

  void check_results(const Instruction& instruction, const c10::FunctionSchema& schema) {
    const auto& results = schema.returns();
    if (instruction.unpack) {
      const bool list = results.size() == 1 && results[0].type()->kind() == TypeKind::ListType;
      if (!list) fail("is marked unpack, but does not return one list");
      for (const int slot : instruction.outs) set_content(slot, Content::kTensor);
      return;
    }
    if (results.size() != instruction.outs.size()) {
      fail("has " + std::to_string(instruction.outs.size()) + " outs, its schema returns " +
           std::to_string(results.size()) + " values");
    }
    for (std::size_t i = 0; i < results.size(); ++i) set_content(instruction.outs[i], content_of(*results[i].type()));
  }

  Operand convert(const Arg& arg, const c10::Type& type, const c10::Argument& parameter) {
    Operand operand;
    if (type.kind() == TypeKind::OptionalType) {
      if (arg.kind == Arg::Kind::kNone) return operand;  // the constant is None
      return convert(arg, *type.castRaw<c10::OptionalType>()->getElementType(), parameter);
    }
    if (arg.kind == Arg::Kind::kSlot) return slot_for(arg, type, parameter);
    if (type.kind() == TypeKind::ListType) return list_for(arg, type, parameter);
    if (!scalar_for(arg, type, operand.constant)) mismatch(arg, type, parameter);
    return operand;
  }

  [[noreturn]] void mismatch(const Arg& arg, const c10::Type& type, const c10::Argument& parameter) const {
    fail("argument " + parameter.name() + " is " + describe(arg) + ", its schema takes " + type.str());
  }

  Operand slot_operand(const Arg& arg) const {
    Operand operand;
    operand.kind = Operand::Kind::kSlot;
    operand.slot = static_cast<int>(arg.integer);
    return operand;
  }

  Operand slot_for(const Arg& arg, const c10::Type& type, const c10::Argument& parameter) const {
    Operand operand = slot_operand(arg);
    const Content have = contents_[static_cast<std::size_t>(arg.integer)];
    const Content want = content_of(type);
    if (want == Content::kReal && have != Content::kReal) operand.kind = Operand::Kind::kReal;
    const bool number = type.kind() == TypeKind::NumberType || want == Content::kReal;
    const bool is_number = have == Content::kInt || have == Content::kReal || have == Content::kBool;
    const bool fits = have == Content::kUnknown || have == want || (number && is_number);
    if (!fits) {
      fail("argument " + parameter.name() + " is slot " + std::to_string(arg.integer) + ", which holds " +
           describe(have) + "; its schema takes " + type.str());
    }
    return operand;
  }

  // Constants that are no lists. False if the kinds do not fit.
  bool scalar_for(const Arg& arg, const c10::Type& type, c10::IValue& constant) const {
    const Arg::Kind kind = arg.kind;
    switch (type.kind()) {
      case TypeKind::NumberType:
        if (kind == Arg::Kind::kBool) return constant = arg.integer != 0, true;
        if (kind == Arg::Kind::kReal) return constant = arg.real, true;
        return kind == Arg::Kind::kInt ? (constant = arg.integer, true) : false;
      case TypeKind::FloatType:
      case TypeKind::SymFloatType:
        if (kind == Arg::Kind::kInt) return constant = static_cast<double>(arg.integer), true;
        return kind == Arg::Kind::kReal ? (constant = arg.real, true) : false;
      case TypeKind::BoolType:
      case TypeKind::SymBoolType:
        return kind == Arg::Kind::kBool ? (constant = arg.integer != 0, true) : false;
      case TypeKind::StringType:
        return kind == Arg::Kind::kString ? (constant = arg.text, true) : false;
      case TypeKind::DeviceObjType:
        return kind == Arg::Kind::kDevice ? (constant = device_from(arg.text), true) : false;
      case TypeKind::IntType:
      case TypeKind::SymIntType:
      case TypeKind::ScalarTypeType:
      case TypeKind::LayoutType:
      case TypeKind::MemoryFormatType:
        return enumeration_for(arg, constant);
      default:
        return false;
    }
  }

  // Schemas hold dtypes, layouts and memory formats as integers.
  bool enumeration_for(const Arg& arg, c10::IValue& constant) const {
    switch (arg.kind) {
      case Arg::Kind::kInt:
        constant = arg.integer;
        return true;
      case Arg::Kind::kDtype:
        constant = static_cast<std::int64_t>(dtype_from(arg.text));
        return true;
      case Arg::Kind::kLayout:
        constant = static_cast<std::int64_t>(layout_from(arg.text));
        return true;
      case Arg::Kind::kMemoryFormat:
        constant = static_cast<std::int64_t>(memory_format_from(arg.text));
        return true;
      default:
        return false;
    }
  }

  Operand list_for(const Arg& arg, const c10::Type& type, const c10::Argument& parameter) {
    const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
    Operand operand;
    operand.kind = Operand::Kind::kList;
    operand.list = list_kind(element, parameter);
    if (arg.kind == Arg::Kind::kList) {
      for (const Arg& item : arg.items) operand.items.push_back(convert(item, element, parameter));
    } else if (parameter.N()) {  // `int[2] stride=1`: one number stands for all
      operand.items.assign(static_cast<std::size_t>(*parameter.N()), convert(arg, element, parameter));
    } else {
      mismatch(arg, type, parameter);
    }
    const auto constant = [](const Operand& item) { return item.kind == Operand::Kind::kConstant; };
    if (std::all_of(operand.items.begin(), operand.items.end(), constant)) fold_constant(operand);
    return operand;
  }

  ListKind list_kind(const c10::Type& element, const c10::Argument& parameter) const {
    switch (element.kind()) {
      case TypeKind::TensorType:
        return ListKind::kTensor;
      case TypeKind::OptionalType:
        return ListKind::kOptionalTensor;
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        return ListKind::kInt;
      case TypeKind::FloatType:
        return ListKind::kReal;
      case TypeKind::BoolType:
        return ListKind::kBool;
      case TypeKind::NumberType:
        return ListKind::kNumber;
      default:
        fail("argument " + parameter.name() + " is a list of " + element.str() + ", which is not supported");
    }
  }

  // Lists of plain numbers are made once. Operators do not write to their list arguments.
  static void fold_constant(Operand& operand) {
    const auto collect = [&operand](auto list, auto get) {
      for (const Operand& item : operand.items) list.push_back(get(item.constant));
      operand.constant = std::move(list);
      operand.kind = Operand::Kind::kConstant;
    };
    switch (operand.list) {
      case ListKind::kInt:
        return collect(c10::List<std::int64_t>(), [](const auto& v) { return v.toInt(); });
      case ListKind::kReal:
        return collect(c10::List<double>(), [](const auto& v) { return v.toDouble(); });
      case ListKind::kBool:
        return collect(c10::List<bool>(), [](const auto& v) { return v.toBool(); });
      default:
        return;
    }
  }

  void set_content(int slot, Content content) {
    if (slot != -1) contents_[static_cast<std::size_t>(slot)] = content;
  }

  // A slot that dies here and is read once goes to the operator without touching its reference count.
  static void move_last_uses(Linked& linked) {
    for (const int slot : linked.frees) {
      std::vector<Operand*> uses;
      for (Operand& operand : linked.operands) find_uses(operand, slot, uses);
      if (uses.size() == 1 && uses[0]->kind == Operand::Kind::kSlot) uses[0]->kind = Operand::Kind::kMove;
    }
  }

  static void find_uses(Operand& operand, int slot, std::vector<Operand*>& uses) {
    if (operand.slot == slot) uses.push_back(&operand);
    for (Operand& item : operand.items) find_uses(item, slot, uses);
  }

  const ProgramSpec& spec_;
  std::vector<Content> contents_;
  std::string place_;
};

}  // namespace

std::vector<Linked> link(const ProgramSpec& spec) { return Linker(spec).run(); }

}  // namespace elaswave::exec

#include "exec/program/unit_program.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <exception>

#include "exec/program/below_autograd_guard.h"

namespace elaswave::exec {
namespace {

std::int64_t int_of(const c10::IValue& value) {
  return value.isBool() ? static_cast<std::int64_t>(value.toBool()) : value.toInt();
}

double real_of(const c10::IValue& value) {
  return value.isDouble() ? value.toDouble() : static_cast<double>(int_of(value));
}

// Python's rules: rounds towards minus infinity, the remainder has the divisor's sign.
std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  TORCH_CHECK(b != 0, "division by zero");
  const std::int64_t quotient = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}

std::int64_t int_pow(std::int64_t base, std::int64_t exponent) {
  TORCH_CHECK(exponent >= 0, "a power of sizes with an exponent below zero");
  std::int64_t power = 1;
  for (std::int64_t i = 0; i < exponent; ++i) power *= base;
  return power;
}

c10::IValue compute_int(Builtin builtin, const std::vector<c10::IValue>& args) {
  const std::int64_t a = int_of(args[0]);
  const std::int64_t b = args.size() > 1 ? int_of(args[1]) : 0;
  switch (builtin) {
    case Builtin::kIntAdd:
      return a + b;
    case Builtin::kIntSub:
      return a - b;
    case Builtin::kIntMul:
      return a * b;
    case Builtin::kIntFloorDiv:
      return floor_div(a, b);
    case Builtin::kIntMod:
      return a - b * floor_div(a, b);
    case Builtin::kIntPow:
      return int_pow(a, b);
    case Builtin::kIntNeg:
      return -a;
    case Builtin::kIntMin:
      return std::min(a, b);
    case Builtin::kIntMax:
      return std::max(a, b);
    case Builtin::kIntEq:
      return a == b;
    case Builtin::kIntNe:
      return a != b;
    case Builtin::kIntLt:
      return a < b;
    case Builtin::kIntLe:
      return a <= b;
    case Builtin::kIntGt:
      return a > b;
    default:
      return a >= b;  // kIntGe
  }
}

c10::IValue compute(Builtin builtin, const std::vector<c10::IValue>& args) {
  switch (builtin) {
    case Builtin::kSize:
      return args[0].toTensor().size(int_of(args[1]));
    case Builtin::kNumel:
      return args[0].toTensor().numel();
    case Builtin::kFloatAdd:
      return real_of(args[0]) + real_of(args[1]);
    case Builtin::kFloatSub:
      return real_of(args[0]) - real_of(args[1]);
    case Builtin::kFloatMul:
      return real_of(args[0]) * real_of(args[1]);
    case Builtin::kFloatTrueDiv:
      return real_of(args[0]) / real_of(args[1]);
    case Builtin::kFloatPow:
      return std::pow(real_of(args[0]), real_of(args[1]));
    case Builtin::kFloatNeg:
      return -real_of(args[0]);
    case Builtin::kFloatFromInt:
      return real_of(args[0]);
    case Builtin::kIntFromFloat:
      return static_cast<std::int64_t>(real_of(args[0]));
    default:
      return compute_int(builtin, args);
  }
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

UnitProgram::UnitProgram(ProgramSpec spec) : spec_(std::move(spec)) {
  verify_slots(spec_);
  linked_ = link(spec_);
  slots_.resize(static_cast<std::size_t>(spec_.num_slots));
}

void UnitProgram::clear() {
  stack_.clear();
  slots_.assign(slots_.size(), c10::IValue());
}

std::vector<c10::IValue> UnitProgram::run(std::vector<c10::IValue> inputs, const std::function<void()>& check) {
  if (inputs.size() != static_cast<std::size_t>(spec_.num_inputs)) {
    throw ExecError("program " + spec_.name + ": takes " + std::to_string(spec_.num_inputs) + " inputs, got " +
                    std::to_string(inputs.size()));
  }
  const BelowAutogradGuard plain;
  const auto cleared = c10::make_scope_exit([this] { clear(); });
  std::move(inputs.begin(), inputs.end(), slots_.begin());
  for (std::size_t at = 0; at < linked_.size(); ++at) {
    if (check) check();
    try {
      execute(linked_[at]);
    } catch (const c10::Error& error) {
      throw ExecError(place_of(spec_, at) + ": " + first_line(error.what_without_backtrace()));
    } catch (const std::exception& error) {
      throw ExecError(place_of(spec_, at) + ": " + first_line(error.what()));
    }
  }
  std::vector<c10::IValue> outputs;
  outputs.reserve(spec_.outputs.size());
  for (const int slot : spec_.outputs) {
    outputs.push_back(slot == -1 ? c10::IValue() : slots_[static_cast<std::size_t>(slot)]);
  }
  return outputs;
}

void UnitProgram::execute(const Linked& linked) {
  const bool viewed = linked.view != View::kNone && view(linked);
  if (!viewed) call(linked);
  if (linked.unpack && !viewed) {
    const c10::List<at::Tensor> tensors = stack_.back().toTensorList();
    TORCH_CHECK(tensors.size() == linked.outs.size(), "returned ", tensors.size(), " tensors, the program keeps ",
                linked.outs.size());
    for (std::size_t i = 0; i < linked.outs.size(); ++i) {
      if (linked.outs[i] != -1) slots_[static_cast<std::size_t>(linked.outs[i])] = tensors.get(i);
    }
  } else {
    TORCH_CHECK(stack_.size() == linked.outs.size(), "returned ", stack_.size(), linked.unpack ? " tensors" : " values",
                ", the program keeps ", linked.outs.size());
    for (std::size_t i = 0; i < linked.outs.size(); ++i) {
      if (linked.outs[i] != -1) slots_[static_cast<std::size_t>(linked.outs[i])] = std::move(stack_[i]);
    }
  }
  stack_.clear();
  for (const int slot : linked.frees) slots_[static_cast<std::size_t>(slot)] = c10::IValue();
}

// Whether the results are on the stack already.
bool UnitProgram::view(const Linked& linked) {
  sizes_.clear();
  for (const Size& size : linked.sizes) {
    sizes_.push_back(size.slot < 0 ? size.value : int_of(slots_[static_cast<std::size_t>(size.slot)]));
  }
  const c10::IValue& base = slots_[static_cast<std::size_t>(linked.operands[0].slot)];
  return make_view(linked.view, base.toTensor(), sizes_, stack_);
}

void UnitProgram::call(const Linked& linked) {
  for (const Operand& operand : linked.operands) push(operand);
  if (linked.handle) {
    linked.handle->callBoxed(&stack_);
    return;
  }
  c10::IValue result = compute(linked.builtin, stack_);
  stack_.clear();
  stack_.push_back(std::move(result));
}

void UnitProgram::push(const Operand& operand) {
  switch (operand.kind) {
    case Operand::Kind::kConstant:
      stack_.push_back(operand.constant);
      return;
    case Operand::Kind::kSlot:
      stack_.push_back(slots_[static_cast<std::size_t>(operand.slot)]);
      return;
    case Operand::Kind::kMove:
      stack_.push_back(std::move(slots_[static_cast<std::size_t>(operand.slot)]));
      return;
    case Operand::Kind::kReal: {
      const c10::IValue& value = slots_[static_cast<std::size_t>(operand.slot)];
      stack_.push_back(value.isInt() || value.isBool() ? c10::IValue(real_of(value)) : value);
      return;
    }
    case Operand::Kind::kList:
      break;
  }
  // The items go through the stack above what is there already, then are folded into one list.
  const std::size_t base = stack_.size();
  for (const Operand& item : operand.items) push(item);
  const auto collect = [&](auto list, auto get) {
    list.reserve(operand.items.size());
    for (std::size_t i = base; i < stack_.size(); ++i) list.push_back(get(stack_[i]));
    stack_.resize(base);
    stack_.emplace_back(std::move(list));
  };
  switch (operand.list) {
    case ListKind::kTensor:
      return collect(c10::List<at::Tensor>(), [](const auto& v) { return v.toTensor(); });
    case ListKind::kOptionalTensor:
      return collect(c10::List<std::optional<at::Tensor>>(),
                     [](const auto& v) { return v.isNone() ? std::nullopt : std::make_optional(v.toTensor()); });
    case ListKind::kInt:
      return collect(c10::List<std::int64_t>(), int_of);
    case ListKind::kReal:
      return collect(c10::List<double>(), real_of);
    case ListKind::kBool:
      return collect(c10::List<bool>(), [](const auto& v) { return v.toBool(); });
    case ListKind::kNumber:
      return collect(c10::List<at::Scalar>(), [](const auto& v) { return v.toScalar(); });
  }
}

}  // namespace elaswave::exec

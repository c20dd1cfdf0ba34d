#include "exec/program/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "exec/program/compiled.h"
#include "kernels/versions.h"

namespace elaswave::exec {

// Not in an anonymous namespace: compilers refuse versions of local functions.
ELASWAVE_VERSIONS
void run_operations(const Elementwise::Operation* operations, std::size_t number, float* const* registers,
                    std::int64_t count) {
  using Code = Elementwise::Code;
  for (std::size_t at = 0; at < number; ++at) {
    const Elementwise::Operation& operation = operations[at];
    const float* a = registers[operation.a];
    const float* b = registers[operation.b];
    const float* c = registers[operation.c];
    float* to = registers[operation.to];
    switch (operation.code) {
      case Code::kAdd:
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) to[i] = a[i] + b[i];
        break;
      case Code::kSub:
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) to[i] = a[i] - b[i];
        break;
      case Code::kMul:
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) to[i] = a[i] * b[i];
        break;
      case Code::kDiv:
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) to[i] = a[i] / b[i];
        break;
      case Code::kSqrt:
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) to[i] = std::sqrt(a[i]);
        break;
      case Code::kFma:
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) to[i] = std::fma(a[i], b[i], c[i]);
        break;
    }
  }
}

class Elementwise::Builder {
 public:
  Builder(const ProgramSpec& spec, std::size_t arrays) : spec_(spec) {
    made_.arrays_ = arrays;
    const auto inputs = static_cast<std::size_t>(spec.num_inputs);
    for (std::size_t slot = 0; slot < inputs; ++slot) registers_[static_cast<std::int64_t>(slot)] = slot;
    made_.own_.resize(inputs - arrays);
  }

  std::optional<Elementwise> build() {
    for (const Instruction& instruction : spec_.instructions) {
      if (instruction.unpack || instruction.outs.size() != 1) return std::nullopt;
      const std::optional<std::size_t> result = compute(instruction);
      if (!result || !known_) return std::nullopt;
      registers_[instruction.outs[0]] = *result;
    }
    for (const int slot : spec_.outputs) {
      // An input that is an output would have to be there still when another output has been written over it.
      if (slot < spec_.num_inputs) return std::nullopt;
      made_.outputs_.push_back(registers_.at(slot));
    }
    made_.compiled_ = compiled_form(made_.arrays_, made_.operations_, made_.outputs_);
    made_.set_numbers({});
    return std::move(made_);
  }

 private:
  using Args = std::vector<Arg>;

  std::optional<std::size_t> compute(const Instruction& instruction) {
    const Args& args = instruction.args;
    const std::string& form = instruction.overload;
    const bool binary = form == "Tensor" || form == "Scalar";
    if (instruction.op == "aten::add" && binary) return scaled_sum(Code::kAdd, args, 1.0);
    if (instruction.op == "aten::sub" && binary) return scaled_sum(Code::kSub, args, -1.0);
    if (instruction.op == "aten::mul" && binary) return emit(Code::kMul, read(args[0]), read(args[1]));
    if (instruction.op == "aten::div" && binary) return emit(Code::kDiv, read(args[0]), read(args[1]));
    if (instruction.op == "aten::sqrt") return emit(Code::kSqrt, read(args[0]));
    if (instruction.op == "aten::lerp" && form == "Scalar") return lerp(args);
    if (instruction.op == "aten::addcmul")
      return emit(Code::kFma, scaled(args[1], args[3]), read(args[2]), read(args[0]));
    if (instruction.op == "aten::addcdiv") {
      return emit(Code::kAdd, read(args[0]), emit(Code::kDiv, scaled(args[1], args[3]), read(args[2])));
    }
    return std::nullopt;
  }

  // a + factor * b, or a - factor * b.
  std::size_t scaled_sum(Code code, const Args& args, double sign) {
    const double factor = number(args[2]);
    if (factor == 1.0) return emit(code, read(args[0]), read(args[1]));
    return emit(Code::kFma, read(args[1]), constant(sign * factor), read(args[0]));
  }

  // From the nearer end.
  std::size_t lerp(const Args& args) {
    const auto weight = static_cast<float>(number(args[2]));
    const std::size_t from = read(args[0]), to = read(args[1]), way = emit(Code::kSub, to, from);
    const bool near = std::abs(weight) < 0.5F;
    return emit(Code::kFma, constant(near ? weight : weight - 1.0F), way, near ? from : to);
  }

  std::size_t scaled(const Arg& arg, const Arg& factor) {
    return emit(Code::kMul, constant(number(factor)), read(arg));
  }

  std::size_t emit(Code code, std::size_t a, std::size_t b = 0, std::size_t c = 0) {
    const std::size_t to = fresh();
    made_.operations_.push_back({code, to, a, b, c});
    return to;
  }

  std::size_t read(const Arg& arg) {
    return arg.kind == Arg::Kind::kSlot ? registers_.at(arg.integer) : constant(number(arg));
  }

  double number(const Arg& arg) {
    if (arg.kind == Arg::Kind::kInt) return static_cast<double>(arg.integer);
    known_ = known_ && arg.kind == Arg::Kind::kReal;
    return arg.real;
  }

  std::size_t constant(double value) {
    const std::size_t to = fresh();
    std::fill_n(made_.own_.back().lanes, kPiece, static_cast<float>(value));
    return to;
  }

  std::size_t fresh() {
    made_.own_.emplace_back();
    return made_.arrays_ + made_.own_.size() - 1;
  }

  const ProgramSpec& spec_;
  Elementwise made_;
  std::map<std::int64_t, std::size_t> registers_;  // of slots
  bool known_ = true;
};

std::optional<Elementwise> Elementwise::of(const ProgramSpec& spec, std::size_t arrays) {
  if (arrays > static_cast<std::size_t>(spec.num_inputs)) return std::nullopt;
  return Builder(spec, arrays).build();
}

void Elementwise::set_numbers(std::span<const float> numbers) {
  for (std::size_t i = 0; i < numbers.size(); ++i) std::fill_n(own_[i].lanes, kPiece, numbers[i]);
  numbers_.clear();
  for (const Register& each : own_) numbers_.push_back(each.lanes[0]);
}

void Elementwise::run(std::span<const float* const> inputs, std::span<float* const> outputs, std::int64_t first,
                      std::int64_t last) {
  if (compiled_ != nullptr) return compiled_(inputs.data(), numbers_.data(), outputs.data(), first, last);
  std::vector<float*> registers(arrays_);
  for (Register& each : own_) registers.push_back(each.lanes);
  for (std::int64_t at = first; at < last; at += kPiece) {
    const std::int64_t count = std::min(kPiece, last - at);
    // No operation writes to an input.
    for (std::size_t i = 0; i < arrays_; ++i) registers[i] = const_cast<float*>(inputs[i] + at);
    run_operations(operations_.data(), operations_.size(), registers.data(), count);
    for (std::size_t i = 0; i < outputs.size(); ++i) std::copy_n(registers[outputs_[i]], count, outputs[i] + at);
  }
}

}  // namespace elaswave::exec

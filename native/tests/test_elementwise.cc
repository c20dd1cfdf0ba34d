// Elementwise programs: the arithmetic of each operator, in bits, whatever an element's place; what is not known.
#include "exec/program/elementwise.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"

using namespace elaswave::exec;

namespace {

constexpr std::size_t kCount = 1037;  // odd, and more than some pieces

Arg slot(int number) {
  Arg arg;
  arg.kind = Arg::Kind::kSlot;
  arg.integer = number;
  return arg;
}

Arg real(double value) {
  Arg arg;
  arg.kind = Arg::Kind::kReal;
  arg.real = value;
  return arg;
}

Arg integer(std::int64_t value) {
  Arg arg;
  arg.kind = Arg::Kind::kInt;
  arg.integer = value;
  return arg;
}

// Inputs: arrays 0, 1, 2 and the number 3. Output: slot 4, what the operator gives.
ProgramSpec of_one(const std::string& op, const std::string& overload, std::vector<Arg> args) {
  return {"one", 4, 5, {4}, {{op, overload, std::move(args), {4}, {}, false}}};
}

// Values of both signs and many magnitudes.
std::vector<float> values(std::uint32_t seed) {
  std::vector<float> made;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    const std::uint32_t word = (i + seed) * 0x9e3779b1U;
    made.push_back(std::ldexp(static_cast<float>(word % 100003U) - 50000.5F, static_cast<int>(word >> 28) - 24));
  }
  return made;
}

const std::vector<float> kA = values(1), kB = values(2), kC = values(3);
constexpr float kNumber = 0.3137F;

std::vector<float> run(const ProgramSpec& spec) {
  Elementwise program = *Elementwise::of(spec, 3);
  program.set_numbers(std::vector<float>{kNumber});
  const float* inputs[] = {kA.data(), kB.data(), kC.data()};
  std::vector<float> result(kCount);
  float* outputs[] = {result.data()};
  program.run(inputs, outputs, 0, kCount);
  return result;
}

template <typename Expected>
void check(const std::string& op, const std::string& overload, std::vector<Arg> args, Expected expected) {
  const std::vector<float> got = run(of_one(op, overload, std::move(args)));
  for (std::size_t i = 0; i < kCount; ++i) {
    const float wanted = expected(kA[i], kB[i], kC[i]);
    CHECK_EQUAL(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(wanted));
  }
}

}  // namespace

TEST(sums_and_products) {
  check("aten::add", "Tensor", {slot(0), slot(1), integer(1)}, [](float a, float b, float) { return a + b; });
  check("aten::sub", "Tensor", {slot(0), slot(1), integer(1)}, [](float a, float b, float) { return a - b; });
  check("aten::add", "Scalar", {slot(0), real(1e-8), integer(1)}, [](float a, float, float) { return a + 1e-8F; });
  check("aten::mul", "Tensor", {slot(3), slot(1)}, [](float, float b, float) { return kNumber * b; });
  check("aten::mul", "Scalar", {slot(0), real(0.9)}, [](float a, float, float) { return a * 0.9F; });
  check("aten::div", "Tensor", {slot(0), slot(1)}, [](float a, float b, float) { return a / b; });
}

TEST(scaled_sums_are_fused) {
  const auto add = [](float a, float b, float) { return std::fma(b, 0.3F, a); };
  const auto sub = [](float a, float b, float) { return std::fma(b, -0.3F, a); };
  check("aten::add", "Tensor", {slot(0), slot(1), real(0.3)}, add);
  check("aten::sub", "Tensor", {slot(0), slot(1), real(0.3)}, sub);
}

TEST(lerp_starts_from_the_nearer_end) {
  const auto near = [](float a, float b, float) { return std::fma(0.1F, b - a, a); };
  const auto far = [](float a, float b, float) { return std::fma(0.9F - 1.0F, b - a, b); };
  check("aten::lerp", "Scalar", {slot(0), slot(1), real(0.1)}, near);
  check("aten::lerp", "Scalar", {slot(0), slot(1), real(0.9)}, far);
}

TEST(products_and_quotients_are_added) {
  const auto mul = [](float a, float b, float c) { return std::fma(0.001F * b, c, a); };
  const auto div = [](float a, float b, float c) { return a + (0.001F * b) / c; };
  check("aten::addcmul", "", {slot(0), slot(1), slot(2), real(0.001)}, mul);
  check("aten::addcdiv", "", {slot(0), slot(1), slot(2), real(0.001)}, div);
}

TEST(square_roots_are_rounded_as_ieee_says) {
  ProgramSpec spec = of_one("aten::mul", "Tensor", {slot(0), slot(0)});
  spec.instructions.push_back({"aten::sqrt", "", {slot(4)}, {5}, {}, false});
  spec.outputs = {5};
  spec.num_slots = 6;
  const std::vector<float> got = run(spec);
  for (std::size_t i = 0; i < kCount; ++i) CHECK_EQUAL(got[i], std::sqrt(kA[i] * kA[i]));
}

TEST(a_part_of_an_array_in_its_place) {
  const ProgramSpec spec = of_one("aten::lerp", "Scalar", {slot(0), slot(1), real(0.1)});
  const std::vector<float> whole = run(spec);
  Elementwise program = *Elementwise::of(spec, 3);
  std::vector<float> array = kA;
  const float* inputs[] = {array.data(), kB.data(), kC.data()};
  float* outputs[] = {array.data()};
  program.run(inputs, outputs, 3, 520);
  for (std::size_t i = 0; i < kCount; ++i) CHECK_EQUAL(array[i], i >= 3 && i < 520 ? whole[i] : kA[i]);
}

// As elaswave_fx/runtime/optimizer.py has it: parameter, gradient, moments; then scale, keep, step size, root.
ProgramSpec adamw() {
  const auto of = [](const std::string& op, const std::string& form, std::vector<Arg> args, int out) {
    return Instruction{"aten::" + op, form, std::move(args), {out}, {}, false};
  };
  return {"update",
          8,
          19,
          {18, 9, 11},
          {of("mul", "Tensor", {slot(1), slot(4)}, 8), of("lerp", "Scalar", {slot(2), slot(8), real(0.1)}, 9),
           of("mul", "Tensor", {slot(3), real(0.999)}, 10),
           of("addcmul", "", {slot(10), slot(8), slot(8), real(0.001)}, 11), of("sqrt", "", {slot(11)}, 12),
           of("div", "Tensor", {slot(12), slot(7)}, 13), of("add", "Tensor", {slot(13), real(1e-8), integer(1)}, 14),
           of("mul", "Tensor", {slot(0), slot(5)}, 15), of("div", "Tensor", {slot(9), slot(14)}, 16),
           of("mul", "Tensor", {slot(16), slot(6)}, 17), of("sub", "Tensor", {slot(15), slot(17), integer(1)}, 18)}};
}

TEST(a_compiled_program_gives_the_bits_of_its_operations) {
  ProgramSpec spec = adamw();
  Elementwise compiled = *Elementwise::of(spec, 4);
  spec.num_slots = 20;
  spec.instructions.push_back({"aten::sqrt", "", {slot(11)}, {19}, {}, false});  // nobody wants it
  Elementwise interpreted = *Elementwise::of(spec, 4);
  CHECK_EQUAL(compiled.compiled() && !interpreted.compiled(), true);
  std::vector<float> second(kCount);
  for (std::size_t i = 0; i < kCount; ++i) second[i] = std::abs(kB[i]);
  const auto update = [&second](Elementwise& program) {
    std::vector<float> arrays[] = {kA, kB, kC, second};
    const float* inputs[] = {arrays[0].data(), arrays[1].data(), arrays[2].data(), arrays[3].data()};
    float* outputs[] = {arrays[0].data(), arrays[2].data(), arrays[3].data()};
    for (const float step : {1.0F, 0.5F}) {
      program.set_numbers(std::vector<float>{0.25F, 0.999F, 1e-3F, step});
      program.run(inputs, outputs, 0, 300);
      program.run(inputs, outputs, 300, kCount);
    }
    return std::vector<std::vector<float>>(std::begin(arrays), std::end(arrays));
  };
  const auto got = update(compiled), wanted = update(interpreted);
  for (std::size_t array = 0; array < got.size(); ++array) {
    for (std::size_t i = 0; i < kCount; ++i) {
      CHECK_EQUAL(std::bit_cast<std::uint32_t>(got[array][i]), std::bit_cast<std::uint32_t>(wanted[array][i]));
    }
  }
}

TEST(what_is_not_known_is_left_to_others) {
  const auto known = [](const ProgramSpec& spec) { return Elementwise::of(spec, 3).has_value(); };
  CHECK_EQUAL(known(of_one("aten::sqrt", "", {slot(0)})), true);
  CHECK_EQUAL(known(of_one("aten::sign", "", {slot(0)})), false);
  CHECK_EQUAL(known(of_one("aten::div", "Tensor_mode", {slot(0), slot(1), Arg()})), false);
  CHECK_EQUAL(known(of_one("aten::lerp", "Tensor", {slot(0), slot(1), slot(2)})), false);
  CHECK_EQUAL(known(of_one("aten::add", "Tensor", {slot(0), slot(1), slot(3)})), false);
  ProgramSpec swaps = of_one("aten::sqrt", "", {slot(0)});
  swaps.outputs = {4, 0};
  CHECK_EQUAL(known(swaps), false);
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

#include "philox.h"

#include <cmath>
#include <numbers>

#include "versions.h"

namespace elaswave::kernels {
namespace {

constexpr std::uint32_t kMultiplier0 = 0xD2511F53;
constexpr std::uint32_t kMultiplier1 = 0xCD9E8D57;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9;
constexpr std::uint32_t kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

// Blocks computed side by side: the loops over lanes become vector instructions, several in flight at once, since each
// round waits for the one before.
constexpr std::size_t kLanes = 64;

struct Lanes {
  std::uint32_t x0[kLanes], x1[kLanes], x2[kLanes], x3[kLanes];
};

std::uint32_t low(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
std::uint32_t high(std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); }

// The halves of a product are written apart, which compilers know how to do with vectors.
ELASWAVE_VERSIONS
void rounds(Lanes& lanes, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::uint32_t a = lanes.x0[i], b = lanes.x2[i];
      lanes.x0[i] = high(std::uint64_t{kMultiplier1} * b) ^ lanes.x1[i] ^ key0;
      lanes.x2[i] = high(std::uint64_t{kMultiplier0} * a) ^ lanes.x3[i] ^ key1;
      lanes.x1[i] = kMultiplier1 * b;
      lanes.x3[i] = kMultiplier0 * a;
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

void fill_counters(Lanes& lanes, std::uint64_t first_block, std::uint32_t op) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::uint64_t block = first_block + i;
    lanes.x0[i] = low(block);
    lanes.x1[i] = high(block);
    lanes.x2[i] = op;
    lanes.x3[i] = kElementStream;
  }
}

}  // namespace

Words philox4x32(Words counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kMultiplier0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{kMultiplier1} * counter[2];
    counter = {high(product1) ^ counter[1] ^ key[0], low(product1), high(product0) ^ counter[3] ^ key[1],
               low(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

std::uint64_t sample_key(std::uint64_t seed, std::uint64_t position, std::uint32_t unit) {
  const Words words = philox4x32({low(position), high(position), unit, kSampleKeyStream}, {low(seed), high(seed)});
  return std::uint64_t{words[1]} << 32 | words[0];
}

void element_words(std::uint64_t key, std::uint32_t op, std::uint64_t first_block, std::size_t blocks,
                   std::uint32_t* out) {
  Lanes lanes;
  for (std::size_t done = 0; done < blocks; done += kLanes) {
    fill_counters(lanes, first_block + done, op);
    rounds(lanes, low(key), high(key));
    const std::size_t count = blocks - done < kLanes ? blocks - done : kLanes;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t* block = out + 4 * (done + i);
      block[0] = lanes.x0[i];
      block[1] = lanes.x1[i];
      block[2] = lanes.x2[i];
      block[3] = lanes.x3[i];
    }
  }
}

std::array<double, 2> normal_from(std::uint32_t even, std::uint32_t odd) {
  // 1 - u is in (0, 1], so that the logarithm is finite.
  const double radius = std::sqrt(-2.0 * std::log(1.0 - static_cast<double>(uniform_from(even))));
  const double angle = 2.0 * std::numbers::pi * static_cast<double>(uniform_from(odd));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

std::uint32_t keep_threshold(double p) {
  const double scaled = std::ceil(p * 0x1.0p24);
  return scaled <= 0.0 ? 0U : static_cast<std::uint32_t>(scaled);
}

}  // namespace elaswave::kernels

// Philox 4x32-10: keyed random words as a pure function of (key, counter). No torch in here.
//
// Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants and vectors are those
// of the Random123 library. Two streams of the project are told apart by the last counter word:
//
//   sample key   counter (position lo, position hi, unit, kSampleKeyStream), key (seed lo, seed hi) -> 64 low bits
//   element word counter (e/4 lo, e/4 hi, op, kElementStream),               key = the sample's key -> word e % 4
//
// Everything here may be called from any thread; nothing allocates or throws.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace elaswave::kernels {

inline constexpr std::uint32_t kSampleKeyStream = 0x454c5731;
inline constexpr std::uint32_t kElementStream = 0x454c5732;

using Words = std::array<std::uint32_t, 4>;

// One block of the ten-round generator.
Words philox4x32(Words counter, std::array<std::uint32_t, 2> key);

// The key of the sample at global `position` (of the step, for draws without a sample axis) in `unit`.
std::uint64_t sample_key(std::uint64_t seed, std::uint64_t position, std::uint32_t unit);

// Words [4 * first_block, 4 * (first_block + blocks)) of the element stream of (key, op). `out` holds 4 * blocks.
void element_words(std::uint64_t key, std::uint32_t op, std::uint64_t first_block, std::size_t blocks,
                   std::uint32_t* out);

// The top 24 bits of a word as a number in [0, 1); exact in single precision.
inline float uniform_from(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1.0p-24F; }

// Box-Muller on two words: the pair of standard normal numbers of elements 2j and 2j+1, in double precision.
std::array<double, 2> normal_from(std::uint32_t even, std::uint32_t odd);

// A uniform number u of `uniform_from` satisfies u >= p exactly when (word >> 8) >= keep_threshold(p).
std::uint32_t keep_threshold(double p);

}  // namespace elaswave::kernels

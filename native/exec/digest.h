// Sums over 32-bit words that tell whether two copies hold the same bytes. No torch in here.
//
//   digest = (sum of word[i] * a(i), sum of word[i] * b(i)) mod 2^64, a(i) and b(i) odd 32-bit numbers made of a salt
//   and i
//
// A single wrong word is always found (an odd factor cannot make its difference vanish), several with all but
// certainty. Sums of parts add up to the sum of the whole, in any order: a digest does not know how state is cut or who
// keeps it. Not against forgery.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elaswave::exec {

struct Digest {
  std::uint64_t lo = 0, hi = 0;
  bool operator==(const Digest&) const = default;
  Digest& operator+=(const Digest& other) {
    lo += other.lo;
    hi += other.hi;
    return *this;
  }
};

// Of `count` words, the first of which is number `first` of what `salt` stands for.
inline Digest digest_words(const void* data, std::size_t count, std::uint64_t first, std::uint32_t salt) {
  const auto* words = static_cast<const std::uint32_t*>(data);
  // Odd constants of splitmix64 and xxHash, cut to 32 bits; steps by addition, so that compilers use vectors.
  constexpr std::uint32_t kStepA = 0x9e3779b1, kStepB = 0x85ebca77;
  std::uint32_t a = static_cast<std::uint32_t>(first) * kStepA + salt * 0xc2b2ae3d;
  std::uint32_t b =
      static_cast<std::uint32_t>(first >> 32) * 0x27d4eb2f + static_cast<std::uint32_t>(first) * kStepB + salt;
  Digest digest;
  for (std::size_t i = 0; i < count; ++i) {
    digest.lo += std::uint64_t{words[i]} * ((a ^ a >> 15) | 1);
    digest.hi += std::uint64_t{words[i]} * ((b ^ b >> 13) | 1);
    a += kStepA;
    b += kStepB;
  }
  return digest;
}

}  // namespace elaswave::exec

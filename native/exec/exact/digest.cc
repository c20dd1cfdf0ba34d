#include "exec/exact/digest.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/versions.h"

namespace elaswave::exec {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;

// The finalizer of splitmix64.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// Of the pairs of words in a block: all blocks have the same factors, and each one more for the whole of it.
constexpr std::uint64_t kPairs = 512;
constexpr std::uint64_t kBlock = 2 * kPairs;

using Factors = std::array<std::uint64_t, kPairs>;

constexpr Factors make_factors(std::uint64_t seed) {
  Factors made{};
  for (std::uint64_t i = 0; i < kPairs; ++i) made[i] = mix((seed + i) * kGolden) | 1;
  return made;
}

constexpr Factors kFactorsA = make_factors(1), kFactorsB = make_factors(1 + kPairs);

Digest product(std::uint64_t pair, std::uint64_t place) { return {pair * kFactorsA[place], pair * kFactorsB[place]}; }

}  // namespace

// Not in an anonymous namespace: compilers refuse versions of local functions.
ELASWAVE_VERSIONS
Digest digest_pairs(const std::uint32_t* words, std::size_t count, const std::uint64_t* a, const std::uint64_t* b) {
  Digest digest;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t pair;
    std::memcpy(&pair, words + 2 * i, sizeof pair);
    digest.lo += pair * a[i];
    digest.hi += pair * b[i];
  }
  return digest;
}

Digest digest_words(const void* data, std::size_t count, std::uint64_t first, std::uint32_t salt) {
  const auto* words = static_cast<const std::uint32_t*>(data);
  Digest digest;
  for (std::size_t taken = 0; count > 0; first += taken, words += taken, count -= taken) {
    const std::uint64_t begin = first % kBlock;
    taken = std::min<std::size_t>(count, kBlock - begin);
    const std::uint64_t odd = begin % 2, pairs = (taken - odd) / 2;
    Digest inner = digest_pairs(words + odd, pairs, &kFactorsA[(begin + odd) / 2 % kPairs],
                                &kFactorsB[(begin + odd) / 2 % kPairs]);
    // Halves of pairs: the rest of the first one's, and the last one's before the end.
    if (odd) inner += product(std::uint64_t{words[0]} << 32, begin / 2);
    if (odd + 2 * pairs < taken) inner += product(words[taken - 1], (begin + taken - 1) / 2);
    const std::uint64_t factor = mix((first / kBlock + 1) * kGolden + salt) | 1;
    digest += {inner.lo * factor, inner.hi * factor};
  }
  return digest;
}

}  // namespace elaswave::exec

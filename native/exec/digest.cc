#include "digest.h"

#include "kernels/versions.h"

namespace elaswave::exec {

ELASWAVE_VERSIONS
Digest digest_words(const void* data, std::size_t count, std::uint64_t first, std::uint32_t salt) {
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

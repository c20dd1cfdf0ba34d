// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the challenge that opens a link. Short inputs only: not tuned.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace elaswave::comm {

using Digest = std::array<std::uint8_t, 32>;

class Sha256 {
 public:
  void update(std::span<const std::uint8_t> bytes);
  // The digest of all bytes so far; the object must not be used afterwards.
  Digest finish();

 private:
  void block(const std::uint8_t* bytes);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> buffer_{};
  std::size_t buffered_ = 0;
  std::uint64_t total_ = 0;
};

Digest sha256(std::string_view text);
Digest hmac_sha256(std::string_view key, std::span<const std::uint8_t> message);
// Takes the same time whatever differs.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace elaswave::comm

// What travels in a handshake (see handshake.h), as it lies in memory: both ends are little-endian, which the magic
// number shows. Private to comm/ and its tests.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "comm/sha256.h"

namespace elaswave::comm {

constexpr std::uint64_t kHandshakeMagic = 0x336b6e696c776c65;  // "elwlink3"
constexpr std::uint32_t kAllowsShm = 1;

struct Hello {
  std::uint64_t magic = kHandshakeMagic;
  std::int32_t from = -1;
  std::int32_t to = -1;
  std::uint32_t flags = 0;
  std::uint32_t reserved = 0;
  Digest host{};
  Digest nonce{};
};

struct Challenge {
  std::uint64_t magic = kHandshakeMagic;
  std::int32_t rank = -1;
  std::uint32_t flags = 0;
  Digest host{};
  Digest nonce{};
};

struct Verdict {
  std::uint32_t refusal = 0;
  std::uint32_t shm = 0;
  char unix_name[64] = {};
};

static_assert(std::has_unique_object_representations_v<Hello> && std::has_unique_object_representations_v<Challenge>,
              "the proofs cover their bytes");

// Of the end whose `role` is "accept" or "dial", that it holds the token.
Digest prove(const std::string& token, const char* role, const Hello& hello, const Challenge& challenge);

}  // namespace elaswave::comm

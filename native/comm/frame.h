// The head of every message on a link, in the byte order of the machine (both ends little-endian, checked in the
// handshake by its magic number). Private to comm/.
#pragma once

#include <cstdint>

namespace elaswave::comm {

enum class FrameKind : std::uint16_t {
  kMessage = 1,
  kGoodbye = 2,  // the sender closes its end in order; nothing follows
  kAbort =
      3,  // leave the operation of `generation`; `tag` is the suspected rank + 1, or 0. No payload, ahead of what waits
};

struct FrameHeader {
  static constexpr std::uint32_t kMagic = 0x31575745;  // "EWW1"

  std::uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kMessage;
  std::uint16_t reserved = 0;
  std::uint32_t generation = 0;
  std::uint32_t reserved_too = 0;
  std::uint64_t tag = 0;
  std::uint64_t length = 0;  // bytes that follow
};
static_assert(sizeof(FrameHeader) == 32, "the header is written as it lies in memory");

}  // namespace elaswave::comm

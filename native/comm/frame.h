// The head of every message on a link, in the byte order of the machine (both ends little-endian, checked in the
// handshake by its magic number). Private to comm/.
#pragma once

#include <climits>
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

// What is wrong with a header that no end of ours writes; null for one that is in order.
inline const char* fault_of(const FrameHeader& header) {
  if (header.magic != FrameHeader::kMagic) return "a frame with a wrong magic number";
  if (header.reserved != 0 || header.reserved_too != 0) return "a frame that says what is reserved";
  switch (header.kind) {
    case FrameKind::kMessage:
      return nullptr;
    case FrameKind::kGoodbye:
      return header.length == 0 ? nullptr : "a goodbye with a payload";
    case FrameKind::kAbort:
      if (header.length != 0) return "an abort with a payload";
      return header.tag <= std::uint64_t{INT_MAX} + 1 ? nullptr : "an abort that accuses what is no rank";
  }
  return "a frame of an unknown kind";
}

}  // namespace elaswave::comm

// The head of every message on a link, in the byte order of the machine (both ends little-endian, checked in the
// handshake by its magic number). Private to comm/.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace elaswave::comm {

enum class FrameKind : std::uint16_t {
  kMessage = 1,
  kGoodbye = 2,  // the sender closes its end in order; nothing follows
  kAbort =
      3,  // leave the operation of `generation`; `tag` is the suspected rank + 1, or 0. No payload, ahead of what waits
  kPiece = 4,  // of a bulk message: number `piece` of those that `total` bytes travel in, one after the other
  kTaken = 5,  // pieces that weigh `tag` in all, since the link began, take no room at the sender of this any more
};

// A bulk message travels in pieces of so many bytes, the last one in fewer.
constexpr std::size_t kPieceBytes = std::size_t{64} << 10;
// What a message counts where it is held: its bookkeeping too, or endless messages without bytes would be free.
constexpr std::size_t held_bytes(std::size_t bytes) { return bytes + 256; }
// Pieces may be under way, or lie at a receiver that has no place for them yet, that weigh so much (`held_bytes`) in
// all. So much a step message has before it on a link, wherever on the way it is held.
constexpr std::size_t kMostAhead = 4 * held_bytes(kPieceBytes);
// The receiver tells of what it has taken as soon as it comes to this: before the sender has to stop.
constexpr std::size_t kTellAt = kMostAhead / 4;
// Step messages overtake a piece that could go until they come to so many bytes: then it goes before the next one.
constexpr std::size_t kOvertakeMost = 8 * kPieceBytes;

struct FrameHeader {
  static constexpr std::uint32_t kMagic = 0x32575745;  // "EWW2"

  std::uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kMessage;
  std::uint16_t reserved = 0;
  std::uint32_t generation = 0;
  std::uint32_t piece = 0;  // of kPiece, from 0 on
  std::uint64_t tag = 0;
  std::uint64_t length = 0;  // bytes that follow
  std::uint64_t total = 0;   // of kPiece: bytes of the whole message
};
static_assert(sizeof(FrameHeader) == 40, "the header is written as it lies in memory");

// What is wrong with a header that no end of ours writes; null for one that is in order.
inline const char* fault_of(const FrameHeader& header) {
  if (header.magic != FrameHeader::kMagic) return "a frame with a wrong magic number";
  if (header.reserved != 0) return "a frame that says what is reserved";
  if (header.kind != FrameKind::kPiece && (header.piece != 0 || header.total != 0)) {
    return "a frame that says what is a piece's to say";
  }
  switch (header.kind) {
    case FrameKind::kMessage:
      return nullptr;
    case FrameKind::kGoodbye:
      return header.length == 0 ? nullptr : "a goodbye with a payload";
    case FrameKind::kAbort:
      if (header.length != 0) return "an abort with a payload";
      return header.tag <= std::uint64_t{INT_MAX} + 1 ? nullptr : "an abort that accuses what is no rank";
    case FrameKind::kPiece:
      if (header.length > kPieceBytes || header.length > header.total) return "a piece that is too long";
      return header.length > 0 || header.total == 0 ? nullptr : "a piece of nothing";
    case FrameKind::kTaken:
      return header.length == 0 ? nullptr : "an acknowledgement with a payload";
  }
  return "a frame of an unknown kind";
}

}  // namespace elaswave::comm

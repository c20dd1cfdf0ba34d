// What becomes of a frame that carries the epoch (the links say generation) in which it was sent.
#pragma once

#include <cstdint>

#include "commit/guards.h"

namespace elaswave::commit {

enum class Admission {
  kDrop,     // it is of an older epoch: whatever it says is over
  kDeliver,  // it is of the epoch that the receiver is in
  kHold,     // it is of a newer epoch, which the receiver is about to enter
};

// `older_frames_are_dropped` is the receiver's guard. Pure but for the guard's count.
inline Admission admit(std::uint32_t frame, std::uint32_t current, Guard& older_frames_are_dropped) {
  if (frame > current) return Admission::kHold;
  return older_frames_are_dropped.allows(frame == current) ? Admission::kDeliver : Admission::kDrop;
}

}  // namespace elaswave::commit

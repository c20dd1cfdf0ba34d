// What both sources of the machine use.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "commit/machine.h"

namespace elaswave::commit {

inline bool contains(std::span<const RankId> ranks, RankId rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

inline std::string text(RankId rank) { return "rank " + std::to_string(rank.value()); }
inline std::string text(BoxId box) { return "box " + std::to_string(box.value()); }

}  // namespace elaswave::commit

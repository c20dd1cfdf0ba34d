// Sums over 32-bit words that tell whether two replicas hold the same bytes. No torch in here.
//
//   pair[i] = word[2 i] + 2^32 word[2 i + 1]
//   digest  = (sum of pair[i] * a(i), sum of pair[i] * b(i)) mod 2^64, a(i) and b(i) odd numbers made of a salt and i
//
// A single wrong word is always found (an odd factor cannot make its difference vanish), several with all but
// certainty. Sums of parts add up to the sum of the whole, in any order, wherever they are cut: a digest does not know
// how state is cut or who keeps it. Not against forgery.
#pragma once

#include <cstddef>
#include <cstdint>

#include "commit/types.h"

namespace elaswave::exec {

using commit::Digest;

// Of `count` words, the first of which is number `first` of what `salt` stands for.
Digest digest_words(const void* data, std::size_t count, std::uint64_t first, std::uint32_t salt);

}  // namespace elaswave::exec

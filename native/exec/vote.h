// A rank's yes to a step: it has every sum and every record of its boxes. With all votes at hand, any rank can finish
// the step: loss, count, clipping norm and verdict follow from them. Also what the ledger needs. No torch in here.
//
// As little-endian words of 8 bytes:
//   loss, count, peak memory [float64]  flags  content lo, hi  state lo, hi [uint64]
//   first unit, last + 1, first sample, last + 1, unit-samples run [uint64]  squares of box 0, 1, … [float64]
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "digest.h"
#include "ids.h"
#include "program.h"

namespace elaswave::exec {

// The part of the work plane that a rank really ran forward, samples counted within the step.
struct Consumed {
  std::uint64_t unit_lo = 0, unit_hi = 0, sample_lo = 0, sample_hi = 0;
  std::uint64_t area = 0;  // units x samples; equal to the rectangle's unless something is missing in it

  void add(std::uint64_t unit, std::uint64_t lo, std::uint64_t hi) {
    const bool first = area == 0;
    unit_lo = first ? unit : std::min(unit_lo, unit);
    unit_hi = std::max(unit_hi, unit + 1);
    sample_lo = first ? lo : std::min(sample_lo, lo);
    sample_hi = std::max(sample_hi, hi);
    area += hi - lo;
  }
};

struct Vote {
  static constexpr std::uint64_t kStop = 1;  // the rank wants the run to end after this step
  static constexpr std::size_t kFixedWords = 13;

  double loss = 0.0;  // sums over the rank's samples
  double count = 0.0;
  double memory_bytes = 0.0;
  std::uint64_t flags = 0;
  Digest content;  // of the samples that the rank consumed
  Digest state;    // of the boxes that it owns, before the step
  Consumed consumed;
  std::vector<double> squares;  // per box, 0 for those it does not own

  std::vector<std::uint64_t> pack() const {
    std::vector<std::uint64_t> words = {bits(loss),       bits(count),      bits(memory_bytes), flags,
                                        content.lo,       content.hi,       state.lo,           state.hi,
                                        consumed.unit_lo, consumed.unit_hi, consumed.sample_lo, consumed.sample_hi,
                                        consumed.area};
    for (const double square : squares) words.push_back(bits(square));
    return words;
  }

  // Throws ExecError unless there is a word for each of `boxes`.
  static Vote unpack(const std::vector<std::uint64_t>& words, std::size_t boxes) {
    if (words.size() != kFixedWords + boxes) {
      throw ExecError("vote: " + std::to_string(words.size()) + " words; with " + std::to_string(boxes) +
                      " boxes it has " + std::to_string(kFixedWords + boxes));
    }
    Vote vote{real(words[0]),
              real(words[1]),
              real(words[2]),
              words[3],
              {words[4], words[5]},
              {words[6], words[7]},
              {words[8], words[9], words[10], words[11], words[12]},
              {}};
    for (std::size_t i = 0; i < boxes; ++i) vote.squares.push_back(real(words[kFixedWords + i]));
    return vote;
  }

 private:
  static std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }
  static double real(std::uint64_t word) { return std::bit_cast<double>(word); }
};

using Votes = std::map<RankId, std::vector<std::uint64_t>>;

}  // namespace elaswave::exec

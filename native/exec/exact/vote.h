// A rank's yes to a step: it has every sum and every record of its boxes. With all votes at hand, any rank can finish
// the step: loss, count, clipping norm and verdict follow from them. Also what the ledger needs. No torch in here.
//
// As little-endian words of 8 bytes; control/store/ledger.py reads them, and tests/golden/vote.hex ties the two:
//   peak memory, busy seconds [float64]  flags  content lo, hi  keys  number of spans, number of buckets [uint64]
//   content places  cross-check: rank + 1 or 0, content lo, hi, places [uint64]
//   for each span: first unit, last + 1, first sample, last + 1 [uint64]
//   loss, count, squares [ExactTotal each: the digits from the least one on, then how many values were not finite]
//   for each bucket of which the rank owns a box: number, digest lo, hi [uint64]
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exec/exact/digest.h"
#include "exec/exact/exact_sum.h"
#include "exec/program/program.h"
#include "ids.h"

namespace elaswave::exec {

// A rectangle of the work plane, samples counted within the step.
struct WorkSpan {
  std::uint64_t unit_lo = 0, unit_hi = 0, sample_lo = 0, sample_hi = 0;
  bool operator==(const WorkSpan&) const = default;
};

// Sums over samples, that tell whether two ranks have read the same ones; and which one differs, if one alone does.
struct Content {
  std::uint64_t lo = 0, hi = 0;  // the sum of the samples' hashes modulo 2^128
  std::uint64_t places = 0;      // the sum of the low halves of hashes times the samples' positions, modulo 2^64
  bool operator==(const Content&) const = default;
};

// What `rank` feeds to a step, as another rank has read it.
struct CrossCheck {
  RankId rank;
  Content content;
};

// The part of the work plane that a rank really ran forward: exactly that, with its holes and with what was run twice.
class Consumed {
 public:
  void add(std::uint64_t unit, std::uint64_t lo, std::uint64_t hi) { append(by_unit_[unit], {lo, hi}); }

  // As few rectangles as units with equal samples allow, in order of units and samples.
  std::vector<WorkSpan> spans() const {
    std::vector<WorkSpan> found;
    Pieces open;  // of the units before, which `found` ends with
    for (const auto& [unit, pieces] : by_unit_) {
      const Pieces own = merged(pieces);
      const bool joins = !found.empty() && found.back().unit_hi == unit && own == open;
      if (joins) {
        for (std::size_t i = 1; i <= own.size(); ++i) ++found[found.size() - i].unit_hi;
      } else {
        for (const auto& [lo, hi] : own) found.push_back({unit, unit + 1, lo, hi});
      }
      open = own;
    }
    return found;
  }

 private:
  using Pieces = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

  static void append(Pieces& pieces, std::pair<std::uint64_t, std::uint64_t> piece) {
    if (!pieces.empty() && pieces.back().second == piece.first) {
      pieces.back().second = piece.second;
    } else {
      pieces.push_back(piece);
    }
  }
  static Pieces merged(Pieces pieces) {
    std::sort(pieces.begin(), pieces.end());
    Pieces found;
    for (const auto& piece : pieces) append(found, piece);
    return found;
  }

  std::map<std::uint64_t, Pieces> by_unit_;
};

struct Vote {
  static constexpr std::uint64_t kStop = 1;  // the rank wants the run to end after this step
  static constexpr std::size_t kHeadWords = 13;
  static constexpr std::size_t kSpanWords = 4;
  static constexpr std::size_t kBucketWords = 3;
  static constexpr std::size_t words_with(std::size_t spans, std::size_t buckets) {
    return kHeadWords + kSpanWords * spans + 3 * ExactTotal::kWords + kBucketWords * buckets;
  }

  double memory_bytes = 0.0;
  double busy_seconds = 0.0;  // in which its units computed in this step, on its processor; 0: not known
  std::uint64_t flags = 0;
  Content content;         // of the samples that the rank consumed
  std::uint64_t keys = 0;  // the sum of the keys that it drew with
  std::vector<WorkSpan> consumed;
  ExactTotal loss, count;  // sums over the rank's samples
  ExactTotal squares;      // of the gradient of the boxes that it owns
  std::optional<CrossCheck> cross_check;
  std::map<BucketId, Digest> buckets;  // of the state of the boxes that it owns, before the step

  std::vector<std::uint64_t> pack() const {
    std::vector<std::uint64_t> words = {bits(memory_bytes), bits(busy_seconds), flags, content.lo, content.hi, keys,
                                        consumed.size(),    buckets.size()};
    const CrossCheck check = cross_check.value_or(CrossCheck{RankId(-1), {}});
    words.insert(words.end(), {content.places, static_cast<std::uint64_t>(check.rank.value()) + 1, check.content.lo,
                               check.content.hi, check.content.places});
    for (const WorkSpan& span : consumed) {
      words.insert(words.end(), {span.unit_lo, span.unit_hi, span.sample_lo, span.sample_hi});
    }
    for (const ExactTotal* total : {&loss, &count, &squares}) {
      const auto digits = total->words();
      words.insert(words.end(), digits.begin(), digits.end());
    }
    for (const auto& [bucket, digest] : buckets) {
      words.insert(words.end(), {static_cast<std::uint64_t>(bucket.value()), digest.lo, digest.hi});
    }
    return words;
  }

  // Throws ExecError unless there are as many words as it says.
  static Vote unpack(const std::vector<std::uint64_t>& words) {
    const std::size_t least = words_with(0, 0);
    const std::size_t rest = words.size() < least ? 0 : words.size() - least;
    // Numbers beyond `rest` are refused first: they may be anything, and their products wrap around.
    const bool fits = words.size() >= least && words[6] <= rest && words[7] <= rest;
    if (!fits || rest != kSpanWords * words[6] + kBucketWords * words[7]) {
      throw ExecError("vote: " + std::to_string(words.size()) + " words; it has " + std::to_string(least) + ", " +
                      std::to_string(kSpanWords) + " for each span and " + std::to_string(kBucketWords) +
                      " for each bucket");
    }
    Vote vote;
    vote.memory_bytes = real(words[0]);
    vote.busy_seconds = real(words[1]);
    vote.flags = words[2];
    vote.content = {words[3], words[4], words[8]};
    vote.keys = words[5];
    if (words[9] != 0) {
      // Unsigned, for the words may be anything.
      vote.cross_check = CrossCheck{RankId(static_cast<std::int64_t>(words[9] - 1)), {words[10], words[11], words[12]}};
    }
    std::size_t at = kHeadWords;
    for (; at < kHeadWords + kSpanWords * words[6]; at += kSpanWords) {
      vote.consumed.push_back({words[at], words[at + 1], words[at + 2], words[at + 3]});
    }
    for (ExactTotal* total : {&vote.loss, &vote.count, &vote.squares}) {
      std::array<std::uint64_t, ExactTotal::kWords> digits;
      std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(at), digits.size(), digits.begin());
      *total = ExactTotal(digits);
      at += digits.size();
    }
    for (; at < words.size(); at += kBucketWords) {
      vote.buckets[BucketId(static_cast<std::int64_t>(words[at]))] = {words[at + 1], words[at + 2]};
    }
    return vote;
  }

 private:
  static std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }
  static double real(std::uint64_t word) { return std::bit_cast<double>(word); }
};

using Votes = std::map<RankId, std::vector<std::uint64_t>>;

}  // namespace elaswave::exec

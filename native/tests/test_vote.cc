// Votes: what a rank consumed as rectangles, and the bytes that control/store/ledger.py reads.
#include "exec/exact/vote.h"

#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "check.h"

using namespace elaswave::exec;

namespace {

// Micro-batches one after the other, each through all units of a tile.
Consumed tile(std::uint64_t unit_lo, std::uint64_t unit_hi, std::uint64_t lo, std::uint64_t hi, std::uint64_t size) {
  Consumed consumed;
  for (std::uint64_t at = lo; at < hi; at += size) {
    for (std::uint64_t unit = unit_lo; unit < unit_hi; ++unit) consumed.add(unit, at, std::min(at + size, hi));
  }
  return consumed;
}

void check_spans(const Consumed& consumed, const std::vector<WorkSpan>& expected) {
  CHECK(consumed.spans() == expected);
}

std::string hex_of(const std::vector<std::uint64_t>& words) {
  std::string text;
  char digits[3];
  for (const std::uint64_t word : words) {
    for (int byte = 0; byte < 8; ++byte) {
      std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned>(word >> (8 * byte) & 0xff));
      text += digits;
    }
    text += '\n';
  }
  return text;
}

}  // namespace

TEST(a_tile_is_one_rectangle_however_it_is_run) {
  check_spans(Consumed(), {});
  check_spans(tile(2, 5, 8, 16, 3), {{2, 5, 8, 16}});
  Consumed backwards;
  for (const std::uint64_t at : {12, 8, 10}) backwards.add(1, at, at + 2);
  check_spans(backwards, {{1, 2, 8, 14}});
}

TEST(holes_and_repetitions_are_told) {
  Consumed hole = tile(0, 3, 0, 4, 2);
  hole.add(0, 6, 8);
  hole.add(1, 6, 8);
  check_spans(hole, {{0, 2, 0, 4}, {0, 2, 6, 8}, {2, 3, 0, 4}});
  Consumed twice = tile(0, 1, 0, 4, 2);
  twice.add(0, 0, 2);
  check_spans(twice, {{0, 1, 0, 2}, {0, 1, 0, 4}});
  Consumed apart = tile(0, 1, 0, 4, 4);
  apart.add(2, 0, 4);
  check_spans(apart, {{0, 1, 0, 4}, {2, 3, 0, 4}});
}

TEST(the_bytes_of_a_vote_are_those_of_the_golden) {
  Vote vote;
  vote.memory_bytes = 1048576.0;
  vote.busy_seconds = 0.25;
  vote.flags = Vote::kStop;
  vote.content = {3, 4, 11};
  vote.cross_check = CrossCheck{elaswave::RankId(1), {12, 13, 14}};
  vote.keys = 7;
  vote.consumed = {{2, 5, 8, 16}, {7, 8, 0, 4}};
  vote.loss.add(-1.5);
  vote.count.add(6.0);
  for (const double square : {0x1p-298, 4.0, std::numeric_limits<double>::infinity()}) vote.squares.add(square);
  vote.buckets = {{elaswave::BucketId(0), {5, 6}}, {elaswave::BucketId(9), {8, 9}}};
  std::ifstream file(GOLDEN_VOTE);
  const std::string golden((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  CHECK_EQUAL(hex_of(vote.pack()), golden);
  const Vote back = Vote::unpack(vote.pack());
  CHECK(back.consumed == vote.consumed);
  CHECK(back.loss == vote.loss && back.count == vote.count && back.squares == vote.squares);
  CHECK_EQUAL(back.flags, Vote::kStop);
  CHECK_EQUAL(back.memory_bytes, 1048576.0);
  CHECK_EQUAL(back.busy_seconds, 0.25);
  CHECK(back.content == vote.content && back.keys == 7 && back.buckets == vote.buckets);
  CHECK(back.cross_check && back.cross_check->rank == elaswave::RankId(1));
  CHECK(back.cross_check->content == vote.cross_check->content);
  CHECK(!Vote::unpack(Vote().pack()).cross_check);
}

TEST(a_vote_that_is_none_is_refused) {
  std::vector<std::uint64_t> words = Vote().pack();
  for (const std::size_t number : {6, 7}) {
    for (const std::uint64_t count : {std::uint64_t{1}, ~std::uint64_t{0}, std::uint64_t{1} << 62}) {
      words[number] = count;
      CHECK_THROWS(ExecError, "46 words; it has 46, 4 for each span and 3 for each bucket", Vote::unpack(words));
    }
    words[number] = 0;
  }
  words.pop_back();
  CHECK_THROWS(ExecError, "45 words; it has 46, 4 for each span and 3 for each bucket", Vote::unpack(words));
}

TEST(a_vote_lists_any_number_of_spans) {
  Vote vote;
  for (std::uint64_t i = 0; i < 300; ++i) vote.consumed.push_back({0, 1, 2 * i, 2 * i + 1});
  CHECK_EQUAL(vote.pack().size(), Vote::words_with(300, 0));
  CHECK(Vote::unpack(vote.pack()).consumed == vote.consumed);
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

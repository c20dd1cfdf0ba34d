// The generator against Random123's published vectors, and the vectorised words against single blocks.
#include "check.h"
#include "kernels/layout.h"
#include "kernels/philox.h"

using namespace elaswave::kernels;

namespace {

void check_words(const Words& actual, const Words& expected) {
  for (std::size_t i = 0; i < 4; ++i) CHECK_EQUAL(actual[i], expected[i]);
}

}  // namespace

// kat_vectors of Random123, "philox4x32 10".
TEST(philox_of_published_vectors) {
  constexpr std::uint32_t kOnes = 0xffffffff;
  check_words(philox4x32({0, 0, 0, 0}, {0, 0}), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  check_words(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
              {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  check_words(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
              {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(element_words_are_blocks_in_order) {
  const std::uint64_t key = 0x0123456789abcdef;
  const std::uint64_t first = 0xfffffff5;  // the block number crosses 32 bits under way
  for (const std::size_t blocks : {1U, 15U, 16U, 17U, 40U}) {
    std::vector<std::uint32_t> words(4 * blocks + 1, 7);
    element_words(key, 3, first, blocks, words.data());
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::uint64_t number = first + b;
      const Words expected =
          philox4x32({static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32), 3, kElementStream},
                     {0x89abcdef, 0x01234567});
      for (std::size_t i = 0; i < 4; ++i) CHECK_EQUAL(words[4 * b + i], expected[i]);
    }
    CHECK_EQUAL(words[4 * blocks], 7U);  // nothing is written behind the end
  }
}

TEST(sample_keys_differ_by_seed_position_and_unit) {
  const std::uint64_t key = sample_key(1, 2, 3);
  CHECK_EQUAL(key, sample_key(1, 2, 3));
  CHECK(key != sample_key(2, 2, 3));
  CHECK(key != sample_key(1, 3, 3));
  CHECK(key != sample_key(1, 2, 4));
  CHECK(key != sample_key(1, 2 + (1ULL << 32), 3));
}

// Every element of [outer 3][samples 2][run 5] gets the word of its number o * 5 + r under its sample's key.
TEST(layouts_number_elements_within_their_sample) {
  const SampleLayout layout{3, 2, 5};
  const std::int64_t keys[] = {11, 22};
  std::vector<std::uint32_t> found(30);
  for_each_word(layout, keys, 9, 0, layout.rows(),
                [&](std::int64_t offset, const std::uint32_t* words, std::int64_t skip, std::int64_t count) {
                  for (std::int64_t i = 0; i < count; ++i)
                    found[static_cast<std::size_t>(offset + i)] = words[skip + i];
                });
  for (std::size_t o = 0; o < 3; ++o) {
    for (std::size_t sample = 0; sample < 2; ++sample) {
      for (std::size_t r = 0; r < 5; ++r) {
        const auto number = static_cast<std::uint32_t>(o * 5 + r);
        const Words block =
            philox4x32({number / 4, 0, 9, kElementStream}, {static_cast<std::uint32_t>(keys[sample]), 0});
        CHECK_EQUAL(found[(o * 2 + sample) * 5 + r], block[number % 4]);
      }
    }
  }
}

TEST(keep_threshold_agrees_with_the_uniform_number) {
  for (const double p : {0.0, 0x1.0p-24, 0.1, 0.25, 0.5, 0.999999999, 1.0}) {
    const std::uint32_t threshold = keep_threshold(p);
    for (const std::uint32_t top : {0U, 1U, 2U, threshold - 1, threshold, threshold + 1, (1U << 24) - 1}) {
      if (top >= 1U << 24) continue;
      const bool keep = static_cast<double>(uniform_from(top << 8)) >= p;
      CHECK_EQUAL(top >= threshold, keep);
    }
  }
}

TEST(normal_numbers_are_finite_at_the_ends) {
  for (const std::uint32_t word : {0U, 0xffffffffU}) {
    for (const double value : normal_from(word, ~word)) CHECK(value - value == 0.0);
  }
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

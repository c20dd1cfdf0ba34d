// Digests: the sums that digest.h promises, whatever instructions compute them; parts add up.
#include "exec/exact/digest.h"

#include <cstdint>
#include <vector>

#include "check.h"

using namespace elaswave::exec;

namespace {

std::vector<std::uint32_t> words(std::size_t count) {
  std::vector<std::uint32_t> made;
  for (std::uint32_t i = 0; i < count; ++i) made.push_back((i + 1) * 0x9e3779b1U ^ i << 7);
  return made;
}

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// The first sum alone, one word after the other.
std::uint64_t first_sum(const std::vector<std::uint32_t>& data, std::uint64_t first, std::uint32_t salt) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < data.size(); ++i) {
    const std::uint64_t at = first + i, place = at % 1024 / 2, block = at / 1024;
    const std::uint64_t factor = (mix((place + 1) * kGolden) | 1) * (mix((block + 1) * kGolden + salt) | 1);
    sum += (std::uint64_t{data[i]} << (at % 2 * 32)) * factor;
  }
  return sum;
}

}  // namespace

TEST(every_length_gives_the_same_sum) {
  for (std::size_t count = 0; count < 70; ++count) {
    const std::vector<std::uint32_t> data = words(count);
    for (const std::uint64_t first : {0, 5, 1000, 1023, 1024, 4090}) {
      CHECK_EQUAL(digest_words(data.data(), count, first, 7).lo, first_sum(data, first, 7));
    }
  }
}

TEST(parts_add_up) {
  const std::vector<std::uint32_t> data = words(1037);
  const Digest whole = digest_words(data.data(), data.size(), 11, 3);
  for (const std::size_t cut : {1, 17, 512, 1036}) {
    Digest sum = digest_words(data.data() + cut, data.size() - cut, 11 + cut, 3);
    sum += digest_words(data.data(), cut, 11, 3);
    CHECK_EQUAL(sum == whole, true);
  }
}

TEST(one_wrong_bit_is_found) {
  std::vector<std::uint32_t> data = words(100);
  const Digest before = digest_words(data.data(), data.size(), 0, 1);
  for (std::uint32_t bit = 0; bit < 32; ++bit) {
    data[37] ^= 1U << bit;
    const Digest after = digest_words(data.data(), data.size(), 0, 1);
    CHECK_EQUAL(after.lo != before.lo && after.hi != before.hi, true);
    data[37] ^= 1U << bit;
  }
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

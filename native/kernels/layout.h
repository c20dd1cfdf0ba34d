// Where a sample's elements lie in a tensor, and the words that belong to them. No torch in here.
//
// Dimension `axis` has size samples * period with the sample index outermost in it. Row-major memory is then
// [outer][samples][run]: `outer` is the product of the sizes before the axis, `run` = period * (product of those
// after). Element (o, sample, r) has number o * run + r within its sample: the row-major index with the sample index
// removed. Without a sample axis everything is one run of one sample.
#pragma once

#include <algorithm>
#include <cstdint>

#include "philox.h"

namespace elaswave::kernels {

struct SampleLayout {
  std::int64_t outer = 1;
  std::int64_t samples = 1;
  std::int64_t run = 1;
  std::int64_t rows() const { return outer * samples; }  // contiguous pieces of `run` elements
};

// Calls consume(offset, words, skip, count) for consecutive pieces of the rows [first_row, last_row): the element at
// memory offset + i has the word words[skip + i], i < count. `words` starts at a block border and whole blocks are
// filled, so the other word of an element's pair is always there too.
template <typename Consume>
void for_each_word(const SampleLayout& layout, const std::int64_t* keys, std::uint32_t op, std::int64_t first_row,
                   std::int64_t last_row, Consume&& consume) {
  constexpr std::int64_t kBlocks = 256;
  std::uint32_t words[4 * kBlocks];
  for (std::int64_t row = first_row; row < last_row; ++row) {
    const auto key = static_cast<std::uint64_t>(keys[row % layout.samples]);
    const std::int64_t number = (row / layout.samples) * layout.run;  // of the row's first element
    for (std::int64_t done = 0; done < layout.run;) {
      const std::int64_t block = (number + done) / 4;
      const std::int64_t skip = (number + done) % 4;
      const std::int64_t count = std::min(layout.run - done, 4 * kBlocks - skip);
      element_words(key, op, static_cast<std::uint64_t>(block), static_cast<std::size_t>((skip + count + 3) / 4),
                    words);
      consume(row * layout.run + done, words, skip, count);
      done += count;
    }
  }
}

}  // namespace elaswave::kernels

// What a record or a state travels with. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "commit/types.h"
#include "exec/device/memory.h"
#include "exec/exact/digest.h"

namespace elaswave::exec {

using commit::StateTag;

// The words of a header, per box: version and digest of the state that it belongs to, the digest of the record, whether
// that came with the messages of its step.
inline constexpr std::int64_t kHeaderWords = 6;

inline at::Tensor empty_header(std::size_t boxes) {
  return host_empty({kHeaderWords * static_cast<std::int64_t>(boxes)}, at::kLong);
}

// The words of `count` boxes, the first of which is the `number`th.
inline at::Tensor header_part(const at::Tensor& header, std::size_t number, std::size_t count) {
  return header.narrow(0, kHeaderWords * static_cast<std::int64_t>(number),
                       kHeaderWords * static_cast<std::int64_t>(count));
}

// The words of the box that is the `number`th in its message.
inline void write_header(const at::Tensor& header, std::size_t number, const StateTag& state, const Digest& record,
                         bool prompt = true) {
  auto* words = header.mutable_data_ptr<std::int64_t>() + kHeaderWords * static_cast<std::int64_t>(number);
  words[0] = state.version;
  words[1] = static_cast<std::int64_t>(state.digest.lo);
  words[2] = static_cast<std::int64_t>(state.digest.hi);
  words[3] = static_cast<std::int64_t>(record.lo);
  words[4] = static_cast<std::int64_t>(record.hi);
  words[5] = prompt ? 1 : 0;
}

struct Header {
  StateTag state;
  Digest record;
  bool prompt;
};

inline Header read_header(const at::Tensor& header, std::size_t number) {
  const auto* words = header.const_data_ptr<std::int64_t>() + kHeaderWords * static_cast<std::int64_t>(number);
  const auto word = [words](int i) { return static_cast<std::uint64_t>(words[i]); };
  return {{words[0], {word(1), word(2)}}, {word(3), word(4)}, words[5] != 0};
}

// Of a record as it travels; an odd last half-word of bf16 counts as a word of its own.
inline Digest digest_of_record(const at::Tensor& record) {
  constexpr std::uint32_t kSalt = 0x5eed;
  const std::size_t bytes = record.nbytes();
  Digest digest = digest_words(record.const_data_ptr(), bytes / 4, 0, kSalt);
  if (bytes % 4 != 0) {
    const std::uint32_t rest = *(static_cast<const std::uint16_t*>(record.const_data_ptr()) + bytes / 2 - 1);
    digest += digest_words(&rest, 1, bytes / 4, kSalt);
  }
  return digest;
}

}  // namespace elaswave::exec

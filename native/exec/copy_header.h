// What a record or a state travels with. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "commit/types.h"
#include "digest.h"
#include "memory.h"

namespace elaswave::exec {

using commit::StateTag;

// The words of a header, per box: version and digest of the state that it belongs to, the digest of the record.
inline constexpr std::int64_t kHeaderWords = 5;

inline at::Tensor empty_header(std::size_t boxes) {
  return host_empty({kHeaderWords * static_cast<std::int64_t>(boxes)}, at::kLong);
}

// The words of the box that is the `number`th in its message.
inline void write_header(const at::Tensor& header, std::size_t number, const StateTag& state, const Digest& record) {
  auto* words = header.mutable_data_ptr<std::int64_t>() + kHeaderWords * static_cast<std::int64_t>(number);
  words[0] = state.version;
  words[1] = static_cast<std::int64_t>(state.digest.lo);
  words[2] = static_cast<std::int64_t>(state.digest.hi);
  words[3] = static_cast<std::int64_t>(record.lo);
  words[4] = static_cast<std::int64_t>(record.hi);
}

struct Header {
  StateTag state;
  Digest record;
};

inline Header read_header(const at::Tensor& header, std::size_t number) {
  const auto* words = header.const_data_ptr<std::int64_t>() + kHeaderWords * static_cast<std::int64_t>(number);
  const auto word = [words](int i) { return static_cast<std::uint64_t>(words[i]); };
  return {{words[0], {word(1), word(2)}}, {word(3), word(4)}};
}

}  // namespace elaswave::exec

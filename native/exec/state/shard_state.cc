#include "exec/state/shard_state.h"

#include <iterator>
#include <string>
#include <utility>

#include "exec/program/program.h"

namespace elaswave::exec {

Digest digest_piece(const BoxSpec& box, std::size_t tensor, const float* data, std::int64_t at, std::int64_t count) {
  const auto salt = static_cast<std::uint32_t>(box.bucket().index() * 31 + tensor + 1);
  return digest_words(data + at, static_cast<std::size_t>(count), static_cast<std::uint64_t>(box.lo + at), salt);
}

Digest digest_of(const BoxSpec& box, const ShardState& state) {
  Digest digest = digest_piece(box, 0, state.master.const_data_ptr<float>(), 0, box.numel());
  for (std::size_t i = 0; i < state.optimizer.size(); ++i) {
    digest += digest_piece(box, i + 1, state.optimizer[i].const_data_ptr<float>(), 0, box.numel());
  }
  return digest;
}

ShardState make_state(const BoxSpec& box, std::vector<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.scalar_type() != at::kFloat || !tensor.is_contiguous() || tensor.dim() != 1 ||
        tensor.numel() != box.numel()) {
      throw ExecError("box [" + std::to_string(box.lo) + ", " + std::to_string(box.hi) + ") of bucket " +
                      std::to_string(box.bucket().value()) +
                      ": master and state must be contiguous float32 tensors of " + std::to_string(box.numel()) +
                      " elements");
    }
  }
  ShardState state;
  state.master = std::move(tensors.at(0));
  state.optimizer.assign(std::make_move_iterator(tensors.begin() + 1), std::make_move_iterator(tensors.end()));
  state.digest = digest_of(box, state);
  return state;
}

}  // namespace elaswave::exec

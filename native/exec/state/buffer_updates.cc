#include "exec/state/buffer_updates.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "exec/device/memory.h"
#include "exec/program/program.h"
#include "exec/state/parameter_view.h"

namespace elaswave::exec {
namespace {

constexpr std::int64_t kAlignment = 8;  // bytes

std::int64_t bytes_of(const std::vector<std::int64_t>& shape, c10::ScalarType dtype) {
  return numel_of(shape) * static_cast<std::int64_t>(c10::elementSize(dtype));
}

std::int64_t padded(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::int64_t bytes_of(const BufferUpdateSpec& update) {
  std::int64_t bytes = 0;
  for (const GranuleValue& value : update.values) bytes += padded(bytes_of(value.shape, value.dtype));
  return bytes;
}

// The values of a granule, which begin at `in`; they share no memory with it.
std::vector<c10::IValue> values_at(const BufferUpdateSpec& update, const std::uint8_t* in) {
  std::vector<c10::IValue> values;
  for (const GranuleValue& declared : update.values) {
    const at::Tensor value = host_empty(declared.shape, declared.dtype);
    std::memcpy(value.mutable_data_ptr(), in, value.nbytes());
    in += padded(bytes_of(declared.shape, declared.dtype));
    values.emplace_back(value);
  }
  return values;
}

}  // namespace

void BufferUpdates::install(const std::vector<BucketSpec>& buckets, std::vector<BufferUpdateSpec> specs,
                            std::int64_t granule) {
  granule_ = granule;
  specs_ = std::move(specs);
  granules_.clear();
  buckets_.clear();
  for (const BucketSpec& bucket : buckets) buckets_.push_back({{}, bucket.group, 0});
  for (const BufferUpdateId update : all_ids<BufferUpdateId>(specs_.size())) {
    Bucket& bucket = buckets_[spec(update).buffer.bucket.index()];
    bucket.updates.push_back(update);
    bucket.words += bytes_of(spec(update)) / kWordBytes;
  }
  for (Bucket& bucket : buckets_) bucket.words = std::max(bucket.words, kAlignment / kWordBytes);
}

void BufferUpdates::collect(const UpdateValue& binding, std::int64_t first, const at::Tensor& value) {
  const GranuleValue& declared = spec(binding.update).values[binding.number];
  if (value.sizes() != at::IntArrayRef(declared.shape) || value.scalar_type() != declared.dtype) {
    throw ExecError("buffer update " + std::to_string(binding.update.value()) + ": value " +
                    std::to_string(binding.number) + " has another shape or dtype than declared");
  }
  std::vector<at::Tensor>& values = granules_[{binding.update, first}];
  values.resize(spec(binding.update).values.size());
  values[binding.number] = value;
}

std::int64_t BufferUpdates::words_of(BucketId id, RankId reader) const {
  std::int64_t granules = 0;
  for (const OwnedSpan& span : at(id).group) granules += span.rank == reader ? granules_in(span) : 0;
  return granules * at(id).words;
}

std::int64_t BufferUpdates::words_of(BucketId id) const {
  std::int64_t granules = 0;
  for (const OwnedSpan& span : at(id).group) granules += granules_in(span);
  return granules * at(id).words;
}

at::Tensor BufferUpdates::part(BucketId id, RankId rank) const {
  const Bucket& bucket = at(id);
  const at::Tensor words = host_empty({words_of(id, rank)}, at::kFloat).zero_();
  auto* out = static_cast<std::uint8_t*>(words.mutable_data_ptr());
  for (const OwnedSpan& span : bucket.group) {
    if (span.rank != rank) continue;
    for (std::int64_t first = span.lo; first < span.hi; first += granule_, out += bucket.words * kWordBytes) {
      pack_granule(bucket, first, out);
    }
  }
  return words;
}

void BufferUpdates::pack_granule(const Bucket& bucket, std::int64_t first, std::uint8_t* out) const {
  for (const BufferUpdateId update : bucket.updates) {
    const auto found = granules_.find({update, first});
    for (std::size_t v = 0; v < spec(update).values.size(); ++v) {
      if (found == granules_.end() || !found->second[v].defined()) {
        throw ExecError("buffer update " + std::to_string(update.value()) + ": value " + std::to_string(v) +
                        " of the granule at sample " + std::to_string(first) +
                        " was not produced; micro-batches must be single granules where buffers are updated");
      }
      const at::Tensor value = found->second[v].contiguous();
      std::memcpy(out, value.const_data_ptr(), value.nbytes());
      out += padded(static_cast<std::int64_t>(value.nbytes()));
    }
  }
}

// Spans ascend here and in the parts.
at::Tensor BufferUpdates::record(BucketId id, const std::function<const at::Tensor&(RankId)>& part_of) const {
  const at::Tensor record = host_empty({words_of(id)}, at::kFloat);
  std::map<RankId, std::int64_t> taken;
  std::int64_t at_word = 0;
  for (const OwnedSpan& span : at(id).group) {
    const std::int64_t words = granules_in(span) * at(id).words;
    std::int64_t& from = taken[span.rank];
    record.narrow(0, at_word, words).copy_(part_of(span.rank).narrow(0, from, words));
    from += words;
    at_word += words;
  }
  return record;
}

void BufferUpdates::apply(ProgramLibrary& programs, const BoxSpec& box, ShardState& state,
                          const at::Tensor& record) const {
  const Bucket& bucket = at(box.bucket());
  const auto* words = static_cast<const std::uint8_t*>(record.const_data_ptr());
  const std::int64_t granules = record.numel() / bucket.words;
  const at::Tensor next = state.master.clone();
  std::int64_t offset = 0;  // bytes, of an update's values in a granule
  for (const BufferUpdateId id : bucket.updates) {
    const BufferUpdateSpec& update = spec(id);
    // A program may compute in another dtype than the buffer has: it is rounded once, after the last granule.
    std::vector<c10::IValue> current = {parameter_view(state.master, update.buffer)};
    for (std::int64_t granule = 0; granule < granules; ++granule) {
      for (c10::IValue& value : values_at(update, words + granule * bucket.words * kWordBytes + offset)) {
        current.push_back(std::move(value));
      }
      current = programs.linked(update.program).run(std::move(current));
    }
    parameter_view(next, update.buffer).copy_(current[0].toTensor());
    offset += bytes_of(update);
  }
  state = make_state(box, {next});
}

}  // namespace elaswave::exec

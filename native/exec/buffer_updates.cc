#include "buffer_updates.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "memory.h"
#include "program.h"

namespace elaswave::exec {
namespace {

std::int64_t bytes_of(const GranuleValue& value) {
  std::int64_t numel = 1;
  for (const std::int64_t size : value.shape) numel *= size;
  return numel * static_cast<std::int64_t>(c10::elementSize(value.dtype));
}

std::int64_t padded(std::int64_t bytes) { return (bytes + 7) / 8 * 8; }

std::string place(BufferUpdateId update) { return "buffer update " + std::to_string(update.value()); }

}  // namespace

void BufferUpdates::reset(std::vector<BufferUpdateSpec> specs, std::int64_t granule) {
  granule_ = granule;
  updates_.clear();
  for (BufferUpdateSpec& spec : specs) {
    Update& update = updates_.emplace_back();
    for (const GranuleValue& value : spec.values) update.bytes += padded(bytes_of(value));
    update.spec = std::move(spec);
  }
}

void BufferUpdates::collect(const UpdateValue& binding, std::int64_t first, const at::Tensor& value) {
  Update& update = updates_[binding.update.index()];
  const GranuleValue& declared = update.spec.values[binding.number];
  if (value.sizes() != at::IntArrayRef(declared.shape) || value.scalar_type() != declared.dtype) {
    throw ExecError(place(binding.update) + ": value " + std::to_string(binding.number) +
                    " has another shape or dtype than declared");
  }
  std::vector<at::Tensor>& values = update.granules[first];
  values.resize(update.spec.values.size());
  values[binding.number] = value;
}

void BufferUpdates::exchange() {
  for (std::size_t f = 0; f < updates_.size(); ++f) {
    Update& update = updates_[f];
    const std::uint64_t tag = tag_of(kUpdateValuesTag, f);
    update.packed.clear();
    const auto is_mine = [&](const OwnedSpan& span) { return span.rank == transfers_.rank(); };
    if (std::none_of(update.spec.group.begin(), update.spec.group.end(), is_mine)) continue;
    std::set<RankId> others;
    for (const OwnedSpan& span : update.spec.group) {
      if (!is_mine(span)) others.insert(span.rank);
    }
    // Spans ascend here and there, so that those of one rank arrive in the order in which they are awaited.
    for (const OwnedSpan& span : update.spec.group) {
      if (span.lo == span.hi) continue;  // it keeps the buffers, but makes no values
      if (is_mine(span)) {
        update.packed.push_back(pack(update, span));
        for (const RankId other : others) {
          update.transfers.push_back(transfers_.send(update.packed.back(), other, tag));
        }
      } else {
        update.packed.push_back(host_empty({(span.hi - span.lo) / granule_, update.bytes}, at::kByte));
        update.transfers.push_back(transfers_.receive(update.packed.back(), span.rank, tag));
      }
    }
  }
}

at::Tensor BufferUpdates::pack(const Update& update, const OwnedSpan& span) const {
  at::Tensor packed = host_empty({(span.hi - span.lo) / granule_, update.bytes}, at::kByte);
  auto* out = packed.mutable_data_ptr<std::uint8_t>();
  for (std::int64_t first = span.lo; first < span.hi; first += granule_) {
    const auto found = update.granules.find(first);
    for (std::size_t v = 0; v < update.spec.values.size(); ++v) {
      if (found == update.granules.end() || !found->second[v].defined()) {
        throw ExecError("buffer updates: value " + std::to_string(v) + " of the granule at sample " +
                        std::to_string(first) +
                        " was not produced; micro-batches must be single granules where buffers are updated");
      }
      const at::Tensor value = found->second[v].contiguous();
      std::memcpy(out, value.const_data_ptr(), value.nbytes());
      out += padded(static_cast<std::int64_t>(value.nbytes()));
    }
  }
  return packed;
}

std::vector<at::Tensor> BufferUpdates::unpack(const Update& update, const at::Tensor& packed,
                                              std::int64_t granule) const {
  std::vector<at::Tensor> values;
  const auto* in = packed.const_data_ptr<std::uint8_t>() + granule * update.bytes;
  for (const GranuleValue& declared : update.spec.values) {
    at::Tensor value = host_empty(declared.shape, declared.dtype);
    std::memcpy(value.mutable_data_ptr(), in, value.nbytes());
    in += padded(bytes_of(declared));
    values.push_back(std::move(value));
  }
  return values;
}

void BufferUpdates::wait_ready() {
  for (Update& update : updates_) transfers_.wait(update.transfers);
}

void BufferUpdates::apply(ProgramLibrary& programs, Tables& tables) {
  // Nothing is written before all of it is computed.
  std::vector<std::pair<TableId, at::Tensor>> results;
  for (Update& update : updates_) {
    if (update.packed.empty()) continue;
    std::vector<c10::IValue> current;
    for (const TableId buffer : update.spec.buffers) current.emplace_back(tables.at(buffer));
    for (const at::Tensor& packed : update.packed) {
      for (std::int64_t granule = 0; granule < packed.size(0); ++granule) {
        for (at::Tensor& value : unpack(update, packed, granule)) current.emplace_back(std::move(value));
        current = programs.linked(update.spec.program).run(std::move(current));
      }
    }
    for (std::size_t i = 0; i < current.size(); ++i) {
      results.emplace_back(update.spec.buffers[i], current[i].toTensor());
    }
  }
  for (const auto& [buffer, result] : results) tables.at(buffer).copy_(result);
}

void BufferUpdates::clear() {
  for (Update& update : updates_) {
    update.granules.clear();
    update.packed.clear();
    update.transfers.clear();
  }
}

}  // namespace elaswave::exec

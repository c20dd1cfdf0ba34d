#include "folds.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "program.h"

namespace elaswave::exec {
namespace {

std::int64_t bytes_of(const FoldValue& value) {
  std::int64_t numel = 1;
  for (const std::int64_t size : value.shape) numel *= size;
  return numel * static_cast<std::int64_t>(c10::elementSize(value.dtype));
}

std::int64_t padded(std::int64_t bytes) { return (bytes + 7) / 8 * 8; }

std::string place(std::size_t index) { return "fold " + std::to_string(index); }

}  // namespace

int Folds::add(FoldSpec spec) {
  Fold fold;
  for (const FoldValue& value : spec.values) fold.bytes += padded(bytes_of(value));
  spec.group = sorted_group(folds_.size(), std::move(spec.group));
  fold.spec = std::move(spec);
  folds_.push_back(std::move(fold));
  return size() - 1;
}

void Folds::regroup(std::int64_t index, std::vector<OwnedSpan> group) {
  const auto at = static_cast<std::size_t>(index);
  folds_[at].spec.group = sorted_group(at, std::move(group));
}

std::vector<OwnedSpan> Folds::sorted_group(std::size_t index, std::vector<OwnedSpan> group) const {
  std::stable_sort(group.begin(), group.end(), [](const auto& a, const auto& b) { return a.lo < b.lo; });
  std::int64_t covered = 0;
  for (const OwnedSpan& span : group) {
    if (span.lo == span.hi) continue;
    if (span.lo != covered || (span.hi - span.lo) % granule_ != 0) {
      throw ExecError(place(index) + ": the samples of its ranks must follow each other in whole granules of " +
                      std::to_string(granule_) + "; rank " + std::to_string(span.rank) + " has [" +
                      std::to_string(span.lo) + ", " + std::to_string(span.hi) + ")");
    }
    covered = span.hi;
  }
  return group;
}

void Folds::collect(const Binding& binding, std::int64_t first, const at::Tensor& value) {
  Fold& fold = folds_[static_cast<std::size_t>(binding.index)];
  const FoldValue& declared = fold.spec.values[static_cast<std::size_t>(binding.item)];
  if (value.sizes() != at::IntArrayRef(declared.shape) || value.scalar_type() != declared.dtype) {
    throw ExecError(place(static_cast<std::size_t>(binding.index)) + ": value " + std::to_string(binding.item) +
                    " has another shape or dtype than declared");
  }
  std::vector<at::Tensor>& values = fold.granules[first];
  values.resize(fold.spec.values.size());
  values[static_cast<std::size_t>(binding.item)] = value;
}

void Folds::exchange() {
  for (std::size_t f = 0; f < folds_.size(); ++f) {
    Fold& fold = folds_[f];
    const std::uint64_t tag = tag_of(kFoldTag, static_cast<std::int64_t>(f));
    fold.packed.clear();
    const auto is_mine = [&](const OwnedSpan& span) { return span.rank == courier_.rank(); };
    if (std::none_of(fold.spec.group.begin(), fold.spec.group.end(), is_mine)) continue;
    at::Tensor mine;
    for (const OwnedSpan& span : fold.spec.group) {
      if (span.lo == span.hi) continue;  // it keeps the buffers, but makes no values
      if (is_mine(span)) {
        mine = pack(fold, span);
        fold.packed.push_back(mine);
      } else {
        fold.packed.push_back(at::empty({(span.hi - span.lo) / granule_, fold.bytes}, at::kByte));
        fold.transfers.push_back(courier_.receive(fold.packed.back(), span.rank, tag));
      }
    }
    if (!mine.defined()) continue;
    for (const OwnedSpan& span : fold.spec.group) {
      if (!is_mine(span)) fold.transfers.push_back(courier_.send(mine, span.rank, tag));
    }
  }
}

at::Tensor Folds::pack(const Fold& fold, const OwnedSpan& span) const {
  at::Tensor packed = at::empty({(span.hi - span.lo) / granule_, fold.bytes}, at::kByte);
  auto* out = packed.mutable_data_ptr<std::uint8_t>();
  for (std::int64_t first = span.lo; first < span.hi; first += granule_) {
    const auto found = fold.granules.find(first);
    for (std::size_t v = 0; v < fold.spec.values.size(); ++v) {
      if (found == fold.granules.end() || !found->second[v].defined()) {
        throw ExecError("fold: value " + std::to_string(v) + " of the granule at sample " + std::to_string(first) +
                        " was not produced; micro-batches must be single granules where folds are used");
      }
      const at::Tensor value = found->second[v].contiguous();
      std::memcpy(out, value.const_data_ptr(), value.nbytes());
      out += padded(static_cast<std::int64_t>(value.nbytes()));
    }
  }
  return packed;
}

std::vector<at::Tensor> Folds::unpack(const Fold& fold, const at::Tensor& packed, std::int64_t granule) const {
  std::vector<at::Tensor> values;
  const auto* in = packed.const_data_ptr<std::uint8_t>() + granule * fold.bytes;
  for (const FoldValue& declared : fold.spec.values) {
    at::Tensor value = at::empty(declared.shape, declared.dtype);
    std::memcpy(value.mutable_data_ptr(), in, value.nbytes());
    in += padded(bytes_of(declared));
    values.push_back(std::move(value));
  }
  return values;
}

void Folds::wait() {
  for (Fold& fold : folds_) courier_.wait(fold.transfers);
}

void Folds::apply(const std::vector<std::unique_ptr<UnitProgram>>& programs, const std::vector<at::Tensor>& buffers) {
  // Nothing is written before all of it is computed.
  std::vector<std::pair<int, at::Tensor>> results;
  for (Fold& fold : folds_) {
    if (fold.packed.empty()) continue;
    std::vector<c10::IValue> current;
    for (const int buffer : fold.spec.buffers) current.emplace_back(buffers[static_cast<std::size_t>(buffer)]);
    for (const at::Tensor& packed : fold.packed) {
      for (std::int64_t granule = 0; granule < packed.size(0); ++granule) {
        for (at::Tensor& value : unpack(fold, packed, granule)) current.emplace_back(std::move(value));
        current = programs[static_cast<std::size_t>(fold.spec.program)]->run(std::move(current));
      }
    }
    for (std::size_t i = 0; i < current.size(); ++i) {
      results.emplace_back(fold.spec.buffers[i], current[i].toTensor());
    }
  }
  for (const auto& [buffer, result] : results) buffers[static_cast<std::size_t>(buffer)].copy_(result);
}

void Folds::clear() {
  for (Fold& fold : folds_) {
    fold.granules.clear();
    fold.packed.clear();
    fold.transfers.clear();
  }
}

}  // namespace elaswave::exec

// Updates of mutable buffers, folded in granule order by every rank that keeps them. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

#include "courier.h"
#include "declarations.h"
#include "unit_program.h"

namespace elaswave::exec {

class Folds {
 public:
  Folds(Courier& courier, std::int64_t granule) : courier_(courier), granule_(granule) {}

  // Throws ExecError if the group's spans do not follow each other in whole granules; empty ones may lie anywhere.
  int add(FoldSpec spec);
  // Other samples for the ranks, after a change of tiles.
  void regroup(std::int64_t index, std::vector<OwnedSpan> group);
  int size() const { return static_cast<int>(folds_.size()); }
  const FoldSpec& spec(std::int64_t index) const { return folds_[static_cast<std::size_t>(index)].spec; }

  // What a unit yielded for the granule that starts at sample `first`. Throws ExecError for another shape or dtype than
  // declared.
  void collect(const Binding& binding, std::int64_t first, const at::Tensor& value);
  // Sends the own granules' values to the other holders and posts receives for theirs. Throws ExecError if a value of
  // the own span is missing.
  void exchange();
  // Waits for all values.
  void wait();
  // Runs the folds on what has arrived; `buffers` are written in place.
  void apply(const std::vector<std::unique_ptr<UnitProgram>>& programs, const std::vector<at::Tensor>& buffers);
  void clear();

 private:
  struct Fold {
    FoldSpec spec;
    std::int64_t bytes = 0;                                    // of one granule's values, each padded to 8 bytes
    std::map<std::int64_t, std::vector<at::Tensor>> granules;  // first sample -> values
    std::vector<at::Tensor> packed;                            // per group member, bytes [granules, bytes]
    std::vector<comm::Transfer> transfers;
  };

  std::vector<OwnedSpan> sorted_group(std::size_t index, std::vector<OwnedSpan> group) const;
  at::Tensor pack(const Fold& fold, const OwnedSpan& span) const;
  std::vector<at::Tensor> unpack(const Fold& fold, const at::Tensor& packed, std::int64_t granule) const;

  Courier& courier_;
  std::int64_t granule_;
  std::vector<Fold> folds_;
};

}  // namespace elaswave::exec

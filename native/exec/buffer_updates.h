// Updates of mutable buffers by what units yield per granule, in granule order, on every rank. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

#include "declarations.h"
#include "program_library.h"
#include "tables.h"
#include "tensor_transfers.h"

namespace elaswave::exec {

class BufferUpdates {
 public:
  explicit BufferUpdates(TensorTransfers& transfers) : transfers_(transfers) {}

  // Drops what was collected. `granule` in samples.
  void reset(std::vector<BufferUpdateSpec> specs, std::int64_t granule);
  const BufferUpdateSpec& spec(BufferUpdateId update) const { return updates_[update.index()].spec; }

  // What a unit yielded for the granule that starts at sample `first`. Throws ExecError for another shape or dtype than
  // declared.
  void collect(const UpdateValue& binding, std::int64_t first, const at::Tensor& value);
  // Sends the own granules' values to the other ranks and posts receives for theirs. Throws ExecError if a value of
  // the own span is missing.
  void exchange();
  // Waits for all values.
  void wait_ready();
  // Runs the updates on what has arrived; buffers are written in place, all or none.
  void apply(ProgramLibrary& programs, Tables& tables);
  void clear();

 private:
  struct Update {
    BufferUpdateSpec spec;
    std::int64_t bytes = 0;                                    // of one granule's values, each padded to 8 bytes
    std::map<std::int64_t, std::vector<at::Tensor>> granules;  // first sample -> values
    std::vector<at::Tensor> packed;                            // per group member, bytes [granules, bytes]
    std::vector<comm::Transfer> transfers;
  };

  at::Tensor pack(const Update& update, const OwnedSpan& span) const;
  std::vector<at::Tensor> unpack(const Update& update, const at::Tensor& packed, std::int64_t granule) const;

  TensorTransfers& transfers_;
  std::int64_t granule_ = 1;
  std::vector<Update> updates_;
};

}  // namespace elaswave::exec

// Activations on unit borders and their gradients, per (value, micro-batch) of this rank. Private to exec/.
//
// An activation is produced by a local unit or received in pieces along its sample axis. A gradient is the sum of what
// came from a later stage (first, since those units are later) and what local units add, in the order of their
// BACKWARD: descending units, whatever the cuts are.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "exec/device/tensor_transfers.h"
#include "exec/spec/declarations.h"

namespace elaswave::exec {

class Values {
 public:
  explicit Values(TensorTransfers& transfers) : transfers_(transfers) {}

  // Drops everything held and lays out for these values and micro-batches.
  void reset(std::vector<ValueSpec> specs, std::vector<SampleSpan> micro_batches);
  const ValueSpec& declared(ValueId value) const { return specs_[value.index()]; }
  void clear();

  void post_receive(const Step& step);
  void send(const Step& step);

  // Waits for pending pieces.
  at::Tensor activation(ValueId value, std::int64_t micro_batch);
  // Throws ExecError if `produced` has not the declared shape and dtype.
  void set_activation(ValueId value, std::int64_t micro_batch, const at::Tensor& produced);
  // A value as declared, with zeros in it.
  at::Tensor zeros(ValueId value, std::int64_t micro_batch) const;
  // Zeros where nothing was added.
  at::Tensor gradient(ValueId value, std::int64_t micro_batch);
  void add_gradient(ValueId value, std::int64_t micro_batch, const at::Tensor& addend);
  void release(ValueId value, std::int64_t micro_batch, bool grad);

 private:
  struct Piece {
    comm::Transfer transfer;
    at::Tensor staging;  // defined: to be copied into (or added to) the slot's tensor when it has arrived
    std::int64_t lo, hi;
  };
  struct Slot {
    at::Tensor tensor;
    bool own = false;  // nobody else refers to the tensor: may be added to in place
    std::vector<Piece> pending;
  };

  Slot& slot(ValueId value, std::int64_t micro_batch, bool grad);
  std::int64_t samples(std::int64_t micro_batch) const {
    return micro_batches_[static_cast<std::size_t>(micro_batch)].size();
  }
  std::vector<std::int64_t> shape_of(const ValueSpec& spec, std::int64_t samples) const;
  void wait_ready(Slot& slot, const ValueSpec& spec);

  TensorTransfers& transfers_;
  std::vector<ValueSpec> specs_;
  std::vector<SampleSpan> micro_batches_;
  std::vector<Slot> slots_;  // [value][micro-batch][activation, gradient]
};

}  // namespace elaswave::exec

// Activations on unit borders and their gradients, per (value, micro-batch) of this rank. Private to exec/.
//
// An activation is produced by a local unit or received in pieces along its sample axis. A gradient is the sum of what
// came from a later stage (first, since those units are later) and what local units add, in the order of their
// BACKWARD: descending units, whatever the cuts are.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "courier.h"
#include "declarations.h"

namespace elaswave::exec {

class Values {
 public:
  explicit Values(Courier& courier) : courier_(courier) {}

  int add(ValueSpec spec);
  const std::vector<ValueSpec>& specs() const { return specs_; }
  // Drops everything held and lays out for these micro-batches.
  void reset(std::vector<SampleSpan> micro_batches);
  void clear();

  void post_receive(const Step& step);
  void send(const Step& step);

  // Waits for pending pieces.
  at::Tensor activation(std::int64_t value, std::int64_t micro_batch);
  // Throws ExecError if `produced` has not the declared shape and dtype.
  void set_activation(std::int64_t value, std::int64_t micro_batch, const at::Tensor& produced);
  // A value as declared, with zeros in it.
  at::Tensor zeros(std::int64_t value, std::int64_t micro_batch) const;
  // Zeros where nothing was added.
  at::Tensor gradient(std::int64_t value, std::int64_t micro_batch);
  void add_gradient(std::int64_t value, std::int64_t micro_batch, const at::Tensor& addend);
  void release(std::int64_t value, std::int64_t micro_batch, bool grad);

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

  Slot& slot(std::int64_t value, std::int64_t micro_batch, bool grad);
  std::vector<std::int64_t> shape_of(const ValueSpec& spec, std::int64_t samples) const;
  void settle(Slot& slot, const ValueSpec& spec);

  Courier& courier_;
  std::vector<ValueSpec> specs_;
  std::vector<SampleSpan> micro_batches_;
  std::vector<Slot> slots_;  // [value][micro-batch][activation, gradient]
};

}  // namespace elaswave::exec

// All units of a job one after another in one process, forward and back, timed: for measuring and for comparing. Values
// and gradients have numbered places; what a program leaves for the next one of its unit stays here.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "exec/program/unit_program.h"

namespace elaswave::exec {

using ProgramValues = std::vector<c10::IValue>;

// A unit program that several threads may run: they take turns.
class SharedProgram {
 public:
  explicit SharedProgram(ProgramSpec spec) : program_(std::move(spec)) {}
  const std::string& name() const { return program_.name(); }
  // As UnitProgram::run.
  ProgramValues run(ProgramValues inputs, const std::function<void()>& check = {}) {
    const std::lock_guard lock(mutex_);
    return program_.run(std::move(inputs), check);
  }

 private:
  UnitProgram program_;
  std::mutex mutex_;
};

class UnitSequence {
 public:
  using Places = std::vector<std::pair<std::size_t, std::size_t>>;  // position among the program's, place

  struct Unit {
    std::shared_ptr<SharedProgram> forward;
    ProgramValues fixed;                      // all inputs; those that are read from places are overwritten
    Places reads;                             // inputs from values
    std::vector<std::size_t> writes;          // values that the first outputs become; the others are saved
    std::shared_ptr<SharedProgram> backward;  // null: nothing needs a gradient
    std::shared_ptr<SharedProgram> weights;   // given: `backward` is the half for values, and this the one for weights
    std::size_t results = 0;                  // gradients that each of these returns; the rest of `backward`'s is held
    std::vector<std::size_t> tangents;        // gradients that the backward program reads after what was saved
    Places gradients;                         // outputs that are added to gradients
  };

  struct Result {
    ProgramValues values, gradients;
    std::vector<double> forward_s, backward_s, weights_s;  // by unit; backward has weights in it
  };

  void add(Unit unit) { units_.push_back(std::move(unit)); }
  // `values`: what is given, None for what units write. `gradients`: how many places there are for them. The gradient
  // at `loss_gradient`, if there is such a place, starts as ones of the value at `loss`. Throws ExecError, and
  // std::out_of_range for a place that there is not.
  Result step(ProgramValues values, std::size_t gradients, std::size_t loss, std::size_t loss_gradient);

 private:
  std::vector<Unit> units_;
};

}  // namespace elaswave::exec

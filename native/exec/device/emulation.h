// A device that computes nothing: its kernels take modelled durations, on a clock of its own. Private to exec/.
//
// The clock says when the device is free. A kernel whose inputs the rank had to wait for begins when they are there;
// any other begins when the one before has ended, as on a device that is fed ahead of time. So what one kernel ends too
// late (the system wakes nobody punctually), the next is shorter, and errors do not add up.
#pragma once

#include <cstdint>

namespace elaswave::exec {

// Of one step.
struct EmulatedTimes {
  std::int64_t kernels = 0;
  double modelled_s = 0.0;   // sum of all durations
  double overslept_s = 0.0;  // how much later than wanted the sleeps ended, all together
};

class EmulatedDevice {
 public:
  // A step begins; nothing runs.
  void begin() { times_ = EmulatedTimes(); }
  // Returns when a kernel of `seconds` has ended. `waits`: how often this rank has waited for a transfer so far; if it
  // did since the last kernel, the device was idle.
  void run(double seconds, std::int64_t waits);
  const EmulatedTimes& times() const { return times_; }

 private:
  std::int64_t free_ns_ = 0;
  std::int64_t waits_ = 0;
  EmulatedTimes times_;
};

}  // namespace elaswave::exec

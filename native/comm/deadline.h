// A point in time that a wait must not pass. Every blocking call of this library takes one.
#pragma once

#include <chrono>

namespace elaswave::comm {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `seconds` from now; at most about 30 years, so that "as good as never" does not overflow.
  static Deadline after(double seconds) {
    constexpr double kLongest = 1e9;
    const double clamped = seconds < kLongest ? seconds : kLongest;
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(clamped)));
  }
  bool expired() const { return Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }
  // Time left, never negative.
  std::chrono::nanoseconds left() const {
    const auto now = Clock::now();
    return now >= at_ ? std::chrono::nanoseconds(0) : std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - now);
  }
  // The earlier of two.
  Deadline or_before(Deadline other) const { return at_ < other.at_ ? *this : other; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace elaswave::comm

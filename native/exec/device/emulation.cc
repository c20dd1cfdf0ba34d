#include "exec/device/emulation.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>

namespace elaswave::exec {
namespace {

constexpr std::int64_t kNanoseconds = 1'000'000'000;

// The device lags at most so far behind the real clock: a rank that was stopped for longer has lost the time.
constexpr std::int64_t kLagMostNs = kNanoseconds / 10;

std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNanoseconds + now.tv_nsec;
}

double seconds_of(std::int64_t ns) { return static_cast<double>(ns) / static_cast<double>(kNanoseconds); }

void sleep_until(std::int64_t at_ns) {
  const timespec at{at_ns / kNanoseconds, at_ns % kNanoseconds};
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) continue;
}

}  // namespace

void EmulatedDevice::run(double seconds, std::int64_t waits) {
  std::int64_t now = now_ns();
  // Linux rounds the sleeps of a thread up by 50 us to save power, unless told otherwise.
  if (times_.kernels == 0) ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  const bool idle = times_.kernels == 0 || waits != waits_;
  waits_ = waits;
  const std::int64_t begin = idle ? now : std::max(free_ns_, now - kLagMostNs);
  free_ns_ = begin + std::llround(seconds * static_cast<double>(kNanoseconds));
  if (free_ns_ > now) {
    sleep_until(free_ns_);
    now = now_ns();
    times_.overslept_s += seconds_of(std::max<std::int64_t>(0, now - free_ns_));
  }
  ++times_.kernels;
  times_.modelled_s += seconds;
}

}  // namespace elaswave::exec

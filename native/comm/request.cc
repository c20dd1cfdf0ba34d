#include "comm/request.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdio>

#include "comm/errors.h"

namespace elaswave::comm {

void Failure::raise() const {
  switch (kind) {
    case Kind::kLost:
      throw PeerLost(message, rank.value(), epoch);
    case Kind::kAborted:
      throw Aborted(message, rank);
    case Kind::kComm:
      break;
  }
  throw CommError(message);
}

std::string Request::describe() const {
  char text[128];
  std::snprintf(text, sizeof text, "%s rank %d, tag 0x%llx, %zu bytes", kind == Kind::kSend ? "send to" : "recv from",
                peer, static_cast<unsigned long long>(tag), bytes);
  return text;
}

void Signal::notify() {
  count_.fetch_add(1);
  if (sleepers_.load() > 0) {
    syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Signal::sleep(std::uint32_t ticket, Deadline deadline) {
  static_assert(sizeof count_ == 4, "the kernel waits on 32 bits");
  const auto left = deadline.left().count();
  if (left <= 0) return;
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(left / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(left % 1'000'000'000);
  sleepers_.fetch_add(1);
  syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, ticket, &timeout, nullptr, 0);
  sleepers_.fetch_sub(1);
}

}  // namespace elaswave::comm

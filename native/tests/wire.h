// Two connected sockets in one process, for tests that speak to one end of a link themselves.
#pragma once

#include <sys/socket.h>

#include <cstddef>

#include "check.h"
#include "comm/socket.h"

namespace elaswave::tests {

struct Wire {
  comm::Fd ours;    // nonblocking, as a link's
  comm::Fd theirs;  // nonblocking

  Wire() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    ours = comm::Fd(ends[0]);
    theirs = comm::Fd(ends[1]);
  }
  // The peer's bytes; few enough for the socket to take.
  void say(const void* data, std::size_t bytes) const {
    if (bytes > 0) CHECK(::send(theirs.get(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes));
  }
  void end() const { ::shutdown(theirs.get(), SHUT_WR); }
};

}  // namespace elaswave::tests

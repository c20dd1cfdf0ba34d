// Sockets with deadlines, for setting links up. Private to comm/.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "comm/deadline.h"

namespace elaswave::comm {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// "Connection refused"; thread safe, unlike strerror.
std::string describe_errno(int error);

// Nonblocking, close-on-exec. Throws CommError that names host and port.
Fd listen_tcp(const std::string& host, std::uint16_t port);
std::uint16_t port_of(const Fd& socket);

// One attempt. An empty Fd when the peer is not there (yet), with the reason in `why`; CommError when the host cannot
// be resolved.
Fd dial_tcp(const std::string& host, std::uint16_t port, Deadline deadline, std::string& why);

// TCP_NODELAY, buffer sizes, and probes of a connection that has been idle for half of `silence` (at least a second).
void tune_tcp(const Fd& socket, std::chrono::milliseconds silence);

// All or nothing on a nonblocking socket. Throw DeadlineExceeded or CommError.
void send_all(const Fd& socket, const void* data, std::size_t bytes, Deadline deadline);
void recv_all(const Fd& socket, void* data, std::size_t bytes, Deadline deadline);
// poll() for `events`; false at the deadline.
bool wait_for(const Fd& socket, short events, Deadline deadline);

// Whether another user of this machine has opened the other end of a TCP connection; false where that cannot be known,
// as for an end on another machine.
bool is_of_another_user(const Fd& socket);

// The address of the other end of a TCP connection, without its port, as bytes to compare; empty when it is gone.
std::string address_of_peer(const Fd& socket);
// Whether the other end has this end's own address, and so is on this machine.
bool is_of_own_address(const Fd& socket);

// A listening unix socket in the abstract namespace: leaves nothing behind. `name` without the leading zero byte.
Fd listen_unix(const std::string& name);
Fd dial_unix(const std::string& name);  // empty when it cannot be reached
// Passes an open file over a unix socket, only to or from a process of the same user. Throw CommError.
void send_file(const Fd& socket, const Fd& file, Deadline deadline);
Fd recv_file(const Fd& socket, Deadline deadline);

}  // namespace elaswave::comm

// A nonblocking pipe of bytes in both directions: what a Link frames its messages on. Private to comm/.
//
// All methods but fd() and kind() are called under the lock of the link that owns the channel.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/endpoint.h"
#include "comm/socket.h"

namespace elaswave::comm {

class Channel {
 public:
  static constexpr std::ptrdiff_t kClosed = -1;

  virtual ~Channel() = default;
  // Bytes moved; 0: nothing to read, or no room, right now; kClosed: never again. What a peer wrote before it went
  // is read before kClosed shows.
  virtual std::ptrdiff_t read(void* data, std::size_t bytes) = 0;
  // The reader can do nothing before so many more bytes are there; it need not be woken for fewer. Until the next read.
  virtual void expect(std::size_t /*bytes*/) {}
  virtual std::ptrdiff_t write(const iovec* parts, int count) = 0;
  // Has the socket reported to `epoll` under `number`.
  virtual void watch(int epoll, std::uint64_t number) = 0;
  // Called before the IO thread sleeps, for the directions that it waits for. True: look again, there is something.
  virtual bool arm(bool for_read, bool for_write) = 0;
  // The IO thread need not be woken: somebody else looks. Until `arm`.
  virtual void disarm() = 0;
  // epoll reported `fd`.
  virtual void on_event() = 0;
  // Whether the peer's machine has acknowledged nothing for too long, though it was asked to. `look_afresh`: the caller
  // was away, so the time counts from now. False where both ends are on one machine.
  virtual bool is_silent(std::chrono::steady_clock::time_point, bool /*look_afresh*/) { return false; }
  // Ends the own direction; what was written is still delivered.
  virtual void finish_writing() = 0;
  // Why kClosed.
  virtual std::string trouble() const = 0;
  virtual int fd() const = 0;
  virtual LinkKind kind() const = 0;
};

// `silence`: how long the peer may acknowledge nothing.
std::unique_ptr<Channel> make_tcp_channel(Fd socket, std::chrono::milliseconds silence);
// What is read from `channel` comes as late as on a link of that pace; what is written goes at once, for the other end
// does the same. Throws CommError.
std::unique_ptr<Channel> make_paced_channel(std::unique_ptr<Channel> channel, LinkPace pace);

}  // namespace elaswave::comm

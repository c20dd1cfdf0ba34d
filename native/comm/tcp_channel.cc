#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "comm/channel.h"
#include "comm/errors.h"

namespace elaswave::comm {
namespace {

class TcpChannel final : public Channel {
  using Clock = std::chrono::steady_clock;

 public:
  TcpChannel(Fd socket, std::chrono::milliseconds silence) : socket_(std::move(socket)), silence_(silence) {}

  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    for (;;) {
      const ssize_t n = ::recv(socket_.get(), data, bytes, 0);
      if (n > 0) return n;
      if (n == 0) return close_with("the connection was closed");
      if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
      if (errno != EINTR) return close_with(describe_errno(errno));
    }
  }

  std::ptrdiff_t write(const iovec* parts, int count) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = static_cast<std::size_t>(count);
    for (;;) {
      const ssize_t n = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
      if (n >= 0) return n;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
      if (errno != EINTR) return close_with(describe_errno(errno));
    }
  }

  void watch(int epoll, std::uint64_t number) override {
    epoll_ = epoll;
    number_ = number;
    tell_epoll(EPOLL_CTL_ADD, kReading);
  }
  // A change of what is watched reports what is there already, so nothing is missed in between.
  bool arm(bool for_read, bool for_write) override {
    tell_epoll(EPOLL_CTL_MOD, (for_read ? kReading : kNothing) | (for_write ? kWriting : kNothing));
    return false;
  }
  void disarm() override { tell_epoll(EPOLL_CTL_MOD, kNothing); }
  void on_event() override {}

  // An answer is due to bytes that were sent after the peer was last heard of, and to the second of two probes of a
  // full window or of an idle connection; the first may be counted after it was answered, where packets are handed over
  // within the machine. TCP_USER_TIMEOUT would not do: it also ends connections to those who are there but read nothing
  // for a while, as a rank whose pool is full in a long backward pass.
  bool is_silent(Clock::time_point now, bool look_afresh) override {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
    const bool awaits_bytes = info.tcpi_unacked > 0 && info.tcpi_last_ack_recv > info.tcpi_last_data_sent;
    const bool due = awaits_bytes || info.tcpi_probes >= 2;
    const Clock::time_point heard_at = now - std::chrono::milliseconds(info.tcpi_last_ack_recv);
    due_since_ = due && !look_afresh ? std::max(due_since_, heard_at) : now;
    return now - due_since_ >= silence_;
  }

  void finish_writing() override { ::shutdown(socket_.get(), SHUT_WR); }

  std::string trouble() const override { return trouble_; }
  int fd() const override { return socket_.get(); }
  LinkKind kind() const override { return LinkKind::kTcp; }

 private:
  // Hang-ups are always reported, also while reading stands still for a full pool.
  static constexpr std::uint32_t kNothing = EPOLLRDHUP | EPOLLET;
  static constexpr std::uint32_t kReading = EPOLLIN | kNothing;
  static constexpr std::uint32_t kWriting = EPOLLOUT | kNothing;

  void tell_epoll(int operation, std::uint32_t events) {
    if (operation == EPOLL_CTL_MOD && events == watched_) return;
    epoll_event event{};
    event.events = watched_ = events;
    event.data.u64 = number_;
    if (::epoll_ctl(epoll_, operation, socket_.get(), &event) != 0 && operation == EPOLL_CTL_ADD) {
      throw CommError("a socket cannot be watched: " + describe_errno(errno));
    }
  }

  std::ptrdiff_t close_with(const std::string& trouble) {
    if (trouble_.empty()) trouble_ = trouble;
    return kClosed;
  }

  Fd socket_;
  const std::chrono::milliseconds silence_;
  Clock::time_point due_since_ = Clock::now();
  int epoll_ = -1;
  std::uint64_t number_ = 0;
  std::uint32_t watched_ = 0;
  std::string trouble_;
};

}  // namespace

std::unique_ptr<Channel> make_tcp_channel(Fd socket, std::chrono::milliseconds silence) {
  return std::make_unique<TcpChannel>(std::move(socket), silence);
}

}  // namespace elaswave::comm

#include <sys/socket.h>

#include <cerrno>

#include "comm/channel.h"

namespace elaswave::comm {
namespace {

class TcpChannel final : public Channel {
 public:
  explicit TcpChannel(Fd socket) : socket_(std::move(socket)) {}

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

  // epoll is told of both directions, at their edges, all the time.
  bool arm(bool, bool) override { return false; }
  void on_event() override {}

  void finish_writing() override { ::shutdown(socket_.get(), SHUT_WR); }

  std::string trouble() const override { return trouble_; }
  int fd() const override { return socket_.get(); }
  LinkKind kind() const override { return LinkKind::kTcp; }

 private:
  std::ptrdiff_t close_with(const std::string& trouble) {
    if (trouble_.empty()) trouble_ = trouble;
    return kClosed;
  }

  Fd socket_;
  std::string trouble_;
};

}  // namespace

std::unique_ptr<Channel> make_tcp_channel(Fd socket) { return std::make_unique<TcpChannel>(std::move(socket)); }

}  // namespace elaswave::comm

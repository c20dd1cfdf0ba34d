#include "comm/socket.h"

#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <memory>
#include <system_error>
#include <vector>

#include "comm/errors.h"

namespace elaswave::comm {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

std::string place(const std::string& host, std::uint16_t port) { return host + ":" + std::to_string(port); }

AddressList resolve(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) throw CommError("host '" + host + "' cannot be resolved: " + gai_strerror(error));
  return {found, &freeaddrinfo};
}

// Empty, with errno, where this machine does not speak to addresses of the family.
Fd try_socket(int family) { return Fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

Fd open_socket(int family) {
  Fd fd = try_socket(family);
  if (!fd) throw CommError("no socket: " + describe_errno(errno));
  return fd;
}

int poll_timeout_ms(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
  return static_cast<int>(std::min<std::int64_t>(left, INT_MAX));
}

std::size_t system_limit(const char* path) {
  std::ifstream file(path);
  std::size_t value = 0;
  file >> value;
  return value;
}

sockaddr_un unix_address(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t size = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  return address;
}

void require_same_user(const Fd& socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid()) {
    throw CommError("a process of another user asked for shared memory");
  }
}

struct Port {
  sa_family_t family;
  __be32 address[4]{};
  __be16 port;
};

Port port_from(const sockaddr_storage& name) {
  Port port{.family = name.ss_family, .port = 0};
  if (name.ss_family == AF_INET6) {
    const auto& at = reinterpret_cast<const sockaddr_in6&>(name);
    std::memcpy(port.address, &at.sin6_addr, sizeof at.sin6_addr);
    port.port = at.sin6_port;
  } else {
    const auto& at = reinterpret_cast<const sockaddr_in&>(name);
    std::memcpy(port.address, &at.sin_addr, sizeof at.sin_addr);
    port.port = at.sin_port;
  }
  return port;
}

// sock_diag(7) knows the owner of one connection by its ports, at once and for everybody who asks.
struct OwnerQuestion {
  nlmsghdr header;
  inet_diag_req_v2 asked;
};
struct OwnerAnswer {
  nlmsghdr header;
  inet_diag_msg found;
  char more[512];
};

// Room for the one descriptor that travels beside the byte.
union FileEnvelope {
  cmsghdr header;
  char space[CMSG_SPACE(sizeof(int))];
};

// All files that came, as they are open from now on: alignment leaves room for two in the envelope of one.
std::vector<Fd> files_of(msghdr& message) {
  std::vector<Fd> files;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t bytes = head->cmsg_len - CMSG_LEN(0);
    for (std::size_t at = 0; at + sizeof(int) <= bytes; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(head) + at, sizeof fd);
      files.emplace_back(fd);
    }
  }
  return files;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

std::string describe_errno(int error) { return std::generic_category().message(error); }

Fd listen_tcp(const std::string& host, std::uint16_t port) {
  const AddressList addresses = resolve(host, port, AI_PASSIVE);
  int error = 0;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    Fd fd = try_socket(a->ai_family);
    if (!fd) {
      error = errno;
      continue;
    }
    const int on = 1;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    // Whoever connects and says nothing is the kernel's to keep for a while: dialers speak first.
    constexpr int kSilentSeconds = 10;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &kSilentSeconds, sizeof kSilentSeconds);
    if (::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) return fd;
    error = errno;
  }
  const std::string fact = error == EADDRINUSE ? "the port is already in use" : describe_errno(error);
  throw CommError("cannot listen on " + place(host, port) + ": " + fact);
}

std::uint16_t port_of(const Fd& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw CommError("a socket has no name: " + describe_errno(errno));
  }
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6*>(&address)->sin6_port);
  return ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

Fd dial_tcp(const std::string& host, std::uint16_t port, Deadline deadline, std::string& why) {
  const AddressList addresses = resolve(host, port, 0);
  int left = 0;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) ++left;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next, --left) {
    Fd fd = try_socket(a->ai_family);
    int error = fd ? 0 : errno;
    if (fd && ::connect(fd.get(), a->ai_addr, a->ai_addrlen) != 0) error = errno;
    if (error == EINPROGRESS) {
      socklen_t length = sizeof error;
      // Packets to one of several addresses may vanish: the others get their share of the time.
      const double share_s = std::chrono::duration<double>(deadline.left()).count() / left;
      if (!wait_for(fd, POLLOUT, Deadline::after(share_s).or_before(deadline))) {
        error = ETIMEDOUT;
      } else {
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
    if (error == 0) return fd;
    why = describe_errno(error);
  }
  return Fd();
}

void tune_tcp(const Fd& socket, std::chrono::milliseconds silence) {
  const auto set = [&](int level, int name, int value) { setsockopt(socket.get(), level, name, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // The channel counts unanswered probes itself; the kernel's own limit comes after that.
  const int idle_s = std::max(1, static_cast<int>(silence.count() / 2000));
  constexpr int kProbes = 8;
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, idle_s);
  set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  // A fixed size turns the kernel's own tuning off and is cut to the system's limit, so it helps only where that is
  // high.
  constexpr std::size_t kBuffer = std::size_t{4} << 20;
  if (system_limit("/proc/sys/net/core/rmem_max") >= kBuffer) set(SOL_SOCKET, SO_RCVBUF, kBuffer);
  if (system_limit("/proc/sys/net/core/wmem_max") >= kBuffer) set(SOL_SOCKET, SO_SNDBUF, kBuffer);
}

bool wait_for(const Fd& socket, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{socket.get(), events, 0};
    const int ready = ::poll(&entry, 1, poll_timeout_ms(deadline));
    if (ready > 0) return true;
    if (ready == 0 && deadline.expired()) return false;
    if (ready < 0 && errno != EINTR) throw CommError("poll failed: " + describe_errno(errno));
  }
}

void send_all(const Fd& socket, const void* data, std::size_t bytes, Deadline deadline) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(socket.get(), at, bytes, MSG_NOSIGNAL);
    if (n > 0) {
      at += n;
      bytes -= static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(socket, POLLOUT, deadline)) throw DeadlineExceeded("the peer takes no bytes");
    } else if (errno != EINTR) {
      throw CommError("the connection broke: " + describe_errno(errno));
    }
  }
}

void recv_all(const Fd& socket, void* data, std::size_t bytes, Deadline deadline) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::recv(socket.get(), at, bytes, 0);
    if (n > 0) {
      at += n;
      bytes -= static_cast<std::size_t>(n);
    } else if (n == 0) {
      throw CommError("the peer closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(socket, POLLIN, deadline)) throw DeadlineExceeded("the peer says nothing");
    } else if (errno != EINTR) {
      throw CommError("the connection broke: " + describe_errno(errno));
    }
  }
}

namespace {

std::string address_bytes(const sockaddr_storage& address) {
  const Port port = port_from(address);
  return {reinterpret_cast<const char*>(port.address), sizeof port.address};
}

}  // namespace

std::string address_of_peer(const Fd& socket) {
  sockaddr_storage theirs{};
  socklen_t length = sizeof theirs;
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&theirs), &length) != 0) return {};
  return address_bytes(theirs);
}

bool is_of_own_address(const Fd& socket) {
  sockaddr_storage ours{};
  socklen_t length = sizeof ours;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&ours), &length) != 0) return false;
  return address_bytes(ours) == address_of_peer(socket);
}

bool is_of_another_user(const Fd& socket) {
  sockaddr_storage ours{}, theirs{};
  socklen_t our_length = sizeof ours, their_length = sizeof theirs;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&ours), &our_length) != 0 ||
      ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&theirs), &their_length) != 0) {
    return false;
  }
  const Port here = port_from(ours), there = port_from(theirs);
  OwnerQuestion question{};
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.asked.sdiag_family = static_cast<std::uint8_t>(there.family);
  question.asked.sdiag_protocol = IPPROTO_TCP;
  question.asked.idiag_states = ~0U;
  question.asked.id.idiag_sport = there.port;
  question.asked.id.idiag_dport = here.port;
  std::memcpy(question.asked.id.idiag_src, there.address, sizeof there.address);
  std::memcpy(question.asked.id.idiag_dst, here.address, sizeof here.address);
  question.asked.id.idiag_cookie[0] = question.asked.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;

  const Fd kernel(::socket(AF_NETLINK, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!kernel || ::send(kernel.get(), &question, sizeof question, 0) != sizeof question) return false;
  OwnerAnswer answer{};
  const ssize_t bytes = ::recv(kernel.get(), &answer, sizeof answer, 0);  // it was written by `send`
  if (bytes < static_cast<ssize_t>(offsetof(OwnerAnswer, more))) return false;
  if (answer.header.nlmsg_type != SOCK_DIAG_BY_FAMILY) return false;
  // Where there is no such connection here, a listener at that port may be found instead.
  const inet_diag_msg& found = answer.found;
  if (found.id.idiag_sport != there.port || found.id.idiag_dport != here.port) return false;
  return found.idiag_uid != ::geteuid();
}

Fd listen_unix(const std::string& name) {
  Fd fd = open_socket(AF_UNIX);
  socklen_t length = 0;
  const sockaddr_un address = unix_address(name, length);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 || ::listen(fd.get(), 1) != 0) {
    throw CommError("no unix socket: " + describe_errno(errno));
  }
  return fd;
}

Fd dial_unix(const std::string& name) {
  Fd fd = open_socket(AF_UNIX);
  socklen_t length = 0;
  const sockaddr_un address = unix_address(name, length);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return Fd();
  return fd;
}

void send_file(const Fd& socket, const Fd& file, Deadline deadline) {
  require_same_user(socket);
  char byte = 'F';
  iovec part{&byte, 1};
  FileEnvelope envelope{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = envelope.space;
  message.msg_controllen = sizeof envelope.space;
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = file.get();
  std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  if (!wait_for(socket, POLLOUT, deadline) || ::sendmsg(socket.get(), &message, MSG_NOSIGNAL) != 1) {
    throw CommError("the shared segment could not be passed: " + describe_errno(errno));
  }
}

Fd recv_file(const Fd& socket, Deadline deadline) {
  require_same_user(socket);
  char byte = 0;
  iovec part{&byte, 1};
  FileEnvelope envelope{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = envelope.space;
  message.msg_controllen = sizeof envelope.space;
  if (!wait_for(socket, POLLIN, deadline)) throw DeadlineExceeded("no shared segment came");
  const ssize_t n = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (n < 0) throw CommError("no shared segment came: " + describe_errno(errno));
  std::vector<Fd> files = files_of(message);
  if (n != 1 || files.size() != 1) {
    throw CommError("the message that should carry the shared segment has " + std::to_string(files.size()) + " files");
  }
  return std::move(files.front());
}

}  // namespace elaswave::comm

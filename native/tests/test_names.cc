// Hosts by names that stand for several addresses: each gets its share of the time, and none that this machine cannot
// speak to hinders the others.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "check.h"
#include "cluster.h"
#include "comm/socket.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

struct Address {
  addrinfo info{};
  sockaddr_in name{};
};

std::deque<Address>& addresses() {
  static std::deque<Address> all;
  return all;
}

void add_address(int family, std::uint16_t port) {
  Address& added = addresses().emplace_back();
  added.name.sin_family = static_cast<sa_family_t>(family);
  added.name.sin_port = htons(port);
  added.name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  added.info.ai_family = family;
  added.info.ai_addr = reinterpret_cast<sockaddr*>(&added.name);
  added.info.ai_addrlen = sizeof added.name;
  if (addresses().size() > 1) addresses()[addresses().size() - 2].info.ai_next = &added.info;
}

// Listens on the loopback device with room for so many who were not accepted.
Fd listener(int room, std::uint16_t& port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof name) == 0 && ::listen(fd.get(), room) == 0);
  port = port_of(fd);
  return fd;
}

// Linux drops what comes to a listener without room, so that whoever dials hears nothing.
std::vector<Fd> fill(std::uint16_t port) {
  std::vector<Fd> waiting;
  for (int i = 0; i < 4; ++i) {
    Fd& fd = waiting.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(port);
    ::connect(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof name);
    wait_for(fd, POLLOUT, Deadline::after(0.1));
  }
  return waiting;
}

}  // namespace

// This program's names are ours: the linker takes these before those of the C library.
extern "C" int getaddrinfo(const char*, const char*, const addrinfo*, addrinfo** found) {
  *found = &addresses().front().info;
  return 0;
}
extern "C" void freeaddrinfo(addrinfo*) {}

TEST(an_address_of_an_unknown_family_is_passed_over) {
  addresses().clear();
  std::uint16_t port = 0;
  const Fd open = listener(8, port);
  add_address(AF_MAX - 1, port);
  add_address(AF_INET, port);
  std::string why;
  CHECK(static_cast<bool>(dial_tcp("some.host", port, plenty(), why)));
  addresses().pop_back();
  addresses().front().info.ai_next = nullptr;
  CHECK(!dial_tcp("some.host", port, plenty(), why));
  CHECK_EQUAL(why, describe_errno(EAFNOSUPPORT));
}

TEST(an_address_that_says_nothing_leaves_time_for_the_next) {
  addresses().clear();
  std::uint16_t full = 0, port = 0;
  const Fd silent = listener(0, full), open = listener(8, port);
  const std::vector<Fd> waiting = fill(full);
  add_address(AF_INET, full);
  std::string why;
  CHECK(!dial_tcp("some.host", port, Deadline::after(0.5), why));
  CHECK_EQUAL(why, describe_errno(ETIMEDOUT));
  add_address(AF_INET, port);
  CHECK(static_cast<bool>(dial_tcp("some.host", port, Deadline::after(3.0), why)));
}

int main(int argc, char** argv) { return run(argc, argv); }

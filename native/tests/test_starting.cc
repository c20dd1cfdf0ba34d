// Many endpoints that start at the same time: every link comes to be, whoever is slow or silent.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <latch>
#include <set>
#include <string>
#include <thread>

#include "cluster.h"
#include "comm/socket.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kEndpoints = 100, kAllToAll = 16;
#else
constexpr int kEndpoints = 300, kAllToAll = 32;
#endif
constexpr int kColumns = 10;  // data parallel; the rest is the pipeline's depth

// Two sockets for each link, and some files for each endpoint.
void allow_files(rlim_t count) {
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  if (limit.rlim_cur >= count) return;
  if (limit.rlim_max < count) {
    fail(__FILE__, __LINE__,
         "this test needs " + std::to_string(count) + " descriptors, the limit is " + std::to_string(limit.rlim_max) +
             " (ulimit -Hn)");
  }
  limit.rlim_cur = count;
  CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

// Whom a rank talks to: its neighbours in the pipeline and the other columns of its stage.
std::set<int> partners(int rank) {
  std::set<int> found;
  const int stage = rank / kColumns;
  for (int column = 0; column < kColumns; ++column) found.insert(stage * kColumns + column);
  if (rank >= kColumns) found.insert(rank - kColumns);
  if (rank + kColumns < kEndpoints) found.insert(rank + kColumns);
  found.erase(rank);
  return found;
}

std::vector<std::unique_ptr<Endpoint>> start(int count, bool allow_shm) {
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  for (int rank = 0; rank < count; ++rank) {
    EndpointOptions options;
    options.rank = rank;
    options.token = "the job's token";
    options.host_id = "host";
    options.allow_shm = allow_shm;
    endpoints.push_back(std::make_unique<Endpoint>(options));
  }
  return endpoints;
}

// Everybody connects at once; returns what went wrong, by rank.
std::map<int, std::string> connect_all(std::vector<std::unique_ptr<Endpoint>>& endpoints,
                                       const std::function<std::set<int>(int)>& wanted) {
  std::mutex mutex;
  std::map<int, std::string> failures;
  std::latch all_here(static_cast<std::ptrdiff_t>(endpoints.size()));
  in_threads(static_cast<int>(endpoints.size()), [&](int rank) {
    std::map<int, PeerAddress> peers;
    for (const int peer : wanted(rank)) {
      peers[peer] = {"127.0.0.1", endpoints[static_cast<std::size_t>(peer)]->port(), "host"};
    }
    all_here.arrive_and_wait();
    try {
      endpoints[static_cast<std::size_t>(rank)]->connect(peers, plenty());
    } catch (const CommError& error) {
      const std::lock_guard lock(mutex);
      failures[rank] = error.what();
    }
  });
  return failures;
}

void check_started(std::vector<std::unique_ptr<Endpoint>>& endpoints, const std::map<int, std::string>& failures,
                   const std::function<std::set<int>(int)>& wanted) {
  if (!failures.empty()) {
    fail(__FILE__, __LINE__,
         std::to_string(failures.size()) + " of " + std::to_string(endpoints.size()) +
             " starts failed, the first: " + failures.begin()->second);
  }
  for (const auto& endpoint : endpoints) {
    const std::set<int> expected = wanted(endpoint->rank());
    CHECK(endpoint->peers() == std::vector<int>(expected.begin(), expected.end()));
  }
}

}  // namespace

TEST(none_of_many_starts_fails) {
  allow_files(15'000);
  auto endpoints = start(kEndpoints, false);
  check_started(endpoints, connect_all(endpoints, partners), partners);
}

// All of them greet rank 0 at the same moment.
TEST(none_of_many_starts_that_dial_one_fails) {
  allow_files(5'000);
  const auto star = [](int rank) {
    if (rank > 0) return std::set<int>{0};
    std::set<int> others;
    for (int other = 1; other < kEndpoints; ++other) others.insert(other);
    return others;
  };
  auto endpoints = start(kEndpoints, false);
  check_started(endpoints, connect_all(endpoints, star), star);
}

TEST_BOTH(all_to_all) {
  const auto everybody = [](int rank) {
    std::set<int> found;
    for (int other = 0; other < kAllToAll; ++other) {
      if (other != rank) found.insert(other);
    }
    return found;
  };
  auto endpoints = start(kAllToAll, kind == LinkKind::kSharedMemory);
  check_started(endpoints, connect_all(endpoints, everybody), everybody);
  for (const auto& endpoint : endpoints) CHECK(endpoint->link_kind(endpoint->rank() == 0 ? 1 : 0) == kind);
}

// More than there may be handshakes at one time, all silent.
TEST(silent_strangers_take_nobodys_place) {
  auto endpoints = start(2, false);
  std::string why;
  std::vector<Fd> strangers;
  for (int i = 0; i < 100; ++i) strangers.push_back(dial_tcp("127.0.0.1", endpoints[0]->port(), plenty(), why));
  const auto other = [](int rank) { return std::set<int>{1 - rank}; };
  check_started(endpoints, connect_all(endpoints, other), other);
}

// The same, but they begin to speak, so that the kernel hands them on at once; of another user, who gets no handshake.
TEST(another_user_takes_nobodys_place) {
  if (::geteuid() != 0) return void(std::printf("SKIPPED: only root can be two users\n"));
  constexpr uid_t kAnother = 65534;
  auto endpoints = start(2, false);
  std::vector<Fd> strangers;
  in_threads(1, [&](int) {
    // The system call is the thread's alone, the library's would be the process's.
    CHECK(::syscall(SYS_setresuid, -1, kAnother, -1) == 0);
    std::string why;
    for (const auto& endpoint : endpoints) {
      for (int i = 0; i < 100; ++i) {
        strangers.push_back(dial_tcp("127.0.0.1", endpoint->port(), plenty(), why));
        CHECK(::send(strangers.back().get(), "E", 1, MSG_NOSIGNAL) == 1);
      }
    }
  });
  const auto other = [](int rank) { return std::set<int>{1 - rank}; };
  check_started(endpoints, connect_all(endpoints, other), other);
  for (const Fd& stranger : strangers) {
    CHECK(wait_for(stranger, POLLIN, plenty()));
    char byte = 0;
    CHECK(::recv(stranger.get(), &byte, 1, 0) <= 0);
  }
}

// As another machine does: it has another address, and the kernel does not know whose its connections are. Each begins
// to speak, so that it gets a handshake, and stays.
Fd half_open(const std::string& from, std::uint16_t port) {
  sockaddr_in source{}, target{};
  source.sin_family = target.sin_family = AF_INET;
  CHECK(::inet_pton(AF_INET, from.c_str(), &source.sin_addr) == 1);
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  target.sin_port = htons(port);
  Fd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(::bind(stranger.get(), reinterpret_cast<const sockaddr*>(&source), sizeof source) == 0);
  CHECK(::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&target), sizeof target) == 0);
  CHECK(::send(stranger.get(), "E", 1, MSG_NOSIGNAL) == 1);
  return stranger;
}

TEST(half_open_handshakes_of_another_address_take_nobodys_place) {
  auto endpoints = start(2, false);
  std::vector<Fd> strangers;
  for (const auto& endpoint : endpoints) {
    for (int i = 0; i < 100; ++i) strangers.push_back(half_open("127.0.0.2", endpoint->port()));
  }
  const auto other = [](int rank) { return std::set<int>{1 - rank}; };
  check_started(endpoints, connect_all(endpoints, other), other);
}

// More addresses than there may be handshakes: the oldest go, once they are old enough.
TEST(half_open_handshakes_of_many_addresses_take_nobodys_place) {
  auto endpoints = start(2, false);
  std::vector<Fd> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(half_open("127.0.1." + std::to_string(1 + i), endpoints[0]->port()));
  }
  const auto other = [](int rank) { return std::set<int>{1 - rank}; };
  check_started(endpoints, connect_all(endpoints, other), other);
}

// A new half-open handshake of an address that has all of its own takes the place of the oldest of these.
TEST(the_oldest_half_open_handshake_goes) {
  auto endpoints = start(1, false);
  std::vector<Fd> strangers;
  for (int i = 0; i < 16; ++i) strangers.push_back(half_open("127.0.0.2", endpoints[0]->port()));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  strangers.push_back(half_open("127.0.0.2", endpoints[0]->port()));
  CHECK(wait_for(strangers.front(), POLLIN, plenty()));
  char byte = 0;
  CHECK(::recv(strangers.front().get(), &byte, 1, 0) <= 0);
  CHECK(!wait_for(strangers.back(), POLLIN, Deadline::after(0.1)));
}

// Who is cut off in the middle of a handshake, or finds nobody for a while, dials again: the port is that of somebody
// else at first, who hangs up on the first dialer and goes.
TEST(who_is_cut_off_dials_again) {
  auto stranger = std::make_unique<Fd>(listen_tcp("127.0.0.1", 0));
  EndpointOptions late;
  late.token = "the job's token";
  late.port = port_of(*stranger);
  EndpointOptions early = late;
  early.rank = 1;
  early.port = 0;
  Endpoint dialing(early);
  in_threads(2, [&](int i) {
    if (i == 0) {
      dialing.connect({{0, {"127.0.0.1", late.port, ""}}}, plenty());
      int value = 7;
      return dialing.wait(dialing.send(0, 1, &value, 4), plenty());
    }
    CHECK(wait_for(*stranger, POLLIN, plenty()));
    {
      const Fd dialer(::accept(stranger->get(), nullptr, nullptr));
    }
    stranger.reset();
    Endpoint endpoint(late);
    endpoint.connect({{1, {"127.0.0.1", dialing.port(), ""}}}, plenty());
    int value = 0;
    endpoint.wait(endpoint.recv(1, 1, &value, 4), plenty());
    CHECK_EQUAL(value, 7);
  });
}

int main(int argc, char** argv) { return run(argc, argv); }

// How links come to be, and how they are refused.
#include <netinet/in.h>
#include <sys/socket.h>

#include "cluster.h"
#include "comm/socket.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

EndpointOptions options(int rank, const std::string& token = "secret", const std::string& host_id = "host") {
  EndpointOptions result;
  result.rank = rank;
  result.token = token;
  result.host_id = host_id;
  return result;
}

// A port on which nobody listens and which nobody else is given; an endpoint may still take it.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  }
  std::uint16_t port() const { return port_of(socket_); }

 private:
  Fd socket_;
};

std::map<int, PeerAddress> address_of(const Endpoint& endpoint) {
  return {{endpoint.rank(), {"127.0.0.1", endpoint.port(), endpoint.host_id()}}};
}

}  // namespace

TEST(a_busy_port_is_named) {
  Endpoint first(options(0));
  EndpointOptions second = options(1);
  second.port = first.port();
  CHECK_THROWS(CommError, "127.0.0.1:" + std::to_string(first.port()) + ": the port is already in use",
               Endpoint{second});
}

TEST(a_foreign_host_is_named) {
  EndpointOptions elsewhere = options(0);
  elsewhere.host = "192.0.2.1";
  CHECK_THROWS(CommError, "cannot listen on 192.0.2.1:0", Endpoint{elsewhere});
  elsewhere.host = "no such host";
  CHECK_THROWS(CommError, "host 'no such host' cannot be resolved", Endpoint{elsewhere});
}

TEST(a_wrong_token_is_refused_and_named_on_both_sides) {
  Endpoint good(options(0));
  Endpoint bad(options(1, "guess"));
  in_threads(2, [&](int i) {
    if (i == 0) {
      CHECK_THROWS(CommError, "refused rank 1: wrong token", bad.connect(address_of(good), plenty()));
    } else {
      CHECK_THROWS(DeadlineExceeded, "rank 1 (127.0.0.1:" + std::to_string(bad.port()) + ")",
                   good.connect(address_of(bad), Deadline::after(0.3)));
    }
  });
  // The refusal is noted just after the dialer has heard of it.
  const Deadline deadline = plenty();
  std::string message;
  while (message.find("it was refused for a wrong token") == std::string::npos && !deadline.expired()) {
    try {
      good.connect(address_of(bad), Deadline::after(0.01));
    } catch (const DeadlineExceeded& error) {
      message = error.what();
    }
  }
  CHECK(!deadline.expired());
  CHECK(good.peers().empty());
}

TEST(another_rank_at_the_address_is_refused) {
  Endpoint two(options(2));
  Endpoint five(options(5));
  auto wrong = address_of(two);
  wrong[3] = wrong[2];
  wrong.erase(2);
  CHECK_THROWS(CommError, "not the rank that was dialed", five.connect(wrong, plenty()));
}

TEST(host_ids_decide_the_kind_of_link) {
  Endpoint a(options(0, "secret", "east"));
  Endpoint b(options(1, "secret", "west"));
  Endpoint c(options(2, "secret", "west"));
  EndpointOptions no_shm = options(3, "secret", "west");
  no_shm.allow_shm = false;
  Endpoint d(no_shm);
  std::map<int, PeerAddress> all;
  for (const Endpoint* e : {&a, &b, &c, &d}) all.merge(address_of(*e));
  Endpoint* const endpoints[] = {&a, &b, &c, &d};
  in_threads(4, [&](int i) { endpoints[i]->connect(all, plenty()); });
  CHECK(a.link_kind(1) == LinkKind::kTcp);
  CHECK(b.link_kind(2) == LinkKind::kSharedMemory);
  CHECK(c.link_kind(3) == LinkKind::kTcp);
  CHECK(a.link_kind(9) == LinkKind::kNone);
}

TEST(a_peer_may_listen_late) {
  const ReservedPort reserved;  // stands for a process that has not started yet
  EndpointOptions late = options(0);
  late.port = reserved.port();
  Endpoint early(options(1));
  in_threads(2, [&](int i) {
    if (i == 0) {
      early.connect({{0, {"127.0.0.1", late.port, "host"}}}, plenty());
      int value = 1;
      early.wait(early.send(0, 1, &value, 4), plenty());
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      Endpoint endpoint(late);
      endpoint.connect(address_of(early), plenty());
      int got = 0;
      endpoint.wait(endpoint.recv(1, 1, &got, 4), plenty());
      CHECK_EQUAL(got, 1);
    }
  });
}

TEST(nobody_there_is_named) {
  Endpoint alone(options(1));
  const ReservedPort reserved;
  CHECK_THROWS(DeadlineExceeded, "dialing rank 0 at 127.0.0.1:" + std::to_string(reserved.port()),
               alone.connect({{0, {"127.0.0.1", reserved.port(), ""}}}, Deadline::after(0.05)));
  CHECK_THROWS(DeadlineExceeded, "no link by the deadline with rank 2 (far:1), rank 3 (far:2)",
               alone.connect({{2, {"far", 1, ""}}, {3, {"far", 2, ""}}}, Deadline::after(0.05)));
}

// Strangers that say nothing or nonsense neither become links nor hold up real peers.
TEST(strangers_do_not_hold_up_peers) {
  Endpoint zero(options(0));
  Endpoint one(options(1));
  std::string why;
  std::vector<Fd> strangers;
  for (int i = 0; i < 8; ++i) strangers.push_back(dial_tcp("127.0.0.1", zero.port(), plenty(), why));
  const std::string nonsense(200, 'x');
  CHECK(::send(strangers[0].get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL) > 0);
  one.connect(address_of(zero), plenty());
  zero.connect(address_of(one), plenty());
  CHECK(zero.peers() == std::vector<int>{1});
}

TEST(a_rank_without_a_link_is_named) {
  Endpoint alone(options(4));
  int value = 0;
  CHECK_THROWS(CommError, "rank 4 has no link to rank 7", alone.send(7, 1, &value, 4));
  CHECK_THROWS(CommError, "rank 4 has no link to rank 4", alone.recv(4, 1, &value, 4));
}

int main(int argc, char** argv) { return run(argc, argv); }

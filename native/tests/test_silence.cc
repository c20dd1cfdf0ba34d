// Peers that fall silent: cut off without a word, or there but not reading.
//
// The cut is a real one, between two network namespaces, which takes root and iproute2: without them that case is
// skipped, and says so.
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "cluster.h"
#include "process.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

constexpr int kSkipped = 77;  // what ctest takes for a skip
constexpr const char* kHosts[] = {"10.83.0.1", "10.83.0.2"};
const char* skipped = nullptr;

bool command(const std::string& text) { return std::system((text + " > /dev/null 2>&1").c_str()) == 0; }

EndpointOptions options(int rank) {
  EndpointOptions result;
  result.rank = rank;
  result.token = "the job's token";
  result.host_id = std::to_string(rank);
  result.silence_timeout_s = 1.0;
  return result;
}

// A process in a network namespace of its own, at one end of a pair of interfaces.
class Host {
 public:
  Host(int rank, const std::function<void()>& body)
      : child_([this, rank, body] {
          if (::unshare(CLONE_NEWNET) != 0) throw std::runtime_error("no network namespace");
          born_.put(::getpid());
          plugged_.get<int>();
          const std::string nic = "ewt" + std::to_string(rank);
          if (!command("ip addr add " + std::string(kHosts[rank]) + "/24 dev " + nic) ||
              !command("ip link set " + nic + " up")) {
            throw std::runtime_error("no interface");
          }
          up_.put(1);
          go_.get<int>();
          body();
        }) {}
  pid_t pid() { return pid_ != 0 ? pid_ : pid_ = born_.get<pid_t>(); }
  void plug_in() {
    plugged_.put(1);
    up_.get<int>();
  }
  void go() { go_.put(1); }
  int join() { return child_.join(); }

 private:
  Pipe born_, plugged_, up_, go_;
  pid_t pid_ = 0;
  Child child_;
};

}  // namespace

TEST(a_peer_cut_off_without_a_word_is_lost) {
  if (::geteuid() != 0 || !command("ip -V")) {
    skipped = "network namespaces take root and iproute2";
    return;
  }
  Pipe port, linked, cut;
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  const auto exchange = [&](Endpoint& endpoint, int peer, const std::function<void()>& then) {
    std::vector<std::uint8_t> in(kBytes), out(kBytes, 1);
    // Bytes are under way in both directions from now on, with nobody who would take the last of them.
    const Transfer send = endpoint.send(peer, 2, out.data(), out.size());
    const Transfer recv = endpoint.recv(peer, 1, in.data(), in.size());
    then();
    CHECK_THROWS(PeerLost, "its machine acknowledges nothing any more",
                 endpoint.wait(std::vector<Transfer>{send, recv}, plenty()));
  };
  const auto rank_of = [&](int rank) {
    return [&, rank] {
      EndpointOptions own = options(rank);
      own.host = kHosts[rank];
      Endpoint endpoint(own);
      std::uint16_t other = 9;
      if (rank == 0) port.put(endpoint.port());
      if (rank == 1) other = port.get<std::uint16_t>();
      endpoint.connect({{1 - rank, {kHosts[1 - rank], other, ""}}}, plenty());
      if (rank == 0) return exchange(endpoint, 1, [&] { linked.put(1); });
      exchange(endpoint, 0, [&] {
        linked.put(1);
        cut.get<int>();
        CHECK(command("ip route add blackhole " + std::string(kHosts[0]) + "/32"));
      });
    };
  };
  Host zero(0, rank_of(0)), one(1, rank_of(1));
  const std::string ends = "ip link add ewt0 netns " + std::to_string(zero.pid()) + " type veth peer name ewt1 netns " +
                           std::to_string(one.pid());
  if (!command(ends)) {
    skipped = "this kernel makes no pair of virtual interfaces";
    return;
  }
  zero.plug_in();
  one.plug_in();
  zero.go();
  one.go();
  linked.get<int>();
  linked.get<int>();
  cut.put(1);
  CHECK_EQUAL(zero.join(), 0);
  CHECK_EQUAL(one.join(), 0);
}

// The kernel's TCP_USER_TIMEOUT would end this link: the peer is there, but its pool is full and it reads no further.
TEST(a_peer_that_reads_nothing_is_not_lost) {
  EndpointOptions base;
  base.pool_soft_bytes = 1024;
  base.silence_timeout_s = 0.25;
  Cluster pair(2, LinkKind::kTcp, base);
  constexpr std::size_t kMessages = 32, kBytes = std::size_t{1} << 20;
  std::vector<std::uint8_t> out(kBytes, 1), in(kBytes);
  std::vector<Transfer> sends;
  for (std::size_t i = 0; i < kMessages; ++i) sends.push_back(pair.at(0).send(1, 1, out.data(), out.size()));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // six times what silence may last
  CHECK(!pair.at(0).test(sends.back()));                         // so the link does stand still
  CHECK(pair.at(0).lost_peers().empty());
  for (std::size_t i = 0; i < kMessages; ++i) {
    pair.at(1).wait(pair.at(1).recv(0, 1, in.data(), in.size()), plenty());
    CHECK(in == out);
  }
  pair.at(0).wait(sends, plenty());
}

TEST(a_timeout_that_is_none_is_refused) {
  EndpointOptions wrong = options(3);
  wrong.silence_timeout_s = 0;
  CHECK_THROWS(CommError, "rank 3: a silence timeout of 0.000000 s; it is above 0", Endpoint{wrong});
}

int main(int argc, char** argv) {
  const int code = run(argc, argv);
  if (skipped != nullptr) std::printf("SKIPPED: a silent cut was not tested: %s\n", skipped);
  return code == 0 && skipped != nullptr ? kSkipped : code;
}

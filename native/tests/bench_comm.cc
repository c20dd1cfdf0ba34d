// Bandwidth of 64 MB messages and latency of 1 KB messages between two processes.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cluster.h"
#include "process.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

template <typename Body>
double time_of(int rounds, Body&& body) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const double start = now_s();
    body();
    times.push_back(now_s() - start);
  }
  return median(times);
}

void measure_pair(Endpoint& endpoint, const char* name) {
  const int peer = 1 - endpoint.rank();
  std::vector<std::uint8_t> out(std::size_t{64} << 20, 1), in(out.size(), 2);
  const auto stream = [&] {
    const Transfer t = endpoint.rank() == 0 ? endpoint.send(peer, 1, out.data(), out.size())
                                            : endpoint.recv(peer, 1, in.data(), in.size());
    endpoint.wait(t, plenty());
    const Transfer ack =
        endpoint.rank() == 0 ? endpoint.recv(peer, 2, in.data(), 1) : endpoint.send(peer, 2, out.data(), 1);
    endpoint.wait(ack, plenty());
  };
  const auto both = [&] {
    const std::vector<Transfer> t{endpoint.recv(peer, 1, in.data(), in.size()),
                                  endpoint.send(peer, 1, out.data(), out.size())};
    endpoint.wait(t, plenty());
  };
  const auto ping = [&] {
    for (int half = 0; half < 2; ++half) {
      const bool sends = (endpoint.rank() == 0) == (half == 0);
      endpoint.wait(sends ? endpoint.send(peer, 3, out.data(), 1024) : endpoint.recv(peer, 3, in.data(), 1024),
                    plenty());
    }
  };
  stream();
  const double stream_s = time_of(9, stream), both_s = time_of(9, both), ping_s = time_of(3000, ping);
  if (endpoint.rank() == 0) {
    std::printf("%s: 64 MiB one way %.1f ms (%.2f GB/s), both ways %.1f ms; 1 KiB round trip %.1f us\n", name,
                stream_s * 1e3, static_cast<double>(out.size()) / stream_s / 1e9, both_s * 1e3, ping_s * 1e6);
  }
}

void run_ranks(int ranks, LinkKind kind, const std::function<void(Endpoint&)>& body) {
  const std::uint16_t base = static_cast<std::uint16_t>(20000 + ::getpid() % 20000);
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(std::make_unique<Child>([&] {
      EndpointOptions options;
      options.rank = rank;
      options.port = static_cast<std::uint16_t>(base + rank);
      options.allow_shm = kind == LinkKind::kSharedMemory;
      Endpoint endpoint(options);
      std::map<int, PeerAddress> peers;
      for (int r = 0; r < ranks; ++r) peers[r] = {"127.0.0.1", static_cast<std::uint16_t>(base + r), ""};
      endpoint.connect(peers, plenty());
      body(endpoint);
      std::fflush(stdout);
    }));
  }
  for (const auto& child : children) child->join();
}

}  // namespace

int main() {
  for (const auto& [kind, name] : {std::pair{LinkKind::kSharedMemory, "shm"}, std::pair{LinkKind::kTcp, "tcp"}}) {
    run_ranks(2, kind, [&](Endpoint& e) { measure_pair(e, name); });
  }
  return 0;
}

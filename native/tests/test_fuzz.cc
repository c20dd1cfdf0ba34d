// Random traffic with every byte checked. A seed reproduces the messages (not the timing).
#include <cstdint>
#include <random>

#include "cluster.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

struct Message {
  int from, to;
  std::uint64_t tag;
  std::size_t bytes;
  std::uint32_t content;
};

std::uint8_t byte_at(std::uint32_t content, std::size_t i) {
  return static_cast<std::uint8_t>((content * 31 + i) * 2654435761u >> 23);
}

std::vector<Message> draw_messages(std::uint32_t seed, int ranks, std::size_t count) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  std::vector<Message> messages;
  for (std::size_t i = 0; i < count; ++i) {
    const int from = static_cast<int>(below(static_cast<std::size_t>(ranks)));
    const int to = (from + 1 + static_cast<int>(below(static_cast<std::size_t>(ranks) - 1))) % ranks;
    const std::size_t bound[] = {1, 100, 5000, 70000, 400000};
    messages.push_back({from, to, below(4), below(bound[below(5)]), static_cast<std::uint32_t>(i)});
  }
  return messages;
}

// Every rank posts its sends in order and its receives in an order of its own (kept within a tag), in small batches.
void exchange(Endpoint& endpoint, const std::vector<Message>& messages, std::uint32_t seed) {
  std::mt19937 random(seed + static_cast<std::uint32_t>(endpoint.rank()));
  std::vector<const Message*> sends;
  std::map<std::pair<int, std::uint64_t>, std::vector<const Message*>> receives;
  std::size_t receives_left = 0;
  for (const Message& m : messages) {
    if (m.from == endpoint.rank()) sends.push_back(&m);
    if (m.to == endpoint.rank()) receives[{m.from, m.tag}].push_back(&m), ++receives_left;
  }
  std::map<std::pair<int, std::uint64_t>, std::size_t> next;
  std::vector<std::vector<std::uint8_t>> buffers(messages.size());
  std::vector<Transfer> open;
  std::size_t sent = 0;
  std::vector<std::pair<const Message*, Transfer>> posted;
  while (sent < sends.size() || receives_left > 0) {
    if (sent < sends.size() && (receives_left == 0 || random() % 2 == 0)) {
      const Message& m = *sends[sent++];
      auto& buffer = buffers[m.content];
      for (std::size_t i = 0; i < m.bytes; ++i) buffer.push_back(byte_at(m.content, i));
      open.push_back(endpoint.send(m.to, m.tag, buffer.data(), buffer.size()));
    } else {
      auto it = receives.begin();
      std::advance(it, random() % receives.size());
      std::size_t& at = next[it->first];
      const Message& m = *it->second[at++];
      if (at == it->second.size()) receives.erase(it);
      --receives_left;
      buffers[m.content].assign(m.bytes, 0);
      posted.emplace_back(&m, endpoint.recv(m.from, m.tag, buffers[m.content].data(), m.bytes));
    }
    if (random() % 16 == 0) std::this_thread::yield();
  }
  endpoint.wait(open, plenty());
  for (const auto& [m, transfer] : posted) {
    endpoint.wait(transfer, plenty());
    for (std::size_t i = 0; i < m->bytes; ++i) CHECK(buffers[m->content][i] == byte_at(m->content, i));
  }
}

void fuzz(LinkKind kind, const EndpointOptions& base) {
  constexpr int kRanks = 3;
  for (std::uint32_t seed = 1; seed <= 3; ++seed) {
    Cluster cluster(kRanks, kind, base);
    const std::vector<Message> messages = draw_messages(seed, kRanks, 400);
    in_threads(kRanks, [&](int rank) { exchange(cluster.at(rank), messages, seed); });
  }
}

}  // namespace

TEST_BOTH(random_messages_arrive_whole) { fuzz(kind, {}); }

TEST_BOTH(random_messages_through_small_rings_and_pools) {
  EndpointOptions base;
  base.ring_bytes = 4096;
  base.pool_soft_bytes = 20000;
  fuzz(kind, base);
}

int main(int argc, char** argv) { return run(argc, argv); }

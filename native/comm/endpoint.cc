#include "comm/endpoint.h"

#include "comm/core.h"

namespace elaswave::comm {

Endpoint::Endpoint(EndpointOptions options) : core_(std::make_unique<EndpointCore>(std::move(options))) {}
Endpoint::~Endpoint() = default;

int Endpoint::rank() const { return core_->options().rank; }
std::uint16_t Endpoint::port() const { return core_->connector().port(); }
const std::string& Endpoint::host_id() const { return core_->options().host_id; }
std::uint32_t Endpoint::generation() const { return core_->table().generation(); }

void Endpoint::connect(const std::map<int, PeerAddress>& peers, Deadline deadline) {
  core_->connector().connect(peers, deadline);
}
void Endpoint::mend(Deadline deadline) {
  if (!is_cut()) core_->connector().mend(deadline);
}
void Endpoint::disconnect(int peer) { core_->disconnect(peer); }

LinkKind Endpoint::link_kind(int peer) const {
  const auto link = core_->table().find(peer);
  return link && !link->lost() ? link->kind() : LinkKind::kNone;
}

std::vector<int> Endpoint::peers() const {
  std::vector<int> ranks;
  for (const auto& [rank, link] : core_->table().links()) {
    if (!link->lost()) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> Endpoint::lost_peers() const { return core_->table().lost(); }

Transfer Endpoint::send(int peer, std::uint64_t tag, const void* data, std::size_t bytes) {
  return send(peer, tag, data, bytes, core_->table().generation());
}

Transfer Endpoint::recv(int peer, std::uint64_t tag, void* data, std::size_t bytes) {
  return recv(peer, tag, data, bytes, core_->table().generation());
}

Transfer Endpoint::send(int peer, std::uint64_t tag, const void* data, std::size_t bytes, std::uint32_t generation,
                        Lane lane) {
  auto* at = static_cast<std::byte*>(const_cast<void*>(data));  // a send only reads it
  return core_->post(Request::Kind::kSend, peer, tag, at, bytes, generation, lane);
}

Transfer Endpoint::recv(int peer, std::uint64_t tag, void* data, std::size_t bytes, std::uint32_t generation) {
  return core_->post(Request::Kind::kRecv, peer, tag, static_cast<std::byte*>(data), bytes, generation, Lane::kStep);
}

void Endpoint::wait(const Transfer& transfer, Deadline deadline) { core_->wait({&transfer, 1}, deadline, {}); }
void Endpoint::wait(std::span<const Transfer> transfers, Deadline deadline) { core_->wait(transfers, deadline, {}); }
void Endpoint::wait(std::span<const Transfer> transfers, Deadline deadline, std::span<const int> members) {
  core_->wait(transfers, deadline, members);
}
bool Endpoint::test(const Transfer& transfer) { return core_->test(transfer); }
void Endpoint::cancel(std::span<const Transfer> transfers) { core_->cancel(transfers); }
void Endpoint::abort(const std::string& reason) { core_->abort(reason); }
void Endpoint::broadcast_abort(std::optional<int> suspect) { core_->broadcast_abort(suspect); }
void Endpoint::check(std::span<const int> members) const { core_->check(members); }
void Endpoint::advance(std::uint32_t generation) { core_->advance(generation); }

std::uint64_t Endpoint::bytes_sent() const {
  std::uint64_t sum = 0;
  for (const auto& [rank, link] : core_->table().links()) sum += link->bytes_sent();
  return sum;
}

std::uint64_t Endpoint::bytes_received() const {
  std::uint64_t sum = 0;
  for (const auto& [rank, link] : core_->table().links()) sum += link->bytes_received();
  return sum;
}

std::uint64_t Endpoint::older_frames_rule_consulted() const {
  std::uint64_t sum = 0;
  for (const auto& [rank, link] : core_->table().links()) sum += link->older_frames_rule_consulted();
  return sum;
}

void Endpoint::cut(double seconds) { core_->cut(seconds); }
bool Endpoint::is_cut() const { return core_->is_cut(); }

void Endpoint::close() { core_->close(); }

}  // namespace elaswave::comm

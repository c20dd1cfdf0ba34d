#include "comm/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "comm/errors.h"
#include "comm/handshake_messages.h"
#include "comm/shm_channel.h"

namespace elaswave::comm {
namespace {

constexpr char kYes = 'Y', kNo = 'N', kMapped = 'M';

template <typename T>
void put(const Fd& socket, const T& value, Deadline deadline) {
  static_assert(std::is_trivially_copyable_v<T>);
  send_all(socket, &value, sizeof value, deadline);
}

template <typename T>
T get(const Fd& socket, Deadline deadline) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  recv_all(socket, &value, sizeof value, deadline);
  return value;
}

std::string random_name() {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string name = "elaswave-";
  const Digest bytes = fresh_nonce();
  for (std::size_t i = 0; i < 16; ++i) {
    name += kHex[bytes[i] >> 4];
    name += kHex[bytes[i] & 15];
  }
  return name;
}

// What the acceptor offers for a link in shared memory.
struct Offer {
  Verdict verdict;
  Fd listener;
  Fd segment;
};

// None where the system gives no shared memory.
std::optional<Offer> make_offer(std::size_t ring_bytes) {
  const std::string name = random_name();
  try {
    Offer offer{{.shm = 1}, listen_unix(name), make_segment(ring_bytes)};
    std::memcpy(offer.verdict.unix_name, name.data(), name.size());
    return offer;
  } catch (const CommError&) {
    return std::nullopt;
  }
}

// The acceptor's side of a shared-memory link; null when the dialer could not follow.
std::unique_ptr<Channel> give_segment(const Offer& offer, const Fd& socket, Deadline deadline) {
  if (get<char>(socket, deadline) != kYes) return nullptr;
  // It has connected, so this does not wait.
  Fd pipe(::accept4(offer.listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!pipe) throw CommError("the dialer's unix socket is gone: " + describe_errno(errno));
  std::unique_ptr<Channel> channel;
  try {
    const Fd handle(::fcntl(pipe.get(), F_DUPFD_CLOEXEC, 0));
    // Mapped before it is given away: once the dialer has mapped its part, both have a channel.
    channel = make_shm_channel(offer.segment, std::move(pipe), true);
    send_file(handle, offer.segment, deadline);
  } catch (const CommError&) {
    channel = nullptr;  // the dialer notices by the end of its socket; TCP works as well
    pipe = Fd();
  }
  return get<char>(socket, deadline) == kMapped ? std::move(channel) : nullptr;
}

// The dialer's side; null when the link falls back to TCP.
std::unique_ptr<Channel> take_segment(const Identity& own, const Fd& socket, const Verdict& verdict,
                                      Deadline deadline) {
  if (!own.allows_shm) throw CommError("shared memory is offered that was not asked for");
  std::string name(verdict.unix_name, strnlen(verdict.unix_name, sizeof verdict.unix_name));
  Fd pipe = dial_unix(name);
  put(socket, pipe ? kYes : kNo, deadline);
  if (!pipe) return nullptr;
  std::unique_ptr<Channel> channel;
  try {
    const Fd segment = recv_file(pipe, deadline);
    channel = make_shm_channel(segment, std::move(pipe), false);
  } catch (const CommError&) {
    channel = nullptr;  // say so to the acceptor; TCP works as well
  }
  put(socket, channel ? kMapped : kNo, deadline);
  return channel;
}

void raise_refusal(Refusal refusal, const Identity& own, int peer) {
  const std::string who = "rank " + std::to_string(peer) + " refused rank " + std::to_string(own.rank) + ": ";
  if (refusal == Refusal::kWrongToken) throw LinkRefused(who + "wrong token");
  if (refusal == Refusal::kWrongRank) throw LinkRefused(who + "it is not the rank that was dialed");
  throw LinkRefused(who + "reason " + std::to_string(static_cast<std::uint32_t>(refusal)));
}

}  // namespace

Digest fresh_nonce() {
  Digest nonce;
  std::size_t have = 0;
  while (have < nonce.size()) {
    const ssize_t n = ::getrandom(nonce.data() + have, nonce.size() - have, 0);
    if (n > 0) have += static_cast<std::size_t>(n);
    if (n < 0 && errno != EINTR) throw CommError("no random bytes: " + describe_errno(errno));
  }
  return nonce;
}

Digest prove(const std::string& token, const char* role, const Hello& hello, const Challenge& challenge) {
  const std::size_t role_bytes = std::strlen(role);
  std::vector<std::uint8_t> message(role_bytes + sizeof hello + sizeof challenge);
  std::memcpy(message.data(), role, role_bytes);
  std::memcpy(message.data() + role_bytes, &hello, sizeof hello);
  std::memcpy(message.data() + role_bytes + sizeof hello, &challenge, sizeof challenge);
  return hmac_sha256(token, message);
}

Acceptance accept_link(const Identity& own, const Digest& nonce, Fd socket, const std::function<bool(int)>& linked,
                       Deadline deadline) {
  Acceptance result;
  const auto hello = get<Hello>(socket, deadline);
  if (hello.magic != kHandshakeMagic) throw CommError("a dialer does not speak our protocol");
  result.peer = hello.from;

  Challenge challenge;
  challenge.rank = own.rank;
  challenge.flags = own.allows_shm ? kAllowsShm : 0;
  challenge.host = own.host;
  challenge.nonce = nonce;
  put(socket, challenge, deadline);
  put(socket, prove(own.token, "accept", hello, challenge), deadline);

  const auto proof = get<Digest>(socket, deadline);
  if (!equal_in_constant_time(proof, prove(own.token, "dial", hello, challenge))) {
    result.refusal = Refusal::kWrongToken;
  } else if (hello.to != own.rank || hello.from < 0 || hello.from == own.rank) {
    result.refusal = Refusal::kWrongRank;
  } else if (linked(hello.from)) {
    result.refusal = Refusal::kAlreadyLinked;
  }
  if (result.refusal != Refusal::kNone) {
    Verdict verdict;
    verdict.refusal = static_cast<std::uint32_t>(result.refusal);
    put(socket, verdict, deadline);
    return result;
  }
  tune_tcp(socket, own.silence);
  std::optional<Offer> offer;
  if (own.allows_shm && (hello.flags & kAllowsShm) != 0 && hello.host == own.host) offer = make_offer(own.ring_bytes);
  put(socket, offer ? offer->verdict : Verdict{}, deadline);
  if (offer) result.channel = give_segment(*offer, socket, deadline);
  if (!result.channel) result.channel = make_tcp_channel(std::move(socket), own.silence);
  return result;
}

Dialed dial_link(const Identity& own, const Digest& nonce, int peer, Fd socket, Deadline deadline) {
  Hello hello;
  hello.from = own.rank;
  hello.to = peer;
  hello.flags = own.allows_shm ? kAllowsShm : 0;
  hello.host = own.host;
  hello.nonce = nonce;
  put(socket, hello, deadline);

  const auto challenge = get<Challenge>(socket, deadline);
  if (challenge.magic != kHandshakeMagic)
    throw LinkRefused("what was dialed as rank " + std::to_string(peer) + " is no endpoint");
  const auto their_proof = get<Digest>(socket, deadline);
  // Sent even if theirs is wrong, so that both sides can name the reason.
  put(socket, prove(own.token, "dial", hello, challenge), deadline);
  if (!equal_in_constant_time(their_proof, prove(own.token, "accept", hello, challenge))) {
    raise_refusal(Refusal::kWrongToken, own, peer);
  }
  const auto verdict = get<Verdict>(socket, deadline);
  const auto refusal = static_cast<Refusal>(verdict.refusal);
  if (refusal == Refusal::kAlreadyLinked) return {};
  if (refusal != Refusal::kNone) raise_refusal(refusal, own, peer);
  if (challenge.rank != peer) raise_refusal(Refusal::kWrongRank, own, peer);
  tune_tcp(socket, own.silence);
  Dialed result;
  if (verdict.shm != 0) result.channel = take_segment(own, socket, verdict, deadline);
  if (!result.channel) result.channel = make_tcp_channel(std::move(socket), own.silence);
  return result;
}

}  // namespace elaswave::comm

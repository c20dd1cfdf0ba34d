// How two endpoints make a link: who they are, proof that both hold the job's token, and which kind of link. Private to
// comm/.
//
//   dialer -> acceptor   HELLO      ranks, host digest, nonce
//   acceptor -> dialer   CHALLENGE  rank, host digest, nonce, HMAC(token, "accept" HELLO CHALLENGE)
//   dialer -> acceptor   PROOF      HMAC(token, "dial" HELLO CHALLENGE)
//   acceptor -> dialer   VERDICT    welcome and link kind, or a refusal
// and for shared memory: the dialer reaches a unix socket named in the verdict ('Y', else 'N': TCP it is); the acceptor
// gives a segment over it, or ends it; the dialer says whether it could map that ('M', else 'N': TCP).
//
// The token never travels. Data is neither encrypted nor signed: the network is trusted not to forge packets.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "comm/channel.h"
#include "comm/deadline.h"
#include "comm/errors.h"
#include "comm/sha256.h"

namespace elaswave::comm {

struct Identity {
  int rank;
  std::string token;
  Digest host;  // of the host id
  std::size_t ring_bytes;
  bool allows_shm;
  std::chrono::milliseconds silence;  // how long a peer may acknowledge nothing
};

enum class Refusal : std::uint32_t { kNone = 0, kWrongToken = 1, kWrongRank = 2, kAlreadyLinked = 3 };

struct Acceptance {
  int peer = -1;  // whom the dialer says to be, known once HELLO was read
  Refusal refusal = Refusal::kNone;
  std::unique_ptr<Channel> channel;  // null when refused
};

// 32 random bytes of the system. Throws CommError. A nonce serves one handshake: it is an argument below so that a test
// can give one that it knows.
Digest fresh_nonce();

// The acceptor's part. `linked(rank)` says whether a live link to that rank exists already. Throws CommError or
// DeadlineExceeded for what is not one of our dialers.
Acceptance accept_link(const Identity& own, const Digest& nonce, Fd socket, const std::function<bool(int)>& linked,
                       Deadline deadline);

struct Dialed {
  std::unique_ptr<Channel> channel;  // null: the peer still holds an old link to us, or went away; try again
};

// The peer will never have this link; another try is for nothing.
class LinkRefused : public CommError {
 public:
  using CommError::CommError;
};

// The dialer's part. Throws LinkRefused when the peer refuses us or is not `peer` ("wrong token", ...), CommError when
// the connection breaks, which may be for want of room at the peer: try again.
Dialed dial_link(const Identity& own, const Digest& nonce, int peer, Fd socket, Deadline deadline);

}  // namespace elaswave::comm

// One process's end of all its links: tagged asynchronous messages between ranks.
//
//   Endpoint endpoint({.rank = 1, .token = token, .host_id = "host-a"});
//   endpoint.connect({{0, {"127.0.0.1", 4711, "host-a"}}}, Deadline::after(10));
//   Transfer transfer = endpoint.recv(0, tag, buffer, bytes);
//   endpoint.wait(transfer, Deadline::after(5));
//
// Links are TCP, or shared memory where both ends have the same host id and allow it. One IO thread per endpoint moves
// what callers cannot move at once, so that large transfers go on under compute.
//
// Threads: any thread may call any method of a live endpoint. `close` (and the destructor) may not run at the same time
// as other calls. Do not fork a process that has an endpoint: the child would hold its sockets open.
//
// Matching: messages match receives by (peer, generation, tag), first in first out. A message without a receive is
// held in a pool per link (see EndpointOptions::pool_*). Self-sends are refused.
//
// Buffers: the bytes given to `send` or `recv` must stay valid and unchanged (send) or untouched (recv) until the
// transfer is done. A transfer is done once `wait` returned or threw for it, `test` returned true or threw, `cancel`,
// `abort` or `close` returned. From then on neither this library nor the peer touches the buffer, so it may be freed.
//
// Failures: when a peer is lost, what it sent before it was lost is still delivered; every other pending or later
// transfer with it fails with PeerLost at once. Links to other peers are not concerned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "deadline.h"
#include "errors.h"

namespace elaswave::comm {

struct Request;
class EndpointCore;

// A handle on one pending message. Cheap to copy. Dropping it neither waits nor cancels.
class Transfer {
 public:
  Transfer() = default;
  explicit Transfer(std::shared_ptr<Request> request) : request_(std::move(request)) {}
  // False for a default-constructed handle, which `wait` and `test` take as done.
  bool valid() const { return request_ != nullptr; }
  const std::shared_ptr<Request>& request() const { return request_; }

 private:
  std::shared_ptr<Request> request_;
};

struct PeerAddress {
  std::string host;
  std::uint16_t port = 0;
  std::string host_id;
};

// What a message takes on a link that is slower than this machine's: its bytes one after another at `bytes_per_s`, then
// `latency_s`.
struct LinkPace {
  double latency_s = 0.0;    // at least 0
  double bytes_per_s = 0.0;  // above 0; infinity: as fast as the machine
};

struct EndpointOptions {
  int rank = 0;
  std::string token;               // the job's secret; both ends of a link must hold the same
  std::string host = "127.0.0.1";  // address to listen on
  std::uint16_t port = 0;          // 0: any free port
  std::string host_id;             // equal ids may share memory
  bool allow_shm = true;
  std::size_t ring_bytes = std::size_t{4} << 20;  // shared memory per direction of a link
  // Unexpected messages per link. At the soft bound a link is not read any further while no receive waits on it; with
  // a receive waiting (the head of the stream stands in its way) the pool grows up to the hard bound, where the link
  // fails with CommError. A message counts 256 bytes more than it has, for what holding it costs.
  std::size_t pool_soft_bytes = std::size_t{64} << 20;
  std::size_t pool_hard_bytes = std::size_t{1} << 30;
  // A peer on another machine that acknowledges nothing for so long is lost, also with bytes under way. An idle link
  // has to be asked first, twice: there it takes as much again, and two seconds more at least.
  double silence_timeout_s = 10.0;
  std::size_t pending_limit = std::size_t{1} << 20;  // pending transfers per link and direction; more is a CommError
  std::map<int, LinkPace> paces;                     // messages from these ranks come as late as on such a link
  bool may_be_cut = false;                           // see `cut`
};

enum class LinkKind { kNone, kTcp, kSharedMemory };

// Where a message waits at its sender. Bulk messages travel in pieces, one message after the other, at most a few
// pieces ahead of what the receiver has taken; step messages overtake them between two pieces, wherever those are held
// on the way, and leave them a ninth of a busy link. A receive takes either. Between the lanes there is no order,
// within a lane that of sending.
enum class Lane { kStep, kBulk };

class Endpoint {
 public:
  // Listens at once. Throws CommError that names host and port when the port is busy or the host is not ours.
  explicit Endpoint(EndpointOptions options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  int rank() const;
  std::uint16_t port() const;
  const std::string& host_id() const;

  // Opens the missing links to `peers` (an own rank in it is skipped) and waits for all of them: the higher rank dials,
  // the lower accepts. Links that a peer opens are accepted at any time, so membership can grow under way; a lost
  // link may be opened anew. Throws CommError for a wrong token or a peer that is not the rank it should be, and
  // DeadlineExceeded that names the missing ranks. Links that were made by then stay.
  void connect(const std::map<int, PeerAddress>& peers, Deadline deadline);

  // Opens missing links to the ranks of earlier `connect` calls again, in the background, as long as `deadline` allows:
  // the higher rank dials, so both ends have to ask. Messages of the generation in which a link broke are lost with it.
  // Not for ranks that were disconnected here. Returns at once; asking twice is asking once.
  void mend(Deadline deadline);

  // Ends the link to `peer` in order: transfers that are done reach it (as long as it does not go on sending to us),
  // pending ones fail with PeerLost here and, after a goodbye, there. Nothing happens if there never was one.
  void disconnect(int peer);

  LinkKind link_kind(int peer) const;
  std::vector<int> peers() const;       // ranks with a live link, ascending
  std::vector<int> lost_peers() const;  // ranks whose link broke, ascending

  // Bulk messages are held at the sender until a receive is there for them, but for the first few pieces: one without
  // a receive holds up those behind it, no step message, and takes no place in the pool.
  // Messages of zero bytes are legal (pointer may be null). The forms without a generation use the current one; with an
  // older one a receive fails, and what is sent is dropped on arrival.
  // Throw CommError for a peer that was never linked or more pending transfers than allowed; a lost peer or an abort
  // shows up in `wait` and `test`.
  Transfer send(int peer, std::uint64_t tag, const void* data, std::size_t bytes);
  Transfer recv(int peer, std::uint64_t tag, void* data, std::size_t bytes);
  Transfer send(int peer, std::uint64_t tag, const void* data, std::size_t bytes, std::uint32_t generation,
                Lane lane = Lane::kStep);
  Transfer recv(int peer, std::uint64_t tag, void* data, std::size_t bytes, std::uint32_t generation);

  // Blocks until all are done. On the first failure or at the deadline it cancels those that are not done and throws:
  // PeerLost, DeadlineExceeded, Aborted, or CommError (for instance when a receive's size is not its message's).
  void wait(const Transfer& transfer, Deadline deadline);
  void wait(std::span<const Transfer> transfers, Deadline deadline);
  // The same for an operation of several ranks: the loss of any of `members` ends it (PeerLost), even if all that is
  // still awaited is from others, for they may have left the operation because of that loss. A member that closed its
  // endpoint had done its part and does not count: so a process closes its endpoint before it exits.
  void wait(std::span<const Transfer> transfers, Deadline deadline, std::span<const int> members);
  // True when done; throws like `wait` when it failed. Never blocks; makes a little progress itself.
  bool test(const Transfer& transfer);
  // Takes back what is not done. A message that was partly sent is completed from a private copy, a bulk message only
  // to the end of a piece: one that never ends here is as if it had not begun. Whether a cancelled message arrives is
  // not known to the sender.
  void cancel(std::span<const Transfer> transfers);

  // Fails all pending and later transfers with Aborted(reason) and wakes all waiters, until `advance`.
  void abort(const std::string& reason);
  // The same, and tells some peers to do so, each of which tells its own once; `suspect` is whom the first to notice
  // accuses, if anybody: also ranks without a link to the one
  // that is lost leave at once. Every rank hears of it while the links that are left form a ring in the order of ranks;
  // of other shapes some may not. Abort frames overtake messages that are not on their way yet. Ends with the
  // generation.
  void broadcast_abort(std::optional<int> suspect);
  // For work between transfers: throws Aborted while an abort lasts, PeerLost if the link to one of `members` broke.
  // Cheap otherwise.
  void check(std::span<const int> members) const;
  // Moves to a newer generation and ends an abort: older messages held or still to come are dropped, pending transfers
  // of older generations fail with CommError. A message of a newer generation than ours is held (bounded) until we
  // get there. Throws CommError if `generation` is older than the current one.
  void advance(std::uint32_t generation);
  std::uint32_t generation() const;

  std::uint64_t bytes_sent() const;  // payload bytes, all links
  std::uint64_t bytes_received() const;
  // How often a frame was held against `commit::Guards::older_frames_are_dropped`, on all links.
  std::uint64_t older_frames_rule_consulted() const;

  // For so long nothing leaves this endpoint and nothing reaches it, and no link breaks by it; what was sent meanwhile
  // is under way then. At most a billion seconds. For tests. Throws CommError if that was not allowed for.
  void cut(double seconds);
  bool is_cut() const;

  // Ends all links (as `disconnect`) and the IO thread; pending transfers fail with CommError. Idempotent.
  void close();

 private:
  std::unique_ptr<EndpointCore> core_;
};

}  // namespace elaswave::comm

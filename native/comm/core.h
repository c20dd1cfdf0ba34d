// What an Endpoint is made of: the table of links, the IO thread, and the threads that make links. Private to comm/.
//
// Locks, in the order in which they may be nested: table_mutex_, then a link's own, then woken_links_mutex_. The
// linkers' lock and the window's are taken alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "comm/endpoint.h"
#include "comm/handshake.h"
#include "comm/link.h"
#include "comm/window.h"

namespace elaswave::comm {

class EndpointCore {
 public:
  explicit EndpointCore(EndpointOptions options);
  ~EndpointCore();

  const EndpointOptions& options() const { return options_; }
  std::uint16_t port() const { return port_; }
  std::uint32_t generation() const { return generation_.load(); }

  void connect(const std::map<int, PeerAddress>& peers, Deadline deadline);
  void mend(Deadline deadline);
  void disconnect(int peer);
  // Links by rank; lost ones too, until the rank comes back.
  std::map<int, std::shared_ptr<Link>> links() const;
  std::shared_ptr<Link> find(int peer) const;       // null when never linked
  Window* window() const { return window_.get(); }  // null: no shared memory

  Transfer post(Request::Kind kind, int peer, std::uint64_t tag, std::byte* data, std::size_t bytes,
                std::uint32_t generation);
  void wait(std::span<const Transfer> transfers, Deadline deadline, std::span<const int> members);
  bool test(const Transfer& transfer);
  void cancel(std::span<const Transfer> transfers);
  void abort(const std::string& reason);
  void broadcast_abort(std::optional<int> suspect);
  void check(std::span<const int> members) const;
  void advance(std::uint32_t generation);
  void close();

 private:
  using LinkPtr = std::shared_ptr<Link>;
  // A thread that makes one link: greets a dialer, or dials again.
  struct Linker {
    std::thread thread;
    Fd socket;  // a second handle, while a conversation lasts, for `close` to cut it short
    bool done = false;
  };

  std::string self() const { return "rank " + std::to_string(options_.rank); }

  // connecting
  void dial(int peer, const PeerAddress& address, Deadline deadline);
  void add_link(int peer, std::unique_ptr<Channel> channel);
  bool has_live_link(int peer) const;
  std::vector<int> missing(const std::map<int, PeerAddress>& peers) const;
  [[noreturn]] void raise_missing(const std::vector<int>& ranks, const std::map<int, PeerAddress>& peers) const;
  void start_handshake(Fd socket);
  bool start_linker(Fd socket, std::function<void()> body);
  void redial(int peer, const PeerAddress& address, Deadline deadline);
  bool is_torn(int peer) const;
  bool is_wanted(int peer) const;
  void handshake(Fd socket);
  void note_refusal(const Acceptance& acceptance);
  void reap_linkers(bool all);

  // IO thread
  void run();
  void fail_all_links(const std::string& why);
  void take_events(std::set<LinkPtr>& ready);
  void drive(std::set<LinkPtr>& ready);
  void accept_dialers();
  void detach(const LinkPtr& link);
  void wake_io_thread(const LinkPtr& link);

  // Ends what is under way with `failure`, here and, where `abort` is given, at all peers. False: it was ended before.
  bool abort_links(const FailurePtr& failure, std::optional<PendingAbort::Abort> abort);
  std::vector<LinkPtr> to_be_told() const;
  // Follows the newest abort that a peer told of, if it is of this generation: ends what is under way, tells the
  // others.
  void apply_remote_abort();

  // waiting
  class Driving;
  // Cancels all and throws what `failure` says.
  [[noreturn]] void give_up(std::span<const Transfer> transfers, const FailurePtr& failure, const LinkPtr& link);
  [[noreturn]] void raise_deadline(std::span<Request* const> pending) const;

  const EndpointOptions options_;
  const std::unique_ptr<Window> window_;  // null where memory is not shared, by option or for want of it
  const Identity identity_;
  Fd listener_;
  std::uint16_t port_ = 0;
  Fd epoll_;
  Fd wake_;  // eventfd
  Signal signal_;
  PendingAbort pending_abort_;
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<bool> stop_{false};
  bool closed_ = false;

  mutable std::shared_mutex table_mutex_;
  std::condition_variable_any table_changed_;
  std::map<int, LinkPtr> table_;
  std::unordered_map<std::uint64_t, LinkPtr> watched_;  // by the number that epoll reports
  std::unordered_map<const Link*, std::uint64_t> numbers_;
  std::uint64_t next_number_ = 2;
  FailurePtr aborted_;
  std::atomic<bool> is_aborted_{false};                // aborted_ is set
  std::optional<std::uint32_t> broadcast_generation_;  // the newest generation whose abort the peers were told of
  std::map<int, PeerAddress> addresses_;               // of ranks that were linked, until they are disconnected
  std::set<int> mending_;                              // being dialed again
  std::map<int, std::string> refusals_;  // why dialers were turned away, for the message of a failed connect

  std::mutex woken_links_mutex_;
  std::vector<LinkPtr> woken_links_;
  std::atomic<bool> woken_{false};

  std::mutex linkers_mutex_;
  std::list<Linker> linkers_;

  std::thread io_thread_;
};

}  // namespace elaswave::comm

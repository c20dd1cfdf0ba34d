// Makes the links of one endpoint: dials lower ranks, lets higher ones in, dials again where a link broke. Private to
// comm/.
//
// Any thread may call any method but `stop`, which waits for the threads that this starts. Dialers of this machine that
// come faster than handshakes end wait in the listener's queue. Those of one other address have a bound of their own,
// at which the oldest handshake goes, so that nobody's silence keeps others away. Whoever finds no room, or is cut off,
// dials again.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "comm/endpoint.h"
#include "comm/handshake.h"
#include "comm/link_table.h"
#include "comm/threads.h"

namespace elaswave::comm {

class Connector {
 public:
  // What it calls, on any thread.
  struct Hooks {
    std::function<void(int peer, std::unique_ptr<Channel> channel)> add_link;
    std::function<void(int peer)> end_link;
    std::function<void()> on_room;  // a handshake has ended
  };

  // Listens at once; throws CommError.
  Connector(Identity identity, const std::string& host, std::uint16_t port, LinkTable& table, Hooks hooks);

  const Fd& listener() const { return listener_; }
  std::uint16_t port() const { return port_; }

  void connect(const std::map<int, PeerAddress>& peers, Deadline deadline);
  void mend(Deadline deadline);
  // The rank's link is not to be mended any more.
  void forget(int peer);
  // Starts handshakes with those who dialed, but for other users of this machine, as many as there may be at one time.
  // True: some may still wait.
  bool accept_dialers();
  void stop();

 private:
  struct Redial {
    int peer;
    PeerAddress address;
    Deadline deadline;
  };
  class Turn;

  std::string self() const { return "rank " + std::to_string(identity_.rank); }
  void dial(int peer, const PeerAddress& address, Deadline deadline);
  bool try_dial(int peer, const PeerAddress& address, Deadline deadline, std::string& why);
  std::vector<int> missing(const std::map<int, PeerAddress>& peers) const;
  [[noreturn]] void raise_missing(const std::vector<int>& ranks, const std::map<int, PeerAddress>& peers) const;
  bool has_room(const std::string& address);
  bool start_handshake(Fd socket, const std::string& address);
  void handshake(Fd socket);
  void note_refusal(const Acceptance& acceptance);
  void redial_all();
  void redial(const Redial& task);
  bool is_torn(int peer) const;
  bool is_wanted(int peer) const;

  const Identity identity_;
  const Fd listener_;
  const std::uint16_t port_;
  LinkTable& table_;
  const Hooks hooks_;
  std::atomic<bool> stopped_{false};

  mutable std::mutex mutex_;
  std::map<int, PeerAddress> addresses_;  // of ranks that were linked, until they are forgotten
  std::set<int> dialed_;                  // now, by some thread
  std::set<int> mending_;                 // being dialed again, or waiting for it
  std::deque<Redial> redials_;            // that wait
  std::size_t redialers_ = 0;             // threads that take them
  std::map<int, std::string> refusals_;   // why dialers were turned away, for the message of a failed connect

  LinkingThreads handshakes_;
  LinkingThreads redialing_;
};

}  // namespace elaswave::comm

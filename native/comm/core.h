// What an Endpoint is made of: its links, the thread that moves their bytes, and what makes links. It posts and awaits
// transfers. Private to comm/.
//
// Locks, in the order in which they may be nested: the connector's, the table's, a link's, the IO thread's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/connector.h"
#include "comm/cut.h"
#include "comm/endpoint.h"
#include "comm/io_thread.h"
#include "comm/link.h"
#include "comm/link_table.h"

namespace elaswave::comm {

class EndpointCore {
 public:
  explicit EndpointCore(EndpointOptions options);
  ~EndpointCore() { close(); }

  const EndpointOptions& options() const { return options_; }
  const LinkTable& table() const { return table_; }
  Connector& connector() { return connector_; }

  Transfer post(Request::Kind kind, int peer, std::uint64_t tag, std::byte* data, std::size_t bytes,
                std::uint32_t generation, Lane lane);
  void wait(std::span<const Transfer> transfers, Deadline deadline, std::span<const int> members);
  bool test(const Transfer& transfer);
  void cancel(std::span<const Transfer> transfers);
  void abort(const std::string& reason);
  void broadcast_abort(std::optional<int> suspect);
  void check(std::span<const int> members) const;
  void advance(std::uint32_t generation);
  void disconnect(int peer);
  void cut(double seconds);
  bool is_cut() const { return cut_.lasts(); }
  void close();

 private:
  void broadcast_abort(std::optional<int> suspect, std::uint32_t generation);
  using LinkPtr = std::shared_ptr<Link>;
  class Driving;

  std::string self() const { return "rank " + std::to_string(options_.rank); }
  LinkPtr link_to(int peer) const;
  void add_link(int peer, std::unique_ptr<Channel> channel);
  void end_links(const std::string& why);
  // Follows the newest abort that a peer told of, if it is of this generation: ends what is under way, tells the
  // others.
  void apply_remote_abort();
  // What has waited for the end of a cut goes on.
  void end_cut();
  // Cancels all and throws what `failure` says.
  [[noreturn]] void give_up(std::span<const Transfer> transfers, const FailurePtr& failure, const LinkPtr& link);
  [[noreturn]] void raise_deadline(std::span<Request* const> pending) const;

  const EndpointOptions options_;
  Signal signal_;
  PendingAbort pending_abort_;
  Cut cut_;
  LinkTable table_;
  IoThread io_thread_;
  Connector connector_;
  bool closed_ = false;
};

}  // namespace elaswave::comm

// Several endpoints in one process, connected to each other, for tests.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/endpoint.h"

namespace elaswave::tests {

// Far more than anything takes: tests fail by it only when they would hang.
inline comm::Deadline plenty() { return comm::Deadline::after(60); }

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs `body(i)` for i in 0..count-1, each in a thread; throws the first exception when all have ended.
inline void in_threads(int count, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

class Cluster {
 public:
  // `kind` kSharedMemory gives all the same host id, kTcp forbids shared memory.
  Cluster(int size, comm::LinkKind kind, comm::EndpointOptions base = {}) : kind_(kind) {
    base.token = "the job's token";
    base.host_id = "host";
    base.allow_shm = kind == comm::LinkKind::kSharedMemory;
    for (int rank = 0; rank < size; ++rank) {
      base.rank = rank;
      endpoints_.push_back(std::make_unique<comm::Endpoint>(base));
    }
    connect();
  }

  void connect() {
    std::map<int, comm::PeerAddress> table;
    for (const auto& e : endpoints_) table[e->rank()] = {"127.0.0.1", e->port(), e->host_id()};
    in_threads(size(), [&](int rank) { at(rank).connect(table, plenty()); });
    for (int a = 0; a < size(); ++a) {
      for (int b = 0; b < size(); ++b) {
        if (a != b) CHECK(at(a).link_kind(b) == kind_);
      }
    }
  }

  int size() const { return static_cast<int>(endpoints_.size()); }
  comm::Endpoint& at(int rank) { return *endpoints_.at(static_cast<std::size_t>(rank)); }

 private:
  comm::LinkKind kind_;
  std::vector<std::unique_ptr<comm::Endpoint>> endpoints_;
};

// Registers one case for each kind of link.
inline bool add_for_both(const std::string& name, const std::function<void(comm::LinkKind)>& body) {
  add(name + "_tcp", [body] { body(comm::LinkKind::kTcp); });
  add(name + "_shm", [body] { body(comm::LinkKind::kSharedMemory); });
  return true;
}

}  // namespace elaswave::tests

#define TEST_BOTH(name)                                                         \
  static void name(elaswave::comm::LinkKind kind);                              \
  static const bool added_##name = elaswave::tests::add_for_both(#name, &name); \
  static void name(elaswave::comm::LinkKind kind)

#include "comm/shm_channel.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "comm/errors.h"
#include "comm/shared_file.h"

namespace elaswave::comm {
namespace {

// Single producer, single consumer: the writer alone moves `tail`, the reader alone moves `head`; both only grow, bytes
// live at the position modulo the capacity. A side that is about to sleep raises its flag and looks once more; the
// other side moves its index and then looks at the flag. All four are sequentially consistent, so one of them sees the
// other.
struct RingHeader {
  alignas(64) std::atomic<std::uint64_t> tail;
  alignas(64) std::atomic<std::uint64_t> head;
  alignas(64) std::atomic<std::uint32_t> reader_sleeps;
  alignas(64) std::atomic<std::uint32_t> writer_sleeps;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "the rings are shared between processes");

constexpr std::size_t kHeaderBytes = 4096;
constexpr std::size_t kSmallestRing = 4096;
// Bytes copied between two moves of an index: the other side works on the previous piece meanwhile.
constexpr std::size_t kPiece = std::size_t{128} << 10;

struct Ring {
  RingHeader* header;
  std::byte* data;
};

class ShmChannel final : public Channel {
 public:
  ShmChannel(const Fd& segment, std::size_t ring_bytes, Fd socket, bool creator)
      : mapping_(segment, 2 * (kHeaderBytes + ring_bytes), true), capacity_(ring_bytes), socket_(std::move(socket)) {
    const auto ring = [&](std::size_t base) {
      return Ring{reinterpret_cast<RingHeader*>(mapping_.at(base)), mapping_.at(base + kHeaderBytes)};
    };
    out_ = ring(creator ? 0 : kHeaderBytes + ring_bytes);
    in_ = ring(creator ? kHeaderBytes + ring_bytes : 0);
  }

  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    const bool gone = gone_;  // looked at first: what the peer wrote before its end is in the ring by now
    const std::uint64_t head = in_.header->head.load(std::memory_order_relaxed);
    const std::uint64_t held = in_.header->tail.load(std::memory_order_acquire) - head;
    if (held > capacity_) return close_with("its shared ring is corrupt");
    if (held == 0) return gone ? close_with("the process ended or closed its endpoint") : 0;
    const std::size_t n = std::min({bytes, static_cast<std::size_t>(held), kPiece});
    copy_out(in_.data, head, static_cast<std::byte*>(data), n);
    in_.header->head.store(head + n);
    // A waiting writer is woken once a good part of the ring is free, not for every piece.
    if (held - n <= capacity_ / 2 && in_.header->writer_sleeps.load() != 0 &&
        in_.header->writer_sleeps.exchange(0) != 0) {
      ring_doorbell();
    }
    return static_cast<std::ptrdiff_t>(n);
  }

  std::ptrdiff_t write(const iovec* parts, int count) override {
    if (gone_) return close_with("the process ended or closed its endpoint");
    const std::uint64_t tail = out_.header->tail.load(std::memory_order_relaxed);
    const std::uint64_t held = tail - out_.header->head.load(std::memory_order_acquire);
    if (held > capacity_) {
      gone_ = true;  // so that the reading side, which ends links, comes to an end as well
      return close_with("its shared ring is corrupt");
    }
    const std::size_t room = std::min(capacity_ - static_cast<std::size_t>(held), kPiece);
    std::size_t written = 0;
    for (int i = 0; i < count && written < room; ++i) {
      const std::size_t n = std::min(parts[i].iov_len, room - written);
      copy_in(out_.data, tail + written, static_cast<const std::byte*>(parts[i].iov_base), n);
      written += n;
    }
    if (written == 0) return 0;
    out_.header->tail.store(tail + written);
    if (out_.header->reader_sleeps.load() != 0 && out_.header->reader_sleeps.exchange(0) != 0) ring_doorbell();
    return static_cast<std::ptrdiff_t>(written);
  }

  void watch(int epoll, std::uint64_t number) override {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP | EPOLLET;
    event.data.u64 = number;
    if (::epoll_ctl(epoll, EPOLL_CTL_ADD, socket_.get(), &event) != 0) {
      throw CommError("a socket cannot be watched: " + describe_errno(errno));
    }
  }

  void disarm() override {
    in_.header->reader_sleeps.store(0);
    out_.header->writer_sleeps.store(0);
  }

  bool arm(bool for_read, bool for_write) override {
    if (for_read) {
      if (gone_) return true;  // also after `write` found it: no event tells of that
      in_.header->reader_sleeps.store(1);
      if (in_.header->tail.load() != in_.header->head.load(std::memory_order_relaxed)) return true;
    }
    if (for_write) {
      out_.header->writer_sleeps.store(1);
      // Half, as the reader rings no earlier.
      const std::uint64_t held = out_.header->tail.load(std::memory_order_relaxed) - out_.header->head.load();
      if (held <= capacity_ / 2 || held > capacity_) return true;  // corrupt: `write` says so
    }
    return false;
  }

  void on_event() override {
    char doorbells[256];
    for (;;) {
      const ssize_t n = ::recv(socket_.get(), doorbells, sizeof doorbells, 0);
      if (n > 0) continue;
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) gone_ = true;
      return;
    }
  }

  void finish_writing() override { ::shutdown(socket_.get(), SHUT_WR); }

  std::string trouble() const override { return trouble_; }
  int fd() const override { return socket_.get(); }
  LinkKind kind() const override { return LinkKind::kSharedMemory; }

 private:
  // A full socket means that doorbells lie there unread: one more would add nothing. A broken one shows in on_event.
  void ring_doorbell() { (void)!::send(socket_.get(), "!", 1, MSG_NOSIGNAL | MSG_DONTWAIT); }

  void copy_in(std::byte* ring, std::uint64_t position, const std::byte* from, std::size_t bytes) const {
    if (bytes == 0) return;
    const std::size_t at = static_cast<std::size_t>(position) & (capacity_ - 1);
    const std::size_t first = std::min(bytes, capacity_ - at);
    std::memcpy(ring + at, from, first);
    std::memcpy(ring, from + first, bytes - first);
  }

  void copy_out(const std::byte* ring, std::uint64_t position, std::byte* to, std::size_t bytes) const {
    const std::size_t at = static_cast<std::size_t>(position) & (capacity_ - 1);
    const std::size_t first = std::min(bytes, capacity_ - at);
    std::memcpy(to, ring + at, first);
    std::memcpy(to + first, ring, bytes - first);
  }

  std::ptrdiff_t close_with(const std::string& trouble) {
    if (trouble_.empty()) trouble_ = trouble;
    return kClosed;
  }

  Mapping mapping_;
  std::size_t capacity_;
  Fd socket_;
  Ring out_{};
  Ring in_{};
  bool gone_ = false;
  std::string trouble_;
};

}  // namespace

Fd make_segment(std::size_t ring_bytes) {
  const std::size_t capacity = std::bit_ceil(std::max(ring_bytes, kSmallestRing));
  return make_shared_file("elaswave-link", 2 * (kHeaderBytes + capacity));  // zeros: both rings are empty
}

std::unique_ptr<Channel> make_shm_channel(const Fd& segment, Fd socket, bool creator) {
  const std::size_t bytes = sealed_bytes(segment);
  const std::size_t ring_bytes = bytes / 2 - kHeaderBytes;
  if (bytes == 0 || !std::has_single_bit(ring_bytes) || ring_bytes < kSmallestRing) {
    throw CommError("a shared segment of " + std::to_string(bytes) + " bytes is not one of a link");
  }
  return std::make_unique<ShmChannel>(segment, ring_bytes, std::move(socket), creator);
}

}  // namespace elaswave::comm

// A channel whose incoming bytes come as late as over a slower link. They are taken from the channel below as soon as
// they are there, so that what lies in between does not slow the peer down, and handed out when such a link would have
// delivered them: it is busy with one byte after another, and each is under way for the latency.
//
//   bytes [0, n) are there at t, the link is free at f  ->  byte i is handed out at max(t, f) + (i + 1) / rate +
//   latency
#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "comm/channel.h"
#include "comm/errors.h"

namespace elaswave::comm {
namespace {

constexpr std::size_t kPiece = std::size_t{64} << 10;
constexpr std::size_t kPullMost = std::size_t{1} << 20;  // in one call: the link's lock is held meanwhile
// Bytes held beyond those under way, and bytes held at all.
constexpr double kSpare = 4 << 20;
constexpr double kHeldMost = 1 << 30;
// Bytes of a stream are handed out together that are due within this time, and more where the reader expects more: each
// hand-out wakes a thread. Nor is the channel below asked more often without a sign, for threads that wait look often.
constexpr double kTogether_s = 5e-4;

class PacedChannel final : public Channel {
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

 public:
  PacedChannel(std::unique_ptr<Channel> channel, LinkPace pace)
      : below_(std::move(channel)),
        latency_s_(pace.latency_s),
        rate_(pace.bytes_per_s),
        capacity_(static_cast<std::size_t>(
            std::min(kHeldMost, kSpare + (pace.latency_s > 0 ? pace.latency_s * pace.bytes_per_s : 0.0)))),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
    if (!timer_) throw CommError("no timer: " + describe_errno(errno));
  }

  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    if (ending_) return below_->read(data, bytes);
    expected_ = 1;
    const double now = now_s();
    if (!drained_ || now >= pulled_s_ + kTogether_s) pull(now);
    auto* to = static_cast<std::byte*>(data);
    std::size_t done = 0;
    while (done < bytes && !pieces_.empty()) {
      Piece& piece = pieces_.front();
      const std::size_t n = std::min(bytes - done, due_bytes(piece, now) - piece.taken);
      if (n == 0) break;
      std::memcpy(to + done, piece.data.data() + piece.taken, n);
      piece.taken += n;
      done += n;
      if (piece.taken < piece.data.size()) break;
      held_ -= piece.data.size();
      pieces_.pop_front();
    }
    if (done == 0 && pieces_.empty() && closed_) return kClosed;
    return static_cast<std::ptrdiff_t>(done);
  }

  void expect(std::size_t bytes) override { expected_ = bytes; }
  std::ptrdiff_t write(const iovec* parts, int count) override { return below_->write(parts, count); }

  void watch(int epoll, std::uint64_t number) override {
    below_->watch(epoll, number);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    event.data.u64 = number;
    if (::epoll_ctl(epoll, EPOLL_CTL_ADD, timer_.get(), &event) != 0) {
      throw CommError("a timer cannot be watched: " + describe_errno(errno));
    }
  }

  bool arm(bool for_read, bool for_write) override {
    if (ending_) return below_->arm(for_read, for_write);
    const bool pulls = for_read && !closed_ && held_ < capacity_;
    if (for_read && pieces_.empty() && closed_) return true;  // the next read says so
    if (pulls && !drained_) return true;
    if (for_read && !pieces_.empty() && !set_timer()) return true;
    const bool is_ready = below_->arm(pulls, for_write);
    if (is_ready) drained_ = false;
    return is_ready;
  }

  // The timer may go off once more, to no harm.
  void disarm() override { below_->disarm(); }
  void on_event() override {
    drained_ = false;
    below_->on_event();
  }
  bool is_silent(Clock::time_point now, bool look_afresh) override { return below_->is_silent(now, look_afresh); }
  // Nobody waits for what comes in from now on.
  void finish_writing() override {
    below_->finish_writing();
    ending_ = true;
  }
  std::string trouble() const override { return below_->trouble(); }
  int fd() const override { return below_->fd(); }
  LinkKind kind() const override { return below_->kind(); }

 private:
  struct Piece {
    double begin_s;  // the link begins with its first byte
    std::vector<std::byte> data;
    std::size_t taken = 0;
  };

  static double now_s() { return Seconds(Clock::now().time_since_epoch()).count(); }

  double end_s(const Piece& piece, std::size_t bytes) const {
    return piece.begin_s + static_cast<double>(bytes) / rate_ + latency_s_;
  }

  std::size_t due_bytes(const Piece& piece, double now) const {
    if (now >= end_s(piece, piece.data.size())) return piece.data.size();
    const double passed = std::floor((now - piece.begin_s - latency_s_) * rate_);
    if (!(passed > static_cast<double>(piece.taken))) return piece.taken;
    return std::min(piece.data.size(), static_cast<std::size_t>(passed));
  }

  void pull(double now) {
    pulled_s_ = now;
    drained_ = false;
    for (std::size_t pulled = 0; !closed_ && pulled < kPullMost && held_ < capacity_;) {
      const std::ptrdiff_t n = below_->read(staging_.data(), std::min(staging_.size(), capacity_ - held_));
      if (n == 0) {
        drained_ = true;
        return;
      }
      if (n == kClosed) {
        closed_ = true;
        return;
      }
      const auto bytes = static_cast<std::size_t>(n);
      const double begin_s = std::max(free_s_, now);
      free_s_ = begin_s + static_cast<double>(bytes) / rate_;
      pieces_.push_back({begin_s, {staging_.begin(), staging_.begin() + n}});
      held_ += bytes;
      pulled += bytes;
    }
  }

  // When all bytes that the reader expects are due, or all that are held of these.
  double expected_s() const {
    std::size_t before = 0;
    for (const Piece& piece : pieces_) {
      const std::size_t left = piece.data.size() - piece.taken;
      if (before + left >= expected_) return end_s(piece, piece.taken + (expected_ - before));
      before += left;
    }
    return end_s(pieces_.back(), pieces_.back().data.size());
  }

  // False if something is due by now.
  bool set_timer() {
    const Piece& first = pieces_.front();
    const double next_s = std::max(end_s(first, first.taken) + kTogether_s, expected_s());
    const double at_s = std::min(free_s_ + latency_s_, next_s);
    if (at_s <= now_s()) return false;
    if (at_s == timer_at_s_) return true;
    timer_at_s_ = at_s;
    itimerspec when{};
    when.it_value.tv_sec = static_cast<time_t>(at_s);
    when.it_value.tv_nsec = std::min(999'999'999L, static_cast<long>(std::ceil((at_s - std::floor(at_s)) * 1e9)));
    return ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr) == 0;
  }

  const std::unique_ptr<Channel> below_;
  const double latency_s_, rate_;
  const std::size_t capacity_;
  const Fd timer_;
  double timer_at_s_ = 0.0;
  double pulled_s_ = 0.0;
  std::size_t expected_ = 1;
  double free_s_ = 0.0;  // the link has passed on all that is held
  std::deque<Piece> pieces_;
  std::size_t held_ = 0;
  bool drained_ = false;  // the channel below had nothing more when it was last asked
  bool closed_ = false;
  bool ending_ = false;
  std::array<std::byte, kPiece> staging_{};
};

}  // namespace

std::unique_ptr<Channel> make_paced_channel(std::unique_ptr<Channel> channel, LinkPace pace) {
  return std::make_unique<PacedChannel>(std::move(channel), pace);
}

}  // namespace elaswave::comm

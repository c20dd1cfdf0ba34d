#include "comm/window.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "comm/errors.h"

namespace elaswave::comm {
namespace {

constexpr std::size_t kHeaderBytes = 4096;
constexpr std::size_t kWindowBytes = kHeaderBytes + Window::kPlaces * Window::kPlaceBytes;

struct alignas(64) Place {
  std::atomic<std::uint64_t> turn;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "windows are shared between processes");
static_assert(Window::kPlaces * sizeof(Place) <= kHeaderBytes);

Place& place_of(const Mapping& window, std::uint64_t place) {
  return *reinterpret_cast<Place*>(window.at(place * sizeof(Place)));
}

std::size_t part_offset(std::uint64_t place, std::size_t half) {
  return kHeaderBytes + place * Window::kPlaceBytes + half * Window::kPartBytes;
}

std::size_t sum_offset(std::uint64_t place, std::size_t half) {
  return kHeaderBytes + place * Window::kPlaceBytes + 2 * Window::kPartBytes + half * Window::kSumBytes;
}

const Fd& checked(const Fd& file) {
  if (sealed_bytes(file) != kWindowBytes) throw CommError("what a peer shares is not a window");
  return file;
}

void check_claim(const Claim& claim) {
  if (claim.place >= Window::kPlaces) {
    throw CommError("a peer claims place " + std::to_string(claim.place) + " of its window, which has " +
                    std::to_string(Window::kPlaces));
  }
}

// ThreadSanitizer knows no fences; it also does not see what other processes write.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wtsan"
void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
#pragma GCC diagnostic pop

}  // namespace

Window::Window() : file_(make_shared_file("elaswave-window", kWindowBytes)), mapping_(file_, kWindowBytes, true) {}

Window::Lease::Lease(Window& window) : window_(window) {
  const std::lock_guard lock(window_.mutex_);
  const auto free = std::find(window_.taken_.begin(), window_.taken_.end(), false);
  if (free == window_.taken_.end()) {
    throw CommError("more than " + std::to_string(kPlaces) + " large collectives of one endpoint at a time");
  }
  *free = true;
  claim_ = {static_cast<std::uint64_t>(free - window_.taken_.begin()), ++window_.turns_};
  place_of(window_.mapping_, claim_.place).turn.store(claim_.turn);
  fence();  // nothing is written before the turn stands
}

Window::Lease::~Lease() {
  const std::lock_guard lock(window_.mutex_);
  window_.taken_[claim_.place] = false;
}

std::byte* Window::Lease::part(std::size_t half) const { return window_.mapping_.at(part_offset(claim_.place, half)); }
std::byte* Window::Lease::sum(std::size_t half) const { return window_.mapping_.at(sum_offset(claim_.place, half)); }

WindowView::WindowView(const Fd& file) : mapping_(checked(file), kWindowBytes, false) {}

const std::byte* WindowView::part(const Claim& claim, std::size_t half) const {
  check_claim(claim);
  return mapping_.at(part_offset(claim.place, half));
}

const std::byte* WindowView::sum(const Claim& claim, std::size_t half) const {
  check_claim(claim);
  return mapping_.at(sum_offset(claim.place, half));
}

bool WindowView::stands(const Claim& claim) const {
  check_claim(claim);
  fence();  // all was read before the turn is looked at
  return place_of(mapping_, claim.place).turn.load() == claim.turn;
}

}  // namespace elaswave::comm

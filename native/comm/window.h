// Memory of one endpoint that the other processes of its host read where it lies: what every member of a group wants is
// written once, and nobody needs a copy of a summand to add it. Private to comm/.
//
// A window has a few places, so that several collectives of one endpoint may be under way. A collective leases one for
// its time; every lease has a turn of its own, which stands in the window beside the place. Who was told place and turn
// reads, and then looks whether the turn still stands: if so, what was read was meant for it. That is all the safety
// that is needed when a collective is aborted and its place taken again while a slow reader is still at it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "comm/shared_file.h"

namespace elaswave::comm {

// What a member tells the others, once it has a place.
struct Claim {
  std::uint64_t place = 0;
  std::uint64_t turn = 0;
};

class Window {
 public:
  static constexpr std::size_t kPlaces = 4;
  // Two halves, of which one is filled while the other is read; in each a part for what comes in and one for sums.
  static constexpr std::size_t kPartBytes = std::size_t{1} << 20;
  static constexpr std::size_t kSumBytes = kPartBytes / 2;
  static constexpr std::size_t kPlaceBytes = 2 * (kPartBytes + kSumBytes);
  static constexpr std::size_t kLineBytes = 64;
  // More could not each have a line of a part.
  static constexpr std::size_t kMembers = kPartBytes / kLineBytes;

  Window();  // throws CommError
  // For the peers to map.
  const Fd& file() const { return file_; }

  // The use of one place. Throws CommError when all are taken.
  class Lease {
   public:
    explicit Lease(Window& window);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Claim claim() const { return claim_; }
    std::byte* part(std::size_t half) const;
    std::byte* sum(std::size_t half) const;

   private:
    Window& window_;
    Claim claim_;
  };

 private:
  Fd file_;
  Mapping mapping_;
  std::mutex mutex_;
  std::array<bool, kPlaces> taken_{};
  std::uint64_t turns_ = 0;
};

// Another endpoint's window.
class WindowView {
 public:
  explicit WindowView(const Fd& file);  // throws CommError for a file that is not a window
  // Throw CommError for a claim that no window makes.
  const std::byte* part(const Claim& claim, std::size_t half) const;
  const std::byte* sum(const Claim& claim, std::size_t half) const;
  // Whether everything that was read by now was written for `claim`.
  bool stands(const Claim& claim) const;

 private:
  Mapping mapping_;
};

}  // namespace elaswave::comm

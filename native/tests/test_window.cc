// Windows: places and their turns, and what is not a window.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "comm/errors.h"
#include "comm/window.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

TEST(what_is_written_is_read_elsewhere) {
  Window window;
  const WindowView view(window.file());
  const Window::Lease lease(window);
  for (const std::size_t half : {0u, 1u}) {
    std::memset(lease.part(half), static_cast<int>(1 + half), Window::kPartBytes);
    std::memset(lease.sum(half), static_cast<int>(3 + half), Window::kSumBytes);
  }
  for (const std::size_t half : {0u, 1u}) {
    for (std::size_t i = 0; i < Window::kPartBytes; ++i) {
      CHECK(view.part(lease.claim(), half)[i] == static_cast<std::byte>(1 + half));
    }
    for (std::size_t i = 0; i < Window::kSumBytes; ++i) {
      CHECK(view.sum(lease.claim(), half)[i] == static_cast<std::byte>(3 + half));
    }
  }
  CHECK(view.stands(lease.claim()));
}

TEST(a_claim_falls_when_its_place_is_taken_again) {
  Window window;
  const WindowView view(window.file());
  Claim former;
  {
    const Window::Lease lease(window);
    former = lease.claim();
  }
  CHECK(view.stands(former));  // nothing was written over it yet
  const Window::Lease lease(window);
  CHECK_EQUAL(lease.claim().place, former.place);
  CHECK(!view.stands(former));
  CHECK(view.stands(lease.claim()));
}

TEST(leases_have_places_of_their_own_while_there_are_any) {
  Window window;
  std::vector<std::unique_ptr<Window::Lease>> leases;
  for (std::size_t i = 0; i < Window::kPlaces; ++i) leases.push_back(std::make_unique<Window::Lease>(window));
  for (std::size_t i = 0; i < Window::kPlaces; ++i) {
    std::memset(leases[i]->part(0), static_cast<int>(i), Window::kPlaceBytes / 4);
  }
  for (std::size_t i = 0; i < Window::kPlaces; ++i) CHECK(leases[i]->part(0)[0] == static_cast<std::byte>(i));
  CHECK_THROWS(CommError, "more than 4 large collectives", Window::Lease{window});
  leases.erase(leases.begin() + 1);
  const Window::Lease again(window);
  CHECK_EQUAL(again.claim().place, std::uint64_t{1});
}

TEST(other_files_are_not_windows) {
  const Window window;
  const Fd unsealed(::memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_THROWS(CommError, "is not a window", WindowView{unsealed});
  CHECK(::ftruncate(unsealed.get(), ::lseek(window.file().get(), 0, SEEK_END)) == 0);
  CHECK_THROWS(CommError, "is not a window", WindowView{unsealed});
  CHECK(::ftruncate(window.file().get(), 4096) != 0);
}

TEST(a_claim_on_no_place_is_refused) {
  Window window;
  const WindowView view(window.file());
  CHECK_THROWS(CommError, "a peer claims place 4", view.part({Window::kPlaces, 1}, 0));
  CHECK_THROWS(CommError, "a peer claims place 4", view.sum({Window::kPlaces, 1}, 0));
  CHECK_THROWS(CommError, "a peer claims place 4", view.stands({Window::kPlaces, 1}));
}

int main(int argc, char** argv) { return run(argc, argv); }

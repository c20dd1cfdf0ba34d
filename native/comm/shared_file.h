// Anonymous memory files that processes of one host share: no name that could be left behind, no bound by the size of
// /dev/shm, gone when nobody holds them. Sealed at their size, so that nobody can shrink one under another's mapping
// (which would be a SIGBUS there). Private to comm/.
#pragma once

#include <cstddef>

#include "comm/socket.h"

namespace elaswave::comm {

// Of zeros; takes memory where it is written to. `name` is for people who look. Throws CommError.
Fd make_shared_file(const char* name, std::size_t bytes);

// The size of a file that is sealed at it; 0 for any other.
std::size_t sealed_bytes(const Fd& file);

class Mapping {
 public:
  Mapping(const Fd& file, std::size_t bytes, bool writable);  // throws CommError
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::byte* at(std::size_t offset) const { return static_cast<std::byte*>(at_) + offset; }

 private:
  std::size_t bytes_;
  void* at_;
};

}  // namespace elaswave::comm

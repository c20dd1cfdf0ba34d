#include "comm/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "comm/errors.h"

namespace elaswave::comm {
namespace {

constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

Fd make_shared_file(const char* name, std::size_t bytes) {
  Fd file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file || ::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(file.get(), F_ADD_SEALS, kSize | F_SEAL_SEAL) != 0) {
    throw CommError("no shared memory of " + std::to_string(bytes) + " bytes: " + describe_errno(errno));
  }
  return file;
}

std::size_t sealed_bytes(const Fd& file) {
  struct stat info{};
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & kSize) == kSize && ::fstat(file.get(), &info) == 0;
  return sealed ? static_cast<std::size_t>(info.st_size) : 0;
}

Mapping::Mapping(const Fd& file, std::size_t bytes, bool writable)
    : bytes_(bytes), at_(::mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, file.get(), 0)) {
  if (at_ == MAP_FAILED) throw CommError("shared memory cannot be mapped: " + describe_errno(errno));
}

Mapping::~Mapping() { ::munmap(at_, bytes_); }

}  // namespace elaswave::comm

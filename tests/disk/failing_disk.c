// A disk that fails at one chosen write: this library, preloaded, counts what processes write below a folder, all of
// them together, and gives one of these calls an error instead of doing it.
//
//   FAILING_DISK_UNDER=/tmp/run  FAILING_DISK_COUNTER=/dev/shm/counter  LD_PRELOAD=failing_disk.so  python …
//
// The counter is three 64-bit integers: calls so far, the call that fails (counted from 1; 0 for none), its errno.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static struct {
  uint64_t calls, fails, number;
} *counter;
static const char *under;

__attribute__((constructor)) static void start(void) {
  under = getenv("FAILING_DISK_UNDER");
  const char *path = getenv("FAILING_DISK_COUNTER");
  if (!under || !path) return;
  int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
  int file = real(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  counter = mmap(NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (counter == MAP_FAILED) counter = NULL;
  close(file);
}

// What a run says to its user goes elsewhere than to this disk, though it is kept beside the run.
static int is_under(const char *path) {
  return path && strncmp(path, under, strlen(under)) == 0 && !strstr(path, "/console.log");
}

// Whether the call, of a file that is counted, is the one that fails; sets errno.
static int fails(int counts) {
  if (!counts || __atomic_add_fetch(&counter->calls, 1, __ATOMIC_SEQ_CST) != counter->fails) return 0;
  errno = (int)counter->number;
  return 1;
}

static int path_fails(int at, const char *path) {
  if (!counter || !path) return 0;
  if (path[0] == '/') return fails(is_under(path));
  char name[64], folder[PATH_MAX];
  snprintf(name, sizeof name, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
  ssize_t size = readlink(name, folder, sizeof folder - 1);
  if (size < 0) return 0;
  folder[size] = 0;
  return fails(is_under(folder));
}

static int file_fails(int file) {
  if (!counter) return 0;
  int before = errno;
  char name[64], path[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  ssize_t size = readlink(name, path, sizeof path - 1);
  errno = before;
  if (size < 0) return 0;
  path[size] = 0;
  return fails(is_under(path));
}

#define OF_FILE(result, name, parameters, arguments, failed) \
  result name parameters { \
    static result(*real) parameters; \
    if (!real) real = dlsym(RTLD_NEXT, #name); \
    return file_fails(file) ? (failed) : real arguments; \
  }

OF_FILE(ssize_t, write, (int file, const void *data, size_t size), (file, data, size), -1)
OF_FILE(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at), -1)
OF_FILE(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), -1)
OF_FILE(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count), -1)
OF_FILE(int, fsync, (int file), (file), -1)
OF_FILE(int, fdatasync, (int file), (file), -1)
OF_FILE(int, ftruncate, (int file, off_t size), (file, size), -1)
OF_FILE(int, ftruncate64, (int file, off64_t size), (file, size), -1)
OF_FILE(int, posix_fallocate, (int file, off_t at, off_t size), (file, at, size), errno)
OF_FILE(int, posix_fallocate64, (int file, off64_t at, off64_t size), (file, at, size), errno)

#define OF_PATH(result, name, at, path, parameters, arguments) \
  result name parameters { \
    static result(*real) parameters; \
    if (!real) real = dlsym(RTLD_NEXT, #name); \
    return path_fails(at, path) ? -1 : real arguments; \
  }

OF_PATH(int, mkdir, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode))
OF_PATH(int, mkdirat, at, path, (int at, const char *path, mode_t mode), (at, path, mode))
OF_PATH(int, rename, AT_FDCWD, to, (const char *from, const char *to), (from, to))
OF_PATH(int, renameat, at, to, (int from_at, const char *from, int at, const char *to), (from_at, from, at, to))
OF_PATH(int, symlink, AT_FDCWD, path, (const char *target, const char *path), (target, path))

#define OPENS(name, at, parameters, ...) \
  int name parameters { \
    static int (*real) parameters; \
    if (!real) real = dlsym(RTLD_NEXT, #name); \
    va_list more; \
    va_start(more, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    if (flags & (O_CREAT | O_TRUNC) && path_fails(at, path)) return -1; \
    return real(__VA_ARGS__, flags, mode); \
  }

OPENS(open, AT_FDCWD, (const char *path, int flags, ...), path)
OPENS(open64, AT_FDCWD, (const char *path, int flags, ...), path)
OPENS(openat, at, (int at, const char *path, int flags, ...), at, path)
OPENS(openat64, at, (int at, const char *path, int flags, ...), at, path)

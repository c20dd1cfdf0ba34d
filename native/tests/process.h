// Child processes for tests: forked before the parent has any thread, so that each builds its own endpoint.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>

#include "check.h"

namespace elaswave::tests {

class Pipe {
 public:
  Pipe() {
    int ends[2];
    if (::pipe(ends) != 0) fail(__FILE__, __LINE__, "no pipe");
    read_ = ends[0];
    write_ = ends[1];
  }
  ~Pipe() {
    ::close(read_);
    ::close(write_);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  template <typename T>
  void put(const T& value) {
    CHECK(::write(write_, &value, sizeof value) == static_cast<ssize_t>(sizeof value));
  }
  template <typename T>
  T get() {
    T value;
    CHECK(::read(read_, &value, sizeof value) == static_cast<ssize_t>(sizeof value));
    return value;
  }

 private:
  int read_ = -1;
  int write_ = -1;
};

class Child {
 public:
  // `body` runs in the child, which exits 0, or 1 after printing what was thrown.
  explicit Child(const std::function<void()>& body) {
    std::fflush(stdout);
    pid_ = ::fork();
    if (pid_ < 0) fail(__FILE__, __LINE__, "no fork");
    if (pid_ != 0) return;
    int code = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      code = 1;
    }
    std::_Exit(code);
  }
  ~Child() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void kill(int signal) { ::kill(pid_, signal); }
  // The wait status.
  int join() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_ = -1;
};

}  // namespace elaswave::tests

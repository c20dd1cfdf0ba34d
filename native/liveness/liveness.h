// The end of a process, noticed before the kernel has closed its sockets.
//
// A launcher shares a table of robust mutexes with the processes that it forks. A thread of each process holds one for
// as long as the process lives; a thread of the launcher waits for each. The kernel hands a robust mutex on when the
// thread that holds it ends, which is before it takes the memory of the process apart: after SIGKILL about 0.1 ms,
// where sockets and pidfds of a process with 600 MB need 40 ms.
//
//   Table table(4);                                // in the launcher, before the forks
//   if (fork() == 0) { table.hold(2); work(); }    // in the child
//   table.watch(2); poll(table.fd()); table.ended()  ->  {2}
//
// What it means: the threads of a process are ended by one signal or one call for all of them (only `exec` ends the
// others alone, and then the program is gone as well). So the process is being ended, and none of its threads comes
// back from the kernel; one that ran on another core may have done so for some microseconds more.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace elaswave::liveness {

// The launcher's one thread makes it, watches, reads and destroys it; each child holds its own slot, once. Methods
// throw std::system_error when the system refuses memory, a pipe or a thread, std::out_of_range for a slot that is not
// there.
class Table {
 public:
  explicit Table(std::size_t slots);
  // Ends the waits of this process, which takes a quarter of a second while watched processes live. A copy that came
  // with a fork leaves what is the launcher's alone.
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // In the process that holds the slot until it ends. Returns when the mutex is held, by a thread that takes no
  // signals. Throws std::system_error (EBUSY) if another process holds it.
  void hold(std::size_t slot);

  // In the launcher, after the fork: from now on the end of the slot's process is told, once.
  void watch(std::size_t slot);

  // Readable while ends are to be read; non-blocking.
  int fd() const;

  // The slots whose processes have ended since the last call, in the order in which that was noticed.
  std::vector<std::size_t> ended();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace elaswave::liveness

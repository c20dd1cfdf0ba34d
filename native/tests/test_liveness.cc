// Processes that hold a slot and end, in every way that a process can.
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"
#include "liveness/liveness.h"
#include "process.h"

namespace {

using elaswave::liveness::Table;
using elaswave::tests::Child;
using elaswave::tests::Pipe;

constexpr int kPlentyMs = 60'000;

// A child that holds `slot`, says so and waits.
std::unique_ptr<Child> holder(Table& table, Pipe& says, std::size_t slot) {
  auto child = std::make_unique<Child>([&table, &says, slot] {
    table.hold(slot);
    says.put('h');
    for (;;) ::pause();
  });
  return child;
}

// The next slots to be told, at least one.
std::vector<std::size_t> next(const Table& table, Table& reader) {
  pollfd poll{table.fd(), POLLIN, 0};
  CHECK_EQUAL(::poll(&poll, 1, kPlentyMs), 1);
  return reader.ended();
}

TEST(a_killed_process_is_told_before_it_is_reaped) {
  Table table(2);
  Pipe says;
  auto first = holder(table, says, 0), second = holder(table, says, 1);
  table.watch(0);
  table.watch(1);
  says.get<char>();
  says.get<char>();
  CHECK(table.ended().empty());
  second->kill(SIGKILL);
  CHECK_EQUAL(next(table, table).at(0), 1u);
  CHECK(table.ended().empty());
  first->kill(SIGKILL);
  CHECK_EQUAL(next(table, table).at(0), 0u);
}

TEST(an_exit_and_a_crash_are_told_too) {
  Table table(2);
  Child exits([&] { table.hold(0); });
  Child crashes([&] {
    table.hold(1);
    std::signal(SIGSEGV, SIG_DFL);
    std::raise(SIGSEGV);
  });
  table.watch(0);
  table.watch(1);
  std::set<std::size_t> told;
  while (told.size() < 2) {
    for (const std::size_t slot : next(table, table)) told.insert(slot);
  }
  CHECK_EQUAL(WIFEXITED(exits.join()), true);
  CHECK_EQUAL(WIFSIGNALED(crashes.join()), true);
}

TEST(a_stopped_process_is_not_told_until_it_is_killed) {
  Table table(1);
  Pipe says;
  auto child = holder(table, says, 0);
  table.watch(0);
  says.get<char>();
  child->kill(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // longer than one wait of the watcher
  CHECK(table.ended().empty());
  child->kill(SIGKILL);
  CHECK_EQUAL(next(table, table).at(0), 0u);
}

TEST(a_slot_is_held_again_after_its_process_has_ended) {
  Table table(1);
  Pipe says;
  auto first = holder(table, says, 0);
  says.get<char>();
  first->kill(SIGKILL);
  first->join();
  auto second = holder(table, says, 0);  // nobody watched the first
  says.get<char>();
  auto refused = std::make_unique<Child>([&] {
    CHECK_THROWS(std::system_error, "the mutex of a slot", table.hold(0));
    says.put('r');
  });
  CHECK_EQUAL(says.get<char>(), 'r');
  CHECK_EQUAL(refused->join(), 0);
}

TEST(a_table_goes_while_its_processes_live) {
  Pipe says;
  auto table = std::make_unique<Table>(2);
  auto child = holder(*table, says, 0);
  table->watch(0);
  table->watch(1);  // which nobody ever holds
  says.get<char>();
  table.reset();
  child->kill(0);
}

TEST(signals_are_left_to_other_threads) {
  Table table(1);
  Child child([&] {
    table.hold(0);
    sigset_t blocked;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    CHECK(!sigismember(&blocked, SIGTERM));
  });
  CHECK_EQUAL(child.join(), 0);
}

TEST(a_slot_that_is_not_there_is_refused) {
  Table table(1);
  CHECK_THROWS(std::out_of_range, "slot 1 of 1", table.hold(1));
  CHECK_THROWS(std::out_of_range, "slot 1 of 1", table.watch(1));
}

}  // namespace

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

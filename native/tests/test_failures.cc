// Waits that do not end well, in one process: deadlines, aborts, cancelled transfers, lost peers.
#include <sys/resource.h>
#include <sys/socket.h>

#include <cstdint>

#include "cluster.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

TEST_BOTH(a_deadline_names_what_is_awaited) {
  Cluster pair(2, kind);
  int a = 0, b = 0;
  const std::vector<Transfer> two{pair.at(0).recv(1, 0x2a, &a, 4), pair.at(0).recv(1, 0x2b, &b, 4)};
  CHECK_THROWS(DeadlineExceeded, "recv from rank 1, tag 0x2a, 4 bytes; recv from rank 1, tag 0x2b",
               pair.at(0).wait(two, Deadline::after(0.02)));
  // Both were taken back: the next message finds a new receive, not an old one.
  int value = 3;
  pair.at(1).wait(pair.at(1).send(0, 0x2a, &value, 4), plenty());
  int c = 0;
  pair.at(0).wait(pair.at(0).recv(1, 0x2a, &c, 4), plenty());
  CHECK_EQUAL(c, 3);
  CHECK_EQUAL(a, 0);
}

// The buffers of a wait that threw are free: they are gone here while the rest of the message is still to be sent.
TEST_BOTH(a_cancelled_send_does_not_need_its_buffer) {
  EndpointOptions base;
  base.pool_soft_bytes = 1 << 16;
  Cluster pair(2, kind, base);
  constexpr std::size_t kBytes = std::size_t{48} << 20;
  int first = 1, last = 2, got = 0;
  pair.at(0).wait(pair.at(0).send(1, 1, &first, 4), plenty());
  {
    const std::vector<std::uint8_t> filler(1 << 17, 1);
    pair.at(0).wait(pair.at(0).send(1, 2, filler.data(), filler.size()), Deadline::after(10));
    std::vector<std::uint8_t> gone(kBytes, 0x5a);
    CHECK_THROWS(DeadlineExceeded, "send to rank 1",
                 pair.at(0).wait(pair.at(0).send(1, 3, gone.data(), gone.size()), Deadline::after(0.05)));
    std::fill(gone.begin(), gone.end(), 0);
  }
  const Transfer end = pair.at(0).send(1, 4, &last, 4);
  pair.at(1).wait(pair.at(1).recv(0, 1, &got, 4), plenty());
  CHECK_EQUAL(got, 1);
  std::vector<std::uint8_t> whole(kBytes);
  pair.at(1).wait(pair.at(1).recv(0, 4, &got, 4), plenty());  // the stream kept its step
  CHECK_EQUAL(got, 2);
  pair.at(0).wait(end, plenty());
}

TEST_BOTH(a_cancelled_receive_is_not_written_to) {
  Cluster pair(2, kind);
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  const std::vector<std::uint8_t> sent(kBytes, 7);
  for (int round = 0; round < 4; ++round) {
    std::vector<std::uint8_t> got(kBytes, 0);
    const std::vector<Transfer> receive{pair.at(1).recv(0, 1, got.data(), kBytes)};
    const Transfer send = pair.at(0).send(1, 1, sent.data(), kBytes);
    std::this_thread::sleep_for(std::chrono::microseconds(500 * round));
    pair.at(1).cancel(receive);
    const std::vector<std::uint8_t> then = got;
    if (round == 0) {
      // The message had a place, or comes unexpected now; either way the link goes on.
      pair.at(1).advance(pair.at(1).generation() + 1);
      pair.at(0).wait(send, plenty());
      pair.at(0).advance(pair.at(1).generation());
    } else {
      pair.at(0).wait(send, plenty());
      pair.at(0).advance(pair.at(0).generation() + 1);
      pair.at(1).advance(pair.at(0).generation());
    }
    CHECK(got == then);
  }
  int value = 5, got = 0;
  pair.at(0).wait(pair.at(0).send(1, 9, &value, 4), plenty());
  pair.at(1).wait(pair.at(1).recv(0, 9, &got, 4), plenty());
  CHECK_EQUAL(got, 5);
}

TEST_BOTH(abort_wakes_waiters_until_the_next_generation) {
  Cluster pair(2, kind);
  int value = 4, got = 0;
  in_threads(2, [&](int thread) {
    if (thread == 0) {
      CHECK_THROWS(Aborted, "rank 0: aborted: rank 3 is suspected",
                   pair.at(0).wait(pair.at(0).recv(1, 1, &got, 4), plenty()));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      pair.at(0).abort("rank 3 is suspected");
    }
  });
  CHECK_THROWS(Aborted, "suspected", pair.at(0).wait(pair.at(0).send(1, 1, &value, 4), plenty()));
  pair.at(0).advance(1);
  pair.at(1).advance(1);
  pair.at(1).wait(pair.at(1).send(0, 1, &value, 4), plenty());
  pair.at(0).wait(pair.at(0).recv(1, 1, &got, 4), plenty());
  CHECK_EQUAL(got, 4);
}

TEST_BOTH(an_abort_spreads_over_ranks_without_a_link_to_the_first) {
  // A chain 0-1-2-3: only rank 0 notices, all leave, and everybody hears whom it suspects.
  Cluster four(4, kind);
  const std::vector<std::pair<int, int>> unlinked = {{0, 2}, {0, 3}, {1, 3}};
  for (const auto& [a, b] : unlinked) four.at(a).disconnect(b);
  int never = 0;
  in_threads(4, [&](int rank) {
    Endpoint& mine = four.at(rank);
    if (rank == 0) return mine.broadcast_abort(7);
    try {
      mine.wait(mine.recv(rank - 1, 1, &never, 4), plenty());
      CHECK(false);
    } catch (const Aborted& aborted) {
      CHECK(aborted.suspect() == 7);
    }
  });
  for (int rank = 0; rank < 4; ++rank) CHECK_THROWS(Aborted, "rank 7 is suspected", four.at(rank).check({}));
}

TEST_BOTH(an_abort_of_a_newer_generation_waits_for_it_and_an_older_one_is_over) {
  Cluster pair(2, kind);
  int value = 3, got = 0;
  pair.at(0).advance(2);
  pair.at(0).broadcast_abort(std::nullopt);
  // Messages keep their order with the abort frame before them: when this one is there, the abort was heard.
  pair.at(0).advance(3);
  pair.at(0).wait(pair.at(0).send(1, 1, &value, 4, 1), plenty());
  pair.at(1).advance(1);
  pair.at(1).wait(pair.at(1).recv(0, 1, &got, 4), plenty());
  pair.at(1).check({});
  CHECK_EQUAL(got, 3);
  pair.at(1).advance(2);
  CHECK_THROWS(Aborted, "nobody is suspected", pair.at(1).check({}));
  pair.at(1).advance(3);
  pair.at(1).check({});
}

TEST_BOTH(a_closed_peer_is_lost_after_its_last_message) {
  Cluster three(3, kind);
  int value = 6, got = 0, never = 0;
  three.at(1).advance(2);
  const Transfer pending = three.at(1).recv(0, 2, &never, 4);
  three.at(0).advance(2);
  three.at(0).wait(three.at(0).send(1, 1, &value, 4), plenty());
  three.at(0).close();
  try {
    three.at(1).wait(pending, plenty());
    CHECK(false);
  } catch (const PeerLost& lost) {
    CHECK_EQUAL(lost.rank(), 0);
    CHECK_EQUAL(lost.epoch(), 2u);
    CHECK(std::string(lost.what()).find("it closed its endpoint") != std::string::npos);
  }
  three.at(1).wait(three.at(1).recv(0, 1, &got, 4), plenty());  // it was sent before the end
  CHECK_EQUAL(got, 6);
  CHECK_THROWS(PeerLost, "rank 0 is lost", three.at(1).wait(three.at(1).recv(0, 3, &got, 4), plenty()));
  CHECK_THROWS(PeerLost, "rank 0 is lost", three.at(1).wait(three.at(1).send(0, 3, &value, 4), plenty()));
  CHECK(three.at(1).lost_peers() == std::vector<int>{0});
  CHECK(three.at(1).peers() == std::vector<int>{2});
  // The other link is not concerned.
  three.at(2).advance(2);
  three.at(2).wait(three.at(2).send(1, 1, &value, 4), plenty());
  three.at(1).wait(three.at(1).recv(2, 1, &got, 4), plenty());
}

// Rank 2's part of the operation came, then it went. Rank 1 is still to come.
TEST_BOTH(a_member_that_closed_in_order_does_not_end_an_operation) {
  Cluster three(3, kind);
  int value = 6, got[2] = {0, 0};
  const std::vector<int> members{0, 1, 2};
  const std::vector<Transfer> parts{three.at(0).recv(1, 1, &got[0], 4), three.at(0).recv(2, 1, &got[1], 4)};
  three.at(2).wait(three.at(2).send(0, 1, &value, 4), plenty());
  three.at(2).close();
  in_threads(2, [&](int thread) {
    if (thread == 0) {
      three.at(0).wait(parts, plenty(), members);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      three.at(1).wait(three.at(1).send(0, 1, &value, 4), plenty());
    }
  });
  CHECK_EQUAL(got[0] + got[1], 12);
}

// As of one that was to be linked when its host died.
TEST(to_end_a_link_that_never_was_is_no_failure) {
  Cluster pair(2, LinkKind::kTcp);
  pair.at(0).disconnect(7);
  CHECK_EQUAL(pair.at(0).peers().size(), std::size_t{1});
}

TEST_BOTH(a_link_that_was_ended_can_be_opened_anew) {
  Cluster pair(2, kind);
  int value = 8, got = 0;
  pair.at(0).disconnect(1);
  CHECK_THROWS(PeerLost, "ended here", pair.at(0).wait(pair.at(0).recv(1, 1, &got, 4), plenty()));
  CHECK_THROWS(PeerLost, "rank 0 is lost", pair.at(1).wait(pair.at(1).recv(0, 1, &got, 4), plenty()));
  pair.connect();
  pair.at(0).wait(pair.at(0).send(1, 1, &value, 4), plenty());
  pair.at(1).wait(pair.at(1).recv(0, 1, &got, 4), plenty());
  CHECK_EQUAL(got, 8);
}

namespace {

// Ends every connection of this process, as a network that fails would: nobody says goodbye.
void tear_all_connections() {
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  for (int fd = 3; fd < static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1024)); ++fd) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0) ::shutdown(fd, SHUT_RDWR);
  }
}

template <typename Condition>
void await(const Condition& condition) {
  const Deadline deadline = plenty();
  while (!condition()) {
    CHECK(!deadline.expired());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

TEST_BOTH(broken_links_are_opened_again_in_the_background) {
  Cluster four(4, kind);
  four.at(1).disconnect(0);  // on purpose: not to be mended
  four.at(3).close();        // said goodbye
  await([&] { return four.at(0).lost_peers() == std::vector<int>{1, 3}; });
  tear_all_connections();
  await([&] { return four.at(0).peers().empty() && four.at(1).peers().empty() && four.at(2).peers().empty(); });
  for (int turn = 0; turn < 3; ++turn) {
    for (int rank = 0; rank < 3; ++rank) four.at(rank).mend(plenty());
  }
  await([&] { return four.at(0).peers() == std::vector<int>{2} && four.at(1).peers() == std::vector<int>{2}; });
  await([&] { return four.at(2).peers() == std::vector<int>{0, 1}; });
  for (int rank = 0; rank < 3; ++rank) four.at(rank).advance(1);
  int value = 9, got = 0;
  four.at(0).wait(four.at(0).send(2, 1, &value, 4), plenty());
  four.at(2).wait(four.at(2).recv(0, 1, &got, 4), plenty());
  CHECK_EQUAL(got, 9);
  CHECK(four.at(1).link_kind(0) == LinkKind::kNone);
}

// As of a rank without which others have gone on, and that they take back.
TEST_BOTH(a_link_that_the_other_end_ended_is_opened_again_when_both_ask) {
  Cluster pair(2, kind);
  for (const int leaver : {0, 1}) {
    const int left = 1 - leaver;
    pair.at(leaver).disconnect(left);
    await([&] { return pair.at(left).peers().empty(); });
    std::map<int, PeerAddress> gone = {{left, {"127.0.0.1", pair.at(left).port(), "host"}}};
    std::thread back([&] { pair.at(leaver).connect(gone, plenty()); });
    for (int turn = 0; turn < 3; ++turn) pair.at(left).mend(plenty());
    back.join();
    await([&] { return pair.at(left).peers().size() == 1; });
  }
  int value = 9, got = 0;
  pair.at(0).wait(pair.at(0).send(1, 1, &value, 4), plenty());
  pair.at(1).wait(pair.at(1).recv(0, 1, &got, 4), plenty());
  CHECK_EQUAL(got, 9);
}

// The link that one of them opens is why the peer refuses the other, who must not wait for its end.
TEST_BOTH(a_link_that_is_mended_while_it_is_asked_for_is_dialed_by_one) {
  for (int turn = 0; turn < 20; ++turn) {
    Cluster pair(2, kind);  // nobody mends the links of the last turn
    const std::map<int, PeerAddress> peer = {{0, {"127.0.0.1", pair.at(0).port(), "host"}}};
    tear_all_connections();
    await([&] { return pair.at(0).peers().empty() && pair.at(1).peers().empty(); });
    pair.at(1).mend(plenty());
    pair.at(1).connect(peer, plenty());
    await([&] { return pair.at(0).peers().size() == 1; });
    for (const int from : {0, 1}) {  // both ends have the same one
      int value = turn, got = -1;
      pair.at(from).wait(pair.at(from).send(1 - from, 1, &value, 4), plenty());
      pair.at(1 - from).wait(pair.at(1 - from).recv(from, 1, &got, 4), plenty());
      CHECK_EQUAL(got, turn);
    }
  }
}

// Nobody listens there any more: closing does not wait for the deadline.
TEST_BOTH(a_link_to_nobody_is_dialed_until_the_end) {
  Cluster pair(2, kind);
  tear_all_connections();
  await([&] { return pair.at(0).peers().empty() && pair.at(1).peers().empty(); });
  pair.at(0).close();
  pair.at(1).mend(plenty());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto began = Deadline::Clock::now();
  pair.at(1).close();
  CHECK(Deadline::Clock::now() - began < std::chrono::seconds(20));
}

TEST_BOTH(pending_transfers_are_bounded) {
  EndpointOptions base;
  base.pending_limit = 10;
  Cluster pair(2, kind, base);
  std::vector<int> got(11);
  std::vector<Transfer> receives;
  for (std::size_t i = 0; i < 10; ++i) receives.push_back(pair.at(0).recv(1, i, &got[i], 4));
  CHECK_THROWS(CommError, "more than 10 receives from rank 1 are pending", pair.at(0).recv(1, 10, &got[10], 4));
  pair.at(0).cancel(receives);
}

int main(int argc, char** argv) { return run(argc, argv); }

// Endpoints that are cut off for a while: nothing comes through meanwhile, and all of it afterwards.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "cluster.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

EndpointOptions may_be_cut() {
  EndpointOptions options;
  options.silence_timeout_s = 0.8;
  options.may_be_cut = true;
  return options;
}

// Sends `bytes` from one rank to the other while rank 1 is cut off; the seconds until they are there.
double through_a_cut(Cluster& pair, int source, double cut_s, std::size_t bytes) {
  const std::vector<std::uint8_t> sent(bytes, 7);
  std::vector<std::uint8_t> got(bytes);
  const double begun = now_s();
  pair.at(1).cut(cut_s);
  CHECK(pair.at(1).is_cut());
  const Transfer receive = pair.at(1 - source).recv(source, 1, got.data(), bytes);
  const Transfer send = pair.at(source).send(1 - source, 1, sent.data(), bytes);
  pair.at(1 - source).wait(receive, plenty());
  const double seconds = now_s() - begun;
  pair.at(source).wait(send, plenty());
  CHECK(got == sent);
  CHECK(!pair.at(1).is_cut());
  return seconds;
}

}  // namespace

TEST_BOTH(nothing_reaches_who_is_cut_off) {
  Cluster pair(2, kind, may_be_cut());
  CHECK(through_a_cut(pair, 0, 0.3, 100) >= 0.3);
  CHECK(through_a_cut(pair, 0, 0.3, std::size_t{16} << 20) >= 0.3);
}

TEST_BOTH(nothing_comes_from_who_is_cut_off) {
  Cluster pair(2, kind, may_be_cut());
  CHECK(through_a_cut(pair, 1, 0.3, 100) >= 0.3);
  CHECK(through_a_cut(pair, 1, 0.3, std::size_t{16} << 20) >= 0.3);
}

TEST_BOTH(a_cut_breaks_no_link_and_others_go_on) {
  Cluster three(3, kind, may_be_cut());
  three.at(1).cut(1.0);  // longer than who is silent may be
  std::uint32_t sent = 5, got = 0;
  const Transfer receive = three.at(2).recv(0, 1, &got, sizeof got);
  three.at(0).send(2, 1, &sent, sizeof sent);
  three.at(2).wait(receive, plenty());
  CHECK(got == 5 && three.at(1).is_cut());
  while (three.at(1).is_cut()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  for (int rank = 0; rank < 3; ++rank) CHECK(three.at(rank).peers().size() == 2);
}

TEST_BOTH(who_dials_is_let_in_after_the_cut) {
  Cluster pair(2, kind, may_be_cut());
  pair.at(0).cut(0.3);
  EndpointOptions options = may_be_cut();
  options.rank = 2;
  options.token = "the job's token";
  options.host_id = "host";
  options.allow_shm = kind == LinkKind::kSharedMemory;
  Endpoint joiner(options);
  const double begun = now_s();
  joiner.connect({{0, {"127.0.0.1", pair.at(0).port(), "host"}}}, plenty());
  CHECK(now_s() - begun >= 0.25);
}

TEST(who_was_not_made_for_it_is_not_cut) {
  Cluster pair(2, LinkKind::kTcp);
  CHECK_THROWS(CommError, "was not made to be cut off", pair.at(0).cut(1.0));
  CHECK(!pair.at(0).is_cut());
  Cluster other(2, LinkKind::kTcp, may_be_cut());
  for (const double seconds : {0.0, -1.0, 1e10, std::nan("")}) {
    CHECK_THROWS(CommError, "a cut of ", other.at(0).cut(seconds));
  }
}

int main(int argc, char** argv) { return run(argc, argv); }

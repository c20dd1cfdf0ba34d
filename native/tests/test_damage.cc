// What a peer says or writes that no end of ours would: it ends its own link, and costs no more than that.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <limits>

#include "cluster.h"
#include "comm/frame.h"
#include "comm/link.h"
#include "comm/shared_file.h"
#include "comm/shm_channel.h"
#include "wire.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

// A length beyond all memory is asked for below. Visible, or the sanitizers would not find it.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}

namespace {

constexpr LinkLimits kLimits{
    .pool_soft_bytes = std::size_t{1} << 16, .pool_hard_bytes = std::size_t{1} << 18, .pending_limit = 100};

// A link of rank 0 to rank 1, whose words are ours.
struct Heard {
  Wire wire;
  Link link;

  Heard(Signal& signal, PendingAbort& aborts, LinkLimits limits = kLimits)
      : link(0, 1, make_tcp_channel(std::move(wire.ours), std::chrono::milliseconds(10'000)), limits, signal, aborts) {}
  void hear(const FrameHeader& header) {
    wire.say(&header, sizeof header);
    while (link.progress(1 << 20) == Link::Progress::kMoved) continue;
  }
  std::string end() const { return link.lost() ? link.lost()->message : "no end"; }
};

FrameHeader frame(FrameKind kind, std::uint32_t generation = 0, std::uint64_t tag = 0, std::uint64_t length = 0) {
  FrameHeader header;
  header.kind = kind;
  header.generation = generation;
  header.tag = tag;
  header.length = length;
  return header;
}

FrameHeader piece(std::uint32_t number, std::uint64_t length, std::uint64_t total) {
  FrameHeader header = frame(FrameKind::kPiece, 0, 0, length);
  header.piece = number;
  header.total = total;
  return header;
}

std::string end_by(const FrameHeader& header, LinkLimits limits = kLimits) {
  Signal signal;
  PendingAbort aborts;
  Heard heard(signal, aborts, limits);
  heard.hear(header);
  CHECK(!aborts.newest());
  return heard.end();
}

void check_names(const std::string& message, const std::string& part) {
  if (message.find(part) == std::string::npos) fail(__FILE__, __LINE__, "the message lacks '" + part + "': " + message);
}

// A link of rank 0 in shared memory, whose peer scribbles.
struct Scribbled {
  Signal signal;
  PendingAbort aborts;
  Wire wire;
  Fd segment = make_segment(4096);
  Mapping mapping{segment, sealed_bytes(segment), true};
  Link link{0, 1, make_shm_channel(segment, std::move(wire.ours), true), kLimits, signal, aborts};

  // The head or tail of the ring that rank 0 writes (0) or reads (1).
  void set(std::size_t ring, std::size_t at, std::uint64_t value) {
    std::memcpy(mapping.at(ring * (4096 + 4096) + at), &value, sizeof value);
  }
  // As the IO thread does until it sleeps or lets go.
  void run() {
    for (int turns = 0; turns < 100 && !link.lost(); ++turns) {
      if (link.progress(1 << 20) == Link::Progress::kIdle && link.arm()) return;
    }
  }
};
constexpr std::size_t kTailAt = 0, kHeadAt = 64;

}  // namespace

TEST(a_frame_that_no_end_writes_ends_its_link) {
  FrameHeader header = frame(FrameKind::kMessage);
  header.magic ^= 1;
  check_names(end_by(header),
              "rank 0: the link to rank 1 failed: the stream is out of step (a frame with a wrong magic");
  header = frame(FrameKind::kMessage);
  header.reserved = 1;
  check_names(end_by(header), "what is reserved");
  header = frame(FrameKind::kMessage);
  header.piece = 1;
  check_names(end_by(header), "what is a piece's to say");
  check_names(end_by(frame(static_cast<FrameKind>(6))), "a frame of an unknown kind");
  check_names(end_by(frame(FrameKind::kGoodbye, 0, 0, 1)), "a goodbye with a payload");
  check_names(end_by(frame(FrameKind::kAbort, 0, 0, 1)), "an abort with a payload");
  check_names(end_by(frame(FrameKind::kAbort, 0, std::uint64_t{1} << 32)), "an abort that accuses what is no rank");
  check_names(end_by(frame(FrameKind::kTaken, 0, 0, 1)), "an acknowledgement with a payload");
  check_names(end_by(frame(FrameKind::kTaken, 0, 1)), "an acknowledgement of what was not sent");
}

TEST(a_piece_that_no_end_writes_ends_its_link) {
  check_names(end_by(piece(0, kPieceBytes + 1, kPieceBytes + 1)), "a piece that is too long");
  check_names(end_by(piece(0, 20, 10)), "a piece that is too long");
  check_names(end_by(piece(0, 0, 10)), "a piece of nothing");
  check_names(end_by(piece(1, 10, 20)), "a piece that is not the next one");
  check_names(end_by(piece(0, 0, 0)), "no end");
}

// Whatever is announced and never received: no more than the bound lies here.
TEST(pieces_without_a_receive_are_bounded) {
  Signal signal;
  PendingAbort aborts;
  Heard heard(signal, aborts);
  std::size_t weight = 0;
  for (; !heard.link.lost(); weight += held_bytes(0)) heard.hear(piece(0, 0, 0));
  check_names(heard.end(), "more pieces than there is room for");
  CHECK(weight <= kMostAhead + held_bytes(0));
}

TEST(a_length_beyond_all_memory_ends_its_link) {
  constexpr std::uint64_t kLength = std::uint64_t{1} << 60;
  check_names(end_by(frame(FrameKind::kMessage, 0, 0, kLength)), "hard bound");
  LinkLimits generous = kLimits;
  generous.pool_hard_bytes = std::numeric_limits<std::size_t>::max() / 2;
  check_names(end_by(frame(FrameKind::kMessage, 0, 0, kLength), generous), "no memory for a message of");
}

TEST(messages_without_bytes_fill_the_pool_too) {
  Signal signal;
  PendingAbort aborts;
  Heard heard(signal, aborts);
  heard.link.on_event(true);  // so that it is read beyond the soft bound
  for (std::uint64_t tag = 0; tag < 100'000 && !heard.link.lost(); ++tag)
    heard.hear(frame(FrameKind::kMessage, 0, tag));
  check_names(heard.end(), "hard bound");
}

TEST(an_abort_of_a_far_generation_hides_none_of_another_link) {
  Signal signal;
  PendingAbort aborts;
  Heard far(signal, aborts), near(signal, aborts);
  for (Heard* heard : {&far, &near}) heard->link.advance(4);
  far.hear(frame(FrameKind::kAbort, 4'000'000'000, 3));
  CHECK(!aborts.newest());
  near.hear(frame(FrameKind::kAbort, 4, 8));
  CHECK(aborts.newest()->generation == 4 && aborts.newest()->suspect == 7);
  far.link.advance(4'000'000'000);
  CHECK(aborts.newest()->generation == 4'000'000'000 && aborts.newest()->suspect == 2);
}

TEST(a_corrupt_ring_ends_its_link) {
  Scribbled reading;
  reading.set(1, kTailAt, 4097);
  reading.run();
  CHECK(reading.link.lost());
  check_names(reading.link.lost()->message, "its shared ring is corrupt");
  // The writing side finds it, before a post or while it waits for room; nothing is there to be read.
  for (const bool waits : {false, true}) {
    Scribbled writing;
    const std::vector<std::byte> data(waits ? 8192 : 16);
    auto send = std::make_shared<Request>();
    send->kind = Request::Kind::kSend;
    send->data = const_cast<std::byte*>(data.data());
    send->bytes = data.size();
    if (!waits) writing.set(0, kHeadAt, 1);
    CHECK(writing.link.post_send(send));
    if (waits) writing.set(0, kHeadAt, 5000);
    writing.run();
    CHECK(writing.link.lost());
    check_names(writing.link.lost()->message, "its shared ring is corrupt");
    CHECK(send->state.load() == Request::State::kFailed);
  }
}

TEST(files_that_nobody_asked_for_are_closed) {
  Wire wire;
  const Fd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int two[] = {file.get(), file.get()};
  char byte = 'F';
  iovec part{&byte, 1};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof two)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof two);
  std::memcpy(CMSG_DATA(head), two, sizeof two);
  CHECK(::sendmsg(wire.theirs.get(), &message, MSG_NOSIGNAL) == 1);
  const int lowest_free = Fd(::dup(file.get())).get();
  CHECK_THROWS(CommError, "has 2 files", recv_file(wire.ours, plenty()));
  CHECK_EQUAL(Fd(::dup(file.get())).get(), lowest_free);
}

int main(int argc, char** argv) { return run(argc, argv); }

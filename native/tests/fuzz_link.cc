// What a peer writes on a link that stands: frames on a socket, and the ring that both map. Its owner does meanwhile
// what owners do: posts, cancels, aborts, goes on to the next generation. However the stream is damaged, the link ends
// with it, every transfer with the link, and nothing else.
#include <array>
#include <cstring>
#include <limits>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "cluster.h"
#include "comm/frame.h"
#include "comm/handshake.h"
#include "comm/link.h"
#include "comm/shared_file.h"
#include "comm/shm_channel.h"
#include "fuzz.h"
#include "wire.h"

namespace elaswave::tests {
namespace {

using namespace elaswave::comm;

constexpr std::uint32_t kGeneration = 1;
constexpr std::size_t kTurns = 100'000;  // far more than any input takes
constexpr LinkLimits kLimits{.pool_soft_bytes = 8192, .pool_hard_bytes = std::size_t{1} << 20, .pending_limit = 1000};
const std::vector<std::size_t> kSizes{0, 16, 300, 5000};

// ---- frames -----------------------------------------------------------------------------------------------------

void append_frame(Bytes& bytes, FrameKind kind, std::uint32_t generation, std::uint64_t tag, std::size_t length,
                  std::uint32_t piece = 0, std::size_t total = 0) {
  FrameHeader header;
  header.piece = piece;
  header.total = total;
  header.kind = kind;
  header.generation = generation;
  header.tag = tag;
  header.length = length;
  append(bytes, header);
  for (std::size_t i = 0; i < length; ++i) bytes.push_back(static_cast<std::uint8_t>(i));
}

std::vector<Bytes> streams() {
  std::vector<Bytes> all(5);
  for (std::uint64_t tag = 0; tag < 4; ++tag) append_frame(all[0], FrameKind::kMessage, kGeneration, tag, kSizes[tag]);
  for (std::uint32_t generation = 0; generation < 4; ++generation) {
    append_frame(all[1], FrameKind::kMessage, generation, 1, 16);
  }
  append_frame(all[2], FrameKind::kMessage, kGeneration, 2, 300);
  append_frame(all[2], FrameKind::kAbort, kGeneration, 3, 0);
  append_frame(all[2], FrameKind::kAbort, kGeneration + 1, 0, 0);
  append_frame(all[2], FrameKind::kMessage, kGeneration + 1, 1, 16);
  append_frame(all[3], FrameKind::kMessage, kGeneration, 9, 20);
  append_frame(all[3], FrameKind::kGoodbye, 0, 0, 0);
  // Overtaken, taken back, and one that nobody asked for.
  append_frame(all[4], FrameKind::kPiece, kGeneration, 2, 200, 0, 300);
  append_frame(all[4], FrameKind::kMessage, kGeneration, 1, 16);
  append_frame(all[4], FrameKind::kPiece, kGeneration, 2, 100, 1, 300);
  append_frame(all[4], FrameKind::kTaken, 0, 0, 0);
  append_frame(all[4], FrameKind::kPiece, kGeneration, 9, 100, 0, 5000);
  append_frame(all[4], FrameKind::kPiece, kGeneration, 0, 0, 0, 0);
  return all;
}

// A link and its owner.
class Owner {
 public:
  Owner(std::unique_ptr<Channel> channel, Draw& draw)
      : draw_(draw), link_(0, 1, std::move(channel), kLimits, signal_, aborts_) {
    link_.advance(generation_);
    for (std::uint64_t tag = 0; tag < 3; ++tag) post(Request::Kind::kRecv, tag, kSizes[tag], generation_);
  }

  void act() {
    switch (draw_.below(11)) {
      case 0:
        post(Request::Kind::kRecv, draw_.below(4), draw_.of(kSizes), generation_ + draw_.coin());
        break;
      case 1:
        post(Request::Kind::kSend, draw_.below(4), draw_.of(kSizes), generation_);
        break;
      case 2:
        link_.cancel(requests_[draw_.below(requests_.size())], reason_);
        break;
      case 3:
        link_.abort(reason_);
        break;
      case 4:
        link_.advance(generation_ += static_cast<std::uint32_t>(draw_.below(2)));
        break;
      case 5:
        link_.post_abort({generation_, static_cast<int>(draw_.below(8))});
        break;
      case 6:
        post(Request::Kind::kSend, draw_.below(4), draw_.of(kSizes), generation_, Lane::kBulk);
        break;
      case 7:
        link_.enter();
        link_.try_progress(4096);
        link_.leave();
        break;
      default:
        break;
    }
  }

  // As the IO thread does until it would sleep.
  void turn() {
    const std::size_t budget = draw_.coin() ? 64 : std::size_t{1} << 20;
    for (std::size_t turns = 0; link_.progress(budget) == Link::Progress::kMoved || !link_.arm(); ++turns) {
      if (link_.lost()) return;
      if (turns == kTurns) throw std::logic_error("the link never comes to rest");
    }
  }

  // The peer has gone. True if that is why the link ended, and not what it had said.
  bool end() {
    link_.on_event(true);
    turn();
    const FailurePtr lost = link_.lost();
    if (!lost) throw std::logic_error("the peer went, the link stays");
    for (const RequestPtr& request : requests_) {
      if (request->state.load() == Request::State::kPending) throw std::logic_error(request->describe() + " waits");
    }
    return lost->kind == Failure::Kind::kLost && lost->message.find("corrupt") == std::string::npos;
  }

 private:
  void post(Request::Kind kind, std::uint64_t tag, std::size_t bytes, std::uint32_t generation,
            Lane lane = Lane::kStep) {
    auto request = std::make_shared<Request>();
    request->kind = kind;
    request->peer = 1;
    request->tag = tag;
    request->generation = generation;
    // Of exactly this size, so that the sanitizer sees a byte too many.
    request->data = buffers_.emplace_back(new std::byte[bytes]()).get();
    request->bytes = bytes;
    request->lane = lane;
    requests_.push_back(request);
    kind == Request::Kind::kRecv ? link_.post_recv(request) : link_.post_send(request);
  }

  Draw& draw_;
  Signal signal_;
  PendingAbort aborts_;
  std::list<std::unique_ptr<std::byte[]>> buffers_;
  std::vector<RequestPtr> requests_;
  std::uint32_t generation_ = kGeneration;
  const FailurePtr reason_ = std::make_shared<const Failure>();
  Link link_;
};

bool read_frames(const Bytes& input, Draw& draw) {
  Wire wire;
  Owner owner(make_tcp_channel(std::move(wire.ours), std::chrono::milliseconds(10'000)), draw);
  for (std::size_t said = 0; said < input.size();) {
    const std::size_t piece = 1 + draw.below(input.size() - said);
    wire.say(input.data() + said, piece);
    said += piece;
    owner.turn();
    owner.act();
  }
  wire.end();
  return owner.end();
}

// ---- the ring ---------------------------------------------------------------------------------------------------

constexpr std::size_t kRing = 4096, kRingHeader = 4096;
// Where the words of a ring's header lie; see RingHeader in comm/shm_channel.cc.
constexpr std::array<std::size_t, 4> kWordsAt{0, 64, 128, 192};
constexpr std::size_t kWordBytes = 2 * kWordsAt.size() * sizeof(std::uint64_t);

// Calls `visit(word in the segment)` for all words of both headers in turn.
template <typename Visit>
void for_each_word(const Mapping& segment, const Visit& visit) {
  for (const std::size_t ring : {std::size_t{0}, kRingHeader + kRing}) {
    for (const std::size_t at : kWordsAt) visit(segment.at(ring + at));
  }
}

// The words of both headers, then the bytes of the ring that we read.
Bytes ring_with(const Bytes& stream) {
  const Fd segment = make_segment(kRing);
  const Mapping mapping(segment, sealed_bytes(segment), false);
  Wire wire;
  const auto writer = make_shm_channel(segment, std::move(wire.theirs), true);
  const iovec part{const_cast<std::uint8_t*>(stream.data()), stream.size()};
  const bool whole = writer->write(&part, 1) == static_cast<std::ptrdiff_t>(std::min(stream.size(), kRing));
  CHECK(whole);
  Bytes bytes;
  for_each_word(mapping, [&](const std::byte* word) {
    std::uint64_t value;
    std::memcpy(&value, word, sizeof value);
    append(bytes, value);
  });
  bytes.insert(bytes.end(), stream.begin(),
               stream.begin() + static_cast<std::ptrdiff_t>(std::min(stream.size(), kRing)));
  return bytes;
}

void scribble(const Mapping& segment, const Bytes& input) {
  std::size_t from = 0;
  for_each_word(segment, [&](std::byte* word) {
    if (from + sizeof(std::uint64_t) <= input.size()) std::memcpy(word, input.data() + from, sizeof(std::uint64_t));
    from += sizeof(std::uint64_t);
  });
  if (input.size() <= kWordBytes) return;
  std::memcpy(segment.at(kRingHeader), input.data() + kWordBytes, std::min(kRing, input.size() - kWordBytes));
}

bool read_ring(const Bytes& input, Draw& draw) {
  const Fd segment = make_segment(kRing);
  const Mapping peers(segment, sealed_bytes(segment), true);
  Wire wire;
  Owner owner(make_shm_channel(segment, std::move(wire.ours), false), draw);
  for (std::size_t times = 1 + draw.below(3); times > 0; --times) {
    scribble(peers, input);
    owner.turn();
    owner.act();
  }
  wire.end();
  return owner.end();
}

// ---- an endpoint ------------------------------------------------------------------------------------------------

// Ranks 0 and 1 talk, whatever a third with the token writes on its link to 0.
class Talk {
 public:
  Talk() : pair_(2, LinkKind::kTcp, bounded()) { advance(); }

  bool goes_on(const Bytes& input, Draw&) {
    const std::unique_ptr<Channel> channel = link_of_the_third();
    const iovec part{const_cast<std::uint8_t*>(input.data()), input.size()};
    channel->write(&part, 1);
    channel->finish_writing();
    for (;;) {
      try {
        exchange();
        return true;
      } catch (const Aborted&) {
        advance();  // the input held a proper abort
      }
    }
  }

 private:
  static EndpointOptions bounded() {
    EndpointOptions options;
    options.pool_soft_bytes = kLimits.pool_soft_bytes;
    options.pool_hard_bytes = kLimits.pool_hard_bytes;
    return options;
  }

  // The former link may not have ended yet: then there is none to be had, and one tries again.
  std::unique_ptr<Channel> link_of_the_third() {
    const Identity third{2, "the job's token", sha256("host"), 4096, false, std::chrono::milliseconds(10'000)};
    for (;;) {
      std::string why;
      Fd socket = dial_tcp("127.0.0.1", pair_.at(0).port(), plenty(), why);
      CHECK(socket);
      if (Dialed dialed = dial_link(third, fresh_nonce(), 0, std::move(socket), plenty()); dialed.channel) {
        return std::move(dialed.channel);
      }
      std::this_thread::yield();
    }
  }

  void exchange() {
    const std::uint64_t sent = ++words_;
    std::uint64_t got = 0;
    const Transfer receive = pair_.at(0).recv(1, sent, &got, sizeof got);
    pair_.at(1).wait(pair_.at(1).send(0, sent, &sent, sizeof sent), plenty());
    pair_.at(0).wait(receive, plenty());
    CHECK_EQUAL(got, sent);
  }

  void advance() {
    ++generation_;
    for (int rank = 0; rank < 2; ++rank) pair_.at(rank).advance(generation_);
  }

  Cluster pair_;
  std::uint32_t generation_ = kGeneration - 1;
  std::uint64_t words_ = 0;
};

}  // namespace

std::vector<Parser> link_parsers() {
  std::vector<Bytes> rings;
  for (const Bytes& stream : streams()) rings.push_back(ring_with(stream));
  const auto talk = std::make_shared<std::unique_ptr<Talk>>();
  const auto goes_on = [talk](const Bytes& input, Draw& draw) {
    if (!*talk) *talk = std::make_unique<Talk>();
    return (*talk)->goes_on(input, draw);
  };
  return {
      {.name = "frames", .valid = streams(), .parse = read_frames},
      {.name = "ring", .valid = rings, .parse = read_ring},
      {.name = "endpoint", .valid = streams(), .parse = goes_on, .has_threads = true, .costs = 200},
  };
}

}  // namespace elaswave::tests

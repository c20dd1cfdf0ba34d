// Both ends of the handshake, with all that a peer says at hand before they begin: they never have to wait, and their
// deadline is over when they would. Half of the inputs are proved again after the damage, as by one who has the token.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "comm/handshake.h"
#include "comm/handshake_messages.h"
#include "comm/shm_channel.h"
#include "fuzz.h"
#include "wire.h"

namespace elaswave::tests {
namespace {

using namespace elaswave::comm;

constexpr int kAcceptor = 0, kLinked = 1, kDialer = 2;

Identity identity(int rank) {
  return {rank, "the job's token", sha256("host"), 4096, true, std::chrono::milliseconds(10'000)};
}

Digest nonce_of(int rank) { return sha256("nonce of rank " + std::to_string(rank)); }

Hello hello(std::uint32_t flags) {
  Hello made;
  made.from = kDialer;
  made.to = kAcceptor;
  made.flags = flags;
  made.host = identity(kDialer).host;
  made.nonce = nonce_of(kDialer);
  return made;
}

Challenge challenge() {
  Challenge made;
  made.rank = kAcceptor;
  made.flags = kAllowsShm;
  made.host = identity(kAcceptor).host;
  made.nonce = nonce_of(kAcceptor);
  return made;
}

void speak(const Wire& wire, const Bytes& input, Draw& draw) {
  wire.say(input.data(), input.size());
  if (draw.coin()) wire.end();
}

template <typename T>
T front(const Bytes& input) {
  T value;
  std::memcpy(&value, input.data(), sizeof value);
  return value;
}

// Puts the proof of `prover` behind the first message, which is a T.
template <typename T, typename Prover>
void prove_again(Bytes& input, Draw& draw, const Prover& prover) {
  if (input.size() < sizeof(T) + sizeof(Digest) || draw.coin()) return;
  const Digest proof = prover(front<T>(input));
  std::copy(proof.begin(), proof.end(), input.begin() + sizeof(T));
}

// ---- the acceptor -----------------------------------------------------------------------------------------------

Digest dialers_proof(const Hello& said) { return prove(identity(kDialer).token, "dial", said, challenge()); }

bool accept(Bytes input, Draw& draw) {
  prove_again<Hello>(input, draw, dialers_proof);
  Wire wire;
  speak(wire, input, draw);
  const auto linked = [](int rank) { return rank == kLinked; };
  try {
    return accept_link(identity(kAcceptor), nonce_of(kAcceptor), std::move(wire.ours), linked, Deadline::after(0))
               .channel != nullptr;
  } catch (const CommError&) {
    return false;
  }
}

// HELLO, PROOF, and for shared memory whether the dialer reached the socket and mapped the segment.
Bytes dialers_words(std::uint32_t flags, const std::string& letters) {
  Bytes bytes;
  append(bytes, hello(flags));
  append(bytes, dialers_proof(hello(flags)));
  bytes.insert(bytes.end(), letters.begin(), letters.end());
  return bytes;
}

// ---- the dialer -------------------------------------------------------------------------------------------------

Digest acceptors_proof(const Challenge& said) {
  return prove(identity(kAcceptor).token, "accept", hello(kAllowsShm), said);
}

bool dial(const Fd& unix_listener, Bytes input, Draw& draw) {
  prove_again<Challenge>(input, draw, acceptors_proof);
  Wire wire;
  speak(wire, input, draw);
  bool read = false;
  try {
    read =
        dial_link(identity(kDialer), nonce_of(kDialer), kAcceptor, std::move(wire.ours), Deadline::after(0)).channel !=
        nullptr;
  } catch (const CommError&) {
  }
  // Who came for a segment has waited for none.
  const Fd caller(::accept4(unix_listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return read;
}

// CHALLENGE, PROOF, VERDICT.
Bytes acceptors_words(const Verdict& verdict) {
  Bytes bytes;
  append(bytes, challenge());
  append(bytes, acceptors_proof(challenge()));
  append(bytes, verdict);
  return bytes;
}

Verdict offer(const std::string& unix_name) {
  Verdict verdict;
  verdict.shm = 1;
  std::memcpy(verdict.unix_name, unix_name.data(), std::min(unix_name.size(), sizeof verdict.unix_name));
  return verdict;
}

// ---- the segment ------------------------------------------------------------------------------------------------

enum class File : std::uint32_t { kSealed, kOpen, kReadOnly, kPipe, kEmpty };
constexpr std::uint32_t kFileKinds = 5;
constexpr std::uint64_t kLargestFile = std::uint64_t{1} << 40;

struct Passed {
  std::uint64_t bytes;
  std::uint32_t count;
  File kind;
};

Fd make_file(File kind, std::uint64_t bytes) {
  if (kind == File::kPipe) {
    int ends[2];
    CHECK(::pipe2(ends, O_CLOEXEC) == 0);
    ::close(ends[1]);
    return Fd(ends[0]);
  }
  Fd file(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(file);
  if (kind != File::kEmpty) CHECK(::ftruncate(file.get(), static_cast<off_t>(bytes % kLargestFile)) == 0);
  int seals = kind == File::kOpen ? 0 : F_SEAL_SHRINK | F_SEAL_GROW;
  if (kind == File::kReadOnly) seals |= F_SEAL_WRITE;
  CHECK(::fcntl(file.get(), F_ADD_SEALS, seals) == 0);
  return file;
}

// One byte, and beside it the same file so many times.
void pass(const Fd& socket, const Fd& file, std::size_t count) {
  char byte = 'F';
  iovec part{&byte, 1};
  alignas(cmsghdr) char space[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (count > 0) {
    message.msg_control = space;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(count * sizeof(int));
    for (std::size_t i = 0; i < count; ++i) {
      const int fd = file.get();
      std::memcpy(CMSG_DATA(head) + i * sizeof fd, &fd, sizeof fd);
    }
  }
  CHECK(::sendmsg(socket.get(), &message, MSG_NOSIGNAL) == 1);
}

bool take_segment(const Bytes& input, Draw& draw) {
  Wire wire;
  if (input.size() >= sizeof(Passed)) {
    const auto said = front<Passed>(input);
    const Fd file = make_file(static_cast<File>(static_cast<std::uint32_t>(said.kind) % kFileKinds), said.bytes);
    pass(wire.theirs, file, said.count % 5);
  } else {
    wire.say(input.data(), input.size());
  }
  if (draw.coin()) wire.theirs = Fd();
  try {
    const Fd segment = recv_file(wire.ours, Deadline::after(0));
    const auto channel = make_shm_channel(segment, std::move(wire.ours), false);
    char bytes[100] = {};
    const iovec part{bytes, sizeof bytes};
    CHECK(channel->read(bytes, sizeof bytes) == 0);
    CHECK(channel->write(&part, 1) == sizeof bytes);
    return true;
  } catch (const CommError&) {
    return false;
  }
}

Bytes passed(std::uint64_t ring_bytes) {
  Bytes bytes;
  append(bytes, Passed{2 * (4096 + ring_bytes), 1, File::kSealed});
  return bytes;
}

}  // namespace

std::vector<Parser> handshake_parsers() {
  const std::string name = "elaswave-fuzz-" + std::to_string(::getpid());
  const auto listener = std::make_shared<Fd>(listen_unix(name));
  return {
      {.name = "acceptor", .valid = {dialers_words(0, ""), dialers_words(kAllowsShm, "NN")}, .parse = accept},
      {.name = "dialer",
       .valid = {acceptors_words({}), acceptors_words(offer(name)), acceptors_words(offer("elaswave-nobody"))},
       .parse = [listener](const Bytes& input, Draw& draw) { return dial(*listener, input, draw); }},
      {.name = "segment", .valid = {passed(4096), passed(std::uint64_t{4} << 20)}, .parse = take_segment},
  };
}

}  // namespace elaswave::tests

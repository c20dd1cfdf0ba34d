// `make fuzz`, the native part: every parser that reads bytes of another process.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>

#include "exec/exact/vote.h"
#include "fuzz.h"

namespace elaswave::tests {
namespace {

// Words of another rank; a link delivers whole ones only.
bool read_vote(const Bytes& input, Draw&) {
  std::vector<std::uint64_t> words(input.size() / sizeof(std::uint64_t));
  if (!words.empty()) std::memcpy(words.data(), input.data(), words.size() * sizeof(std::uint64_t));
  try {
    const exec::Vote vote = exec::Vote::unpack(words);
    exec::ExactTotal total = vote.loss;
    total.add(vote.squares);
    return vote.consumed.size() <= words.size() && !std::isinf(total.value());
  } catch (const exec::ExecError&) {
    return false;
  }
}

}  // namespace

std::vector<Parser> vote_parsers() {
  exec::Vote vote;
  vote.loss.add(1.5);
  vote.squares.add(3.0);
  std::vector<Bytes> valid;
  for (std::size_t spans = 0; spans <= 12; spans += 4) {
    vote.consumed.assign(spans, {0, 1, 2, 3});
    vote.buckets[BucketId(static_cast<std::int64_t>(spans))] = {4, 5};
    Bytes& bytes = valid.emplace_back();
    for (const std::uint64_t word : vote.pack()) append(bytes, word);
  }
  return {{.name = "vote", .valid = valid, .parse = read_vote}};
}

}  // namespace elaswave::tests

int main(int argc, char** argv) {
  using namespace elaswave::tests;
  std::vector<Parser> parsers;
  for (auto&& some : {handshake_parsers(), link_parsers(), vote_parsers()}) {
    parsers.insert(parsers.end(), some.begin(), some.end());
  }
  try {
    return fuzz(parsers, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_parsers: %s\n", error.what());
    return 2;
  }
}

// Damaged bytes for the parsers of the native runtime, as tests/fuzz.py has them for those of Python: valid inputs with
// bits, bytes and pieces changed, cut off, doubled or mixed with another. A seed reproduces an input on every machine.
//
//   int main(int argc, char** argv) { return elaswave::tests::fuzz(all_parsers(), argc, argv); }
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace elaswave::tests {

using Bytes = std::vector<std::uint8_t>;

// The numbers that a seed gives.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : next_(seed) {}
  // 0..n-1; n is not 0.
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next_() % n); }
  bool coin() { return below(2) == 0; }
  template <typename T>
  const T& of(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }

 private:
  std::mt19937_64 next_;
};

struct Parser {
  std::string name;
  std::vector<Bytes> valid;  // what it reads
  // True: it was read; false: refused as the parser's header says. Whatever it throws is a finding, and so are a report
  // of a sanitizer, an end of the process, ten seconds without an end, a descriptor that stays open, and memory that
  // grows.
  std::function<bool(const Bytes&, Draw&)> parse;
  bool has_threads = false;  // they open and close descriptors at times of their own
  std::size_t costs = 1;     // of the inputs asked for, a dear parser gets one in so many
};

// One of `valid`, changed in one to four ways.
Bytes damaged(Draw& draw, const std::vector<Bytes>& valid);

// The command line: --inputs N (for each parser), --seed S (of the first input), --only PART (of a name). Prints what
// became of the inputs and the findings. Returns 0, 1 after a finding, or kNoSuchParser.
constexpr int kNoSuchParser = 3;
int fuzz(const std::vector<Parser>& parsers, int argc, char** argv);

// The bytes of a value as it lies in memory, for making inputs.
template <typename T>
void append(Bytes& bytes, const T& value) {
  const std::size_t had = bytes.size();
  bytes.resize(had + sizeof value);
  std::memcpy(bytes.data() + had, &value, sizeof value);
}

// The parsers, by the file that they are in.
std::vector<Parser> handshake_parsers();
std::vector<Parser> link_parsers();
std::vector<Parser> vote_parsers();

}  // namespace elaswave::tests

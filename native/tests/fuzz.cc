#include "fuzz.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>

// No input may ask for more memory at once than this. Visible, or the sanitizers would not find it.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "abort_on_error=1:max_allocation_size_mb=64";
}
extern "C" __attribute__((visibility("default"))) const char* __ubsan_default_options() {
  return "abort_on_error=1:print_stacktrace=1";
}

namespace elaswave::tests {
namespace {

constexpr unsigned kLongestSeconds = 10;
constexpr std::size_t kNamedFindings = 20;
constexpr long kMostKib = 1 << 20;  // of the whole process, sanitizers included

using Change = void (*)(Draw&, Bytes&, const std::vector<Bytes>&);

auto at(Bytes& data, std::size_t position) { return data.begin() + static_cast<std::ptrdiff_t>(position); }
auto at(const Bytes& data, std::size_t position) { return data.begin() + static_cast<std::ptrdiff_t>(position); }

void flip(Draw& draw, Bytes& data, const std::vector<Bytes>&) {
  if (!data.empty()) data[draw.below(data.size())] ^= static_cast<std::uint8_t>(1 << draw.below(8));
}

void set(Draw& draw, Bytes& data, const std::vector<Bytes>&) {
  static const Bytes values{0, 1, 2, 3, 0x7f, 0x80, 0xff, 'Y', 'N', 'M'};
  if (!data.empty()) data[draw.below(data.size())] = draw.of(values);
}

// A whole word, in step with the words of the input: lengths and ranks at the edges of their types.
void set_word(Draw& draw, Bytes& data, const std::vector<Bytes>&) {
  static const std::vector<std::uint64_t> values{
      0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, 0x7fffffffffffffff, 0x8000000000000000, ~std::uint64_t{0}};
  const std::size_t bytes = draw.coin() ? 4 : 8;
  if (data.size() < bytes) return;
  std::memcpy(data.data() + draw.below(data.size() / bytes) * bytes, &draw.of(values), bytes);
}

void cut(Draw& draw, Bytes& data, const std::vector<Bytes>&) { data.resize(draw.below(data.size() + 1)); }

void remove(Draw& draw, Bytes& data, const std::vector<Bytes>&) {
  const std::size_t from = draw.below(data.size() + 1);
  data.erase(at(data, from), at(data, std::min(data.size(), from + 1 + draw.below(16))));
}

void repeat(Draw& draw, Bytes& data, const std::vector<Bytes>&) {
  const std::size_t from = draw.below(data.size() + 1);
  const Bytes piece(at(data, from), at(data, std::min(data.size(), from + 1 + draw.below(64))));
  for (std::size_t times = 1 + draw.below(8); times > 0; --times) {
    data.insert(at(data, from), piece.begin(), piece.end());
  }
}

void insert(Draw& draw, Bytes& data, const std::vector<Bytes>&) {
  const std::size_t from = draw.below(data.size() + 1);
  Bytes piece(draw.coin() ? 8 : 2000, static_cast<std::uint8_t>(draw.below(256)));
  for (std::size_t i = 0; i < 8; ++i) piece[i] = static_cast<std::uint8_t>(draw.below(256));
  data.insert(at(data, from), piece.begin(), piece.end());
}

void mix(Draw& draw, Bytes& data, const std::vector<Bytes>& valid) {
  const Bytes& other = draw.of(valid);
  data.resize(draw.below(data.size() + 1));
  data.insert(data.end(), at(other, draw.below(other.size() + 1)), other.end());
}

constexpr Change kChanges[] = {flip, set, set_word, cut, remove, repeat, insert, mix};

// What is being done, for a handler of signals.
volatile std::sig_atomic_t in_parser = 0;
char doing[128];

void tell_and_end(int signal) {
  if (in_parser != 0) {
    static const char hang[] = "finding, no end after 10 s: ", crash[] = "finding, the process ended: ";
    if (signal == SIGALRM) (void)!::write(STDOUT_FILENO, hang, sizeof hang - 1);
    if (signal != SIGALRM) (void)!::write(STDOUT_FILENO, crash, sizeof crash - 1);
    (void)!::write(STDOUT_FILENO, doing, std::strlen(doing));
  }
  ::_exit(1);
}

int lowest_free_descriptor() {
  const int found = ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0);
  if (found < 0) throw std::runtime_error("no descriptor is left");
  ::close(found);
  return found;
}

long most_kib_so_far() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

struct Count {
  std::size_t read = 0, refused = 0, findings = 0;
};

void try_one(const Parser& parser, const Bytes& input, Draw& draw, const std::string& which, Count& count) {
  std::snprintf(doing, sizeof doing, "%s, %s\n", parser.name.c_str(), which.c_str());
  ::alarm(kLongestSeconds);
  in_parser = 1;
  try {
    const int free_before = lowest_free_descriptor();
    const bool read = parser.parse(input, draw);
    ++(read ? count.read : count.refused);
    if (!parser.has_threads && lowest_free_descriptor() != free_before)
      throw std::runtime_error("a descriptor stays open");
    if (most_kib_so_far() > kMostKib) throw std::runtime_error("memory grows without end");
  } catch (const std::exception& error) {
    if (++count.findings <= kNamedFindings) std::printf("finding: %s: %s", error.what(), doing);
  }
  in_parser = 0;
}

Count fuzz(const Parser& parser, std::size_t inputs, std::uint64_t first_seed) {
  Count count;
  for (std::size_t i = 0; i < parser.valid.size(); ++i) {
    Draw draw(first_seed);
    try_one(parser, parser.valid[i], draw, "valid input " + std::to_string(i), count);
    if (count.refused > 0) throw std::logic_error(parser.name + ": refuses valid input " + std::to_string(i));
  }
  for (std::uint64_t seed = first_seed; seed < first_seed + inputs; ++seed) {
    Draw draw(seed);
    const Bytes input = damaged(draw, parser.valid);
    try_one(parser, input, draw, "seed " + std::to_string(seed), count);
  }
  ::alarm(0);
  return count;
}

struct Options {
  std::size_t inputs = 1'000'000;
  std::uint64_t seed = 0;
  std::string only;
};

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) throw std::invalid_argument(name + " has no value");
    if (name == "--inputs") {
      options.inputs = std::stoull(argv[i + 1]);
    } else if (name == "--seed") {
      options.seed = std::stoull(argv[i + 1]);
    } else if (name == "--only") {
      options.only = argv[i + 1];
    } else {
      throw std::invalid_argument(name + " is none of --inputs, --seed, --only");
    }
  }
  return options;
}

}  // namespace

Bytes damaged(Draw& draw, const std::vector<Bytes>& valid) {
  Bytes data = draw.of(valid);
  for (std::size_t changes = 1 + draw.below(4); changes > 0; --changes) {
    kChanges[draw.below(std::size(kChanges))](draw, data, valid);
  }
  return data;
}

int fuzz(const std::vector<Parser>& parsers, int argc, char** argv) {
  const Options options = read_options(argc, argv);
  for (const int signal : {SIGALRM, SIGABRT}) std::signal(signal, tell_and_end);
  bool found = false, chosen = false;
  for (const Parser& parser : parsers) {
    if (parser.name.find(options.only) == std::string::npos) continue;
    chosen = true;
    const auto started = std::chrono::steady_clock::now();
    const std::size_t inputs = std::max<std::size_t>(1, options.inputs / parser.costs);
    const Count count = fuzz(parser, inputs, options.seed);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
    std::printf("%s: %zu inputs, %zu read, %zu refused, %zu findings (%.0f s)\n", parser.name.c_str(), inputs,
                count.read, count.refused, count.findings, took.count());
    std::fflush(stdout);
    found = found || count.findings > 0;
  }
  return found ? 1 : chosen ? 0 : kNoSuchParser;
}

}  // namespace elaswave::tests

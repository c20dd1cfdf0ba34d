// A small test harness: cases register themselves, a failed check throws, main() runs and counts.
//
//   TEST(rings_wrap_around) { CHECK_EQUAL(read(), 3); }
//   int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace elaswave::tests {

struct Case {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline bool add(std::string name, std::function<void()> body) {
  cases().push_back({std::move(name), std::move(body)});
  return true;
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& fact) {
  throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": " + fact);
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " is not " << b;
  fail(file, line, out.str());
}

template <typename Error, typename Body>
void check_throws(Body&& body, const std::string& part, const char* file, int line) {
  try {
    body();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return;
    fail(file, line, "the message lacks '" + part + "': " + error.what());
  } catch (const std::exception& error) {
    fail(file, line, std::string("another exception: ") + error.what());
  }
  fail(file, line, "no exception");
}

inline int run(int argc, char** argv) {
  int failed = 0, ran = 0;
  for (const Case& test : cases()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted = wanted || test.name.find(argv[i]) != std::string::npos;
    if (!wanted) continue;
    ++ran;
    try {
      test.body();
      std::printf("ok    %s\n", test.name.c_str());
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAIL  %s\n      %s\n", test.name.c_str(), error.what());
    }
    std::fflush(stdout);
  }
  if (ran == 0) std::printf("no case has such a name\n");
  return failed == 0 && ran > 0 ? 0 : 1;
}

}  // namespace elaswave::tests

#define TEST(name)                                                              \
  static void name();                                                           \
  static const bool added_##name = elaswave::tests::add(#name, [] { name(); }); \
  static void name()
#define CHECK(fact) \
  if (!(fact)) elaswave::tests::fail(__FILE__, __LINE__, #fact)
#define CHECK_EQUAL(a, b) elaswave::tests::check_equal((a), (b), #a, __FILE__, __LINE__)
#define CHECK_THROWS(Error, part, statement) \
  elaswave::tests::check_throws<Error>([&] { statement; }, (part), __FILE__, __LINE__)

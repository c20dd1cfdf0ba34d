// That the fuzzer finds: a parser that throws, one that keeps a descriptor, and one that refuses what is valid.
#include <unistd.h>

#include "check.h"
#include "fuzz.h"

using namespace elaswave::tests;

namespace {

int fuzz_one(const std::function<bool(const Bytes&, Draw&)>& parse) {
  const char* words[] = {"fuzz", "--inputs", "200", "--only", "rok"};
  return fuzz({{.name = "broken", .valid = {{1, 2, 3, 4}}, .parse = parse}}, 5, const_cast<char**>(words));
}

}  // namespace

TEST(a_parser_that_breaks_is_found) {
  CHECK_EQUAL(fuzz_one([](const Bytes&, Draw&) { return true; }), 0);
  CHECK_EQUAL(fuzz_one([](const Bytes& input, Draw&) { return input.at(3) < 255; }), 1);
  CHECK_EQUAL(fuzz_one([](const Bytes& input, Draw&) { return input.size() < 5 || ::dup(0) >= 0; }), 1);
  CHECK_THROWS(std::logic_error, "refuses valid input 0", fuzz_one([](const Bytes&, Draw&) { return false; }));
}

TEST(a_parser_that_is_not_there_is_named_by_its_own_code) {
  const char* words[] = {"fuzz", "--only", "nobody"};
  CHECK_EQUAL(fuzz({}, 3, const_cast<char**>(words)), kNoSuchParser);
}

int main(int argc, char** argv) { return run(argc, argv); }

#include "check.h"
#include "comm/sha256.h"

using namespace elaswave::comm;

namespace {

std::string hex(const Digest& digest) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += kHex[byte >> 4];
    text += kHex[byte & 15];
  }
  return text;
}

std::string hmac_hex(const std::string& key, const std::string& message) {
  return hex(hmac_sha256(key, {reinterpret_cast<const std::uint8_t*>(message.data()), message.size()}));
}

}  // namespace

// FIPS 180-4 examples.
TEST(sha256_of_published_examples) {
  CHECK_EQUAL(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQUAL(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQUAL(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQUAL(hex(sha256(std::string(1000000, 'a'))),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, test cases 1, 2 and 6.
TEST(hmac_of_published_examples) {
  CHECK_EQUAL(hmac_hex(std::string(20, '\x0b'), "Hi There"),
              "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQUAL(hmac_hex("Jefe", "what do ya want for nothing?"),
              "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQUAL(hmac_hex(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
              "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(comparison_sees_any_difference) {
  const Digest a = sha256("a");
  Digest b = a;
  CHECK(equal_in_constant_time(a, b));
  b[31] ^= 1;
  CHECK(!equal_in_constant_time(a, b));
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }

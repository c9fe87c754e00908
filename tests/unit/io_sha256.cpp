// SHA-256 against the examples of FIPS 180-4.

#include <gtest/gtest.h>

#include "io/sha256.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

std::string sha256_of_bytes(const std::string& bytes) {
  const test::SharedFolder folder;
  test::write_bytes(folder.file("x"), bytes);
  EXPECT_EQ(sha256_of_file(test::world(), folder.file("x")), sha256_of_file(folder.file("x")));
  return sha256_of_file(folder.file("x"));
}

TEST(Sha256, Examples) {
  EXPECT_EQ(sha256_of_bytes(""),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_of_bytes("abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_of_bytes(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, LongerThanOneBlock) {
  std::string bytes(3'000'001, 'x');
  const std::string whole = sha256_of_bytes(bytes);
  bytes.back() = 'y';
  EXPECT_NE(sha256_of_bytes(bytes), whole);
}

TEST(Sha256, MissingFile) {
  test::expect_error(ExitCode::usage, "cannot read '/no/such/file': No such file or directory",
                     [] { sha256_of_file("/no/such/file"); });
}

}  // namespace GYRE_FILE
}  // namespace gyre

#include <rapidcheck.h>

#include "core/error.hpp"
#include "mpi_test.hpp"
#include "report/options.hpp"

namespace gyre {
namespace GYRE_FILE {

ExitCode code_of(const char* size) {
  try {
    parse_size(size);
  } catch (const Error& error) {
    return error.code();
  }
  return ExitCode::ok;
}

TEST(ParseSize, AcceptsPlainNumbersAndBinaryUnits) {
  EXPECT_EQ(parse_size("0"), 0);
  EXPECT_EQ(parse_size("4096"), 4096);
  EXPECT_EQ(parse_size("128K"), 131072);
  EXPECT_EQ(parse_size("128k"), 131072);
  EXPECT_EQ(parse_size("3M"), 3 * 1048576);
  EXPECT_EQ(parse_size("1G"), 1073741824);
}

TEST(ParseSize, IsExactUpToTheLimit) {
  EXPECT_EQ(parse_size("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(parse_size("8589934591G"), 8589934591 * 1073741824);
  EXPECT_EQ(code_of("9223372036854775808"), ExitCode::usage);
  EXPECT_EQ(code_of("8589934592G"), ExitCode::usage);
  EXPECT_EQ(code_of("99999999999999999999999"), ExitCode::usage);
}

TEST(ParseSize, RefusesEverythingElse) {
  for (const char* text :
       {"", "K", "-1", "+1", " 1", "1 ", "1.5K", "1e3", "1KB", "1Ki", "1T", "0x10", "12 K", "K1"})
    EXPECT_EQ(code_of(text), ExitCode::usage) << '"' << text << '"';
}

TEST(ParseSize, RoundTrips) {
  EXPECT_TRUE(rc::check("a number and its text", [] {
    const int64_t number = *rc::gen::nonNegative<int64_t>();
    RC_ASSERT(parse_size(std::to_string(number)) == number);
  }));
}

TEST(EditDistance, CountsSingleEdits) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("ring", "ring"), 0);
  EXPECT_EQ(edit_distance("rings", "ring"), 1);
  EXPECT_EQ(edit_distance("rung", "ring"), 1);
  EXPECT_EQ(edit_distance("--inptu", "--input"), 1);  // neighbours swapped
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
}

TEST(EditDistance, IsSymmetric) {
  EXPECT_TRUE(rc::check("d(a, b) = d(b, a)", [](const std::string& a, const std::string& b) {
    RC_ASSERT(edit_distance(a, b) == edit_distance(b, a));
  }));
}

TEST(Nearest, SuggestsWhatWasMeant) {
  const std::vector<std::string> options = {"--input", "--iters", "--cp", "--tp", "--json"};
  EXPECT_EQ(nearest("--inptu", options), "--input");
  EXPECT_EQ(nearest("--iter", options), "--iters");
  EXPECT_EQ(nearest("--cpp", options), "--cp");
  EXPECT_EQ(nearest("--dp", options), "--cp");  // equally near to --tp: the first
}

TEST(Nearest, KeepsQuietWhenNothingIsNear) {
  EXPECT_EQ(nearest("--frobnicate", {"--input", "--cp"}), "");
  EXPECT_EQ(nearest("--x", {}), "");
}

}  // namespace GYRE_FILE
}  // namespace gyre

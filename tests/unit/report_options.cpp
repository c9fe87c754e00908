#include <rapidcheck.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>

#include "core/error.hpp"
#include "mpi_test.hpp"
#include "report/command_line.hpp"
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

/// What a program with a flag, its negation and the common options makes of a command line.
struct Switches {
  bool in_place = true, list = false, verbose = false;
  std::string refusal;
};

Switches read_switches(std::vector<const char*> arguments) {
  Switches result;
  CommonOptions common;
  CLI::App app("", "program");
  app.set_help_flag("");
  add_flag(app, {"--in-place,!--out-of-place", ""}, result.in_place);
  add_flag(app, {"--list", ""}, result.list);
  declare_common(app, common);
  arguments.insert(arguments.begin(), "program");
  try {
    parse_command_line(app, static_cast<int>(arguments.size()), arguments.data());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    result.refusal = error.what();
  }
  result.verbose = common.verbose;
  return result;
}

Switches read_switches_of_file(const std::string& name, const std::string& value) {
  const std::string file = "gyre-switches-" + std::to_string(getpid()) + ".toml";
  const std::string path = std::filesystem::temp_directory_path() / file;
  std::ofstream(path) << name << " = " << value << '\n';
  const Switches result = read_switches({"--config", path.c_str()});
  std::filesystem::remove(path);
  return result;
}

TEST(Switch, IsTrueOrFalse) {
  EXPECT_TRUE(read_switches({"--list"}).list);
  for (const char* yes : {"--list=true", "--list=True", "--list=on", "--list=yes", "--list=1"})
    EXPECT_TRUE(read_switches({yes}).list) << yes;
  for (const char* no : {"--list=false", "--list=off", "--list=no", "--list=0"})
    EXPECT_FALSE(read_switches({no}).list) << no;
  EXPECT_FALSE(read_switches({"--out-of-place"}).in_place);
  EXPECT_FALSE(read_switches({"--out-of-place=true"}).in_place);
  EXPECT_TRUE(read_switches({"--out-of-place=no"}).in_place);
  EXPECT_FALSE(read_switches_of_file("in-place", "false").in_place);
  EXPECT_FALSE(read_switches_of_file("out-of-place", "true").in_place);
  EXPECT_TRUE(read_switches_of_file("list", "\"on\"").list);
}

TEST(Switch, RefusesEverythingElseByNameAndValue) {
  for (const std::string value : {"18446744073709551616", "-99999999999999999999", "2", "-1", "1e5",
                                  "3x", "tru", "{}", "", "x"})
    for (const std::string name : {"in-place", "out-of-place", "list", "verbose", "quiet"}) {
      const std::string want = "--" + name + " is a switch: true or false, not '" + value + "'";
      const std::string argument = "--" + name + "=" + value;
      const std::string of_line = read_switches({argument.c_str()}).refusal;
      EXPECT_EQ(of_line.rfind(want, 0), 0U) << argument << ": " << of_line;
      const std::string of_file = read_switches_of_file(name, '"' + value + '"').refusal;
      EXPECT_EQ(of_file.rfind(want, 0), 0U) << argument << " of a file: " << of_file;
    }
  EXPECT_NE(read_switches({"--list=flase"}).refusal.find("; nearest: false"), std::string::npos);
}

TEST(Switch, IsNamedTogetherWithOthers) {
  const std::string refusal = read_switches({"--list=7", "--verbose=9"}).refusal;
  EXPECT_NE(refusal.find("--list is"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("--verbose is"), std::string::npos) << refusal;
}

}  // namespace GYRE_FILE
}  // namespace gyre

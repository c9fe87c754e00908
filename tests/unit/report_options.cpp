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
  EXPECT_EQ(nearest("--overlap", {"--help"}), "");  // dashes alone make no name near
}

/// What a program with a flag, its negation and the common options makes of a command line.
struct Switches {
  bool in_place = true, list = false, verbose = false;
  std::string refusal;
};

Switches read_switches(std::vector<const char*> arguments) {
  Switches result;
  CommonOptions common;
  OptionTable app("", "program");
  app.parser().set_help_flag("");
  const AddOptions add(app);
  add.flag("--in-place,!--out-of-place", "", result.in_place);
  add.flag("--list", "", result.list);
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

/// A configuration file for as long as it lives.
class File {
 public:
  explicit File(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("gyre-options-" + std::to_string(getpid()) + ".toml")) {
    std::ofstream(path_) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Switches read_switches_of_file(const std::string& name, const std::string& value) {
  const File file(name + " = " + value + '\n');
  Switches result = read_switches({"--config", file.path().c_str()});
  if (const std::string place = file.path() + ":1: " + name + " = "; !result.refusal.empty()) {
    EXPECT_EQ(result.refusal.rfind(place, 0), 0U) << result.refusal;
  }
  return result;
}

/// What a program with an option of each kind makes of a configuration file, in which "FILE" stands
/// for the file's name.
struct Configured {
  std::string text = "unset", choice = "last", choices = "all";
  std::vector<std::string> texts;
  int number = 1;
  int64_t size = 1;
  double real = 1;
  bool list = false;
  std::string refusal;
};

Configured configure(const std::string& text, std::vector<const char*> arguments = {}) {
  const File file(text);
  Configured result;
  CommonOptions common;
  OptionTable app("", "program");
  app.parser().set_help_flag("");
  const AddOptions add(app);
  add("--text", "", result.text);
  add.choice("-c,--choice", "", result.choice, {"none", "last"});
  add.choices("--choices", "", result.choices,
              {{"first-fit", "in order"}, {"best", "tightest (Baker)"}});
  add("texts", "", result.texts);
  add("-n,--number", "", result.number, 1, 1000);
  add.size("--size", "", result.size, 1);
  add("--real", "", result.real, {.least = 0, .most = 4, .open = true});
  add.flag("--list", "", result.list);
  declare_common(app, common);
  arguments.insert(arguments.begin(), {"program", "--config", file.path().c_str()});
  try {
    parse_command_line(app, static_cast<int>(arguments.size()), arguments.data());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    result.refusal = error.what();
  }
  for (size_t at = 0; (at = result.refusal.find(file.path())) != std::string::npos;)
    result.refusal.replace(at, file.path().size(), "FILE");
  return result;
}

TEST(Configuration, GivesOptionsTheirValues) {
  const Configured all = configure(
      "# a comment\ntext = \"a # b, c\"\nc = \"none\"\ntexts = [\"x\",\n  \"y\"]\nnumber = 1_000\n"
      "size = \"4K\"\nreal = 2.5e-3\nlist = true\n");
  EXPECT_EQ(all.refusal, "");
  EXPECT_EQ(all.text, "a # b, c");
  EXPECT_EQ(all.choice, "none");
  EXPECT_EQ(all.texts, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(all.number, 1000);
  EXPECT_EQ(all.size, 4096);
  EXPECT_EQ(all.real, 2.5e-3);
  EXPECT_TRUE(all.list);
  EXPECT_EQ(configure("size = 4096").size, 4096);
  EXPECT_EQ(configure("real = 3").real, 3);
  EXPECT_EQ(configure("number = \"7\"").number, 7);
  EXPECT_EQ(configure("texts = \"x\"").texts, std::vector<std::string>{"x"});
  EXPECT_EQ(configure("").refusal, "");
}

TEST(Configuration, ListsOfChoices) {
  const std::string both = configure("choices = 'best,first-fit'").choices;
  EXPECT_EQ(both, "best,first-fit");
  EXPECT_TRUE(lists_several(both) && lists(both, "best") && lists(both, "first-fit"));
  EXPECT_FALSE(lists(both, "first") || lists_several("best") || lists("best", "first-fit"));
  EXPECT_TRUE(lists_several("all") && lists("all", "best"));
}

TEST(Configuration, TheCommandLineWins) {
  const Configured both = configure("number = 5\nsize = 6\n", {"-n", "2"});
  EXPECT_EQ(both.refusal, "");
  EXPECT_EQ(both.number, 2);
  EXPECT_EQ(both.size, 6);
}

TEST(Configuration, RefusesUnknownKeysAndSectionsByLine) {
  const std::string hint = "\n  see program --help";
  EXPECT_EQ(configure("size = 2\n\nnmber = 3\n").refusal,
            "FILE:3: unknown key nmber = 3; nearest: number" + hint);
  EXPECT_EQ(configure("q_q = 1").refusal, "FILE:1: unknown key q_q = 1" + hint);
  EXPECT_EQ(configure("version = true").refusal.rfind("FILE:1: unknown key version = true", 0), 0U);
  EXPECT_EQ(configure("config = \"x\"").refusal.rfind("FILE:1: unknown key config = ", 0), 0U);
  const std::string sections = ": there are no sections, and keys are names of options";
  EXPECT_EQ(configure("size = 2\n[program]\nnumber = 3\n").refusal,
            "FILE:2: unknown section [program]" + sections + hint);
  EXPECT_EQ(configure("[[runs]]\nnumber = 3\n").refusal,
            "FILE:1: unknown section [runs]" + sections + hint);
  EXPECT_EQ(configure("a.b = 3\n").refusal, "FILE:1: unknown section [a]" + sections + hint);
  std::string dots = "text = \"" + std::string(100, '.') + "\"\na";
  for (int i = 0; i < 100000; ++i) dots += ".a";
  EXPECT_EQ(configure(dots + " = 3").refusal, "FILE:2: a key of too many parts" + hint);
}

TEST(Configuration, RefusesValuesOfAnotherType) {
  const auto wants = [](const std::string& line, const std::string& why) {
    EXPECT_EQ(configure(line).refusal, "FILE:1: " + line + ": " + why + "\n  see program --help");
  };
  wants("number = 'many'", "'many' is not an integer of at least 1");
  wants("number = 1.5", "'1.5' is not an integer of at least 1");
  wants("number = true", "a truth value where --number takes one INT");
  wants("number = [ 1, 2 ]", "an array where --number takes one INT");
  wants("number = 1979-05-27", "a date or time where --number takes one INT");
  wants("text = false", "a truth value where --text takes one TEXT");
  wants("text = { a = 1 }", "a table where --text takes one TEXT");
  wants("texts = [ 'a', [ 'b' ] ]", "an array where --texts takes values, each TEXT");
  wants("texts = []", "an empty array is no value; leave the key out instead");
  wants("choice = 'nnoe'", "'nnoe' is not one of none, last; nearest: none");
  wants("choices = 'fisrt-fit,best'",
        "'fisrt-fit' is not one of all, first-fit, best; nearest: first-fit");
  wants("choices = 'baker'", "'baker' is called best here (tightest (Baker))");
  wants("choices = 'best,best'", "'best' is there twice");
  wants("choices = 'tightest'", "'tightest' is not one of all, first-fit, best");
  wants("choices = 'best,all'", "all stands alone, not beside other names");
  wants("choices = 'best,'", "'' is not one of all, first-fit, best");
  wants("size = -1", "'-1' is not a size (digits, then K, M or G for 2^10, 2^20, 2^30)");
  wants("real = 'x'", "'x' is not a finite number");
  wants("real = 0", "'0' is not above 0");
  wants("real = 4.5", "'4.5' is more than 4");
  wants("number = 1001", "'1001' is more than 1000");
  wants("number = 9999999999", "'9999999999' is more than 1000");
  wants("list = 2", "--list is a switch: true or false, not '2'");
  wants("list = [ true ]", "an array where --list takes true or false");
}

TEST(Configuration, ListsAllThatIsWrongInOrderOfLines) {
  EXPECT_EQ(configure("size = 0\nnumber = 0\nlst = true\n", {"--tex"}).refusal,
            "unknown option --tex; nearest: --text\n"
            "  FILE:1: size = 0: '0' is less than 1\n"
            "  FILE:2: number = 0: '0' is not an integer of at least 1\n"
            "  FILE:3: unknown key lst = true; nearest: list\n"
            "  see program --help");
}

TEST(Configuration, RefusesWhatIsNoToml) {
  for (const char* text : {"size = 2\nnumber 3\n", "size = 2\nnumber = \n", "size = 2\nsize = 3\n",
                           "size = 2\nnumber = 18446744073709551616\n", "size = 2\ntext = x\n"})
    EXPECT_EQ(configure(text).refusal.rfind("FILE:2: this is no TOML: ", 0), 0U)
        << configure(text).refusal;
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
      EXPECT_NE(of_file.find(": " + want), std::string::npos) << argument << ": " << of_file;
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

// Output files appear complete or not at all, however their process ends.

#include "supervision/output_guard.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "errors.hpp"
#include "runtime/process.hpp"
#include "supervision/guard.hpp"

namespace gyre {
namespace GYRE_FILE {

namespace fs = std::filesystem;

class OutputGuardTest : public testing::Test {
 protected:
  void SetUp() override { fs::create_directory(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path() const { return (folder_ / "result.h5").string(); }
  /// Files in the folder, after the watcher has had up to two seconds to leave at most `wanted`.
  int64_t files_left(int64_t wanted) const {
    const auto count = [&] {
      return std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
    };
    for (int i = 0; i < 200 && count() > wanted; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return count();
  }

  fs::path folder_ = fs::temp_directory_path() / fmt::format("gyre-output-guard-{}", getpid());
};

void write(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
}
std::string read(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST_F(OutputGuardTest, CommitGivesTheFinalNameAndReplacesAnOldFile) {
  write(path(), "old");
  OutputGuard guard(path());
  write(guard.temporary_path(), "new");
  EXPECT_EQ(read(path()), "old");
  guard.commit();
  EXPECT_EQ(read(path()), "new");
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(files_left(1), 1) << "the watcher must leave a committed file alone";
}

TEST_F(OutputGuardTest, WrongResultsNeverHaveTheNameThatWasAskedFor) {
  write(path(), "old");
  OutputGuard guard(path());
  write(guard.temporary_path(), "wrong");
  const std::string name = guard.name_as_invalid();
  EXPECT_EQ(name, (folder_ / "result.invalid.h5").string());
  guard.commit();
  EXPECT_EQ(read(path()), "old");
  EXPECT_EQ(read(name), "wrong");
}

TEST_F(OutputGuardTest, AnInputMayNotHaveTheNameOfWrongResults) {
  const std::string input = (folder_ / "result.invalid.h5").string();
  write(input, "input");
  test::expect_usage(
      fmt::format("--output '{}' would be '{}' if its results were wrong, the file of --input",
                  path(), input),
      [&] {
        check_output_places({{{"--output", path()}}, {}, {{"--input", input}}});
      });
  check_output_places({{}, {{"--json", path()}}, {{"--input", input}}});  // a text has one name
}

TEST_F(OutputGuardTest, WithoutCommitNothingIsLeft) {
  {
    OutputGuard guard(path());
    write(guard.temporary_path(), "half");
  }
  EXPECT_EQ(files_left(0), 0);
}

TEST_F(OutputGuardTest, TheWatcherOfOneGuardDoesNotRemoveTheFileOfTheNext) {
  std::string first;
  {
    OutputGuard guard(path());
    first = guard.temporary_path();
  }
  OutputGuard guard(path());
  EXPECT_NE(guard.temporary_path(), first);
}

TEST_F(OutputGuardTest, AKilledProcessLeavesNothing) {
  const pid_t child = fork();
  if (child == 0) {
    start_guard(0, nullptr, false);
    OutputGuard guard(path());
    write(guard.temporary_path(), "half");
    raise(SIGKILL);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  EXPECT_EQ(files_left(0), 0);
}

TEST_F(OutputGuardTest, UnwritablePlacesAreRefusedAtOnce) {
  const auto message = [](const std::string& path) {
    try {
      OutputGuard guard(path);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message((folder_ / "no" / "x.h5").string()),
            fmt::format("cannot write '{}': there is no folder '{}'",
                        (folder_ / "no" / "x.h5").string(), (folder_ / "no").string()));
  write(path(), "a file");
  EXPECT_EQ(message(path() + "/x.h5"), "cannot write '" + path() + "/x.h5': Not a directory");
  EXPECT_EQ(message(folder_.string()),
            fmt::format("cannot write '{}': it is a folder", folder_.string()));
}

TEST_F(OutputGuardTest, WriteFileAtomically) {
  write_temporary(path(), "whole")->commit();
  EXPECT_EQ(read(path()), "whole");
  EXPECT_EQ(files_left(1), 1);
}

TEST_F(OutputGuardTest, DevicesAreNotReplaced) {
  try {
    OutputGuard guard("/dev/null");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_STREQ(error.what(), "cannot write '/dev/null': it is there and no regular file");
  }
}

TEST_F(OutputGuardTest, WhatBecameSpecialIsNotReplacedEither) {
  OutputGuard guard(path());
  write(guard.temporary_path(), "new");
  ASSERT_EQ(mkfifo(path().c_str(), 0600), 0);
  try {
    guard.commit();
    ADD_FAILURE() << "the pipe is gone";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::runtime);
    EXPECT_TRUE(fs::is_fifo(path()));
  }
}

TEST_F(OutputGuardTest, LinksStay) {
  const std::string link = path() + ".link";
  fs::create_symlink("result.h5", link);
  write_temporary(link, "through")->commit();
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(read(path()), "through");
}

TEST_F(OutputGuardTest, WhatIsSpecialIsNotReplaced) {
  write(path(), "");
  const int open = ::open(path().c_str(), O_WRONLY);
  const std::string descriptor = "/proc/self/fd/" + std::to_string(open);
  EXPECT_TRUE(is_special(descriptor)) << "a regular file is behind it";
  EXPECT_TRUE(is_special("/dev/null"));
  EXPECT_FALSE(is_special(path()));
  EXPECT_FALSE(is_special(path() + ".new"));
  const int input = dup(STDIN_FILENO);
  close(STDIN_FILENO);
  const int own = open_special(descriptor);
  dup2(input, STDIN_FILENO);
  close(input);
  EXPECT_GT(own, STDERR_FILENO) << "a standard stream";
  EXPECT_EQ(fcntl(own, F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(write_all(own, "text"), 0);
  EXPECT_EQ(read(path()), "text");
  close(own);
  close(open);
  EXPECT_EQ(test::usage_message([&] { open_special(descriptor); }),
            "cannot write '" + descriptor + "': Bad file descriptor");
}

TEST_F(OutputGuardTest, ALimitOnFilesIsNamed) {
  rlimit usual{};
  getrlimit(RLIMIT_FSIZE, &usual);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{10, usual.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    write_temporary(path(), std::string(5000, 'x'));
  } catch (const Error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &usual);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(message.ends_with(": File too large")) << message;
}

TEST_F(OutputGuardTest, OutputsAreNoInputsAndDiffer) {
  write(path(), "old");
  check_output_places({{{"--output", path()}},
                       {{"--csv", path() + ".csv"}, {"--json", ""}},
                       {{"--input", path() + ".h5"}}});
  EXPECT_EQ(test::usage_message([&] {
              check_output_places({{{"--output", path()}}, {}, {{"--input", path()}}});
            }),
            "--output '" + path() + "' is the file of --input");
  const std::filesystem::path whole(path());
  const std::string detour = (whole.parent_path() / "." / whole.filename()).string();
  EXPECT_EQ(test::usage_message([&] {
              check_output_places({{}, {{"--csv", path()}, {"--json", detour}}});
            }),
            "--json '" + detour + "' is the file of --csv");
  EXPECT_EQ(test::usage_message([&] {
              check_output_places({{}, {{"--csv", path() + ".new"}, {"--json", detour + ".new"}}});
            }),
            "--json '" + detour + ".new' is the file of --csv");
  check_output_places({{}, {{"--csv", "/dev/null"}, {"--json", "/dev/null"}}});
  fs::create_hard_link(path(), path() + ".hard");
  fs::create_symlink("result.h5", path() + ".link");
  for (const std::string& other : {path() + ".hard", path() + ".link"})
    EXPECT_EQ(test::usage_message([&] {
                check_output_places({{}, {{"--csv", other}}, {{"--config", path()}}});
              }),
              "--csv '" + other + "' is the file of --config");
}

TEST_F(OutputGuardTest, OutputsAreNotTheFilesOfTheStandardStreams) {
  write(path(), "");
  for (const auto& [stream, name] :
       {std::pair{STDOUT_FILENO, "output"}, {STDERR_FILENO, "error"}}) {
    const int usual = dup(stream), file = ::open(path().c_str(), O_WRONLY | O_APPEND);
    dup2(file, stream);
    const std::string message = test::usage_message([&] {
      check_output_places({{}, {{"--csv", path()}}});
    });
    dup2(usual, stream);
    close(usual), close(file);
    EXPECT_EQ(message, fmt::format("--csv '{}' is the file of standard {}", path(), name));
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

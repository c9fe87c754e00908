// The main of every test program: GoogleTest under MPI, with one verdict for all ranks.
//
// Rank 0 prints as usual; the others print only their failures, marked "[rank r]". At the end of
// each test the ranks exchange whether it failed, so that a failure on one rank fails the test on
// all of them and the ranks agree on the exit code: 0, 1, or 77 when every test was skipped. The
// watchdog ends a test that hangs.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi.hpp"
#include "core/error.hpp"
#include "io/h5.hpp"
#include "mpi_test.hpp"
#include "runtime/parallel.hpp"
#include "runtime/watchdog.hpp"
#include "supervision/supervision.hpp"

namespace gyre::test {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr double test_timeout_seconds = 300;
#else
constexpr double test_timeout_seconds = 60;
#endif

MpiEnvironment* the_environment = nullptr;
Communicator* the_world = nullptr;

/// `mine` of all ranks, in rank order. Plain MPI: it must work when the library under test does
/// not.
std::vector<int> gather_from_all(int mine, const std::string& what) {
  std::vector<int> all(static_cast<size_t>(environment().size()));
  std::vector<MPI_Request> requests(1);
  const WaitScope scope(what);
  check_mpi(MPI_Iallgather(&mine, 1, MPI_INT, all.data(), 1, MPI_INT, environment().world(),
                           requests.data()),
            "MPI_Iallgather");
  wait_politely(requests);
  return all;
}

/// Makes a failure on any rank a failure on all. Listeners are called in reverse order at the end
/// of a test: this one, appended last, comes before the printer reports the verdict.
class AgreeOnFailure : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& info) override {
    set_current_step(std::string(info.test_suite_name()) + "." + info.name());
  }

  void OnTestEnd(const testing::TestInfo& info) override {
    const bool failed_here = info.result()->Failed();
    const std::vector<int> failed = gather_from_all(failed_here ? 1 : 0, "end of the test");
    std::string ranks;
    for (size_t r = 0; r < failed.size(); ++r)
      if (failed[r] != 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
    if (!failed_here && !ranks.empty()) ADD_FAILURE() << "failed on rank " << ranks;
  }
};

/// Prints failures of a rank other than 0, each with one call. (GoogleTest holds a lock here: a
/// query of the current test would deadlock.)
class PrintFailures : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& info) override {
    test_ = std::string(info.test_suite_name()) + "." + info.name();
  }

  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::string text = test_ + ": ";
    if (result.file_name() != nullptr)
      text += std::string(result.file_name()) + ":" + std::to_string(result.line_number()) + ": ";
    text += result.message();
    const std::string prefix = "[rank " + std::to_string(environment().rank()) + "] ";
    for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 1 + prefix.size())
      text.insert(at + 1, prefix);
    std::fputs((prefix + text + "\n").c_str(), stderr);
  }

  std::string test_ = "outside of tests";
};

void install_listeners() {
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (environment().rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    delete listeners.Release(listeners.default_xml_generator());
    listeners.Append(new PrintFailures);
  }
  listeners.Append(new AgreeOnFailure);
}

/// The file whose tests are wanted: --file=PATH, as CMake names it. Empty: those of all files.
std::string wanted_file(int argc, char** argv) {
  const std::string option = "--file=";
  for (int i = 1; i < argc; ++i)
    if (std::string(argv[i]).rfind(option, 0) == 0) return argv[i] + option.size();
  return {};
}

/// "unit/plan.cpp": what comes before differs where a compiler's cache makes paths relative.
std::string folder_and_name(const std::string& path) {
  const size_t name = path.rfind('/'), folder = name == 0 ? name : path.rfind('/', name - 1);
  return folder == std::string::npos ? path : path.substr(folder + 1);
}

/// What assign_suite was told.
std::map<std::string, std::string>& files_of_suites() {
  static std::map<std::string, std::string> files;
  return files;
}

/// GoogleTest's filter of the tests of each file. Throws for tests of a header that are no file's:
/// nobody would run them.
std::map<std::string, std::string> filters_of_files() {
  std::map<std::string, std::string> filters;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    const auto assigned = files_of_suites().find(suite.name());
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string file = assigned != files_of_suites().end() ? assigned->second : test.file();
      if (file.ends_with(".hpp"))
        throw_usage("the tests {} of {} are no file's; wanted: assign_suite", suite.name(), file);
      std::string& filter = filters[folder_and_name(file)];
      filter += (filter.empty() ? "" : ":") + std::string(suite.name()) + "." + test.name();
    }
  }
  return filters;
}

/// Leaves only the tests of `file` to be run. Throws when it has none.
void select_file(const std::string& file) {
  const auto filters = filters_of_files();
  const auto found = filters.find(folder_and_name(file));
  if (found == filters.end()) throw_usage("there are no tests of '{}' in this program", file);
  testing::GTEST_FLAG(filter) = found->second;
}

/// The exit code of all ranks.
int run_all_tests() {
  const int mine = RUN_ALL_TESTS();
  const std::vector<int> codes = gather_from_all(mine, "end of all tests");
  const int code = *std::max_element(codes.begin(), codes.end());
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  const bool skipped =
      tests.test_to_run_count() > 0 && tests.skipped_test_count() == tests.test_to_run_count();
  const std::vector<int> others = gather_from_all(skipped ? 1 : 0, "end of all tests");
  if (code == 0 && *std::min_element(others.begin(), others.end()) == 1)
    return static_cast<int>(ExitCode::skipped);
  return code;
}

// The ranks of a run must draw the same random cases, and a run must be repeatable: RC_PARAMS
// without a seed gets one. To look further: RC_PARAMS="seed=... max_success=10000".
void fix_seed_of_properties() {
  const char* const given = std::getenv("RC_PARAMS");
  const std::string parameters = given == nullptr ? "" : given;
  if (parameters.find("seed=") == std::string::npos)
    setenv("RC_PARAMS", ("seed=20240229 " + parameters).c_str(), 1);
}

}  // namespace

bool assign_suite(const std::string& suite, const std::string& file) {
  return files_of_suites().emplace(suite, file).second;
}

Communicator& world() {
  return *the_world;
}
MpiEnvironment& environment() {
  return *the_environment;
}

}  // namespace gyre::test

int main(int argc, char** argv) {
  using namespace gyre;
  if (argc == 2 && std::string(argv[1]) == "--list-files") {
    testing::InitGoogleTest(&argc, argv);  // makes those of TEST_P
    for (const auto& [file, filter] : test::filters_of_files()) std::printf("%s\n", file.c_str());
    return 0;
  }
  test::fix_seed_of_properties();
  start_supervised("test", argc, argv);
  h5::initialise();
  MpiEnvironment environment(argc, argv, "test");
  if (environment.launched_ranks() > 1 && environment.size() == 1) {
    std::fprintf(stderr, "test: the launcher started %d ranks, but MPI sees one: wrong mpiexec?\n",
                 environment.launched_ranks());
    return static_cast<int>(ExitCode::usage);
  }
  sharing_limits = {0, 0};  // threads share small loops, too
  Watchdog::set_timeout(test::test_timeout_seconds);
  const std::unique_ptr<Communicator> world = make_mpi_communicator(environment.world());
  test::the_environment = &environment;
  test::the_world = world.get();
  testing::InitGoogleTest(&argc, argv);
  if (const std::string file = test::wanted_file(argc, argv); !file.empty())
    test::select_file(file);
  if (testing::GTEST_FLAG(list_tests)) return environment.rank() == 0 ? RUN_ALL_TESTS() : 0;
  test::install_listeners();
  return test::run_all_tests();
}

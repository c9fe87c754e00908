// Results as lines: written as they are measured, read again by --resume.

#include <fmt/ranges.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "errors.hpp"
#include "mpi_test.hpp"
#include "report/result.hpp"
#include "report/row_log.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

class RowLogs : public testing::Test {
 protected:
  RowLogs() { std::filesystem::create_directory(folder_); }
  ~RowLogs() override { std::filesystem::remove_all(folder_); }

  ReportOptions options(const std::string& resume) const {
    ReportOptions options;
    options.json = folder_ / "rows.jsonl";
    options.resume = resume;
    return options;
  }
  std::string text() const {
    std::ifstream file(options("none").json);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(const std::string& text) const { std::ofstream(options("none").json) << text; }
  std::vector<nlohmann::json> lines() const {
    std::vector<nlohmann::json> all;
    std::istringstream file(text());
    for (std::string line; std::getline(file, line);) all.push_back(nlohmann::json::parse(line));
    return all;
  }

  static RunReport report() {
    RunReport report;
    report.program = "gyre-test";
    report.build = {"0.1.0", "1a2b3c4d", "clean", "Release", "GNU"};
    report.ranks = {{0, "node01", "cpu"}};
    report.configuration = {{"heads", int64_t{8}}};
    return report;
  }
  static ResultEntry row(int64_t tokens, bool right, bool quiet) {
    ResultEntry entry;
    entry.key = {{"tokens", tokens}};
    entry.timing = {{{20, 20, 20, 20, 20, quiet ? 20.0 : 40.0}}, 1};
    entry.verified = right;
    return entry;
  }
  static Fields key(int64_t tokens) { return {{"tokens", tokens}}; }

  /// A run that was killed behind its last row.
  void write(RunReport report, const std::vector<ResultEntry>& rows) const {
    RowLog log(world());
    log.begin(report, options("none"));
    report.results = rows;
    log.write(report);
  }

 private:
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("gyre-rows-" + std::to_string(getpid()));
};

TEST_F(RowLogs, HaveARunItsRowsAndItsEnd) {
  RunReport report = RowLogs::report();
  RowLog log(world());
  log.begin(report, options("none"));
  report.results.push_back(row(1, true, true));
  log.write(report);
  EXPECT_EQ(lines().size(), 2U) << "a row is there as soon as it is measured";
  report.results.push_back(row(2, true, false));
  log.end(report);
  const auto all = lines();
  ASSERT_EQ(all.size(), 4U);
  EXPECT_EQ(all[0].at("kind"), "run");
  EXPECT_EQ(all[0].at("suite").at("program"), "gyre-test");
  EXPECT_EQ(all[1].at("run"), all[0].at("id"));
  EXPECT_EQ(all[1].at("status").at("result"), "VALID");
  EXPECT_EQ(all[2].at("key").at("tokens"), 2);
  EXPECT_EQ(all[2].at("status").at("measured"), false);
  EXPECT_EQ(all[2].at("status").at("reasons").size(), 2U);
  EXPECT_EQ(all[3].at("kind"), "end");
}

TEST_F(RowLogs, FinishedRowsStay) {
  write(report(), {row(1, true, true), row(2, true, false), row(3, false, true)});
  {
    RowLog none(world());
    none.begin(report(), options("none"));
    EXPECT_FALSE(none.has(key(1))) << "nobody asked for it";
  }
  RowLog finished(world());
  finished.begin(report(), options("finished"));
  EXPECT_TRUE(finished.has(key(1)));
  EXPECT_TRUE(finished.has(key(2)));
  EXPECT_FALSE(finished.has(key(3))) << "a wrong row is measured again";
  EXPECT_FALSE(finished.has(key(4)));
  EXPECT_EQ(finished.skipped(), 2);
}

TEST_F(RowLogs, TheNewestRowOfAKeyCounts) {
  write(report(), {row(1, true, true), row(2, false, true)});
  write(report(), {row(1, false, true), row(2, true, true)});
  RowLog log(world());
  log.begin(report(), options("finished"));
  EXPECT_FALSE(log.has(key(1)));
  EXPECT_TRUE(log.has(key(2)));
}

TEST_F(RowLogs, RowsThatDoNotSayHowTheyEndedDoNotStand) {
  write(report(), {row(1, true, true), row(2, true, true)});
  std::string unsaid;
  std::istringstream file(text());
  for (std::string said; std::getline(file, said);) {
    auto line = nlohmann::ordered_json::parse(said);
    if (line["kind"] == "row" && line["key"]["tokens"] == 1) line.erase("status");
    if (line["kind"] == "row" && line["key"]["tokens"] == 2) line["status"].erase("measured");
    unsaid += line.dump() + "\n";
  }
  for (const char* mode : {"finished", "measured"}) {
    put(unsaid);
    RowLog log(world());
    log.begin(report(), options(mode));
    EXPECT_FALSE(log.has(key(1)));
    EXPECT_EQ(log.has(key(2)), mode == std::string("finished"));
  }
}

TEST_F(RowLogs, RowsThatStayKeepTheirVerdict) {
  ResultEntry unchecked = row(3, true, true);
  unchecked.verified = std::nullopt;
  write(report(), {row(1, true, true), row(2, true, false), unchecked});
  RowLog log(world());
  log.begin(report(), options("finished"));
  RunReport resumed = report();
  const auto verdict = [&](int64_t tokens) {
    EXPECT_TRUE(log.has(key(tokens)));
    resumed.standing = log.standing();
    const Verdict judged = judge(resumed);
    return fmt::format("{} {}", name_of(judged.validity), fmt::join(judged.reasons, "; "));
  };
  EXPECT_EQ(verdict(1), "VALID ");
  EXPECT_EQ(verdict(2).substr(0, 54), "UNOFFICIAL 1 row that stays is UNOFFICIAL (noisy: CV 3");
  EXPECT_EQ(verdict(3).substr(0, 10), "UNVERIFIED");
  resumed.verification.check("x", 1).add(0, 0, [] { return ""; });
  EXPECT_EQ(judge(resumed).validity, Validity::unverified) << "others were checked";
  resumed.standing = {{"INVALID", {"verification failed"}}};
  EXPECT_EQ(judge(resumed).validity, Validity::invalid);
}

TEST_F(RowLogs, OtherProcessesBesideARunConcernItsRows) {
  RunReport busy = report();
  busy.start = "2026-01-31T12:00:00Z";
  busy.foreign_load = {"node01", 1.5, 2};
  ResultEntry unchecked = row(2, true, true);
  unchecked.verified = std::nullopt;
  write(report(), {row(3, true, true)});
  {
    RowLog log(world());
    log.begin(busy, options("none"));
    busy.results = {row(1, true, true), unchecked};
    log.end(busy);
  }
  const auto standing = [&](const char* mode) {
    RowLog log(world());
    log.begin(report(), options(mode));
    for (const int64_t tokens : {1, 2, 3}) log.has(key(tokens));
    return log.standing();
  };
  const std::vector<StandingRow> finished = standing("finished");
  ASSERT_EQ(finished.size(), 3U);
  EXPECT_EQ(finished[0].result, "UNOFFICIAL");
  EXPECT_EQ(finished[0].reasons, std::vector<std::string>{breach_text(busy.foreign_load)});
  EXPECT_EQ(finished[1].result, "UNVERIFIED") << "which is worse";
  EXPECT_EQ(finished[2].result, "VALID") << "of another run";
  EXPECT_EQ(standing("measured").size(), 1U);
}

TEST_F(RowLogs, NoisyRowsAreMeasuredAgainWhenThatIsWanted) {
  write(report(), {row(1, true, true), row(2, true, false)});
  RowLog log(world());
  log.begin(report(), options("measured"));
  EXPECT_TRUE(log.has(key(1)));
  EXPECT_FALSE(log.has(key(2)));
}

TEST_F(RowLogs, RowsOfAnotherSeedOfTheSoftwareGpuStand) {
  RunReport one = report(), other = report();
  one.libraries = {{"cuda", "software GPU (seed 1)"}};
  other.libraries = {{"cuda", "software GPU (seed 2)"}};
  write(one, {row(1, true, true)});
  RowLog log(world());
  log.begin(other, options("finished"));
  EXPECT_TRUE(log.has(key(1)));
}

TEST_F(RowLogs, RowsOfAnotherRunDoNotStand) {
  write(report(), {row(1, true, true)});
  for (const auto change : {+[](RunReport& r) { r.build.git_sha = "5e6f"; },
                            +[](RunReport& r) { r.build.flags = "-O1"; },
                            +[](RunReport& r) {
                              r.libraries = {{"mpi", "MPICH 4.1"}};
                            },
                            +[](RunReport& r) {
                              r.environment = {{"OMP_PROC_BIND", "false"}};
                            },
                            +[](RunReport& r) { r.configuration[0].second = int64_t{4}; },
                            +[](RunReport& r) { r.ranks[0].host = "node02"; },
                            +[](RunReport& r) {
                              r.inputs = {{"x.h5", "77"}};
                            }}) {
    RunReport other = report();
    change(other);
    RowLog log(world());
    log.begin(other, options("finished"));
    EXPECT_FALSE(log.has(key(1)));
  }
}

TEST_F(RowLogs, ALineThatWasCutOffIsDropped) {
  write(report(), {row(1, true, true), row(2, true, true)});
  const std::string whole = text();
  for (const size_t cut : {size_t{1}, size_t{40}, size_t{300}}) {
    put(whole.substr(0, whole.size() - cut));
    {
      RowLog log(world());
      log.begin(report(), options("finished"));
      EXPECT_TRUE(log.has(key(1)));
      EXPECT_FALSE(log.has(key(2))) << cut;
    }
    EXPECT_EQ(lines().size(), 3U) << "run, row, run";
  }
  put(R"({"schema":"gyre-re)");
  RowLog log(world());
  log.begin(report(), options("finished"));
  EXPECT_EQ(lines().size(), 1U);
}

TEST_F(RowLogs, FilesOfOtherKindsAreRefusedUnharmed) {
  const std::string line = R"({"schema": "gyre-result/1", "kind": )";
  for (const std::string& other :
       {std::string("notes\nof mine\n"), std::string("notes"), std::string("{\"a\": 1}\n"),
        std::string("\n"), std::string("{\"schema\": 1, \"kind\": \"row\"}\n"), line + "5}\n",
        line + R"("row", "run": 5})" + "\n"}) {
    put(other);
    RowLog log(world());
    const std::string message =
        test::usage_message([&] { log.begin(report(), options("finished")); });
    EXPECT_NE(message.find("line 1 is no line of gyre-result/1"), std::string::npos) << message;
    EXPECT_EQ(text(), other);
  }
}

TEST_F(RowLogs, OneRunAtATimeWrites) {
  RowLog first(world());
  first.begin(report(), options("none"));
  RowLog second(world());
  try {
    second.begin(report(), options("none"));
    ADD_FAILURE() << "two runs write one file";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::runtime);
    EXPECT_TRUE(std::string(error.what()).ends_with(": another run is writing it")) << error.what();
  }
}

TEST_F(RowLogs, ResumeNeedsAFileOfLines) {
  ReportOptions no_lines = options("finished");
  no_lines.json = "r.json";
  RowLog log(world());
  EXPECT_EQ(test::usage_message([&] { log.begin(report(), no_lines); }),
            "--resume finished needs -J FILE.jsonl, the file that has the rows");
}

TEST_F(RowLogs, FullDisksAreToldAndLeaveWholeLines) {
  write(report(), {row(1, true, true)});
  const std::string before = text();
  rlimit usual{};
  getrlimit(RLIMIT_FSIZE, &usual);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{before.size() + 10, usual.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  RowLog log(world());
  EXPECT_THROW(log.begin(report(), options("none")), Error);
  setrlimit(RLIMIT_FSIZE, &usual);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(text(), before);
}

TEST(ResultCsv, HasAllVariablesAndUnits) {
  RunReport report;
  report.program = "gyre-test";
  report.build.git_sha = "1a2b";
  report.start = "2026-01-31T12:00:00Z";
  report.ranks = {{0, "node01", "cpu"}};
  report.configuration = {{"heads", int64_t{8}}, {"tokens", int64_t{0}}};
  ResultEntry entry;
  entry.key = {{"tokens", int64_t{64}}};
  entry.add("rate", 0.5, "TF/s/rank");
  entry.add("of_peak", 50.0, "%");
  entry.add("err_over_tol", 0.25, "");
  entry.verified = true;
  report.results = {entry};
  EXPECT_EQ(
      csv_text(report),
      "app,git,start,host,ranks,heads,tokens,rate_tf_s_rank,of_peak_percent,err_over_tol,result\n"
      "gyre-test,1a2b,2026-01-31T12:00:00Z,node01,1,8,64,0.5,50,0.25,UNOFFICIAL\n");
}

}  // namespace GYRE_FILE
}  // namespace gyre

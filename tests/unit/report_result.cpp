#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "app_context.hpp"
#include "errors.hpp"
#include "mpi_test.hpp"
#include "report/at_least.hpp"
#include "report/options.hpp"
#include "report/result.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

std::string somewhere() {
  return "somewhere";
}

RunReport sample_report() {
  RunReport report;
  report.program = "gyre-attention";
  report.build = {"0.1.0", "1a2b3c4d", "clean", "Release", "GNU 12.2.0"};
  report.arguments = {"gyre-attention", "--cp", "2", "--note", "a b"};
  report.command_line = "gyre-attention --cp 2 --note 'a b'";
  report.start = "2026-01-31T12:00:00Z";
  report.launcher = "hydra";
  report.job = "none";
  report.ranks = {
      {0, "node01", "cpu"}, {1, "node01", "cpu"}, {2, "node02", "cpu"}, {3, "node01", "cpu"}};
  report.libraries = {{"mpi", "MPICH 4.0.2"}, {"hdf5", "1.10.8"}, {"cuda", "no"}, {"nccl", "no"}};
  report.environment = {{"OMP_NUM_THREADS", "1"}};
  report.memory = {12'600'000, 48'100'000, 61'200'000};
  report.configuration = {{"tokens", int64_t{131072}}, {"cp", int64_t{2}}, {"causal", true}};
  report.inputs = {{"some/folder/pack.h5", "9f2c"}};
  ResultEntry entry;
  entry.key = {{"schedule", "ring"}};
  entry.timing = {{{30, 31, 30, 32, 31, 30, 31}, {31, 30, 32, 31, 30, 31, 30}}, 0.99};
  entry.add("imbalance", 0.5, "");
  entry.add("rate", 2.5, "TF/s/rank");
  entry.verified = true;
  entry.flops = 1e9;
  report.results = {entry};
  report.foms = {{"tokens_per_s", 2654321, "1/s", {{"schedule", "ring"}, {"cp", int64_t{2}}}}};
  report.verification.check("attention", 1).add(1.25, 1, somewhere);
  return report;
}

TEST(Report, HeaderIdentifiesTheRun) {
  EXPECT_EQ(header_text(sample_report()),
            "# gyre-attention 0.1.0  git 1a2b3c4d (clean)  Release  GNU 12.2.0\n"
            "# mpi MPICH 4.0.2 | hdf5 1.10.8 | cuda no | nccl no\n"
            "# run 2026-01-31T12:00:00Z  4 ranks on 2 hosts  launcher hydra  job none  cmd: "
            "gyre-attention --cp 2 --note 'a b'\n"
            "# hosts node01: 0-1, 3 | node02: 2\n"
            "# env OMP_NUM_THREADS=1\n"
            "# config tokens=131072 cp=2 causal=true\n"
            "# input pack.h5 sha256 9f2c\n");
}

TEST(Report, OptionsOfTheCompilerAreNamed) {
  RunReport report = sample_report();
  report.build.flags = "-O1 -ffast-math";
  EXPECT_NE(header_text(report).find("  GNU 12.2.0  -O1 -ffast-math\n"), std::string::npos);
  EXPECT_NE(run_line(report, "id").find("\"flags\":\"-O1 -ffast-math\""), std::string::npos);
  EXPECT_FALSE(build_info().fast_math);
  report.build.fast_math = true;
  EXPECT_TRUE(footer_text(report).ends_with("RESULT UNOFFICIAL (fast-math build)\n"));
}

TEST(AtLeast, TakesFiguresThatTheProgramHas) {
  const std::vector<std::string> metrics = {"attention_rate", "average_attention_rate"};
  check_at_least("", metrics);
  check_at_least("attention_rate=0.5", metrics);
  test::expect_usage(
      "--at-least atention_rate=1: there is no figure atention_rate; nearest: attention_rate; "
      "there are: attention_rate, average_attention_rate",
      [&] { check_at_least("atention_rate=1", metrics); });
  test::expect_usage("--at-least x=1: there is no figure x; there are: none",
                     [] { check_at_least("x=1", {}); });
  EXPECT_THROW(check_at_least("attention_rate", metrics), Error);
}

TEST(AtLeast, ComparesTheFiguresOfTheRun) {
  const std::vector<Fom> foms = {{"rate", 2, "1/s", {}}};
  EXPECT_EQ(compare_at_least("rate=2", foms).code, ExitCode::ok);
  EXPECT_EQ(compare_at_least("rate=2.1", foms).code, ExitCode::verification_failed);
  EXPECT_EQ(compare_at_least("average_rate=1", foms).code, ExitCode::usage);
}

TEST(Report, ManyHostsAreCounted) {
  std::vector<RankInfo> ranks;
  for (int r = 0; r < 40; ++r) ranks.push_back({r, "n" + std::to_string(r / 4), "cpu"});
  EXPECT_EQ(hosts_text(ranks, 2), "hosts n0: 0-3 | n1: 4-7 | 8 more");
}

TEST(Report, FooterOfAValidResult) {
  EXPECT_EQ(footer_text(sample_report()),
            "FOM gyre-attention tokens_per_s 2.65432e+06 1/s schedule=ring cp=2\n"
            "VERIFY PASSED 1/1 max_err_over_tol=0.25\n"
            "RESULT VALID\n");
}

TEST(Report, MemoryThatIsNotPlannedIsNotNamed) {
  EXPECT_EQ(
      memory_text(sample_report().memory),
      "# memory of a rank: 12.6 MB planned, 61.2 MB of its process at most, 48.1 MB of these at "
      "the start\n");
  EXPECT_EQ(memory_text({0, 48'100'000, 61'200'000}),
            "# memory of a rank: 61.2 MB of its process at most, 48.1 MB of these at the start\n");
}

TEST(Report, AWrongResultHasNoFigureOfMerit) {
  RunReport report = sample_report();
  report.verification.check("attention", 1).add(nan, 1, [] { return "document 3 position 17"; });
  EXPECT_EQ(footer_text(report),
            "VERIFY FAILED 0/1 max_err_over_tol=inf\n"
            "VERIFY   attention: 1 of 2 values outside\n"
            "VERIFY     document 3 position 17: got nan, expected 1, error nan, tolerance 1\n"
            "RESULT INVALID (verification failed)\n");
  EXPECT_EQ(exit_code_of(judge(report)), ExitCode::verification_failed);
  EXPECT_TRUE(nlohmann::json::parse(json_text(report, "now")).at("fom").empty());
}

TEST(Report, UnofficialSaysWhy) {
  RunReport report = sample_report();
  report.build.git_state = "dirty";
  report.build.build_type = "Debug";
  report.verification = Verification(2);
  report.verification.check("attention", 0.5).add(1, 1, somewhere);
  report.unofficial_reasons = {"ranks share a GPU"};
  const Verdict verdict = judge(report);
  EXPECT_EQ(verdict.validity, Validity::unofficial);
  EXPECT_EQ(exit_code_of(verdict), ExitCode::ok);
  EXPECT_TRUE(footer_text(report).ends_with(
      "RESULT UNOFFICIAL (dirty tree; Debug build; tolerances times 2; ranks share a GPU)\n"));
}

TEST(Report, LongLinesAreContinued) {
  RunReport report = sample_report();
  report.configuration.clear();
  for (int i = 0; i < 20; ++i)
    report.configuration.emplace_back("number_" + std::to_string(i), std::string(i, 'x') + " y");
  report.unofficial_reasons = {std::string(60, 'a') + " b", std::string(60, 'c'), "d",
                               std::string(100, 'e') + ' ' + std::string(100, 'f')};
  std::istringstream lines(header_text(report) + footer_text(report));
  std::string config, result;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("# config ") && !line.starts_with("RESULT ")) continue;
    EXPECT_LT(line.size(), 120u) << line;
    EXPECT_NE(line.back(), ' ') << line;
    (line[0] == '#' ? config : result) += line.substr(line[0] == '#' ? 8 : 0) + "\n";
  }
  EXPECT_EQ(std::ranges::count(config, '"'), 40);
  EXPECT_EQ(std::ranges::count(config, '\n'), 5);
  EXPECT_EQ(result, "RESULT UNOFFICIAL (" + std::string(60, 'a') + " b;\nRESULT   " +
                        std::string(60, 'c') + "; d;\nRESULT   " + std::string(100, 'e') +
                        "\nRESULT   " + std::string(100, 'f') + ")\n");
}

TEST(Report, UncheckedIsUnverifiedAndATreeWithoutGitIsFine) {
  RunReport report = sample_report();
  report.build.git_state = "no git";
  EXPECT_EQ(judge(report).validity, Validity::valid);
  report.verification = Verification();
  EXPECT_TRUE(
      footer_text(report).ends_with("VERIFY SKIPPED\nRESULT UNVERIFIED (nothing checked)\n"));
}

TEST(Report, ACheckThatComparedNothingIsNamed) {
  RunReport report = sample_report();
  report.verification.check("survivors", 1);
  EXPECT_EQ(judge(report).reasons, std::vector<std::string>{"nothing was compared of survivors"});
  EXPECT_EQ(exit_code_of(judge(report)), ExitCode::verification_failed);
}

TEST(Report, AnswersThatWereNotComparedMakeItUnverified) {
  const std::vector<AnswerUse> uses{{"logprob"},
                                    {"d_logprob", "the run rounds d_value"},
                                    {"entropy", "--op logprob", false},
                                    {"d_entropy", "the run rounds d_value"}};
  EXPECT_EQ(answers_text("NumPy", uses),
            "# reference by NumPy: compared in full: logprob; not compared: d_logprob, d_entropy "
            "(the run rounds d_value), entropy (--op logprob)\n");
  EXPECT_EQ(answers_text("", {}), "# reference: compared in full: nothing\n");
  RunReport report = sample_report();
  report.unofficial_reasons = {"ranks share a GPU"};
  judge_answers(report, {{"entropy", "--op logprob", false}});
  EXPECT_EQ(judge(report).validity, Validity::unofficial) << "it was not asked for";
  judge_answers(report, uses);
  EXPECT_TRUE(footer_text(report).ends_with(
      "RESULT UNVERIFIED (answers not compared: d_logprob, d_entropy: the run rounds d_value; "
      "ranks share a GPU)\n"));
  EXPECT_EQ(exit_code_of(judge(report)), ExitCode::ok);
  report.verification.check("attention", 1).add(9, 1, somewhere);
  EXPECT_EQ(judge(report).validity, Validity::invalid);
}

TEST(Report, ChecksOfNoElementClaimNothing) {
  RunReport report = sample_report();
  report.build.git_state = "no git";
  report.nothing_to_verify = "no documents";
  EXPECT_EQ(judge(report).validity, Validity::unverified);
  EXPECT_EQ(judge(report).reasons.front(), "nothing to check: no documents");
  EXPECT_EQ(check_text(report, report.verification), "-");
  ResultEntry entry;
  entry.verified = true;
  EXPECT_EQ(judge_row(report, entry).validity, Validity::unverified);
  report.verification.check("attention", 1).add(9, 1, somewhere);
  EXPECT_EQ(judge(report).validity, Validity::invalid);
  EXPECT_EQ(check_text(report, report.verification), "FAILED");
}

TEST(Report, InvalidOutranksEverything) {
  RunReport report = sample_report();
  report.build.git_state = "dirty";
  report.verification.check("attention", 1).add(9, 1, somewhere);
  EXPECT_EQ(judge(report).validity, Validity::invalid);
}

TEST(Report, UnknownFiguresAreNotPrinted) {
  RunReport report = sample_report();
  report.foms[0].value = nan;
  EXPECT_TRUE(footer_text(report).starts_with("VERIFY"));
}

TEST(Report, AnImpossibleFigureMakesTheResultInvalid) {
  for (const double value : {-1.0, 1.5, std::numeric_limits<double>::infinity()}) {
    RunReport report = sample_report();
    report.foms.push_back({"needed_share", value, "of ring", {}, 1});
    EXPECT_EQ(judge(report).validity, Validity::invalid) << value;
    EXPECT_EQ(exit_code_of(judge(report)), ExitCode::verification_failed);
    EXPECT_TRUE(footer_text(report).starts_with("VERIFY")) << "a figure of a wrong result";
    EXPECT_NE(footer_text(report).find("needed_share is"), std::string::npos);
  }
}

TEST(ReportJson, RoundTrips) {
  const auto json = nlohmann::json::parse(json_text(sample_report(), "2026-01-31T12:00:09Z"));
  EXPECT_EQ(json.at("schema"), "gyre-result/1");
  EXPECT_EQ(json.at("suite").at("git"), "1a2b3c4d");
  EXPECT_EQ(json.at("build").at("type"), "Release");
  EXPECT_EQ(json.at("run").at("argv"), sample_report().arguments);
  EXPECT_EQ(json.at("run").at("end"), "2026-01-31T12:00:09Z");
  EXPECT_EQ(json.at("ranks")[2].at("host"), "node02");
  EXPECT_EQ(json.at("libraries").at("hdf5"), "1.10.8");
  EXPECT_EQ(json.at("environment").at("OMP_NUM_THREADS"), "1");
  EXPECT_EQ(json.at("configuration").at("tokens").get<int64_t>(), 131072);
  EXPECT_EQ(json.at("configuration").at("causal").get<bool>(), true);
  EXPECT_EQ(json.at("memory").at("planned_bytes").get<int64_t>(), 12'600'000);
  EXPECT_EQ(json.at("memory").at("peak_bytes").get<int64_t>(), 61'200'000);
  EXPECT_EQ(json.at("inputs")[0].at("file"), "pack.h5");
  const auto& result = json.at("results")[0];
  EXPECT_EQ(result.at("key").at("schedule"), "ring");
  EXPECT_EQ(result.at("samples_ms").get<Samples>(), sample_report().results[0].timing.samples_ms);
  // Of the slowest ranks 31 31 32 32 31 31 31; 7 samples: the interval is their range.
  EXPECT_EQ(result.at("statistics_ms").at("median").get<double>(), 31);
  EXPECT_EQ(result.at("statistics_ms").at("median_high").get<double>(), 32);
  EXPECT_EQ(result.at("status").at("measured"), true);
  EXPECT_EQ(result.at("units").at("rate"), "TF/s/rank");
  EXPECT_EQ(result.at("model").at("flops").get<double>(), 1e9);
  EXPECT_TRUE(result.at("model").at("bytes_wire").is_null());
  EXPECT_EQ(json.at("verification").at("passed").get<bool>(), true);
  EXPECT_EQ(json.at("verification").at("checks")[0].at("error_over_tolerance").get<double>(), 0.25);
  EXPECT_EQ(json.at("fom")[0].at("tags").at("cp").get<int>(), 2);
  EXPECT_EQ(json.at("status").at("result"), "VALID");
}

TEST(ReportJson, NumbersKeepAllTheirDigits) {
  RunReport report = sample_report();
  report.results[0].timing.samples_ms = {{1.0 / 3.0, nan, std::numeric_limits<double>::infinity()}};
  const auto json = nlohmann::json::parse(json_text(report, "now"));
  const auto& samples = json.at("results")[0].at("samples_ms")[0];
  EXPECT_EQ(samples[0].get<double>(), 1.0 / 3.0);
  EXPECT_TRUE(samples[1].is_null());
  EXPECT_TRUE(samples[2].is_null());
}

TEST(ReportJson, BytesThatAreNotUtf8DoNotStopTheReport) {
  RunReport report = sample_report();
  report.arguments.push_back("\xff\xfe");
  EXPECT_TRUE(nlohmann::json::accept(json_text(report, "now")));
}

TEST(ReportJson, FileIsWrittenWhole) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("gyre-report-" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::string path = folder / "result.json";
  Outputs outputs(test::world());
  outputs.add_text(path, json_text(sample_report(), utc_now()));
  EXPECT_FALSE(std::filesystem::exists(path));
  outputs.publish("");
  std::ifstream file(path);
  EXPECT_EQ(nlohmann::json::parse(file).at("status").at("result"), "VALID");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1) << "left-overs";
  std::filesystem::remove_all(folder);
}

TEST(ReportEnvironment, HoldsOnlyAllowedVariables) {
  setenv("UCX_TLS", "posix,self", 1);
  setenv("GYRE_TEST_SECRET", "hunter2", 1);
  const std::string text = to_text(allowed_environment());
  EXPECT_NE(text.find("UCX_TLS=posix,self"), std::string::npos);
  EXPECT_EQ(text.find("hunter2"), std::string::npos);
  unsetenv("UCX_TLS");
}

TEST(Report, KnowsItsOwnRun) {
  test::TestContext made;
  int heads = 8, tp = 1;
  const AddOptions add(made.options, "Problem");
  add("--heads", "", heads, 1);
  add("--tp", "", tp, 1);
  tp = 2;
  const RunReport report =
      begin_report(made.context, {{"cp", int64_t{1}}}, {{"hdf5", "1.10.8"}, {"nccl", "2.28"}});
  EXPECT_EQ(to_text(report.configuration), "cp=1 heads=8 tp=2");
  EXPECT_NE(header_text(report).find("\n# config cp=1 heads=8 tp=2\n"), std::string::npos)
      << header_text(report);
  EXPECT_EQ(std::ssize(report.ranks), test::world().size());
  EXPECT_EQ(report.launcher, "hydra");
  EXPECT_EQ(report.start.size(), std::string("2026-01-31T12:00:00Z").size());
  const std::string libraries = to_text(report.libraries);
  EXPECT_NE(libraries.find("hdf5=1.10.8"), std::string::npos);
  EXPECT_NE(libraries.find("nccl=2.28"), std::string::npos);
  EXPECT_EQ(libraries.find("nccl=no"), std::string::npos);
}

}  // namespace GYRE_FILE
}  // namespace gyre

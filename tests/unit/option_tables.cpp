// The tables of options of all programs that record results: every option says what tells its
// values apart in a result, and every file that one reads is safe from every output.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>

#include "apps/attention/options.hpp"
#include "apps/logprobs/options.hpp"
#include "apps/pack/options.hpp"
#include "apps/pipeline/options.hpp"
#include "apps/predict/options.hpp"
#include "apps/recurrence/options.hpp"
#include "apps/shard/options.hpp"
#include "errors.hpp"
#include "mpi_test.hpp"
#include "report/command_line.hpp"
#include "report/result.hpp"

namespace gyre {
namespace GYRE_FILE {

/// The declared options of a program, and their variables.
struct Declared {
  explicit Declared(const std::string& program) : table("", program) {}
  virtual ~Declared() = default;
  Declared(const Declared&) = delete;
  Declared& operator=(const Declared&) = delete;

  void parse(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"program"});
    arguments.insert(arguments.end(), needed.begin(), needed.end());
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    parse_command_line(table, static_cast<int>(argv.size()), argv.data());
  }

  OptionTable table;
  CommonOptions common;
  std::string machine;
  std::vector<std::string> needed;  ///< arguments that the program cannot do without
};

template <class Options>
struct DeclaredBy : Declared {
  explicit DeclaredBy(const std::string& program) : Declared(program) {
    table.parser().set_help_flag("");
    declare_options(table, options);
    declare_common(table, common);
    if (program == "gyre-predict")
      needed = {"--machine", "m"};
    else
      declare_machine_option(table, machine);
    if (program == "gyre-pipeline") needed = {"--model", "m"};
  }
  Options options;
};

using Make = std::unique_ptr<Declared> (*)(const std::string&);
template <class Options>
std::unique_ptr<Declared> make(const std::string& program) {
  return std::make_unique<DeclaredBy<Options>>(program);
}
const std::map<std::string, Make> programs = {
    {"gyre-attention", make<AttentionOptions>}, {"gyre-logprobs", make<LogprobsOptions>},
    {"gyre-pack", make<PackOptions>},           {"gyre-pipeline", make<PipelineOptions>},
    {"gyre-predict", make<PredictOptions>},     {"gyre-recurrence", make<RecurrenceOptions>},
    {"gyre-shard", make<ShardOptions>}};

/// The program after it has read these arguments; null if it refuses them.
std::unique_ptr<Declared> parsed(const std::string& program, const std::vector<std::string>& args) {
  auto declared = programs.at(program)(program);
  if (!declared->needed.empty() && declared->needed.front() == args.front())
    declared->needed.clear();
  try {
    declared->parse(args);
  } catch (const Error&) {
    return nullptr;
  }
  return declared;
}

TEST(OptionTables, HaveEveryOption) {
  for (const auto& [program, declare] : programs) {
    const auto declared = declare(program);
    std::set<std::string> known = {"--help", "--version"}, names;
    for (const Option& option : declared->table.all()) {
      EXPECT_TRUE(known.insert(option.flag).second) << program << ' ' << option.flag;
      EXPECT_TRUE(names.insert(option.name).second) << program << ' ' << option.name;
      EXPECT_TRUE(!option.writes || option.told_by == ToldBy::nothing) << option.flag;
    }
    for (const CLI::Option* option : declared->table.parser().get_options())
      EXPECT_TRUE(known.contains("--" + option->get_lnames().front())) << option->get_name();
  }
}

/// The message of the error by which a program refuses these arguments; "" if it takes them.
std::string refusal(const std::string& program, const std::vector<std::string>& arguments) {
  const auto declared = programs.at(program)(program);
  try {
    declared->parse(arguments);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// An option that makes inputs up is not ignored beside a file of inputs. Every option of a problem
// is in_problem_file(), or goes with a file, or with lengths, which the programs check.
TEST(OptionTables, WhatAFileSaysIsRefusedBesideIt) {
  const std::set<std::string> others = {"--tokens", "--min",    "--max",      "--factor",
                                        "--step",   "--cycles", "--batch",    "--sequences",
                                        "--gen",    "--dtype",  "--capacity", "--shards",
                                        "--hidden", "--op",     "--method",   "--input"};
  int refused = 0;
  for (const char* program : {"gyre-attention", "gyre-logprobs", "gyre-recurrence"}) {
    const auto declared = programs.at(program)(program);
    for (const Option& option : declared->table.all()) {
      const std::string group = declared->table.parser().get_option(option.flag)->get_group();
      if (group != "Problem" || others.contains(option.flag)) continue;
      bool is_tried = false;
      EXPECT_TRUE(option.is_in_problem_file)
          << program << ' ' << option.flag << ": does a file say it?";
      std::vector<std::string> texts = {"true", "3", "0.5"};
      texts.insert(texts.end(), option.choices.begin(), option.choices.end());
      for (const std::string& text : texts) {
        const std::string given = option.flag + "=" + text;
        const auto alone = parsed(program, {given});
        if (!alone || !alone->table.at(option.flag).is_given()) continue;
        EXPECT_NE(refusal(program, {given, "--input=f.h5"})
                      .find(option.flag + " is that of the file of --input: leave it out"),
                  std::string::npos)
            << program << ' ' << given;
        ++refused;
        is_tried = true;
        break;
      }
      EXPECT_TRUE(is_tried) << program << ' ' << option.flag;
    }
  }
  EXPECT_GE(refused, 30);
}

/// The identity of a run with this configuration.
std::string identity(const Fields& configuration) {
  RunReport report;
  report.program = "program";
  report.configuration = configuration;
  return identity_of(run_line(report, "id"));
}

/// Facts that a program could derive: one of each name of an option, always the same.
Fields facts_of(const OptionTable& table) {
  Fields facts;
  for (const Option& option : table.all()) facts.emplace_back(option.name, "a fact");
  return facts;
}

TEST(OptionTables, RunsThatDifferInOneOptionDifferInIdentity) {
  const std::vector<std::string> texts = {"true", "false", "1",   "2",    "3",
                                          "4",    "0.25",  "0.5", "text", "another"};
  int64_t compared = 0;
  for (const auto& [program, declare] : programs) {
    const auto declared_once = declare(program);
    for (const Option& option : declared_once->table.all()) {
      if (option.told_by != ToldBy::configuration) continue;
      std::map<std::string, Value> without_facts, with_facts;  // by identity
      std::vector<std::string> arguments = {"--timeout=1"};    // the option is left out
      for (const std::string& text : option.choices.empty() ? texts : option.choices)
        arguments.push_back(option.flag + "=" + text);
      for (const std::string& argument : arguments) {
        const auto declared = parsed(program, {argument});
        if (!declared) continue;
        const OptionTable& table = declared->table;
        const Value value = table.at(option.flag).value();
        for (const auto& [identities, facts] :
             {std::pair(&without_facts, Fields()), {&with_facts, facts_of(table)}}) {
          const auto [same, added] =
              identities->emplace(identity(table.configuration(facts)), value);
          EXPECT_TRUE(added || same->second == value)
              << program << ' ' << option.flag << ": " << to_text(same->second) << " and "
              << to_text(value) << " are recorded alike";
        }
      }
      EXPECT_GE(without_facts.size(), 2U) << program << ' ' << option.flag;
      EXPECT_GE(with_facts.size(), 2U) << program << ' ' << option.flag;
      ++compared;
    }
  }
  EXPECT_GT(compared, 100);
}

/// Flags of a program's options that results tell apart by `by`, but those of files that it writes.
std::string flags_told_by(const std::string& program, ToldBy by) {
  const auto declared = programs.at(program)(program);
  std::string flags;
  for (const Option& option : declared->table.all())
    if (option.told_by == by && !option.writes) flags += option.flag.substr(2) + " ";
  return flags;
}

// Options that no configuration records are exceptions, each with its reason: rows have them in
// their key, or they leave results as they are.
TEST(OptionTables, ExceptionsAreKnown) {
  const std::string report = "resume columns at-least ",
                    run = "config timeout progress verbose quiet ",
                    sweep = "tokens min max factor step cycles ";
  struct Known {
    std::string key, nothing;
  };
  const std::map<std::string, Known> known = {
      {"gyre-attention",
       {sweep + "schedule layout pass ",
        "explain tflops gbps latency-us " + report + run + "machine "}},
      {"gyre-logprobs", {sweep + "op method pass ", "list " + report + run + "machine "}},
      {"gyre-pack",
       {"algorithm ",
        "unpack attention fused-flag device gradient-probe unpacked forward-only "
        "linear-attention " +
            report + run + "machine "}},
      {"gyre-pipeline", {"dp cp tp ", "top " + report + "dry-run " + run + "machine "}},
      {"gyre-predict",
       {sweep + "cp schedule state-schedule recurrent-layout layout pass ", report + run}},
      {"gyre-recurrence",
       {sweep + "kind schedule layout pass ",
        "explain tflops gbps latency-us " + report + run + "machine "}},
      {"gyre-shard", {"layout ", "bin " + report + run + "machine "}}};
  for (const auto& [program, declare] : programs) {
    EXPECT_EQ(flags_told_by(program, ToldBy::key), known.at(program).key) << program;
    EXPECT_EQ(flags_told_by(program, ToldBy::nothing), known.at(program).nothing) << program;
  }
}

TEST(OptionTables, RangesEndWhereTheDeclarationSays) {
  const auto takes = [](const std::string& program, const std::string& flag, const char* text) {
    return parsed(program, {flag + "=" + text}) != nullptr;
  };
  struct Limits {
    std::string program, flag;
    std::vector<const char*> taken, refused;
  };
  for (const auto& [program, flag, taken, refused] : std::vector<Limits>{
           {"gyre-attention", "--heads", {"1", "4096"}, {"0", "4097"}},
           {"gyre-attention", "--tokens", {"1", "1G"}, {"0", "2G"}},
           {"gyre-attention", "--tol-scale", {"1e-9", "1e300"}, {"0", "-1", "inf", "nan"}},
           {"gyre-attention", "--factor", {"1.001"}, {"1", "0.5"}},
           {"gyre-attention", "--latency-us", {"0"}, {"-1"}},
           {"gyre-logprobs", "--max-seconds", {"1e-3"}, {"0", "-1"}},
           {"gyre-logprobs", "--temperature", {"1e-15", "1e30"}, {"0", "1e31"}},
           {"gyre-logprobs", "--top-p", {"1e-9", "1"}, {"0", "1.5"}},
           {"gyre-logprobs", "--min-p", {"0", "1"}, {"-0.5", "1.5"}},
           {"gyre-logprobs", "--zero-fraction", {"0", "1"}, {"-1", "2"}},
           {"gyre-logprobs", "--logit-scale", {"0", "1e6"}, {"-1", "2e6", "nan"}},
           {"gyre-pipeline", "--cp", {"0", "65536"}, {"-1", "65537"}},
           {"gyre-pipeline", "--check-seconds", {"0.1"}, {"0"}},
           {"gyre-pack", "--mtp", {"1", "16"}, {"0", "17"}},
           {"gyre-predict", "--head-dim", {"0", "1024"}, {"1025"}},
           {"gyre-shard", "--timeout", {"0"}, {"-1", "inf"}}}) {
    for (const char* text : taken) EXPECT_TRUE(takes(program, flag, text)) << flag << ' ' << text;
    for (const char* text : refused)
      EXPECT_FALSE(takes(program, flag, text)) << flag << ' ' << text;
  }
}

TEST(OptionTables, ConfigurationsHaveFactsAndOptions) {
  OptionTable table("", "program");
  int heads = 8, tp = 1, stripe = 1;
  std::string network, columns;
  const AddOptions add(table, "Problem");
  add("--kv-heads", "", heads, 1);
  add("--tp", "", tp, 1);
  add("--emulate-network", "", network).called("network").empty_is("none");
  add("--columns", "", columns).same_results();
  const Fields facts = {{"source", "a file"}, {"kv_heads", int64_t{4}}};
  EXPECT_EQ(to_text(table.configuration(facts)), "source=\"a file\" kv_heads=4 tp=1 network=none");
  EXPECT_EQ(table.not_shown(facts), (std::vector<std::string>{"network", "columns"}));
  heads = 2;
  network = "beta=5G";
  EXPECT_EQ(to_text(table.configuration(facts)),
            "source=\"a file\" kv_heads=2 tp=1 network=beta=5G");
  EXPECT_EQ(table.not_shown(facts), (std::vector<std::string>{"columns"}));
  const AddOptions advanced(table, "Advanced");
  advanced("--stripe", "", stripe, 1);
  EXPECT_EQ(table.not_shown({}), (std::vector<std::string>{"columns", "stripe"}));
  stripe = 2;
  EXPECT_EQ(table.not_shown({}), std::vector<std::string>{"columns"});
  EXPECT_THROW((void)table.at("--nonsense"), std::logic_error);
}

/// A folder with a file of two names.
class Files : public testing::Test {
 protected:
  Files() {
    std::filesystem::create_directory(folder_);
    std::ofstream(file()) << "";
    std::filesystem::create_symlink(file(), link());
  }
  ~Files() override { std::filesystem::remove_all(folder_); }
  std::string file() const { return folder_ / "file.toml"; }
  std::string link() const { return folder_ / "link.toml"; }

 private:
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("gyre-tables-" + std::to_string(getpid()));
};

TEST_F(Files, NoOutputIsAnInput) {
  int64_t pairs = 0;
  for (const auto& [program, declare] : programs) {
    const auto declared = declare(program);
    for (const Option& input : declared->table.all()) {
      if (!input.reads) continue;
      const std::string value = input.flag == "--gen" ? "dist=list,file=" + file() : file();
      for (const Option& output : declared->table.all())
        for (const std::string& path : {file(), link()}) {
          if (!output.writes) continue;
          const auto both = parsed(program, {input.flag, value, output.flag, path});
          ASSERT_TRUE(both) << program << ' ' << input.flag << ' ' << output.flag;
          const std::string refusal =
              test::usage_message([&] { check_output_places(both->table.files()); });
          EXPECT_NE(refusal.find(input.flag), std::string::npos) << output.flag << ": " << refusal;
          ++pairs;
        }
    }
  }
  EXPECT_GT(pairs, 100);
}

TEST_F(Files, InputsAreWhatTellsResultsApart) {
  const auto attention = parsed("gyre-attention", {"--gen", "dist=list,file=" + file(), "--config",
                                                   file(), "--emulate-compute", link()});
  ASSERT_TRUE(attention);
  EXPECT_EQ(attention->table.inputs(), (std::vector<std::string>{file(), link()}));
  const auto rate = parsed("gyre-attention", {"--emulate-compute", "tflops=1"});
  EXPECT_TRUE(rate->table.inputs().empty());
}

}  // namespace GYRE_FILE
}  // namespace gyre

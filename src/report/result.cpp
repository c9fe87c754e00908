#include "report/result.hpp"

#include <fmt/ranges.h>

#include <cmath>
#include <cstdlib>
#include <ctime>
#include <initializer_list>
#include <map>
#include <numeric>
#include <utility>

#include "comm/agree.hpp"
#include "comm/cuda_device.hpp"
#include "comm/nccl_version.hpp"
#include "io/trust/sha256.hpp"
#include "report/at_least.hpp"
#include "report/progress.hpp"
#include "runtime/process.hpp"
#include "runtime/process_memory.hpp"

namespace gyre {
namespace {

constexpr const char* allowed_variables[] = {
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_DYNAMIC",
    "OMP_SCHEDULE",
    "OMP_THREAD_LIMIT",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "KMP_AFFINITY",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "HWLOC_COMPONENTS",
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "UCX_MEM_EVENTS",
    "UCX_RNDV_THRESH",
    "FI_PROVIDER",
    "MPIR_CVAR_CH4_SHM",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
    "NCCL_GRAPH_REGISTER",
    "NCCL_WIN_ENABLE",
    "NCCL_COMM_BLOCKING",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string first_set(std::initializer_list<std::pair<const char*, const char*>> labelled) {
  for (const auto& [label, name] : labelled)
    if (const std::string value = variable(name); !value.empty())
      return fmt::format("{} {}", label, value);
  return "none";
}

std::string launcher() {
  if (!variable("OMPI_COMM_WORLD_SIZE").empty()) return "openmpi";
  if (!variable("MPI_LOCALNRANKS").empty()) return "hydra";
  if (!variable("SLURM_STEP_ID").empty()) return "srun";
  if (!variable("PMI_SIZE").empty()) return "pmi";
  return "none";
}

bool built_with_sanitizer() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

std::string file_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

/// Hosts in order of their first rank, each with its ranks.
std::vector<std::pair<std::string, std::vector<int>>> ranks_by_host(
    const std::vector<RankInfo>& ranks) {
  std::vector<std::pair<std::string, std::vector<int>>> hosts;
  std::map<std::string, size_t> index;
  for (const RankInfo& rank : ranks) {
    const auto [entry, is_new] = index.emplace(rank.host, hosts.size());
    if (is_new) hosts.push_back({rank.host, {}});
    hosts[entry->second].second.push_back(rank.rank);
  }
  return hosts;
}

std::string fom_line(const std::string& program, const Fom& fom) {
  const std::string tags = to_text(fom.tags);
  return fmt::format("FOM {} {} {:.6g} {}{}{}\n", program, fom.metric, fom.value, fom.unit,
                     tags.empty() ? "" : " ", tags);
}

/// Collects reasons and the worst of their verdicts.
struct Judgement {
  Verdict verdict = {};
  void apply(Validity validity, std::string reason) {
    verdict.validity = std::max(verdict.validity, validity);
    verdict.reasons.push_back(std::move(reason));
  }
  /// A result without any check, or with nothing to check, is unverified.
  Verdict of(bool checked, const std::string& nothing) {
    if ((!checked || !nothing.empty()) && verdict.validity != Validity::invalid) {
      verdict.reasons.insert(
          verdict.reasons.begin(),
          nothing.empty() ? "nothing checked" : fmt::format("nothing to check: {}", nothing));
      verdict.validity = Validity::unverified;
    }
    return std::move(verdict);
  }
};

/// Judges the checks that failed. Some fail because they compared nothing.
void judge_checks(const Verification& checks, Judgement& judgement) {
  if (checks.empty() || checks.passed()) return;
  const auto compared_nothing = [](const Check& check) { return check.count() == 0; };
  const auto failed = [](const Check& check) { return check.count() > 0 && !check.passed(); };
  const auto nothing = std::ranges::find_if(checks.checks(), compared_nothing);
  if (std::ranges::any_of(checks.checks(), failed))
    judgement.apply(Validity::invalid, "verification failed");
  if (nothing != checks.checks().end())
    judgement.apply(Validity::invalid, "nothing was compared of " + nothing->name());
}

/// Counts the kept rows of earlier runs by verdict; each count has the reasons of its first row.
void judge_standing(const RunReport& report, Judgement& judgement) {
  for (const Validity validity : {Validity::unofficial, Validity::unverified, Validity::invalid}) {
    const auto is_so = [&](const StandingRow& row) { return row.result == name_of(validity); };
    const auto first = std::ranges::find_if(report.standing, is_so);
    if (first == report.standing.end()) continue;
    const auto rows = std::ranges::count_if(report.standing, is_so);
    judgement.apply(validity, fmt::format("{} that {} {} {} ({})", count_text(rows, "row"),
                                          rows == 1 ? "stays" : "stay", rows == 1 ? "is" : "are",
                                          first->result, fmt::join(first->reasons, ", ")));
  }
}

/// Applies the reasons that concern the whole run and are known at its start.
void judge_setting(const RunReport& report, Judgement& judgement) {
  if (report.build.git_state == "dirty") judgement.apply(Validity::unofficial, "dirty tree");
  if (report.build.build_type != "Release" && report.build.build_type != "RelWithDebInfo")
    judgement.apply(Validity::unofficial, fmt::format("{} build", report.build.build_type));
  if (report.build.fast_math) judgement.apply(Validity::unofficial, "fast-math build");
  if (const double scale = report.verification.tolerance_scale(); scale != 1)
    judgement.apply(Validity::unofficial, fmt::format("tolerances times {:g}", scale));
  for (const std::string& reason : report.unofficial_reasons)
    judgement.apply(Validity::unofficial, reason);
}

}  // namespace

std::string_view name_of(Validity validity) {
  switch (validity) {
    case Validity::valid:
      return "VALID";
    case Validity::unverified:
      return "UNVERIFIED";
    case Validity::unofficial:
      return "UNOFFICIAL";
    case Validity::invalid:
      return "INVALID";
  }
  return "?";
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc)};
}

Fields allowed_environment() {
  Fields fields;
  for (const char* name : allowed_variables)
    if (const char* value = std::getenv(name)) fields.emplace_back(name, std::string(value));
  return fields;
}

RunReport begin_report(const AppContext& context, const Fields& facts, const Fields& libraries) {
  RunReport report;
  report.program = context.info.name;
  report.build = build_info();
  report.arguments = context.arguments;
  report.command_line = context.command_line;
  report.start = utc_now();
  report.launcher = launcher();
  report.job = first_set({{"slurm", "SLURM_JOB_ID"}, {"pbs", "PBS_JOBID"}, {"lsf", "LSB_JOBID"}});
  for (const PeerProcess& peer : context.mpi.peers())
    report.ranks.push_back({peer.world_rank, peer.host, "cpu"});
  report.machine = describe_machine(context);
  report.libraries = {{"mpi", MpiEnvironment::library_version()},
                      {"cuda", cuda_version()},
                      {"nccl", nccl_version()}};
  for (const auto& library : libraries) {
    const auto same = [&](const auto& field) { return field.first == library.first; };
    const auto known = std::find_if(report.libraries.begin(), report.libraries.end(), same);
    if (known != report.libraries.end())
      *known = library;
    else
      report.libraries.push_back(library);
  }
  report.environment = allowed_environment();
  report.configuration = context.options.configuration(facts);
  report.not_shown = context.options.not_shown(facts);
  for (const std::string& path : context.options.inputs())
    report.inputs.push_back({path, sha256_of_file(context.world, path)});
  report.memory.start = process_memory().now_bytes;
  if (built_with_sanitizer()) report.unofficial_reasons.push_back("sanitizer");
  return report;
}

const std::string& checksum_of(const RunReport& report, const std::string& path) {
  static const std::string none;
  const auto input = std::ranges::find(report.inputs, path, &InputInfo::path);
  return input == report.inputs.end() ? none : input->sha256;
}

void ResultEntry::add(const std::string& name, const Value& value, const std::string& unit) {
  measurements.emplace_back(name, value);
  if (!unit.empty()) units.emplace_back(name, unit);
}

std::string check_text(const RunReport& report, const Verification& checks) {
  if (checks.empty() || (checks.passed() && !report.nothing_to_verify.empty())) return "-";
  return checks.passed() ? "ok" : "FAILED";
}

Verdict judge(const RunReport& report) {
  Judgement judgement;
  const Verification& checks = report.verification;
  judge_checks(checks, judgement);
  for (const std::string& reason : report.unverified_reasons)
    judgement.apply(Validity::unverified, reason);
  for (const Fom& fom : report.foms)
    if (fom.value < 0 || fom.value > fom.most)
      judgement.apply(Validity::invalid,
                      fmt::format("{} is {}, not 0 to {}", fom.metric, fom.value, fom.most));
  judge_setting(report, judgement);
  std::vector<const Timing*> timed;
  for (const ResultEntry& entry : report.results)
    if (!entry.timing.samples_ms.empty()) timed.push_back(&entry.timing);
  for (std::string& reason : breaches_text(timed))
    judgement.apply(Validity::unofficial, std::move(reason));
  if (std::string reason = breach_text(report.foreign_load); !timed.empty() && !reason.empty())
    judgement.apply(Validity::unofficial, std::move(reason));
  judge_standing(report, judgement);
  return judgement.of(!checks.empty() || !report.standing.empty(), report.nothing_to_verify);
}

Verdict judge_row(const RunReport& report, const ResultEntry& entry) {
  Judgement judgement;
  if (entry.verified == false) judgement.apply(Validity::invalid, "verification failed");
  judge_setting(report, judgement);
  for (const Breach& breach : breaches_of(entry.timing))
    judgement.apply(Validity::unofficial, text_of(breach));
  return judgement.of(entry.verified.has_value(), report.nothing_to_verify);
}

ExitCode exit_code_of(const Verdict& verdict) {
  return verdict.validity == Validity::invalid ? ExitCode::verification_failed : ExitCode::ok;
}

std::string hosts_text(const std::vector<RankInfo>& ranks, size_t most) {
  const auto hosts = ranks_by_host(ranks);
  std::string text = "hosts ";
  for (size_t i = 0; i < std::min(most, hosts.size()); ++i)
    text += fmt::format("{}{}: {}", i == 0 ? "" : " | ", hosts[i].first,
                        fmt::join(ranges_text(hosts[i].second), ", "));
  if (hosts.size() > most) text += fmt::format(" | {} more", hosts.size() - most);
  return text;
}

std::string devices_text(const std::vector<RankInfo>& ranks, size_t most) {
  const auto on_cpu = [](const RankInfo& rank) { return rank.device == "cpu"; };
  if (std::all_of(ranks.begin(), ranks.end(), on_cpu)) return "";
  std::map<int, const RankInfo*> by_rank;
  for (const RankInfo& rank : ranks) by_rank[rank.rank] = &rank;
  const auto hosts = ranks_by_host(ranks);
  std::string text = "devices (rank:device) ";
  for (size_t i = 0; i < std::min(most, hosts.size()); ++i) {
    text += fmt::format("{}{}:", i == 0 ? "" : " | ", hosts[i].first);
    std::string model;  // printed once for consecutive ranks with the same model
    for (const int rank : hosts[i].second) {
      const std::string& device = by_rank[rank]->device;
      const size_t blank = std::min(device.find(' '), device.size());
      if (!model.empty() && device.substr(blank) != model) text += std::exchange(model, "");
      model = device.substr(blank);
      text += fmt::format(" {}:{}", rank, device.substr(0, blank));
    }
    text += model;
  }
  if (hosts.size() > most) text += fmt::format(" | {} more", hosts.size() - most);
  return text;
}

std::string header_text(const RunReport& report) {
  const BuildInfo& build = report.build;
  std::string text = fmt::format("# {} {}  git {} ({})  {}  {}{}{}\n", report.program,
                                 build.version, build.git_sha, build.git_state, build.build_type,
                                 build.compiler, build.flags.empty() ? "" : "  ", build.flags);
  std::vector<std::string> libraries;
  for (const auto& [name, value] : report.libraries)
    libraries.push_back(fmt::format("{} {}", name, to_text(value)));
  text += fmt::format("# {}\n", fmt::join(libraries, " | "));
  text += fmt::format("# run {}  {} on {}  launcher {}  job {}  cmd: {}\n", report.start,
                      count_text(std::ssize(report.ranks), "rank"),
                      count_text(std::ssize(ranks_by_host(report.ranks)), "host"), report.launcher,
                      report.job, report.command_line);
  text += fmt::format("# {}\n", hosts_text(report.ranks));
  if (const std::string devices = devices_text(report.ranks); !devices.empty())
    text += fmt::format("# {}\n", devices);
  text += machine_text(report.machine);
  if (!report.environment.empty()) text += fmt::format("# env {}\n", to_text(report.environment));
  Fields shown = report.configuration;
  std::erase_if(shown, [&](const auto& field) {
    return std::ranges::count(report.not_shown, field.first) > 0;
  });
  text += wrapped("# config ", "# config ", texts_of(shown), " ");
  for (const InputInfo& input : report.inputs)
    text += fmt::format("# input {} sha256 {}\n", file_name(input.path),
                        input.sha256.empty() ? "not computed" : input.sha256);
  return text;
}

std::string memory_text(const MemoryReport& memory) {
  const auto text = [](int64_t bytes) { return si_text(bytes, "B"); };
  return fmt::format("# memory of a rank: {}{} of its process at most, {} of these at the start\n",
                     memory.planned == 0 ? "" : text(memory.planned) + " planned, ",
                     text(memory.peak), text(memory.start));
}

void start_run(AppContext& context, RunReport& report, const ReportOptions& options, int64_t rows) {
  run_agreed(context.world, "--at-least", [&] {
    check_at_least(options.at_least, options.metrics);
    if (!options.at_least.empty() && options.resume != "none")
      throw_usage(
          "--at-least compares the figures of this run, and --resume leaves rows out: "
          "leave out one of the two");
  });
  if (!context.quiet) context.outputs.print(header_text(report));
  context.rows.begin(report, options);
  context.progress.expect(rows);
  report.load_at_start = host_load();
}

std::string shown_columns(const AppContext& context, const ReportOptions& options) {
  return context.verbose && options.columns == "default" ? "all" : options.columns;
}

void finish_row(AppContext& context, RunReport& report, ResultEntry entry) {
  report.results.push_back(std::move(entry));
  context.rows.write(report);
  context.progress.rows_done(std::ssize(report.results) + context.rows.skipped());
}

void add_average(std::vector<Fom>& figures, const std::string& metric, const std::string& unit,
                 std::vector<double> values) {
  std::erase_if(values, [](double value) { return std::isnan(value); });
  if (values.size() < 2) return;
  const double count = values.size();
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  figures.push_back({"average_" + metric, mean, unit, {{"rows", std::ssize(values)}}});
}

ExitCode finish_run(AppContext& context, RunReport& report, const ReportOptions& options,
                    const std::function<std::string()>& make) {
  context.progress.stop();
  std::vector<std::string> hosts;
  for (const RankInfo& rank : report.ranks) hosts.push_back(rank.host);
  report.foreign_load = foreign_load(context.world, hosts, report.load_at_start, host_load());
  report.memory.peak = process_memory().peak_bytes;
  for (int64_t* bytes : {&report.memory.planned, &report.memory.start, &report.memory.peak})
    *bytes = all_reduce_value(context.world, *bytes, ReduceOp::max);
  report.standing = context.rows.standing();
  if (check_text(report, report.verification) == "-")
    report.verification = Verification(report.verification.tolerance_scale());
  ExitCode code = exit_code_of(judge(report));
  std::vector<std::string> invalid;
  if (agree_on(context.world, code) != ExitCode::ok) invalid = context.outputs.name_as_invalid();
  AtLeast compared;
  if (code == ExitCode::ok) compared = compare_at_least(options.at_least, report.foms);
  if (code == ExitCode::ok) code = compared.code;
  std::string text;
  run_on_root(context.world, "report", [&] {
    text = make();
    if (!options.csv.empty()) context.outputs.add_text(options.csv, csv_text(report));
    if (!options.json.empty() && !options.in_lines())
      context.outputs.add_text(options.json, json_text(report, utc_now()));
    if (context.verbose) text += memory_text(report.memory);
    if (context.rows.skipped() > 0)
      text += fmt::format("# {} of {} stay and were not measured again\n",
                          count_text(context.rows.skipped(), "row"), options.json);
    for (const std::string& path : invalid)
      text += fmt::format("# results that did not pass are in {}\n", path);
    text += compared.text + footer_text(report, context.verbose ? Check::max_deviations : 1);
    if (compared.code == ExitCode::usage)  // the options do not tell that there is no such figure
      write_diagnostic(fmt::format("{}: error: {}", report.program, compared.text.substr(2)));
  });
  context.rows.end(report);
  context.outputs.publish(text);
  return code;
}

std::string footer_text(const RunReport& report, size_t most) {
  const Verdict verdict = judge(report);
  std::string text;
  if (verdict.validity != Validity::invalid)
    for (const Fom& fom : report.foms)
      if (std::isfinite(fom.value)) text += fom_line(report.program, fom);
  text += report.verification.text(most);
  const std::string result = fmt::format("RESULT {}", name_of(verdict.validity));
  if (verdict.reasons.empty()) return text + result + "\n";
  std::vector<std::string> reasons = verdict.reasons;
  reasons.front().insert(0, "(");
  reasons.back() += ')';
  return text + wrapped(result + " ", "RESULT   ", reasons, "; ");
}

}  // namespace gyre

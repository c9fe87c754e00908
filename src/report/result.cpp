#include "report/result.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <utility>

#include "comm/agree.hpp"
#include "comm/cuda_device.hpp"
#include "comm/nccl_version.hpp"

namespace gyre {
namespace {

constexpr const char* allowed_variables[] = {
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
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
  if (!variable("HYDI_CONTROL_FD").empty()) return "hydra";
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
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now));
}

Fields allowed_environment() {
  Fields fields;
  for (const char* name : allowed_variables)
    if (const char* value = std::getenv(name)) fields.emplace_back(name, std::string(value));
  return fields;
}

RunReport begin_report(const AppContext& context, Fields configuration, const Fields& libraries) {
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
  report.configuration = std::move(configuration);
  if (built_with_sanitizer()) report.unofficial_reasons.push_back("sanitizer");
  return report;
}

Verdict judge(const RunReport& report) {
  Verdict verdict;
  const auto apply = [&](Validity validity, std::string reason) {
    verdict.validity = std::max(verdict.validity, validity);
    verdict.reasons.push_back(std::move(reason));
  };
  const Verification& checks = report.verification;
  if (!checks.empty() && !checks.passed()) apply(Validity::invalid, "verification failed");
  for (const Fom& fom : report.foms)
    if (fom.value < 0 || fom.value > fom.most)
      apply(Validity::invalid,
            fmt::format("{} is {}, not 0 to {}", fom.metric, fom.value, fom.most));
  if (report.build.git_state == "dirty") apply(Validity::unofficial, "dirty tree");
  if (report.build.build_type != "Release" && report.build.build_type != "RelWithDebInfo")
    apply(Validity::unofficial, fmt::format("{} build", report.build.build_type));
  if (checks.tolerance_scale() != 1)
    apply(Validity::unofficial, fmt::format("tolerances times {:g}", checks.tolerance_scale()));
  for (const std::string& reason : report.unofficial_reasons) apply(Validity::unofficial, reason);
  if (checks.empty() && verdict.validity != Validity::invalid) {
    verdict.reasons.insert(verdict.reasons.begin(), "nothing checked");
    verdict.validity = Validity::unverified;
  }
  return verdict;
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
  std::string text = fmt::format("# {} {}  git {} ({})  {}  {}\n", report.program, build.version,
                                 build.git_sha, build.git_state, build.build_type, build.compiler);
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
  if (!report.environment.empty()) text += fmt::format("# env {}\n", to_text(report.environment));
  text += fmt::format("# config {}\n", to_text(report.configuration));
  for (const InputInfo& input : report.inputs)
    text += fmt::format("# input {} sha256 {}\n", file_name(input.path),
                        input.sha256.empty() ? "not computed" : input.sha256);
  return text;
}

ExitCode finish_run(AppContext& context, const RunReport& report,
                    const std::function<RunTexts()>& make) {
  const ExitCode code = exit_code_of(judge(report));
  std::string text;
  run_on_root(context.world, "report", [&] {
    const RunTexts texts = make();
    context.outputs.add_text(texts.csv_path, texts.csv);
    if (!texts.json_path.empty())
      context.outputs.add_text(texts.json_path, json_text(report, utc_now()));
    text = texts.text + footer_text(report);
  });
  if (agree_on(context.world, code) != ExitCode::ok) context.outputs.discard_files();
  context.outputs.publish(text);
  return code;
}

std::string footer_text(const RunReport& report) {
  const Verdict verdict = judge(report);
  std::string text;
  if (verdict.validity != Validity::invalid)
    for (const Fom& fom : report.foms)
      if (std::isfinite(fom.value)) text += fom_line(report.program, fom);
  text += report.verification.text();
  text += fmt::format("RESULT {}", name_of(verdict.validity));
  if (!verdict.reasons.empty()) text += fmt::format(" ({})", fmt::join(verdict.reasons, "; "));
  return text + "\n";
}

}  // namespace gyre

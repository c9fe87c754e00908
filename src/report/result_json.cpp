// The JSON document gyre-result/1. The order of fields is fixed, so that diff can compare two
// files.

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/json.hpp"
#include "report/result.hpp"
#include "supervision/output_guard.hpp"

namespace gyre {
namespace {

Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json to_json(const Value& value) {
  if (const double* real = std::get_if<double>(&value)) return number(*real);
  return std::visit([](const auto& v) { return Json(v); }, value);
}

Json to_json(const Fields& fields) {
  Json object = Json::object();
  for (const auto& [name, value] : fields) object[name] = to_json(value);
  return object;
}

Json to_json(const Statistics& s) {
  return {{"count", s.count},
          {"median", number(s.median)},
          {"median_low", number(s.median_low)},
          {"median_high", number(s.median_high)},
          {"min", number(s.min)},
          {"p95", number(s.p95)},
          {"mean", number(s.mean)},
          {"cv", number(s.cv)}};
}

Json to_json(const Samples& samples) {
  Json ranks = Json::array();
  for (const std::vector<double>& rank : samples) {
    Json list = Json::array();
    for (const double sample : rank) list.push_back(number(sample));
    ranks.push_back(std::move(list));
  }
  return ranks;
}

Json to_json(const Verdict& verdict) {
  return {{"result", name_of(verdict.validity)}, {"reasons", verdict.reasons}};
}

/// A row, as in the document and in a "row" line.
Json row_json(const RunReport& report, const ResultEntry& entry) {
  Json status = to_json(judge_row(report, entry));
  status["measured"] = breaches_of(entry.timing).empty();
  return {{"key", to_json(entry.key)},
          {"samples_ms", to_json(entry.timing.samples_ms)},
          {"statistics_ms", to_json(entry.timing.statistics())},
          {"cpu_share", number(entry.timing.cpu_share)},
          {"measurements", to_json(entry.measurements)},
          {"units", to_json(entry.units)},
          {"model", {{"flops", number(entry.flops)}, {"bytes_wire", number(entry.bytes_wire)}}},
          {"status", std::move(status)}};
}

Json to_json(const Check& check) {
  Json all = Json::array();
  for (const Deviation& d : check.deviations())
    all.push_back({{"where", d.where},
                   {"got", d.compared ? number(d.got) : Json(nullptr)},
                   {"expected", d.compared ? number(d.expected) : Json(nullptr)},
                   {"tolerance", number(check.tolerance() * d.scale)}});
  return all;
}

Json to_json(const Verification& verification) {
  Json checks = Json::array();
  for (const Check& c : verification.checks())
    checks.push_back({{"name", c.name()},
                      {"passed", c.passed()},
                      {"fault", c.fault()},
                      {"count", c.count()},
                      {"outside", c.outside()},
                      {"max_error", number(c.max_error())},
                      {"tolerance", number(c.tolerance())},
                      {"error_over_tolerance", number(c.error_over_tolerance())},
                      {"where", c.where()},
                      {"sampled_tokens", c.sampled()},
                      {"of_tokens", c.sampled_of()},
                      {"worst", to_json(c)}});
  return {{"passed", verification.empty() ? Json(nullptr) : Json(verification.passed())},
          {"tolerance_scale", number(verification.tolerance_scale())},
          {"checks", std::move(checks)}};
}

Json run_json(const RunReport& report) {
  return {{"argv", report.arguments},
          {"start", report.start},
          {"launcher", report.launcher},
          {"job", report.job}};
}

Json suite_json(const RunReport& report) {
  return {{"name", "gyre"},
          {"program", report.program},
          {"version", report.build.version},
          {"git", report.build.git_sha},
          {"git_state", report.build.git_state}};
}

Json build_json(const RunReport& report) {
  return {{"type", report.build.build_type},
          {"compiler", report.build.compiler},
          {"flags", report.build.flags}};
}

Json to_json(const ForeignLoad& load) {
  return {{"host", load.host}, {"cores", number(load.cores)}, {"of_cores", load.of_cores}};
}

Json to_json(const MemoryReport& memory) {
  return {{"planned_bytes", memory.planned == 0 ? Json(nullptr) : Json(memory.planned)},
          {"start_bytes", memory.start},
          {"peak_bytes", memory.peak}};
}

Json ranks_json(const RunReport& report) {
  Json ranks = Json::array();
  for (const RankInfo& rank : report.ranks) {
    Json& entry =
        ranks.emplace_back(Json{{"rank", rank.rank}, {"host", rank.host}, {"device", rank.device}});
    if (!rank.device_uuid.empty()) entry["device_uuid"] = rank.device_uuid;
    add_placement(entry, report.machine, rank.rank);
  }
  return ranks;
}

Json inputs_json(const RunReport& report) {
  Json inputs = Json::array();
  for (const InputInfo& input : report.inputs) {
    Json sha256 = input.sha256.empty() ? Json(nullptr) : Json(input.sha256);
    inputs.push_back(
        {{"file", input.path.substr(input.path.rfind('/') + 1)}, {"sha256", std::move(sha256)}});
  }
  return inputs;
}

Json foms_json(const RunReport& report) {
  Json foms = Json::array();
  for (const Fom& fom : report.foms)
    foms.push_back({{"metric", fom.metric},
                    {"value", number(fom.value)},
                    {"unit", fom.unit},
                    {"tags", to_json(fom.tags)}});
  return foms;
}

/// Adds the fields that are known before the first row.
void add_run(Json& json, const RunReport& report) {
  json["suite"] = suite_json(report);
  json["build"] = build_json(report);
  json["run"] = run_json(report);
  json["ranks"] = ranks_json(report);
  json["machine"] = machine_json(report.machine);
  json["libraries"] = to_json(report.libraries);
  json["environment"] = to_json(report.environment);
  json["configuration"] = to_json(report.configuration);
  json["inputs"] = inputs_json(report);
}

/// Adds the fields that are known after the last row.
void add_end(Json& json, const RunReport& report) {
  const Verdict verdict = judge(report);
  json["memory"] = to_json(report.memory);
  json["foreign_load"] = to_json(report.foreign_load);
  json["verification"] = to_json(report.verification);
  json["fom"] = verdict.validity == Validity::invalid ? Json::array() : foms_json(report);
  json["status"] = to_json(verdict);
}

Json line_of(const char* kind) {
  return {{"schema", "gyre-result/1"}, {"kind", kind}};
}

}  // namespace

std::string json_text(const RunReport& report, const std::string& end) {
  Json document = {{"schema", "gyre-result/1"}};
  add_run(document, report);
  document["run"]["end"] = end;
  document["results"] = Json::array();
  for (const ResultEntry& entry : report.results)
    document["results"].push_back(row_json(report, entry));
  add_end(document, report);
  return dump_json(document, 2) + "\n";
}

std::string run_line(const RunReport& report, const std::string& run) {
  Json json = line_of("run");
  json["id"] = run;
  add_run(json, report);
  return dump_json(json);
}

std::string row_line(const RunReport& report, const ResultEntry& entry, const std::string& run) {
  Json json = line_of("row");
  json["run"] = run;
  json["time"] = utc_now();
  json.update(row_json(report, entry));
  return dump_json(json);
}

std::string end_line(const RunReport& report, const std::string& run) {
  Json json = line_of("end");
  json["run"] = run;
  json["end"] = utc_now();
  add_end(json, report);
  return dump_json(json);
}

std::string identity_of(const std::string& run_line) {
  const Json line = parse_json("a run", run_line, "JSON");
  Json same;
  for (const char* part : {"suite", "build", "libraries", "environment", "configuration", "inputs"})
    same[part] = line.value(part, Json());
  if (same["libraries"].contains("cuda")) {  // the software GPU draws a seed for each run
    const std::string cuda = same["libraries"]["cuda"];
    same["libraries"]["cuda"] = cuda.substr(0, cuda.find(" (seed "));
  }
  for (const Json& rank : line.value("ranks", Json::array()))
    same["ranks"].push_back({rank.value("host", ""), rank.value("device", "")});
  return dump_json(same);
}

std::string key_text(const Fields& key) {
  return dump_json(to_json(key));
}

}  // namespace gyre

// The JSON document gyre-result/1. The order of fields is fixed, so that diff can compare two
// files.

#include <cmath>
#include <nlohmann/json.hpp>

#include "report/result.hpp"
#include "runtime/output_guard.hpp"

namespace gyre {
namespace {

using Json = nlohmann::ordered_json;

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
  return {{"count", s.count},     {"median", number(s.median)}, {"min", number(s.min)},
          {"p95", number(s.p95)}, {"mean", number(s.mean)},     {"cv", number(s.cv)}};
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

Json to_json(const ResultEntry& entry) {
  return {{"key", to_json(entry.key)},
          {"samples_ms", to_json(entry.samples_ms)},
          {"statistics_ms", to_json(summarize(slowest_rank(entry.samples_ms)))},
          {"measurements", to_json(entry.measurements)},
          {"model", {{"flops", number(entry.flops)}, {"bytes_wire", number(entry.bytes_wire)}}}};
}

Json to_json(const Verification& verification) {
  Json checks = Json::array();
  for (const Check& c : verification.checks())
    checks.push_back({{"name", c.name()},
                      {"passed", c.passed()},
                      {"count", c.count()},
                      {"outside", c.outside()},
                      {"max_error", number(c.max_error())},
                      {"tolerance", number(c.tolerance())},
                      {"error_over_tolerance", number(c.error_over_tolerance())},
                      {"where", c.where()}});
  return {{"passed", verification.empty() ? Json(nullptr) : Json(verification.passed())},
          {"tolerance_scale", number(verification.tolerance_scale())},
          {"checks", std::move(checks)}};
}

Json run_json(const RunReport& report, const std::string& end) {
  return {{"argv", report.arguments},
          {"start", report.start},
          {"end", end},
          {"launcher", report.launcher},
          {"job", report.job}};
}

Json ranks_json(const RunReport& report) {
  Json ranks = Json::array();
  for (const RankInfo& rank : report.ranks) {
    Json& entry =
        ranks.emplace_back(Json{{"rank", rank.rank}, {"host", rank.host}, {"device", rank.device}});
    if (!rank.device_uuid.empty()) entry["device_uuid"] = rank.device_uuid;
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

}  // namespace

std::string json_text(const RunReport& report, const std::string& end) {
  const Verdict verdict = judge(report);
  const BuildInfo& build = report.build;
  Json results = Json::array();
  for (const ResultEntry& entry : report.results) results.push_back(to_json(entry));
  const Json document = {
      {"schema", "gyre-result/1"},
      {"suite",
       {{"name", "gyre"},
        {"program", report.program},
        {"version", build.version},
        {"git", build.git_sha},
        {"git_state", build.git_state}}},
      {"build", {{"type", build.build_type}, {"compiler", build.compiler}}},
      {"run", run_json(report, end)},
      {"ranks", ranks_json(report)},
      {"libraries", to_json(report.libraries)},
      {"environment", to_json(report.environment)},
      {"configuration", to_json(report.configuration)},
      {"inputs", inputs_json(report)},
      {"results", std::move(results)},
      {"verification", to_json(report.verification)},
      {"fom", verdict.validity == Validity::invalid ? Json::array() : foms_json(report)},
      {"status", {{"result", name_of(verdict.validity)}, {"reasons", verdict.reasons}}}};
  // File names and arguments may hold any bytes; JSON requires UTF-8.
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace gyre

// Writes machine models (machine_file.hpp).

#include <nlohmann/json.hpp>

#include "predict/machine_file.hpp"

namespace gyre {
namespace {

template <class Value>
Json figure_json(const Value& value, const std::string& source) {
  return {{"value", value}, {"source", source}};
}

Json links_json(const MachineModel& machine, const std::string& source) {
  const auto figure = [&](const auto& value) { return figure_json(value, source); };
  Json links = Json::array();
  for (const LinkTier& tier : machine.links) {
    Json& link = links.emplace_back(Json{{"tier", tier.name}});
    if (tier.ranks > 0) link["ranks"] = tier.ranks;
    link["latency_s"] = figure(tier.latency_s);
    std::vector<double> sizes, rates;
    for (const auto& [bytes, rate] : tier.curve) {
      sizes.push_back(bytes);
      rates.push_back(rate);
    }
    if (!sizes.empty()) link["message_bytes"] = sizes;
    link["bytes_per_s"] = sizes.empty() ? figure(tier.bytes_per_s) : figure(rates);
    link["all_at_once"] = figure(tier.all_at_once);
    link["kernel_slowdown"] = figure(tier.kernel_slowdown);
  }
  return links;
}

Json kernels_json(const MachineModel& machine, const std::string& source) {
  const auto figure = [&](const auto& value) { return figure_json(value, source); };
  Json kernels = Json::array();
  for (const KernelSurface& s : machine.kernel.surfaces) {
    Json& kernel = kernels.emplace_back(
        Json{{"pass", name_of(s.pass)}, {"dtype", name_of(s.type)}, {"head_dim", s.head_dim}});
    kernel["launch_s"] = figure(s.launch_s);
    kernel["diagonal_s"] = figure(s.diagonal_s);
    if (s.merge_s > 0) kernel["merge_s"] = figure(s.merge_s);
    kernel["rows"] = s.rows;
    if (!s.keys.empty()) kernel["keys"] = s.keys;
    kernel["flops_per_s"] = figure(s.flops_per_s);
  }
  return kernels;
}

}  // namespace

Json model_json(const MachineModel& machine, const std::string& source) {
  const auto figure = [&](const auto& value) { return figure_json(value, source); };
  Json linears = Json::array(), all_reduces = Json::array();
  for (const LinearSurface& s : machine.decoder.linears) {
    Json& linear = linears.emplace_back(Json{{"dtype", name_of(s.type)}});
    linear["launch_s"] = figure(s.launch_s);
    linear["rows"] = s.rows;
    if (!s.keys.empty()) linear["columns"] = s.keys;
    linear["flops_per_s"] = figure(s.flops_per_s);
  }
  for (const CollectiveTimes& times : machine.decoder.all_reduces) {
    std::vector<double> sizes, seconds;
    for (const auto& [bytes, time] : times.points) {
      sizes.push_back(bytes);
      seconds.push_back(time);
    }
    all_reduces.push_back(
        {{"ranks", times.ranks}, {"message_bytes", sizes}, {"seconds", figure(seconds)}});
  }
  Json model = {{"name", machine.name}};
  if (machine.memory_bytes > 0) model["memory_bytes"] = figure(machine.memory_bytes);
  model["copy_bytes_per_s"] = figure(machine.copy_bytes_per_s);
  if (machine.kernel_bytes_per_s > 0)
    model["kernel_bytes_per_s"] = figure(machine.kernel_bytes_per_s);
  if (machine.order_margin > 0) model["order_margin"] = figure(machine.order_margin);
  for (const PredictionError& e : machine.errors)
    model["errors"].push_back({{"pass", name_of(e.pass)},
                               {"ranks", e.several_ranks ? "several" : "one"},
                               {"share", figure(e.share)}});
  model["links"] = links_json(machine, source);
  model["kernels"] = kernels_json(machine, source);
  for (const RecurrenceRate& r : machine.recurrence.rates) {
    Json& rate = model["recurrences"].emplace_back(
        Json{{"kind", r.kind}, {"pass", name_of(r.pass)}, {"dtype", name_of(r.type)}});
    rate["launch_s"] = figure(r.launch_s);
    rate["scan_s"] = figure(r.scan_s);
    rate["flops_per_s"] = figure(r.flops_per_s);
    if (r.summary_flops_per_s > 0) rate["summary_flops_per_s"] = figure(r.summary_flops_per_s);
  }
  if (linears.empty()) return model;
  model["linears"] = std::move(linears);
  model["elementwise_bytes_per_s"] = figure(machine.decoder.elementwise_bytes_per_s);
  model["logprob_bytes_per_s"] = figure(machine.decoder.logprob_bytes_per_s);
  model["logprob_row_s"] = figure(machine.decoder.logprob_row_s);
  if (!all_reduces.empty()) model["all_reduces"] = std::move(all_reduces);
  return model;
}

}  // namespace gyre

#include "apps/predict/frame.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <utility>

#include "attention/schedules/registry.hpp"
#include "core/error.hpp"
#include "io/sha256.hpp"

namespace gyre {

RunReport begin_predicting(AppContext& context, const PredictOptions& o,
                           const MachineModel& machine, const std::string& origin) {
  Fields configuration = {{"machine", machine.name},
                          {"links", fmt::format("{}", fmt::join(o.links, ","))},
                          {"source", origin}};
  const auto add = [&](const char* name, const Value& value) {
    configuration.emplace_back(name, value);
  };
  if (o.model.empty()) {
    add("heads", int64_t{o.heads});
    add("kv_heads", int64_t{o.kv_heads});
    add("head_dim", int64_t{o.head_dim});
    add("mask", o.mask.mask);
    add("window", o.mask.window);
    add("partial_out", o.partial_out);
    add("partial_dq", o.partial_dq);
    add("wire_dkv", o.wire_dkv);
  } else {
    add("model", std::filesystem::path(o.model).filename().string());
    add("capacity", o.capacity);
    add("dp", int64_t{o.dp});
  }
  add("dtype", o.dtype);
  add("tp", int64_t{o.tp});
  RunReport report = begin_report(context, configuration, {});
  report.unofficial_reasons.emplace_back("predicted, not measured");
  for (const std::string& path : {o.machine, o.model, o.input})
    if (!path.empty()) report.inputs.push_back({path, sha256_of_file(context.world, path)});
  return report;
}

void for_each_configuration(const PredictOptions& o, size_t sizes,
                            const std::function<void(int cp, size_t size, const Schedule& schedule,
                                                     const LayoutKind& layout)>& f) {
  for (const int cp : o.cps)
    for (size_t size = 0; size < sizes; ++size)
      for (const Schedule& schedule : schedules())
        for (const LayoutKind& layout : layout_kinds())
          if (o.schedule.wants(schedule.name) && o.layout.wants(layout.name))
            f(cp, size, schedule, layout);
}

int64_t rows_of(const PredictOptions& o, size_t sizes) {
  int64_t rows = 0;
  const int64_t passes = o.pass == "both" ? 2 : 1;
  for_each_configuration(o, sizes,
                         [&](int, size_t, const Schedule&, const LayoutKind&) { rows += passes; });
  return rows;
}

void Refusals::collect(const PredictOptions& o, int cp, const Schedule& schedule,
                       const LayoutKind& layout, const std::function<void()>& predict) {
  try {
    predict();
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage || !(o.schedule.all() || o.layout.all())) throw;
    all_.push_back(
        {schedule.name, fmt::format("cp {} under {}: {}", cp, layout.name, error.what())});
  }
}

std::string Refusals::text() const {
  std::string text;
  std::map<std::string, size_t> more;
  for (const Refusal& r : all_) ++more[r.schedule];
  for (const Refusal& r : all_) {
    const size_t count = std::exchange(more[r.schedule], 0);
    if (count == 0) continue;
    text += "# refused: " + r.reason;
    text += count > 1 ? fmt::format(" (and {} more of {})\n", count - 1, r.schedule) : "\n";
  }
  return text;
}

}  // namespace gyre

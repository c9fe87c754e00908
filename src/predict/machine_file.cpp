#include "predict/machine_file.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "core/error.hpp"
#include "core/nearest.hpp"
#include "machine/json.hpp"
#include "report/toml_file.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

/// "nearest: 'rack'", or all candidates if none is near.
std::string nearest_or(const char* all, const std::string& name,
                       const std::vector<std::string>& candidates) {
  const std::string near = nearest(name, candidates);
  if (near.empty()) return fmt::format("{} {}", all, fmt::join(candidates, ", "));
  return "nearest: '" + near + "'";
}

/// Limit of a figure of any machine: rates are at least `limit`, times at most. A number beyond it
/// mostly has a wrong unit; multiplied by `unit`, it is the intended one.
struct Plausible {
  std::string_view key;  ///< end of the figure's name
  bool is_rate;          ///< a list is judged by its largest rate, or by its shortest time
  double limit;
  const char* wanted;
  double unit;
};
constexpr Plausible plausible[] = {
    {"flops_per_s", true, 1e7, "FLOPs in a second, which any processor has more than 1e7 of", 1e12},
    {"bytes_per_s", true, 1e6, "bytes in a second, of which the slowest disk has more than 1e6",
     1e9},
    {"memory_bytes", true, 1e6, "bytes, 1e6 or more", 1e9},
    {"kernel_slowdown", false, 100, "seconds lost for each second of a transfer, at most 100", 0},
    {"_s", false, 1, "seconds, at most 1", 1e-6},
    {"share", false, 2, "a share of the predicted time, at most 2", 0.01},
    {"order_margin", false, 1, "a share of the time, at most 1", 0.01},
    {"seconds", false, 10, "seconds, at most 10", 1e-6},
};

/// An object of the file; every key is either read or refused.
class Object {
 public:
  Object(const std::string& file, const Json& json, std::string place,
         std::vector<std::string> keys)
      : file_(file), json_(json), place_(std::move(place)), keys_(std::move(keys)) {
    require(json.is_object(), place_, json, "an object");
    for (const auto& [key, value] : json.items()) {
      if (std::find(keys_.begin(), keys_.end(), key) != keys_.end()) continue;
      throw_usage("{}: {} has no '{}'; {}", file_, place_, key,
                  nearest_or("there are", key, keys_));
    }
  }

  bool has(const char* key) const { return json_.contains(key); }
  const Json& at(const char* key) const {
    if (!has(key)) throw_usage("{}: {} lacks '{}'", file_, place_, key);
    return json_[key];
  }
  std::string text(const char* key) const {
    require(at(key).is_string(), place_of(key), at(key), "a text");
    return at(key).get<std::string>();
  }
  int64_t whole(const char* key) const {
    const std::optional<int64_t> number = whole_number(at(key));
    require(number.has_value(), place_of(key), at(key), "a whole number");
    return *number;
  }
  /// Number with a source.
  double figure(const char* key) const {
    const double value = number(sourced(key), place_of(key));
    require_plausible(key, std::span(&value, 1));
    return value;
  }
  double figure_or(const char* key, double usual) const { return has(key) ? figure(key) : usual; }
  /// Numbers with a source: one number, a list, or a list of lists in row-major order.
  std::vector<double> figures(const char* key) const {
    std::vector<double> values;
    append(sourced(key), place_of(key), values);
    require_plausible(key, values);
    return values;
  }
  /// List without a source: the points at which something was measured.
  std::vector<double> points(const char* key) const {
    std::vector<double> values;
    if (has(key)) append(at(key), place_of(key), values);
    return values;
  }
  template <class Element>
  void each(const char* key, const Element& element) const {
    require(at(key).is_array(), place_of(key), at(key), "a list");
    for (size_t i = 0; i < at(key).size(); ++i)
      element(at(key)[i], fmt::format("{}[{}]", place_of(key), i));
  }
  const std::string& place() const { return place_; }
  std::string place_of(const char* key) const { return place_ + "." + key; }
  void require(bool good, const std::string& place, const Json& value, const char* wanted) const {
    if (!good) throw_usage("{}: {} is {}; wanted: {}", file_, place, shown_json(value), wanted);
  }

 private:
  /// Limits of figures; their products and quotients with the numbers of a problem stay finite.
  static constexpr double least = 1e-30, most = 1e30;

  /// The value of {value = ..., source = "..."}.
  const Json& sourced(const char* key) const {
    const Object figure(file_, at(key), place_of(key), {"value", "source"});
    if (figure.text("source").find_first_not_of(" \t\n") == std::string::npos)
      throw_usage("{}: {} has no source; wanted: where the number comes from", file_,
                  place_of(key));
    return figure.at("value");
  }
  /// Numbers that are not above 0 are left to check_machine().
  void require_plausible(const char* key, std::span<const double> values) const {
    const auto* rule = std::ranges::find_if(plausible, [&](const Plausible& entry) {
      return std::string_view(key).ends_with(entry.key);
    });
    if (rule == std::end(plausible) || values.empty()) return;
    const double value = rule->is_rate ? std::ranges::max(values) : std::ranges::min(values);
    if (value <= 0 || (rule->is_rate ? value >= rule->limit : value <= rule->limit)) return;
    const double in_thousands = rule->is_rate && value >= 1000 ? 1e-3 : 1;  // MB/s, not GB/s
    throw_usage("{}: {} is {}; wanted: {}{}", file_, place_of(key), value, rule->wanted,
                rule->unit == 0
                    ? ""
                    : fmt::format("; did you mean {:.4g}?", value * rule->unit * in_thousands));
  }
  double number(const Json& value, const std::string& place) const {
    require(value.is_number(), place, value, "a number");
    const double size = std::abs(value.get<double>());
    require(size == 0 || (size >= least && size <= most), place, value,
            "0, or a number from 1e-30 to 1e30");
    return value.get<double>();
  }
  void append(const Json& value, const std::string& place, std::vector<double>& values) const {
    if (!value.is_array()) return values.push_back(number(value, place));
    for (size_t i = 0; i < value.size(); ++i)
      append(value[i], fmt::format("{}[{}]", place, i), values);
  }

  const std::string& file_;
  const Json& json_;
  std::string place_;
  std::vector<std::string> keys_;
};

LinkTier tier_of(const Object& o) {
  LinkTier tier;
  tier.name = o.text("tier");
  static const std::vector<std::string> tiers = {"core", "socket", "node", "rack", "switch"};
  if (std::find(tiers.begin(), tiers.end(), tier.name) == tiers.end())
    throw_usage("{} is '{}'; {}", o.place_of("tier"), tier.name,
                nearest_or("wanted: one of", tier.name, tiers));
  if (o.has("ranks")) {
    const int64_t ranks = o.whole("ranks");
    o.require(ranks >= 1 && ranks <= max_ranks, o.place_of("ranks"), o.at("ranks"),
              "a number of ranks from 1 on, or no 'ranks' in the outermost tier");
    tier.ranks = static_cast<int>(ranks);
  }
  tier.latency_s = o.figure("latency_s");
  const std::vector<double> sizes = o.points("message_bytes"), rates = o.figures("bytes_per_s");
  if (sizes.empty() ? rates.size() != 1 : rates.size() != sizes.size())
    throw_usage("{}: {} rates for {} message_bytes", o.place_of("bytes_per_s"), rates.size(),
                sizes.size());
  tier.bytes_per_s = rates.back();
  for (size_t i = 0; i < sizes.size(); ++i) tier.curve.push_back({sizes[i], rates[i]});
  tier.all_at_once = o.figure_or("all_at_once", 1);
  tier.kernel_slowdown = o.figure_or("kernel_slowdown", 0);
  return tier;
}

DType type_of(const Object& o) {
  const std::string type = o.text("dtype");
  o.require(type == "f32" || type == "bf16", o.place_of("dtype"), o.at("dtype"), "f32 or bf16");
  return type == "f32" ? DType::f32 : DType::bf16;
}

Pass pass_of(const Object& o) {
  const std::string pass = o.text("pass");
  o.require(pass == "fwd" || pass == "bwd", o.place_of("pass"), o.at("pass"), "fwd or bwd");
  return pass == "fwd" ? Pass::forward : Pass::backward;
}

PredictionError error_of(const Object& o) {
  const std::string ranks = o.text("ranks");
  o.require(ranks == "one" || ranks == "several", o.place_of("ranks"), o.at("ranks"),
            "one or several");
  return {.pass = pass_of(o), .several_ranks = ranks == "several", .share = o.figure("share")};
}

KernelSurface surface_of(const Object& o) {
  KernelSurface surface;
  surface.pass = pass_of(o);
  surface.type = type_of(o);
  const int64_t head_dim = o.whole("head_dim");
  o.require(head_dim >= 1 && head_dim <= 1024, o.place_of("head_dim"), o.at("head_dim"),
            "a number from 1 to 1024");
  surface.head_dim = static_cast<int>(head_dim);
  surface.launch_s = o.figure_or("launch_s", 0);
  surface.diagonal_s = o.figure_or("diagonal_s", 0);
  surface.merge_s = o.figure_or("merge_s", 0);
  surface.rows = o.points("rows");
  surface.keys = o.points("keys");
  surface.flops_per_s = o.figures("flops_per_s");
  return surface;
}

RecurrenceRate recurrence_of(const Object& o) {
  RecurrenceRate rate;
  rate.kind = o.text("kind");
  std::vector<std::string> kinds;
  for (const RecurrenceKind& kind : recurrence_kinds()) kinds.push_back(kind.name);
  if (std::ranges::find(kinds, rate.kind) == kinds.end())
    throw_usage("{} is '{}'; {}", o.place_of("kind"), rate.kind,
                nearest_or("wanted: one of", rate.kind, kinds));
  rate.pass = pass_of(o);
  rate.type = type_of(o);
  rate.launch_s = o.figure_or("launch_s", 0);
  rate.scan_s = o.figure_or("scan_s", 0);
  rate.flops_per_s = o.figure("flops_per_s");
  rate.summary_flops_per_s = o.figure_or("summary_flops_per_s", 0);
  return rate;
}

LinearSurface linear_of(const Object& o) {
  LinearSurface linear;
  linear.type = type_of(o);
  linear.launch_s = o.figure_or("launch_s", 0);
  linear.rows = o.points("rows");
  linear.keys = o.points("columns");
  linear.flops_per_s = o.figures("flops_per_s");
  return linear;
}

CollectiveTimes collective_of(const Object& o) {
  CollectiveTimes times;
  const int64_t ranks = o.whole("ranks");
  o.require(ranks >= 2 && ranks <= max_ranks, o.place_of("ranks"), o.at("ranks"),
            "a number of ranks from 2 on");
  times.ranks = static_cast<int>(ranks);
  const std::vector<double> sizes = o.points("message_bytes"), seconds = o.figures("seconds");
  if (sizes.empty() || sizes.size() != seconds.size())
    throw_usage("{}: {} times for {} message_bytes", o.place_of("seconds"), seconds.size(),
                sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) times.points.push_back({sizes[i], seconds[i]});
  return times;
}

/// Throws a usage error if `name` is the same for two elements of a list of the model.
template <class T, class Name>
void require_distinct(const char* list, const std::vector<T>& all, const Name& name) {
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (name(all[i]) == name(all[j]))
        throw_usage("model.{}[{}] and [{}] are both {}", list, j, i, name(all[i]));
}

void require_distinct(const MachineModel& machine) {
  require_distinct("links", machine.links,
                   [](const LinkTier& tier) { return "the tier " + tier.name; });
  require_distinct("kernels", machine.kernel.surfaces, [](const KernelSurface& s) {
    return fmt::format("{} {} of head_dim {}", name_of(s.type), name_of(s.pass), s.head_dim);
  });
  require_distinct("recurrences", machine.recurrence.rates, [](const RecurrenceRate& r) {
    return fmt::format("{} {} {}", r.kind, name_of(r.type), name_of(r.pass));
  });
  require_distinct("errors", machine.errors, [](const PredictionError& e) {
    return fmt::format("{} of {}", name_of(e.pass), e.several_ranks ? "several ranks" : "one rank");
  });
  require_distinct("linears", machine.decoder.linears,
                   [](const LinearSurface& s) { return fmt::format("of {}", name_of(s.type)); });
  require_distinct("all_reduces", machine.decoder.all_reduces, [](const CollectiveTimes& times) {
    return fmt::format("of {} ranks", times.ranks);
  });
}

/// Reads the rates of a decoder; absent ones default to the copy rate.
DecoderModel decoder_of(const std::string& path, const Object& o, double copy_bytes_per_s) {
  DecoderModel decoder;
  if (o.has("linears"))
    o.each("linears", [&](const Json& json, const std::string& place) {
      decoder.linears.push_back(linear_of(
          {path, json, place, {"dtype", "launch_s", "rows", "columns", "flops_per_s", "library"}}));
    });
  if (o.has("all_reduces"))
    o.each("all_reduces", [&](const Json& json, const std::string& place) {
      decoder.all_reduces.push_back(
          collective_of({path, json, place, {"ranks", "message_bytes", "seconds", "library"}}));
    });
  decoder.elementwise_bytes_per_s = o.figure_or("elementwise_bytes_per_s", copy_bytes_per_s);
  decoder.logprob_bytes_per_s = o.figure_or("logprob_bytes_per_s", copy_bytes_per_s);
  decoder.logprob_row_s = o.figure_or("logprob_row_s", 0);
  return decoder;
}

MachineModel model_of(const std::string& path, const Json& document) {
  if (!document.is_object() || !document.contains("schema") || document["schema"] != machine_schema)
    throw_usage("{}: no {}: 'schema' says {}", path, machine_schema,
                document.is_object() && document.contains("schema") ? shown_json(document["schema"])
                                                                    : "nothing");
  if (!document.contains("model"))
    throw_usage("{}: it has no 'model', which predictions need; gyre-info --model measures one",
                path);
  const Object o(path, document["model"], "model",
                 {"name", "rank", "memory_bytes", "copy_bytes_per_s", "kernel_bytes_per_s", "links",
                  "kernels", "recurrences", "linears", "elementwise_bytes_per_s",
                  "logprob_bytes_per_s", "logprob_row_s", "all_reduces", "errors", "order_margin"});
  MachineModel machine;
  machine.name = o.text("name");
  if (o.has("rank")) o.text("rank");
  machine.memory_bytes = o.figure_or("memory_bytes", 0);
  machine.copy_bytes_per_s = o.figure("copy_bytes_per_s");
  machine.kernel_bytes_per_s = o.figure_or("kernel_bytes_per_s", 0);
  machine.order_margin = o.figure_or("order_margin", 0);
  if (o.has("errors"))
    o.each("errors", [&](const Json& json, const std::string& place) {
      machine.errors.push_back(error_of({path, json, place, {"pass", "ranks", "share"}}));
    });
  o.each("links", [&](const Json& json, const std::string& place) {
    machine.links.push_back(tier_of({path,
                                     json,
                                     place,
                                     {"tier", "ranks", "latency_s", "bytes_per_s", "message_bytes",
                                      "all_at_once", "kernel_slowdown"}}));
  });
  o.each("kernels", [&](const Json& json, const std::string& place) {
    machine.kernel.surfaces.push_back(
        surface_of({path,
                    json,
                    place,
                    {"pass", "dtype", "head_dim", "launch_s", "diagonal_s", "merge_s", "rows",
                     "keys", "flops_per_s", "library"}}));
  });
  if (o.has("recurrences"))
    o.each("recurrences", [&](const Json& json, const std::string& place) {
      machine.recurrence.rates.push_back(
          recurrence_of({path,
                         json,
                         place,
                         {"kind", "pass", "dtype", "launch_s", "scan_s", "flops_per_s",
                          "summary_flops_per_s", "library"}}));
    });
  machine.decoder = decoder_of(path, o, machine.copy_bytes_per_s);
  o.require(!machine.links.empty() && machine.links.size() <= max_tiers, "model.links",
            document["model"]["links"], "1 to 8 tiers");
  o.require(!machine.kernel.surfaces.empty(), "model.kernels", document["model"]["kernels"],
            "a kernel or more");
  require_distinct(machine);
  return machine;
}

}  // namespace

MachineModel parse_machine_model(const std::string& path, const std::string& text) {
  MachineModel machine;
  const Json document = parse_json(path, path.ends_with(".toml") ? toml_as_json(path, text) : text,
                                   fmt::format("{} in JSON or, by its name, TOML", machine_schema));
  try {
    machine = model_of(path, document);
    check_machine(machine);
  } catch (const Error& error) {
    const std::string what = error.what();
    if (what.starts_with(path + ": ")) throw;
    throw_usage("{}: {}", path, what);
  }
  return machine;
}

}  // namespace gyre

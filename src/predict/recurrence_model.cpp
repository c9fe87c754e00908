#include "predict/recurrence_model.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.hpp"

namespace gyre {
namespace {

std::string text_of(const std::string& kind, Pass pass, DType type) {
  return fmt::format("{} {} of {}", kind, name_of(pass), name_of(type));
}

const RecurrenceRate* found(const RecurrenceModel& model, const std::string& kind, Pass pass,
                            DType type) {
  const auto rate = std::ranges::find_if(model.rates, [&](const RecurrenceRate& r) {
    return r.kind == kind && r.pass == pass && r.type == type;
  });
  return rate == model.rates.end() ? nullptr : &*rate;
}

}  // namespace

double RecurrenceRate::seconds(const ChunkedWork& work, bool summary) const {
  const double launch = work.scanned > 0 ? launch_s : 0;
  return launch + scan_s * static_cast<double>(work.scanned) +
         work.flops / (summary && summary_flops_per_s > 0 ? summary_flops_per_s : flops_per_s);
}

std::string RecurrenceModel::why_not(const std::string& kind, Pass pass, DType type) const {
  if (found(*this, kind, pass, type) != nullptr) return "";
  if (rates.empty()) return "the machine has no 'recurrences', which recurrent layers need";
  std::vector<std::string> names;
  for (const RecurrenceRate& r : rates) names.push_back(text_of(r.kind, r.pass, r.type));
  return fmt::format("no recurrence {}; the machine has {}", text_of(kind, pass, type),
                     fmt::join(names, ", "));
}

const RecurrenceRate& RecurrenceModel::of(const std::string& kind, Pass pass, DType type) const {
  if (const std::string why = why_not(kind, pass, type); !why.empty()) throw_usage("{}", why);
  return *found(*this, kind, pass, type);
}

}  // namespace gyre

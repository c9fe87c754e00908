#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "apps/predict/run.hpp"

namespace gyre {
namespace {

template <class Bytes>
double megabytes(Bytes bytes) {
  return static_cast<double>(bytes) / 1e6;
}

}  // namespace

Table<PredictedRow> predicted_table(const MachineModel& machine) {
  using Row = PredictedRow;
  std::vector<Column<Row>> columns = {
      {"schedule", "", 18, 0, [](const Row& r) { return r.schedule; }, Align::left},
      {"layout", "", 15, 0, [](const Row& r) { return r.layout; }, Align::left},
      {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.prediction.pass)); },
       Align::left},
      {"cp", "", 4, 0, [](const Row& r) { return int64_t{r.cp}; }},
      {"tokens", "", 7, 0, [](const Row& r) { return r.tokens; }},
      {"time", "ms", 8, 3, [](const Row& r) { return 1e3 * r.prediction.seconds; }},
      Column<Row>{"rate", "TF/s/rank", 8, 4, [](const Row& r) { return r.tflops_per_rank(); }}
          .with_prefix(),
      {"exposed", "%", 7, 1, [](const Row& r) { return 100 * r.exposed(); }},
      Column<Row>{"imbal", "%", 6, 1, [](const Row& r) { return 100 * r.imbalance(); }}.extra(),
      {"memory", "GB/rank", 7, 2, [](const Row& r) { return r.memory_bytes() / 1e9; }},
      {"bound", "", 9, 0, [](const Row& r) { return r.bound(); }, Align::left},
      {"surface", "", 7, 0, [](const Row& r) { return r.surface(); }, Align::left},
      Column<Row>{"extrapolated", "%", 12, 1,
                  [](const Row& r) { return 100 * r.prediction.extrapolated; }}
          .extra(),
      Column<Row>{"sent", "MB/rank", 9, 3,
                  [](const Row& r) { return megabytes(r.prediction.bytes_most); }}
          .extra(),
      Column<Row>{"msgs", "", 5, 0, [](const Row& r) { return r.prediction.messages_most; }}
          .extra(),
      Column<Row>{"kernel", "ms", 9, 3, [](const Row& r) { return 1e3 * r.prediction.kernel_mean; }}
          .extra(),
      Column<Row>{"copies", "ms", 9, 3, [](const Row& r) { return 1e3 * r.prediction.copies_most; }}
          .extra(),
      Column<Row>{"buffers", "MB/rank", 8, 2,
                  [](const Row& r) { return megabytes(r.prediction.transient_bytes); }}
          .extra(),
  };
  columns.push_back(
      Column<Row>{"library", "", 10, 0, [](const Row& r) { return r.algorithms(); }, Align::left}
          .extra());
  for (size_t tier = 0; tier < machine.links.size(); ++tier)
    columns.push_back(Column<Row>{
        "sent_" + machine.links[tier].name, "MB", 11, 3, [tier](const Row& r) {
          return megabytes(r.prediction.bytes_by_tier[tier]);
        }}.extra());
  return Table<Row>(std::move(columns));
}

std::vector<Winner> winners_of(const std::vector<PredictedRow>& rows) {
  struct Total {
    std::string schedule, layout;
    double seconds = 0, flops = 0, kernel = 0;
    bool fits = true;
  };
  std::vector<std::pair<int, int64_t>> sizes;
  std::map<std::pair<int, int64_t>, std::vector<Total>> of;
  for (const PredictedRow& row : rows) {
    const std::pair<int, int64_t> size{row.cp, row.tokens};
    std::vector<Total>& totals = of[size];
    if (totals.empty()) sizes.push_back(size);
    if (totals.empty() || totals.back().schedule != row.schedule ||
        totals.back().layout != row.layout)
      totals.push_back({row.schedule, row.layout, 0, 0, 0, true});
    Total& total = totals.back();
    total.seconds += row.prediction.seconds;
    total.kernel += row.prediction.kernel_mean;
    total.flops += row.flops;
    total.fits = total.fits && row.fits();
  }
  std::vector<Winner> winners;
  for (const auto& size : sizes) {
    std::vector<Total>& totals = of[size];
    std::erase_if(totals, [](const Total& t) { return !t.fits; });
    std::ranges::stable_sort(totals, {}, &Total::seconds);
    if (totals.empty()) continue;
    const Total& best = totals.front();
    Winner winner;
    winner.cp = size.first;
    winner.tokens = size.second;
    winner.schedule = best.schedule;
    winner.layout = best.layout;
    winner.seconds = best.seconds;
    winner.tflops_per_rank = best.flops / best.seconds / size.first / 1e12;
    winner.efficiency = best.kernel / best.seconds;
    const auto other =
        std::ranges::find_if(totals, [&](const Total& t) { return t.schedule != best.schedule; });
    if (other != totals.end()) {
      winner.second = other->schedule;
      winner.margin = other->seconds / best.seconds - 1;
    }
    winners.push_back(std::move(winner));
  }
  return winners;
}

std::string winners_text(const std::vector<Winner>& winners) {
  std::string text;
  for (const Winner& w : winners) {
    text += fmt::format("# fastest at cp {}, {} tokens: {} under {}, {:.4g} ms", w.cp, w.tokens,
                        w.schedule, w.layout, 1e3 * w.seconds);
    if (!w.second.empty())
      text += fmt::format("; next: {}, {:.1f} % longer", w.second, 100 * w.margin);
    text += '\n';
  }
  return text;
}

}  // namespace gyre

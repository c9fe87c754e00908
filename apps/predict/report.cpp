#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "apps/predict/run.hpp"
#include "attention/schedules/registry.hpp"
#include "report/svg.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

constexpr double cell_width = 132, cell_height = 58, left = 92, top = 80, line = 20;

template <class T>
size_t index_in(const std::set<T>& values, T value) {
  return static_cast<size_t>(std::distance(values.begin(), values.find(value)));
}

/// The colour of a schedule, from its place in its registry, so that all pictures agree.
std::string colour_of(const std::string& schedule) {
  const auto of_attention = std::ranges::find(schedules(), schedule, &Schedule::name);
  const auto of_states = std::ranges::find(state_schedules(), schedule, &StateSchedule::name);
  return svg::tint(static_cast<int>(of_attention != schedules().end()
                                        ? of_attention - schedules().begin()
                                        : of_states - state_schedules().begin()));
}

/// "2M", "64K", or all digits.
std::string size_text(int64_t tokens) {
  if (tokens % (1 << 20) == 0) return fmt::format("{}M", tokens >> 20);
  if (tokens % 1024 == 0) return fmt::format("{}K", tokens >> 10);
  return std::to_string(tokens);
}

std::string text_of(const Winner::Other& other) {
  const double percent = 100 * other.margin;
  return fmt::format("{} +{:.{}f} %", other.schedule, percent, percent < 10 ? 1 : 0);
}

std::string cell(const Winner& w, double x, double y) {
  std::string text =
      svg::rect(x + 1, y + 1, cell_width - 2, cell_height - 2, colour_of(w.schedule));
  const double middle = x + cell_width / 2;
  text += svg::text(middle, y + 18, 12, "middle", w.schedule);
  text +=
      svg::text(middle, y + 34, 11, "middle",
                fmt::format("{}, kernel {:.0f} %", si_text(w.seconds, "s"), 100 * w.efficiency));
  if (!w.close.empty())
    text += svg::text(middle, y + 49, 10, "middle", "or " + text_of(w.close.front()));
  else if (w.next)
    text += svg::text(middle, y + 49, 10, "middle", text_of(*w.next));
  return text;
}

template <class Bytes>
double megabytes(Bytes bytes) {
  return bytes / 1e6;
}

/// A configuration with all its passes.
struct Total {
  std::string schedule, layout;
  double seconds = 0, flops = 0, kernel = 0;
  bool fits = true, competes = true;
  std::vector<double> draws = {};  ///< seconds of each draw
};

/// Counts the draws in which the first of `totals` is the fastest, and those of the one that most
/// often is. Among equal ones, an earlier one is.
void count_wins(const std::vector<Total>& totals, Winner& winner) {
  winner.draws = totals.front().draws;
  std::vector<int> wins(totals.size());
  for (size_t draw = 0; draw < winner.draws.size(); ++draw) {
    const auto of_draw = [&](const Total& t) { return t.draws[draw]; };
    ++wins[std::ranges::min_element(totals, {}, of_draw) - totals.begin()];
  }
  const auto most = std::ranges::max_element(wins);
  const Total& usual = totals[most - wins.begin()];
  winner.wins = wins.front();
  winner.usual = {usual.schedule, usual.layout, *most};
}

}  // namespace

std::string winners_svg(const std::vector<Winner>& winners, const std::string& title) {
  std::set<int> cps;
  std::set<int64_t> sizes;
  std::set<std::string> layouts;
  for (const Winner& w : winners) {
    cps.insert(w.cp);
    sizes.insert(w.tokens);
    layouts.insert(w.layout);
  }
  const double width = std::max(760.0, left + cell_width * cps.size() + 20);
  const double bottom = top + cell_height * sizes.size();
  std::string picture = svg::begin(width, bottom + 3 * line);
  picture += svg::text(12, 24, 15, "start", title);
  picture += svg::text(12, 44, 11, "start", "each cell: the fastest schedule;");
  picture += svg::text(12, 58, 11, "start",
                       "time of all passes, share of it in which the kernel works; the next "
                       "schedule and how much longer it takes; 'or': too close to tell");
  for (const Winner& w : winners) {
    const double x = left + cell_width * index_in(cps, w.cp);
    const double y = bottom - cell_height * (index_in(sizes, w.tokens) + 1);
    picture += cell(w, x, y);
  }
  for (const int cp : cps)
    picture += svg::text(left + cell_width * (index_in(cps, cp) + 0.5), bottom + 16, 12, "middle",
                         fmt::format("cp {}", cp));
  for (const int64_t size : sizes)
    picture += svg::text(left - 10, bottom - cell_height * (index_in(sizes, size) + 0.5) + 4, 12,
                         "end", size_text(size));
  picture += svg::text(left - 10, bottom + 16, 11, "end", "tokens");
  picture += svg::text(12, bottom + 2 * line, 11, "start",
                       fmt::format("layout of the winners: {}", fmt::join(layouts, ", ")));
  return picture + "</svg>\n";
}

Table<PredictedRow> predicted_table(const MachineModel& machine, bool several_draws) {
  using Row = PredictedRow;
  std::vector<Column<Row>> columns = {
      {"schedule", "", 18, 0, &Row::schedule, Align::left},
      {"layout", "", 15, 0, &Row::layout, Align::left},
      {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.prediction.pass)); },
       Align::left},
      {"cp", "", 4, 0, [](const Row& r) { return int64_t{r.cp}; }},
      {"tokens", "", 7, 0, &Row::tokens},
      {"time", "ms", 8, 3, [](const Row& r) { return 1e3 * r.prediction.seconds; }},
      {"error", "+-%", 5, 0, [](const Row& r) { return 100 * r.error; }},
      Column<Row>{"rate", "TF/s/rank", 8, 4, &Row::tflops_per_rank}.with_prefix(),
      {"exposed", "%", 7, 1, [](const Row& r) { return 100 * r.exposed(); }},
      Column<Row>{"imbal", "%", 6, 1, [](const Row& r) { return 100 * r.imbalance(); }}.extra(),
      {"memory", "GB/rank", 7, 2, [](const Row& r) { return r.memory_bytes() / 1e9; }},
      {"bound", "", 9, 0, &Row::bound, Align::left},
      Column<Row>{"surface", "", 7, 0, &Row::surface, Align::left}.extra(),
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
  if (several_draws)
    columns.insert(std::ranges::find(columns, "error", &Column<Row>::name),
                   {"spread", "%", 6, 1, [](const Row& r) { return 100 * r.spread(); }});
  columns.push_back(Column<Row>{"library", "", 10, 0, &Row::algorithms, Align::left}.extra());
  for (size_t tier = 0; tier < machine.links.size(); ++tier)
    columns.push_back(Column<Row>{
        "sent_" + machine.links[tier].name, "MB", 11, 3, [tier](const Row& r) {
          return megabytes(r.prediction.bytes_by_tier[tier]);
        }}.extra());
  return Table<Row>(std::move(columns));
}

std::vector<Winner> winners_of(const std::vector<PredictedRow>& rows, double order_margin) {
  std::vector<std::pair<int, int64_t>> sizes;
  std::map<std::pair<int, int64_t>, std::vector<Total>> totals_of;
  for (const PredictedRow& row : rows) {
    const std::pair<int, int64_t> size{row.cp, row.tokens};
    std::vector<Total>& totals = totals_of[size];
    if (totals.empty()) sizes.push_back(size);
    if (totals.empty() || totals.back().schedule != row.schedule ||
        totals.back().layout != row.layout)
      totals.push_back({.schedule = row.schedule, .layout = row.layout, .competes = row.competes});
    Total& total = totals.back();
    total.seconds += row.prediction.seconds;
    total.kernel += row.prediction.kernel_mean;
    total.flops += row.flops;
    total.fits = total.fits && row.fits();
    total.draws.resize(row.draws.size());
    std::ranges::transform(total.draws, row.draws, total.draws.begin(), std::plus());
  }
  std::vector<Winner> winners;
  for (const auto& size : sizes) {
    std::vector<Total>& totals = totals_of[size];
    std::erase_if(totals, [](const Total& t) { return !t.fits; });
    if (std::ranges::any_of(totals, &Total::competes))
      std::erase_if(totals, [](const Total& t) { return !t.competes; });
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
    count_wins(totals, winner);
    std::set<std::string> seen = {best.schedule};
    for (const Total& total : totals) {
      if (winner.next || !seen.insert(total.schedule).second) continue;
      const Winner::Other other{total.schedule, total.seconds / best.seconds - 1};
      if (other.margin < order_margin)
        winner.close.push_back(other);
      else
        winner.next = other;
    }
    winners.push_back(std::move(winner));
  }
  return winners;
}

constexpr const char* no_errors =
    "# errors unknown: no prediction for this machine was compared with a measurement\n";

std::string error_text(const MachineModel& machine) {
  if (machine.errors.empty()) return no_errors;
  const bool several = std::ranges::any_of(machine.errors, &PredictionError::several_ranks);
  return fmt::format(
      "# error: 9 in 10 published times of {} differ by no more from the predicted one\n",
      several ? fmt::format("{} ranks or fewer", machine.links.front().ranks) : "one rank");
}

std::string recurrence_error_text() {
  return "# errors unknown: too few times of recurrent layers are published (docs/prediction.md)\n";
}

std::string attention_error_text(const MachineModel& machine) {
  std::vector<std::string> errors;
  for (const PredictionError& error : machine.errors)
    if (error.pass == Pass::forward)
      errors.push_back(fmt::format(
          "{} +-{:.0f} %", error.several_ranks ? "several ranks" : "one rank", 100 * error.share));
  if (errors.empty()) return no_errors;
  return fmt::format("# error of attention alone, 9 in 10 published times, forward: {}\n",
                     fmt::join(errors, "; "));
}

std::string winners_text(const std::vector<Winner>& winners) {
  std::string text;
  for (const Winner& w : winners) {
    text += fmt::format("# fastest at cp {}, {} tokens: {} under {}, {:.4g} ms", w.cp, w.tokens,
                        w.schedule, w.layout, 1e3 * w.seconds);
    if (w.draws.size() > 1)
      text += fmt::format(", mean of {} draws with a spread of {:.1f} %, fastest in {} of them",
                          w.draws.size(), 100 * summarize(w.draws).cv, w.wins);
    if (w.usual.wins > w.wins)
      text += fmt::format(" ({} under {} in {})", w.usual.schedule, w.usual.layout, w.usual.wins);
    std::vector<std::string> close;
    for (const Winner::Other& other : w.close) close.push_back(text_of(other));
    if (!close.empty()) text += fmt::format("; too close to tell: {}", fmt::join(close, ", "));
    if (w.next)
      text += fmt::format("; next: {}, {:.1f} % longer", w.next->schedule, 100 * w.next->margin);
    text += '\n';
  }
  return text;
}

}  // namespace gyre

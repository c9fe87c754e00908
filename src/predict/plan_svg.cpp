#include "predict/plan_svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/error.hpp"
#include "predict/explain.hpp"
#include "report/svg.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

constexpr double margin = 24, label_width = 62, plot_width = 900, share_width = 56;
constexpr double compute_height = 20, send_height = 8, lanes_height = 29;
constexpr double band_height = 36, axis_height = 44;
constexpr double panel_head = 30, title_height = 62, legend_height = 62;
constexpr int max_bands = 16;

using svg::color;
using svg::rect;
using svg::text;

/// Ranks whose keys a Compute step uses, each with its fraction of the pairs. A rectangle over rows
/// of several ranks counts for each in proportion to its rows.
std::map<int, double> key_shares(const RankPlan& plan, const step::Compute& compute) {
  std::map<int, double> shares;
  double all = 0;
  for (const Rectangle& r : compute.rectangles) {
    const double pairs = r.pairs();
    const int64_t begin = r.k_begin, end = begin + r.k_length;
    int64_t row = 0;
    for (const RankRows& run : plan.arrays[compute.kv].rows) {
      const int64_t inside = std::min(end, row + run.length) - std::max(begin, row);
      if (inside > 0)
        shares[run.rank] += pairs * static_cast<double>(inside) / static_cast<double>(r.k_length);
      row += run.length;
    }
    all += pairs;
  }
  for (auto& [rank, share] : shares) share /= all;
  return shares;
}

/// The rank that owns the first row of a slice.
int owner_of(const RankPlan& plan, const Slice& slice) {
  int64_t row = slice.row;
  for (const RankRows& run : plan.arrays[slice.array].rows) {
    if (row < run.length) return run.rank;
    row -= run.length;
  }
  return plan.rank;
}

/// Distance between ticks: 1, 2 or 5 times a power of ten, at most eight ticks.
double tick_of(double longest) {
  const double power = std::pow(10.0, std::floor(std::log10(longest / 8)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (longest / (factor * power) <= 8) return factor * power;
  return 10 * power;
}

class Picture {
 public:
  Picture(const Plan& plan, const AttentionProblem& problem,
          const std::vector<Simulation>& directions, const std::string& assumptions)
      : plan_(plan), problem_(problem), directions_(directions), assumptions_(assumptions) {
    for (const Simulation& s : directions) longest_ = std::max(longest_, s.makespan());
    if (!(longest_ > 0)) longest_ = 1;
  }

  std::string draw() {
    std::string panels;
    double y = title_height;
    for (const Simulation& s : directions_) panels += panel(s, y);
    panels += legend(y);
    const double width = 2 * margin + label_width + plot_width + share_width;
    return svg::begin(width, y + legend_height) +
           "<defs><pattern id=\"wait\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\">"
           "<path d=\"M0 5 L5 0\" stroke=\"#999\" stroke-width=\"0.8\"/></pattern></defs>\n" +
           text(margin, 30, 16, "start", plan_title(plan_, problem_)) +
           text(margin, 48, 11, "start", assumptions_) + panels + "</svg>\n";
  }

 private:
  double x_of(double seconds) const {
    return margin + label_width + plot_width * seconds / longest_;
  }

  /// The ranks to draw: evenly spaced ones, and the slowest in place of its neighbour.
  std::vector<int> chosen_ranks(const Simulation& s) const {
    std::vector<int> shown = shown_ranks(problem_.cp(), max_bands);
    const auto slowest = std::max_element(
        s.ranks.begin(), s.ranks.end(),
        [](const RankTimeline& a, const RankTimeline& b) { return a.total < b.total; });
    const auto rank = static_cast<int>(slowest - s.ranks.begin());
    const auto after = std::lower_bound(shown.begin(), shown.end(), rank);
    if (after != shown.end() && *after != rank)
      *(after + 1 == shown.end() ? after - 1 : after) = rank;
    return shown;
  }

  /// Draws below y, and advances y.
  std::string panel(const Simulation& s, double& y) {
    const std::vector<int> shown = chosen_ranks(s);
    std::string selection;
    if (std::ssize(shown) < problem_.cp())
      selection =
          fmt::format("; {} of {} ranks, the slowest among them", shown.size(), problem_.cp());
    std::string svg =
        text(margin, y + 16, 13, "start",
             fmt::format("{}: {}, of which {} is exposed communication{}",
                         s.pass == Pass::forward ? "forward" : "backward",
                         si_text(s.makespan(), "s"), si_text(s.exposed(), "s"), selection));
    svg += text(margin + label_width + plot_width + share_width, y + 16, 10, "end", "computing");
    y += panel_head;
    for (size_t i = 0; i < shown.size(); ++i)
      svg += rect(x_of(0), y + band_height * static_cast<double>(i), plot_width, lanes_height,
                  "#f4f4f4");
    svg += axis(y, y + band_height * static_cast<double>(shown.size()));  // beneath the bands
    for (const int rank : shown) {
      svg += band(s, rank, y);
      y += band_height;
    }
    y += axis_height;
    return svg;
  }

  std::string band(const Simulation& s, int rank, double y) {
    const RankTimeline& times = s.ranks[rank];
    const RankPlan& mine = plan_.ranks[rank];
    std::string svg = text(margin, y + 16, 11, "start", fmt::format("rank {}", rank));
    const bool two_lanes = messages_overlap(times);
    double free = 0;  // end of the last message in the first lane
    for (const SimulatedSpan& span : times.spans) {
      const Step& step = mine.steps(s.pass)[span.step];
      if (span.kind == SpanKind::message) {
        const bool second = two_lanes && span.begin < free;
        if (!second) free = span.left;
        const double height = two_lanes ? send_height / 2 : send_height;
        svg += message(mine, std::get<step::Exchange>(step), span,
                       y + compute_height + 1 + (second ? height : 0), height);
      } else if (span.kind == SpanKind::compute) {
        svg += computed(mine, std::get<step::Compute>(step), span, y);
      } else {
        const double width = x_of(span.end) - x_of(span.begin);
        svg += rect(x_of(span.begin), y, width, compute_height,
                    span.kind == SpanKind::wait ? "url(#wait)" : "#777");
      }
    }
    const double share = s.makespan() > 0 ? times.compute / s.makespan() : 0;
    return svg + text(margin + label_width + plot_width + share_width, y + 16, 11, "end",
                      fmt::format("{:.1f} %", 100 * share));
  }

  static bool messages_overlap(const RankTimeline& times) {
    double free = 0;
    for (const SimulatedSpan& span : times.spans) {
      if (span.kind != SpanKind::message) continue;
      if (span.begin < free) return true;
      free = span.left;
    }
    return false;
  }

  std::string computed(const RankPlan& mine, const step::Compute& compute,
                       const SimulatedSpan& span, double y) const {
    std::string svg;
    double begin = span.begin;
    for (const auto& [rank, share] : key_shares(mine, compute)) {
      const double end = begin + (span.end - span.begin) * share;
      const double width = x_of(end) - x_of(begin);
      // Leaves a thin gap between steps.
      svg += rect(x_of(begin), y, std::max(0.2, width - 0.5), compute_height,
                  color(rank, problem_.cp()));
      if (width > 18)
        svg += fmt::format(
            "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"10\" "
            "text-anchor=\"middle\" fill=\"{}\">{}</text>\n",
            x_of(begin) + width / 2, y + compute_height - 6, rank % 2 == 0 ? "white" : "#222",
            rank);
      begin = end;
    }
    return svg;
  }

  std::string message(const RankPlan& mine, const step::Exchange& exchange,
                      const SimulatedSpan& span, double y, double height) const {
    const bool of_library = span.message < 0;
    const Message& m = exchange.sends[of_library ? 0 : static_cast<size_t>(span.message)];
    const int owner = of_library ? mine.rank : owner_of(mine, m.slices[0]);
    const std::string fill = color(owner, problem_.cp());
    const double width = x_of(span.left) - x_of(span.begin);
    std::string svg = rect(x_of(span.begin), y, std::max(0.2, width - 0.3), height, fill);
    if (span.end > span.left)
      svg +=
          rect(x_of(span.left), y + height / 2 - 0.75, x_of(span.end) - x_of(span.left), 1.5, fill);
    return svg;
  }

  std::string axis(double top, double y) const {
    std::string svg = rect(x_of(0), y, plot_width, 1, "#222");
    const double tick = tick_of(longest_);
    for (int i = 0; i * tick <= longest_ * (1 + 1e-9); ++i) {
      const double x = x_of(i * tick);
      svg += rect(x - 0.25, top - 4, 0.5, y - top + 8, "#222");
      svg += text(x, y + 18, 11, "middle", i == 0 ? "0" : si_text(i * tick, "s"));
    }
    return svg;
  }

  /// Legend: the colours of the ranks and the meaning of the other fills.
  std::string legend(double y) const {
    const int cp = problem_.cp();
    const double cell = std::min(24.0, 384.0 / cp);
    std::string svg = text(margin, y + 12, 11, "start", "keys or rows of rank");
    const double left = margin + 130;
    for (int r = 0; r < cp; ++r) {
      svg += rect(left + cell * r, y, cell, 14, color(r, cp));
      if (cp <= max_bands || r == 0 || r == cp - 1)
        svg += text(left + cell * (r + 0.5), y + 28, 10, "middle", std::to_string(r));
    }
    double x = left + cell * cp + 40;
    for (const auto& [fill, name, width] : {std::tuple("url(#wait)", "waiting", 90.0),
                                            std::tuple("#777", "copies, clearing", 140.0)}) {
      svg += rect(x, y, 24, 14, fill) + text(x + 30, y + 12, 11, "start", name);
      x += width;
    }
    return svg + text(x, y + 12, 11, "start", "upper lane: compute; lower: sends");
  }

  const Plan& plan_;
  const AttentionProblem& problem_;
  const std::vector<Simulation>& directions_;
  const std::string& assumptions_;
  double longest_ = 0;
};

}  // namespace

std::string plan_svg(const Plan& plan, const AttentionProblem& problem,
                     const std::vector<Simulation>& directions, const std::string& assumptions) {
  for (const Simulation& s : directions)
    GYRE_CHECK(s.ranks.size() == plan.ranks.size(), "a simulation of {} ranks for a plan of {}",
               s.ranks.size(), plan.ranks.size());
  return Picture(plan, problem, directions, assumptions).draw();
}

}  // namespace gyre

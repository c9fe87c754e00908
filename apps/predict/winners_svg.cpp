#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "apps/predict/run.hpp"
#include "attention/schedules/registry.hpp"
#include "report/svg.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

constexpr double cell_width = 132, cell_height = 58, left = 92, top = 64, line = 20;

template <class T>
size_t index_in(const std::set<T>& values, T value) {
  return static_cast<size_t>(std::distance(values.begin(), values.find(value)));
}

/// The colour of a schedule, from its place in the registry, so that all pictures agree.
std::string colour_of(const std::string& schedule) {
  const auto& all = schedules();
  const auto at = std::ranges::find_if(all, [&](const Schedule& s) { return s.name == schedule; }) -
                  all.begin();
  return fmt::format("hsl({:.0f},62%,{}%)",
                     360.0 * static_cast<double>(at) / static_cast<double>(all.size()),
                     at % 2 == 0 ? 78 : 68);
}

/// "2M", "64K", or all digits.
std::string size_text(int64_t tokens) {
  if (tokens % (1 << 20) == 0) return fmt::format("{}M", tokens >> 20);
  if (tokens % 1024 == 0) return fmt::format("{}K", tokens >> 10);
  return std::to_string(tokens);
}

std::string cell(const Winner& w, double x, double y) {
  std::string text =
      svg::rect(x + 1, y + 1, cell_width - 2, cell_height - 2, colour_of(w.schedule));
  const double middle = x + cell_width / 2;
  text += svg::text(middle, y + 18, 12, "middle", w.schedule);
  text +=
      svg::text(middle, y + 34, 11, "middle",
                fmt::format("{} , kernel {:.0f} %", si_text(w.seconds, "s"), 100 * w.efficiency));
  if (!w.second.empty())
    text += svg::text(middle, y + 49, 10, "middle",
                      fmt::format("{} +{:.0f} %", w.second, 100 * w.margin));
  return text;
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
  const double width = std::max(760.0, left + cell_width * static_cast<double>(cps.size()) + 20);
  const double bottom = top + cell_height * static_cast<double>(sizes.size());
  std::string picture = svg::begin(width, bottom + 3 * line);
  picture += svg::text(12, 24, 15, "start", title);
  picture += svg::text(12, 44, 11, "start",
                       "each cell: the fastest schedule; time of all passes, share of it in which "
                       "the kernel works; the next schedule and how much longer it takes");
  for (const Winner& w : winners) {
    const double x = left + cell_width * static_cast<double>(index_in(cps, w.cp));
    const double y = bottom - cell_height * static_cast<double>(index_in(sizes, w.tokens) + 1);
    picture += cell(w, x, y);
  }
  for (const int cp : cps)
    picture += svg::text(left + cell_width * (static_cast<double>(index_in(cps, cp)) + 0.5),
                         bottom + 16, 12, "middle", fmt::format("cp {}", cp));
  for (const int64_t size : sizes)
    picture += svg::text(
        left - 10, bottom - cell_height * (static_cast<double>(index_in(sizes, size)) + 0.5) + 4,
        12, "end", size_text(size));
  picture += svg::text(left - 10, bottom + 16, 11, "end", "tokens");
  picture += svg::text(12, bottom + 2 * line, 11, "start",
                       fmt::format("layout of the winners: {}", fmt::join(layouts, ", ")));
  return picture + "</svg>\n";
}

}  // namespace gyre

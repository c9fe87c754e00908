#include "report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

namespace gyre::svg {

std::string begin(double width, double height) {
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
             "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\">\n",
             width, height) +
         rect(0, 0, width, height, "white");
}

namespace {

struct Rgb {
  double r, g, b;
};

/// `share` of b, the rest of a.
Rgb mixed(const Rgb& a, const Rgb& b, double share) {
  return {a.r + (b.r - a.r) * share, a.g + (b.g - a.g) * share, a.b + (b.b - a.b) * share};
}

std::string hex(const Rgb& c) {
  return fmt::format("#{:02x}{:02x}{:02x}", std::lround(c.r), std::lround(c.g), std::lround(c.b));
}

/// Blue, orange, green, sky blue, vermillion, yellow, wine red, grey.
constexpr std::array<Rgb, 8> palette{{{0, 114, 178},
                                      {230, 159, 0},
                                      {0, 158, 115},
                                      {86, 180, 233},
                                      {213, 94, 0},
                                      {240, 228, 66},
                                      {136, 34, 85},
                                      {187, 187, 187}}};

/// From dark blue over grey to yellow.
constexpr std::array<Rgb, 5> cividis{
    {{0, 34, 78}, {66, 78, 108}, {124, 123, 120}, {188, 175, 111}, {254, 232, 56}}};

/// Between two neighbours of `map`; 0 is the first, 1 the last.
Rgb between(std::span<const Rgb> map, double at) {
  const double place = at * static_cast<double>(map.size() - 1);
  const size_t i = std::min(static_cast<size_t>(place), map.size() - 2);
  return mixed(map[i], map[i + 1], place - static_cast<double>(i));
}

}  // namespace

std::string color(int rank, int cp) {
  if (cp <= std::ssize(palette)) return hex(palette.at(rank));
  const double half = 0.45 * (rank / 2) / std::max(1, (cp - 1) / 2);
  return hex(between(cividis, rank % 2 == 0 ? half : 0.55 + half));
}

std::string tint(int place) {
  const int rounds = place / static_cast<int>(palette.size());
  return hex(mixed(palette.at(place % palette.size()), {255, 255, 255},
                   std::min(0.9, 0.5 + 0.25 * rounds)));
}

std::string text(double x, double y, int size, const std::string& anchor, const std::string& s) {
  return fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" text-anchor=\"{}\">{}</text>\n", x, y, size,
      anchor, s);
}

std::string rect(double x, double y, double width, double height, const std::string& fill,
                 double opacity) {
  return fmt::format(
      "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\"{}/>\n", x, y,
      width, height, fill, opacity < 1 ? fmt::format(" fill-opacity=\"{:.3f}\"", opacity) : "");
}

}  // namespace gyre::svg

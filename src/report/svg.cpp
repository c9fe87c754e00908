#include "report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace gyre::svg {

std::string begin(double width, double height) {
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
             "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\">\n",
             width, height) +
         rect(0, 0, width, height, "white");
}

std::string color(int rank, int cp) {
  return fmt::format("hsl({:.0f},62%,{}%)", 330.0 * rank / std::max(1, cp),
                     rank % 2 == 0 ? 45 : 63);
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

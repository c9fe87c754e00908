#include "predict/decoder_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace gyre {

double CollectiveTimes::seconds(double bytes) const {
  const auto above =
      std::ranges::find_if(points, [&](const Point& point) { return point.bytes >= bytes; });
  if (above == points.begin()) return above->seconds;
  const Point& below = *(above - 1);
  if (above == points.end()) return below.seconds * bytes / below.bytes;
  const double share = (bytes - below.bytes) / (above->bytes - below.bytes);
  return below.seconds + share * (above->seconds - below.seconds);
}

std::string DecoderModel::why_not(DType type) const {
  if (linears.empty()) return "the machine has no 'linears', which a model's layers need";
  const auto is_of_type = [&](const LinearSurface& s) { return s.type == type; };
  if (std::ranges::any_of(linears, is_of_type)) return "";
  return fmt::format("no linears of {}; the machine has {}", name_of(type),
                     name_of(linears.front().type));
}

double DecoderModel::linear_seconds(DType type, double rows, double inner, double columns) const {
  const std::string why = why_not(type);
  if (!why.empty()) throw_usage("{}", why);
  const auto& surface =
      *std::ranges::find_if(linears, [&](const LinearSurface& s) { return s.type == type; });
  if (rows == 0) return 0;
  return surface.launch_s +
         2 * rows * inner * columns / surface.rate(rows, std::sqrt(inner * columns));
}

}  // namespace gyre

#include "predict/rate_surface.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Position of a value among ascending points: its neighbours and the fraction between them.
struct Between {
  size_t low = 0, high = 0;
  double share = 0;
};
Between between(const std::vector<double>& points, double value) {
  if (value <= points.front()) return {0, 0, 0};
  if (value >= points.back()) return {points.size() - 1, points.size() - 1, 0};
  const auto above = std::upper_bound(points.begin(), points.end(), value);
  const size_t high = above - points.begin();
  const double low = points[high - 1];
  return {high - 1, high, std::log(value / low) / std::log(points[high] / low)};
}

bool inside(const std::vector<double>& points, double value) {
  constexpr double rounding = 1e-9;
  return value >= points.front() * (1 - rounding) && value <= points.back() * (1 + rounding);
}

void check_points(const std::vector<double>& points, const char* name) {
  if (points.size() < 2) throw_usage("{} {} of a surface; wanted: 2 or more", points.size(), name);
  for (size_t i = 0; i < points.size(); ++i)
    if (!(points[i] > (i == 0 ? 0 : points[i - 1])) || std::isinf(points[i]))
      throw_usage("{} of {} at place {}; wanted: finite, above 0, ascending", name, points[i],
                  i + 1);
}

}  // namespace

double RateSurface::rate(double row, double key) const {
  if (keys.empty()) {
    const Between at = between(rows, std::sqrt(row * key));
    return flops_per_s[at.low] * std::pow(flops_per_s[at.high] / flops_per_s[at.low], at.share);
  }
  const Between q = between(rows, row), k = between(keys, key);
  const auto log_rate = [&](size_t i, size_t j) {
    return std::log(flops_per_s[i * keys.size() + j]);
  };
  const auto at_row = [&](size_t i) {
    return (1 - k.share) * log_rate(i, k.low) + k.share * log_rate(i, k.high);
  };
  return std::exp((1 - q.share) * at_row(q.low) + q.share * at_row(q.high));
}

bool RateSurface::outside(double row, double key) const {
  if (keys.empty()) return !inside(rows, std::sqrt(row * key));
  return !inside(rows, row) || !inside(keys, key);
}

void check_surface(const RateSurface& s, const char* keys) {
  check_points(s.rows, "rows");
  if (!s.keys.empty()) check_points(s.keys, keys);
  const size_t wanted = s.rows.size() * std::max<size_t>(1, s.keys.size());
  if (s.flops_per_s.size() != wanted)
    throw_usage("{} flops_per_s for {} rows and {} {}; wanted: {}", s.flops_per_s.size(),
                s.rows.size(), s.keys.size(), keys, wanted);
  for (const double rate : s.flops_per_s) {
    if (!(rate >= 1)) throw_usage("flops_per_s of {}; wanted: at least 1", rate);
    if (std::isinf(rate)) throw_usage("flops_per_s of inf in a surface; wanted: finite");
  }
}

}  // namespace gyre

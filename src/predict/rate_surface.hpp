#pragma once
// Rates that depend on two sizes, measured at sample points.

#include <vector>

namespace gyre {

/// Interpolates linearly in the logarithms of rates and sizes.
struct RateSurface {
  std::vector<double> rows;         ///< ascending
  std::vector<double> keys;         ///< ascending; empty: squares of side sqrt(rows · keys)
  std::vector<double> flops_per_s;  ///< [rows][keys], or [rows]

  /// Rate at two sizes; outside the measured range, the rate of the nearest point.
  double rate(double row, double key) const;
  /// Whether one of the sizes lies outside the measured range.
  bool outside(double row, double key) const;
};

/// Throws a usage error that names what is wrong: fewer than two points, sizes that do not ascend,
/// the wrong number of rates, a rate below 1 or infinite. `keys` is the second size's name in the
/// file.
void check_surface(const RateSurface& surface, const char* keys);

}  // namespace gyre

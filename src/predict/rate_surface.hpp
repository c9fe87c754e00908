#pragma once
// Rates that depend on two sizes, measured at some of them.

#include <vector>

namespace gyre {

/// Interpolated linearly in the logarithms of rates and sizes.
struct RateSurface {
  std::vector<double> rows;         ///< ascending
  std::vector<double> keys;         ///< ascending; empty: of squares, of side sqrt(rows · keys)
  std::vector<double> flops_per_s;  ///< [rows][keys], or [rows]

  /// Rate at two sizes; outside of the measured ones that of the nearest.
  double rate(double row, double key) const;
  /// Whether two sizes lie outside of the measured ones.
  bool outside(double row, double key) const;
};

/// Throws a usage error that names what is wrong: fewer than two points, sizes that do not ascend,
/// another number of rates, a rate that is not positive and finite. `keys`: what the file calls
/// the second size.
void check_surface(const RateSurface& surface, const char* keys);

}  // namespace gyre

// The packing whose training step is shortest under the layout `hybrid` (hybrid_bins in bins.hpp).

#include <algorithm>
#include <cmath>

#include "packing/bins_detail.hpp"
#include "packing/packing.hpp"
#include "sharding/cost.hpp"

namespace gyre {

double step_seconds(std::span<const Bin> bins, std::span<const int64_t> lengths,
                    const BinOptions& options) {
  const LayoutOptions layout{.cp = options.cp, .time = options.time};
  std::vector<double> seconds;
  for (const Bin& bin : bins) {
    std::vector<int32_t> bounds = {0};
    for (const int64_t item : bin)
      bounds.push_back(bounds.back() + static_cast<int32_t>(lengths[item]));
    seconds.push_back(layout_cost(hybrid({bounds, bounds}, layout)).seconds(options.time));
  }
  double slowest = 0;
  for (const std::vector<int64_t>& group : balance_over_groups(seconds, options.dp)) {
    double sum = 0;
    for (const int64_t bin : group) sum += seconds[bin];
    slowest = std::max(slowest, sum);
  }
  return slowest;
}

std::vector<Bin> hybrid_bins(std::span<const int64_t> lengths, const BinOptions& options) {
  detail::check_packing_of_int32("hybrid", lengths, options);
  std::vector<Bin> best;
  double least = 0;
  for (const BinPacker& packer : bin_packers()) {
    if (packer.by_step) continue;
    std::vector<Bin> bins = packer.pack(lengths, options);
    const double seconds = step_seconds(bins, lengths, options);
    constexpr double rounding = 1e-9;  // relative, of a sum in another order
    const bool ties = std::abs(seconds - least) <= rounding * least;
    if (!best.empty() && (ties ? bins.size() >= best.size() : seconds > least)) continue;
    least = seconds;
    best = std::move(bins);
  }
  return best;
}

}  // namespace gyre

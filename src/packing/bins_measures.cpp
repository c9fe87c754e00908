#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/index.hpp"
#include "packing/bins.hpp"

namespace gyre {
namespace {

/// 1 - (sample standard deviation) / mean; 1 for a single value and for a mean of 0.
double balance_of(std::span<const double> values) {
  const double n = values.size();
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  if (values.size() == 1 || mean == 0) return 1;
  double squares = 0;
  for (double value : values) squares += (value - mean) * (value - mean);
  return 1 - std::sqrt(squares / (n - 1)) / mean;
}

}  // namespace

BinMeasures measure_bins(std::span<const Bin> bins, std::span<const int64_t> lengths,
                         int64_t capacity, int64_t multiple) {
  BinMeasures result;
  if (bins.empty()) return result;
  result.bins = std::ssize(bins);
  std::vector<double> utilisations;
  int64_t room = 0, packed = 0, within_capacity = 0;
  for (const Bin& bin : bins) {
    int64_t load = 0;
    double cost = 0;
    for (int64_t item : bin) {
      const int64_t length = lengths[item];
      const double real = length;
      load += round_up(length, multiple);
      result.tokens += length;
      cost += real * (real + 1) / 2;
    }
    packed += load;
    room += std::max(capacity, load);
    within_capacity += std::min(capacity, load);
    utilisations.push_back(load / static_cast<double>(std::max(capacity, load)));
    result.costs.push_back(cost);
    result.max_cost = std::max(result.max_cost, cost);
    result.mean_cost += cost / bins.size();
  }
  result.padding = packed - result.tokens;
  result.waste = room - packed;
  result.utilisation = packed / static_cast<double>(room);
  result.waste_ratio = 1 - result.utilisation;
  result.efficiency = ceil_div(within_capacity, capacity) / static_cast<double>(bins.size());
  result.balance = balance_of(utilisations);
  if (result.mean_cost > 0) result.cost_imbalance = result.max_cost / result.mean_cost;
  return result;
}

}  // namespace gyre

// Bin packers on a million documents of the long-tailed distribution, capacity C = 64K: seconds,
// and quality of the packing. Documents are cut at C/4 (where attention cost can be balanced) and
// at C (where a bin with one document of length C bounds the largest cost from below).

#include <benchmark/benchmark.h>

#include <algorithm>
#include <string>

#include "packing/bins.hpp"
#include "packing/lengths.hpp"

namespace gyre {
namespace {

void report(benchmark::State& state, const std::vector<Bin>& bins,
            const std::vector<int64_t>& lengths, int64_t capacity) {
  const BinMeasures measures = measure_bins(bins, lengths, capacity);
  const double longest = *std::max_element(lengths.begin(), lengths.end());
  const double bound = std::max(measures.mean_cost, longest * (longest + 1) / 2);
  state.counters["bins"] = measures.bins;
  state.counters["utilisation"] = measures.utilisation;
  state.counters["max_over_mean_cost"] = measures.cost_imbalance;
  state.counters["max_over_bound"] = measures.max_cost / bound;
}

/// Arguments: number of documents, capacity, longest document.
void pack(benchmark::State& state, const BinPacker& packer) {
  LengthSpec spec;
  spec.count = state.range(0);
  spec.max = state.range(2);
  const std::vector<int64_t> lengths = draw_lengths(spec);
  BinOptions options;
  options.capacity = state.range(1);
  std::vector<Bin> bins;
  for (auto _ : state) bins = packer.pack(lengths, options);
  report(state, bins, lengths, options.capacity);
}

[[maybe_unused]] const bool registered = [] {
  for (const BinPacker& packer : bin_packers()) {
    auto* benchmark = benchmark::RegisterBenchmark(
        packer.name.c_str(), [&packer](benchmark::State& state) { pack(state, packer); });
    benchmark->ArgNames({"documents", "capacity", "longest"})->Unit(benchmark::kMillisecond);
    for (int64_t capacity : {int64_t{32} << 10, int64_t{64} << 10, int64_t{128} << 10})
      for (int64_t longest : {capacity / 4, capacity}) benchmark->Args({4096, capacity, longest});
    for (int64_t longest : {16 << 10, 64 << 10}) benchmark->Args({1'000'000, 64 << 10, longest});
  }
  return true;
}();

void draw(benchmark::State& state) {
  LengthSpec spec;
  spec.count = state.range(0);
  for (auto _ : state) benchmark::DoNotOptimize(draw_lengths(spec));
}
BENCHMARK(draw)->Arg(1'000'000)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace gyre

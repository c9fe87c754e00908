// Sharding and unsharding against memcpy of the same bytes, and layouts against each other: pairs
// of the slowest rank and keys needed from other ranks, for packed long-tailed documents.
//
// Rates are per second of CPU time, which other load disturbs less. A copy is measured as a whole
// job, all ranks' shards of one stream, in alternation with memcpy of the stream: by one call per
// rank (shard, unshard), or one for all (shard-all, unshard-all).
//
// The target is of_memcpy of the latter for streams beyond the caches: at least 0.8 for rows of 4
// bytes and more, except for 64-token documents, whose runs then have 16 bytes. On one core of an
// AMD EPYC 9004 (memcpy 12.5 GB/s) whose memory other processes also use, shard-all / unshard-all
// of 128 MiB over 8 ranks, and in brackets rank by rank:
//
//     row bytes          64                       8                        4
//     contiguous      1.37 / 1.27 (1.00, 0.98)  1.40 / 1.30 (1.00, 0.98)  1.41 / 1.31 (1.02, 0.98)
//     zigzag          1.44 / 1.32 (0.93, 0.90)  1.44 / 1.32 (0.92, 0.89)  1.38 / 1.29 (0.93, 0.92)
//     dual-chunk-swap 1.38 / 1.03 (0.63, 0.69)  1.11 / 0.77 (0.38, 0.47)  0.87 / 0.72 (0.32, 0.38)
//       of 64 tokens  0.97 / 0.78 (0.30, 0.47)  0.37 / 0.43 (0.12, 0.28)  0.22 / 0.23 (0.07, 0.14)
//     balanced        1.57 / 1.32 (0.92, 0.87)  1.56 / 1.15 (0.68, 0.72)  1.58 / 1.03 (0.56, 0.60)
//     striped         1.69 / 1.33 (0.68, 0.62)  0.71 / 1.03 (0.18, 0.18)  0.69 / 0.71 (0.24, 0.19)
//
// A run of the whole program takes about a minute.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "packing/lengths.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"
#include "sharding/balanced.hpp"
#include "sharding/cost.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

double time_of(const std::function<void()>& body) {
  const double start = thread_cpu_seconds();
  body();
  return thread_cpu_seconds() - start;
}

struct Bounds {
  std::vector<int32_t> real = {0}, padded = {0};
  SegmentBounds view() const { return {real, padded}; }
  void add(int64_t length, int64_t multiple) {
    real.push_back(real.back() + static_cast<int32_t>(length));
    padded.push_back(padded.back() + static_cast<int32_t>(round_up(length, multiple)));
  }
};

/// Long-tailed document lengths, cut at `longest`, enough to fill `slots` slots.
std::vector<int64_t> long_tailed_lengths(int64_t slots, int64_t longest) {
  LengthSpec spec;
  spec.distribution = "long-tailed";
  spec.count = slots / 128;
  spec.max = longest;
  return draw_lengths(spec);
}

/// Packs of `slots` slots, filled with documents that are cut at slots / 4 and padded to a multiple
/// of `multiple` slots.
std::vector<Bounds> long_tailed_packs(int64_t count, int64_t slots, int64_t multiple) {
  std::vector<Bounds> packs(1);
  for (const int64_t length : long_tailed_lengths(count * slots, slots / 4)) {
    if (packs.back().view().slots() >= slots) {
      if (std::ssize(packs) == count) break;
      packs.emplace_back();
    }
    packs.back().add(std::min(length, slots - packs.back().view().slots()), multiple);
  }
  return packs;
}

Bounds equal_documents(int64_t slots, int64_t length) {
  Bounds bounds;
  while (bounds.view().slots() < slots) bounds.add(length, length);
  return bounds;
}

constexpr int copy_cp = 8;
constexpr int64_t large_stream = int64_t{128} << 20;  // beyond the caches
constexpr int64_t small_stream = int64_t{1} << 20;    // ids of 256K tokens

struct CopyCase {
  std::string name;
  std::string layout;
  int64_t document;  ///< length of every document; 0: long-tailed, cut at 16K
};

Layout copy_layout(const CopyCase& which, int64_t slots) {
  LayoutOptions options;
  options.cp = copy_cp;
  options.chunk = 512;
  Bounds bounds;
  if (which.document > 0) {
    bounds = equal_documents(slots, which.document);
  } else {
    for (const int64_t length : long_tailed_lengths(slots, 16 << 10))
      if (const int64_t room = slots - bounds.view().slots(); room > 0)
        bounds.add(std::min(length, room), 2 * copy_cp);
  }
  return find_layout(which.layout).make(bounds.view(), options);
}

/// Layout of a copy case. The last one is cached for consecutive cases that share it.
const Layout& kept_copy_layout(const CopyCase& which, int64_t slots) {
  static std::string kept_for;
  static Layout layout;
  if (const std::string wanted = fmt::format("{} {}", which.name, slots); wanted != kept_for) {
    layout = copy_layout(which, slots);
    kept_for = wanted;
  }
  return layout;
}

/// Direction of the copy; `all`: one call for all ranks.
struct CopyMode {
  const char* name;
  bool back;
  bool all;
};

void copy_shards(const Layout& layout, const CopyMode& mode, std::span<std::byte> stream,
                 std::span<std::byte> shards, int64_t row_bytes) {
  if (mode.all && mode.back) {
    unshard_all_rows<std::byte>(layout, shards, stream, row_bytes);
  } else if (mode.all) {
    shard_all_rows<std::byte>(layout, stream, shards, row_bytes);
  } else {
    const size_t each = shards.size() / copy_cp;
    for (int r = 0; r < copy_cp; ++r) {
      const auto mine = shards.subspan(r * each, each);
      if (mode.back)
        unshard_rows<std::byte>(layout, r, mine, stream, row_bytes);
      else
        shard_rows<std::byte>(layout, r, stream, mine, row_bytes);
    }
  }
}

void copy_job(benchmark::State& state, const CopyCase& which, const CopyMode& mode,
              int64_t row_bytes, int64_t stream_bytes) {
  const Layout& layout = kept_copy_layout(which, stream_bytes / row_bytes);
  const int64_t bytes = layout.padded_slots * row_bytes;
  Buffer<std::byte> stream(bytes), shards(bytes);
  std::memset(stream.data(), 1, bytes);
  std::memset(shards.data(), 2, bytes);
  const auto& from = mode.back ? shards : stream;
  auto& to = mode.back ? stream : shards;
  double best = HUGE_VAL, best_memcpy = HUGE_VAL;
  for (auto _ : state) {
    best_memcpy = std::min(best_memcpy, time_of([&] {
                             std::memcpy(to.data(), from.data(), to.span().size());
                             benchmark::ClobberMemory();
                           }));
    const double seconds = time_of([&] {
      copy_shards(layout, mode, stream.span(), shards.span(), row_bytes);
      benchmark::ClobberMemory();
    });
    best = std::min(best, seconds);
    state.SetIterationTime(seconds);
  }
  state.counters["B/s"] = bytes / best;
  state.counters["of_memcpy"] = best_memcpy / best;
}

/// Packs of long-tailed documents for comparing layouts.
struct PackCase {
  int64_t slots;
  int cp;
  int64_t joint_packs;  ///< for layouts found by search
  std::vector<Bounds> packs(int64_t multiple, int64_t count = 20) const {
    return long_tailed_packs(count, slots, multiple);
  }
};

/// Means over the packs: max/mean of pairs, fraction of a ring's bytes that is needed (over all
/// ranks, and by the rank that needs most), and tokens per piece.
struct CostMeans {
  double pair_ratio = 0, worst_ratio = 0, needed = 0, needed_most = 0, run = 0;
  void add(const LayoutCost& cost, double packs) {
    int64_t tokens = 0;
    for (const RankCost& rank : cost.ranks) tokens += rank.real_tokens;
    pair_ratio += cost.pair_ratio() / packs;
    worst_ratio = std::max(worst_ratio, cost.pair_ratio());
    needed += cost.needed_share() / packs;
    needed_most += cost.largest_needed_share() / packs;
    run += tokens / static_cast<double>(cost.pieces) / packs;
  }
  void report(benchmark::State& state) const {
    state.counters["max/mean"] = pair_ratio;
    state.counters["worst"] = worst_ratio;
    state.counters["needed"] = needed;
    state.counters["needed_most"] = needed_most;
    state.counters["tokens/piece"] = run;
  }
};

void make_layouts(benchmark::State& state, const PackCase& which, const std::string& name,
                  int64_t chunk) {
  LayoutOptions options;
  options.cp = which.cp;
  options.chunk = chunk;
  const std::vector<Bounds> packs = which.packs(name == "dual-chunk-swap" ? 2 * which.cp : 1);
  CostMeans means;
  for (const Bounds& pack : packs)
    means.add(layout_cost(find_layout(name).make(pack.view(), options)), packs.size());
  size_t next = 0;
  for (auto _ : state)
    benchmark::DoNotOptimize(find_layout(name).make(packs[next++ % packs.size()].view(), options));
  means.report(state);
}

/// `communication`: ratio of the time for needed keys to the time for pairs under the balanced
/// layout, means over ranks. Times are relative to perfectly balanced compute.
void make_joint(benchmark::State& state, const PackCase& which, int64_t chunk,
                double communication) {
  LayoutOptions options;
  options.cp = which.cp;
  options.chunk = chunk;
  const std::vector<Bounds> packs = which.packs(1, which.joint_packs);
  const double count = packs.size();
  CostMeans means;
  double joint_time = 0, balanced_time = 0, contiguous_time = 0;
  for (auto _ : state)
    for (const Bounds& pack : packs) {
      const LayoutCost compute = layout_cost(balanced(pack.view(), options));
      double needed = 0;
      for (const RankCost& rank : compute.ranks) needed += rank.kv_needed;
      const double pairs = compute.pairs();
      options.time = {which.cp / pairs, communication * which.cp / needed};
      const LayoutCost joint = layout_cost(balanced_joint(pack.view(), options));
      means.add(joint, count);
      joint_time += joint.seconds(options.time) / count;
      balanced_time += compute.seconds(options.time) / count;
      contiguous_time +=
          layout_cost(contiguous(pack.view(), options)).seconds(options.time) / count;
    }
  const double search = balance_joint(packs.front().view(), options).cpu_seconds;
  means.report(state);
  state.counters["time"] = joint_time;
  state.counters["balanced"] = balanced_time;
  state.counters["contiguous"] = contiguous_time;
  state.counters["search_s"] = search;
}

void register_layouts() {
  for (const PackCase& which : {PackCase{64 << 10, 8, 20}, PackCase{256 << 10, 32, 5}}) {
    const std::string size = fmt::format("{}K/cp:{}", which.slots >> 10, which.cp);
    for (const char* name : {"contiguous", "zigzag", "dual-chunk-swap", "striped"})
      benchmark::RegisterBenchmark(
          fmt::format("layout/{}/{}", size, name).c_str(),
          [=](benchmark::State& state) { make_layouts(state, which, name, 0); })
          ->Unit(benchmark::kMillisecond);
    for (const int64_t chunk : {256, 512, 1024, 2048}) {
      benchmark::RegisterBenchmark(
          fmt::format("layout/{}/balanced/chunk:{}", size, chunk).c_str(),
          [=](benchmark::State& state) { make_layouts(state, which, "balanced", chunk); })
          ->Unit(benchmark::kMillisecond);
      for (const double communication : {0.1, 1.0, 10.0})
        benchmark::RegisterBenchmark(
            fmt::format("layout/{}/balanced-joint/chunk:{}/communication:{}", size, chunk,
                        communication)
                .c_str(),
            [=](benchmark::State& state) { make_joint(state, which, chunk, communication); })
            ->Iterations(1)
            ->Unit(benchmark::kMillisecond);
    }
  }
}

void register_copies() {
  const std::vector<CopyCase> cases = {
      {"contiguous", "contiguous", 0},
      {"zigzag", "zigzag", 0},
      {"dual-chunk-swap", "dual-chunk-swap", 0},
      {"dual-chunk-swap of 64-token documents", "dual-chunk-swap", 64},
      {"balanced", "balanced", 0},
      {"striped", "striped", 0},
  };
  const std::vector<CopyMode> modes = {{"shard", false, false},
                                       {"shard-all", false, true},
                                       {"unshard", true, false},
                                       {"unshard-all", true, true}};
  for (const CopyCase& which : cases) {
    const auto add = [&](int64_t row_bytes, int64_t stream_bytes, const char* where) {
      for (const CopyMode& mode : modes)
        benchmark::RegisterBenchmark(
            fmt::format("{}/{}/row_bytes:{}{}", mode.name, which.name, row_bytes, where).c_str(),
            [=](benchmark::State& state) { copy_job(state, which, mode, row_bytes, stream_bytes); })
            ->Iterations(stream_bytes == large_stream ? 5 : 200)
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
    };
    for (const int64_t row_bytes : {4096, 64, 8, 4}) add(row_bytes, large_stream, "");
    add(4, small_stream, "/in cache");
  }
}

const bool registered = [] {
  register_layouts();
  register_copies();
  return true;
}();

}  // namespace
}  // namespace gyre

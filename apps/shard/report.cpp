#include "apps/shard/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "attention/schedules/builder/plan_builder.hpp"
#include "comm/agree.hpp"
#include "model/shared_prefixes.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

/// Sums over bins: first over this rank's bins, later over all.
struct Totals {
  double mean_pairs = 0, max_pairs = 0, worst_ratio = 1;
  double slots = 0, real_tokens = 0, runs = 0;
  double needed = 0, needed_most = 0, ring = 0;
  double compute_s = 0, communicate_s = 0, step_s = 0, planning_s = 0;
};

/// Counts the runs, over all ranks, of consecutive tokens of a document at consecutive slots.
int64_t count_runs(const Layout& layout) {
  int64_t runs = 0;
  for (const Shard& shard : layout.shards) {
    Fragment last;
    for (const Fragment& f : shard.fragments) {
      const bool joined = f.stride == 1 && last.stride == 1 && f.segment == last.segment &&
                          f.start == last.start + last.length &&
                          f.local_begin == last.local_begin + last.length && last.length > 0;
      runs += f.stride == 1 ? (joined ? 0 : 1) : f.length;
      last = f;
    }
  }
  return runs;
}

/// Adds one bin.
void add(Totals& t, const Layout& layout, const LayoutCost& cost, const TimeModel& time) {
  const double cp = layout.cp();
  double needed = 0, most = 0, real = 0;
  for (const RankCost& rank : cost.ranks) {
    needed += rank.kv_needed;
    most = std::max(most, static_cast<double>(rank.kv_needed));
    real += rank.real_tokens;
  }
  t.mean_pairs += cost.pairs() / cp;
  t.max_pairs += cost.max_pairs();
  t.worst_ratio = std::max(t.worst_ratio, cost.pair_ratio());
  t.slots += cost.slots;
  t.real_tokens += real;
  t.runs += count_runs(layout);
  t.needed += needed / cp;
  t.needed_most += most;
  t.ring += (cp - 1) * cost.slots;
  t.compute_s += cost.max_pairs() * time.seconds_per_pair;
  t.communicate_s += most * time.seconds_per_kv_token;
  t.step_s += cost.seconds(time);
}

/// The cost of a layout. Unless the mask is causal, the needed keys are those a group-cast sends.
LayoutCost cost_of(const Layout& layout, const MaskRule& mask) {
  LayoutCost cost = layout_cost(layout);
  if (mask.plain_causal()) return cost;
  const AttentionProblem problem{&layout, {}, mask, {}};
  for (int r = 0; r < layout.cp(); ++r) {
    RankCost& rank = cost.ranks[r];
    rank.pairs = rank.kv_needed = 0;
    for (const Fragment& f : layout.shard(r).fragments) {
      const DocumentMask document(mask, f.segment, f.start.value() + (f.length - 1) * f.stride + 1);
      for (int64_t i = 0; i < f.length; ++i)
        rank.pairs += document.keys_of(f.start.value() + i * f.stride);
    }
    for (int s = 0; s < layout.cp(); ++s)
      if (s != r)
        for (const RankRows& rows : needed_rows(problem, r, s)) rank.kv_needed += rows.length;
  }
  return cost;
}

double ratio(double a, double b, double otherwise) {
  return b > 0 ? a / b : otherwise;
}

void sum_over(Communicator& world, Totals& t) {
  for (double* x :
       {&t.mean_pairs, &t.max_pairs, &t.slots, &t.real_tokens, &t.runs, &t.needed, &t.needed_most,
        &t.ring, &t.compute_s, &t.communicate_s, &t.step_s, &t.planning_s})
    *x = all_reduce_value(world, *x, ReduceOp::sum);
  t.worst_ratio = all_reduce_value(world, t.worst_ratio, ReduceOp::max);
}

}  // namespace

const Table<ShardingResult>& sharding_table() {
  using Row = ShardingResult;
  static const Table<Row> table({
      {"layout", "", 15, 0, &Row::layout, Align::left},
      {"cp", "", 4, 0, &Row::cp},
      {"slots", "", 9, 0, &Row::slots},
      {"pad", "%", 6, 2, [](const Row& r) { return 100 * r.padding; }},
      {"run", "tokens", 8, 1, &Row::run_length},
      {"pairs", "max/mean", 8, 4, &Row::pair_ratio},
      Column<Row>{"worst_bin", "max/mean", 9, 4, &Row::worst_ratio}.extra(),
      {"need", "% ring", 7, 1, [](const Row& r) { return 100 * r.needed; }},
      Column<Row>{"need_most", "% ring", 9, 1, [](const Row& r) { return 100 * r.needed_most; }}
          .extra(),
      {"fetch", "MB", 9, 2, [](const Row& r) { return r.needed_bytes / 1e6; }},
      Column<Row>{"compute", "ms", 9, 3, [](const Row& r) { return 1e3 * r.compute_s; }}.extra(),
      Column<Row>{"receive", "ms", 9, 3, [](const Row& r) { return 1e3 * r.communicate_s; }}
          .extra(),
      {"step", "ms", 9, 3, [](const Row& r) { return 1e3 * r.step_s; }},
      Column<Row>{"planning", "ms", 9, 2, [](const Row& r) { return 1e3 * r.planning_s; }}.extra(),
      {"check", "", 6, 0, &Row::check, Align::left},
  });
  return table;
}

BinBounds ShardingPlan::bounds(int64_t bin) const {
  const auto real = header_.cu_seqlens(bin), padded = header_.cu_seqlens_padded(bin);
  BinBounds bounds{{real.begin(), real.end()}, {padded.begin(), padded.end()}};
  if (!repad_) return bounds;
  const int64_t multiple = int64_t{chunks_for_all_layouts()} * cp();
  int64_t end = 0;
  for (size_t i = 0; i + 1 < padded.size(); ++i) {
    end += round_up(padded[i + 1] - padded[i], multiple);
    if (end > std::numeric_limits<int32_t>::max())
      throw_usage("bin {}, segment {}: repadded to {}, the stream exceeds the int32 range", bin, i,
                  multiple);
    bounds.padded[i + 1] = static_cast<int32_t>(end);
  }
  return bounds;
}

MaskRule ShardingPlan::mask(int64_t bin) const {
  return forest_.trees() == 0 ? MaskRule() : mask_of(forest_, header_.documents_of(bin));
}

const Layout& ShardingPlan::layout(int64_t bin) {
  const auto known = layouts_.find(bin);
  if (known != layouts_.end()) return known->second;
  const BinBounds bounds = this->bounds(bin);
  const MaskRule mask = this->mask(bin);
  LayoutOptions options = options_;
  if (!mask.plain_causal())
    options.pairs = [&](int64_t segment, int64_t queries) {
      return DocumentMask(mask, segment, bounds.view().real_length(segment)).pairs(queries);
    };
  const double start = thread_cpu_seconds();
  try {
    const Layout& made = layouts_.emplace(bin, kind_.make(bounds.view(), options)).first->second;
    seconds_ += thread_cpu_seconds() - start;
    return made;
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    throw_usage("{}: bin {}, {}{}", kind_.name, bin, error.what(),
                kind_.chunks_per_rank > 0 && !repad_ ? " (--repad makes it so)" : "");
  }
}

ShardingResult plan_layout(ShardingPlan& plan, const AttentionShape& shape, Communicator& world,
                           std::vector<RankCost>& rank_costs) {
  const PackedHeader& header = plan.header();
  const TimeModel time = shape.time_model();
  Totals totals;
  rank_costs.assign(plan.cp(), {});
  run_agreed(world, "planning", [&] {
    for (int64_t b = world.rank(); b < header.bin_count(); b += world.size()) {
      const Layout& layout = plan.layout(b);
      const LayoutCost cost = cost_of(layout, plan.mask(b));
      add(totals, layout, cost, time);
      for (size_t r = 0; r < rank_costs.size(); ++r) {
        rank_costs[r].pairs += cost.ranks[r].pairs;
        rank_costs[r].real_tokens += cost.ranks[r].real_tokens;
        rank_costs[r].kv_needed += cost.ranks[r].kv_needed;
      }
    }
  });
  totals.planning_s = plan.seconds();
  sum_over(world, totals);
  for (RankCost& rank : rank_costs)
    for (int64_t* x : {&rank.pairs, &rank.real_tokens, &rank.kv_needed})
      *x = all_reduce_value(world, *x, ReduceOp::sum);
  ShardingResult row;
  row.layout = plan.kind().name;
  row.cp = plan.cp();
  row.slots = static_cast<int64_t>(totals.slots);
  row.padding = 1 - ratio(totals.real_tokens, totals.slots * plan.cp(), 1);
  row.run_length = ratio(totals.real_tokens, totals.runs, 0);
  row.pair_ratio = ratio(totals.max_pairs, totals.mean_pairs, 1);
  row.worst_ratio = totals.worst_ratio;
  row.needed = ratio(totals.needed, totals.ring, 0);
  row.needed_most = ratio(totals.needed_most, totals.ring, 0);
  row.needed_bytes = totals.needed_most * shape.kv_token_bytes();
  row.compute_s = totals.compute_s;
  row.communicate_s = totals.communicate_s;
  row.step_s = totals.step_s;
  row.planning_s = totals.planning_s;
  row.key = {{"layout", row.layout}, {"cp", row.cp}};
  return row;
}

std::string rank_costs_text(const std::string& layout, const std::vector<RankCost>& costs,
                            const AttentionShape& shape) {
  struct Row {
    int64_t rank;
    RankCost cost;
    double share, bytes;
  };
  static const Table<Row> table({
      {"rank", "", 5, 0, &Row::rank},
      {"tokens", "real", 10, 0, [](const Row& r) { return r.cost.real_tokens; }},
      {"pairs", "per head", 14, 0, [](const Row& r) { return r.cost.pairs; }},
      {"pairs", "of mean", 8, 4, &Row::share},
      {"need", "tokens", 10, 0, [](const Row& r) { return r.cost.kv_needed; }},
      {"need", "MB", 9, 2, [](const Row& r) { return r.bytes / 1e6; }},
  });
  double mean = 0;
  for (const RankCost& cost : costs) mean += static_cast<double>(cost.pairs) / costs.size();
  std::string text = fmt::format("# {}, by rank:\n{}", layout, table.header());
  for (size_t r = 0; r < costs.size(); ++r)
    text += as_comment(table.row({static_cast<int64_t>(r), costs[r], ratio(costs[r].pairs, mean, 1),
                                  costs[r].kv_needed * shape.kv_token_bytes()}));
  return text;
}

RunReport begin_sharding_report(const AppContext& context, const PackedHeader& header,
                                const std::string& origin, const AttentionShape& shape) {
  return begin_report(context,
                      {{"streams", origin},
                       {"bins", header.bin_count()},
                       {"segments", std::ssize(header.bins.document)},
                       {"capacity", header.bins.bin_capacity},
                       {"element_bytes", shape.element_bytes()}},
                      {{"hdf5", h5::library_version()}});
}

void add_row(RunReport& report, const ShardingResult& row) {
  report.foms.push_back({"pair_ratio", row.pair_ratio, "max/mean", row.key});
  report.foms.push_back({"needed_share", row.needed, "of ring", row.key, 1});
  report.results.push_back(entry_of(row, sharding_table()));
}

}  // namespace gyre

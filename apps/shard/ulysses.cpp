// Ulysses on packed streams: exchanges heads for tokens between the ranks of the run.

#include "sharding/ulysses.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "apps/shard/kept_tensors.hpp"
#include "apps/shard/present.hpp"
#include "comm/agree.hpp"
#include "core/index.hpp"
#include "harness/row.hpp"
#include "io/schemas/packed_file.hpp"
#include "runtime/clock.hpp"
#include "sharding/layouts.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

/// Measurements of one step of Ulysses over all bins.
struct UlyssesResult : MeasuredRow {
  std::string step;
  int ranks = 1;
  int64_t slots = 0;    ///< per rank, all bins
  int64_t padding = 0;  ///< slots that the step appended to the streams
  double bytes = 0;     ///< counted bytes sent by all ranks
  double formula = 0;   ///< `bytes` by the closed form; NaN if there is none
  double step_ms = 0;   ///< time of the slowest rank, all bins
};

/// The attention whose tensors are exchanged.
struct UlyssesHeads {
  int64_t heads = 32, kv_heads = 8, head_dim = 128;
};

/// Element of a tensor. It is below 2^16, so float holds sums over 256 copies exactly.
float element(int64_t head, int64_t slot, int64_t lane) {
  return static_cast<float>((head * 7919 + slot * 31 + lane * 3) % (1 << 16));
}

/// One bin of the streams.
struct BinView {
  int64_t index = 0;
  std::vector<int64_t> ids;
  std::vector<int64_t> positions;  ///< [axes, slots]
  std::vector<int32_t> bounds;     ///< segment boundaries, in slots
  int64_t slots() const { return std::ssize(ids); }
};

/// Times one step over all bins and counts its bytes.
class ExchangeStep {
 public:
  /// `kept`, if not null, gets the tensors of the step.
  ExchangeStep(std::string name, Communicator& world, Verification& checks, bool check,
               KeptTensors* kept)
      : world_(world), check_(check ? &checks.check(name, 0) : nullptr), kept_(kept) {
    row_.step = std::move(name);
    row_.ranks = world.size();
    row_.check = "-";
    row_.formula = std::numeric_limits<double>::quiet_NaN();
    if (check_ != nullptr) check_->add_nothing();  // a rank may have no part of any bin
  }
  UlyssesResult& row() { return row_; }
  Communicator& world() { return world_; }
  int ranks() const { return world_.size(); }
  int rank() const { return world_.rank(); }

  /// Runs `work`, which is collective, and adds its time and its bytes.
  template <class Work>
  auto measured(const Work& work) {
    const int64_t before = world_.traffic().bytes_sent;
    const Stopwatch watch;
    auto result = work();
    seconds_ += watch.seconds();
    sent_ += world_.traffic().bytes_sent - before;
    return result;
  }
  int64_t sent() const { return sent_; }  ///< bytes sent by this rank so far
  /// Adds to the bytes that all ranks should send.
  void add_formula(double bytes) {
    row_.formula = std::isnan(row_.formula) ? bytes : row_.formula + bytes;
  }
  template <class T>
  void compare(const std::vector<T>& actual, const std::vector<T>& expected,
               const std::string& what) {
    if (check_ != nullptr) check_->add_all(actual, expected, what);
  }

  template <class T>
  void keep(const std::string& name, const KeptTensors::Form& form, const std::vector<T>& values) {
    if (kept_ != nullptr) kept_->add(name, form, values);
  }

  /// The row, with the bytes of all ranks and the time of the slowest. Collective.
  UlyssesResult finish() {
    row_.bytes = all_reduce_value(world_, sent_, ReduceOp::sum);
    row_.step_ms = 1e3 * all_reduce_value(world_, seconds_, ReduceOp::max);
    if (check_ != nullptr && !std::isnan(row_.formula))
      check_->add(row_.bytes, row_.formula, [&] { return row_.step + ": bytes sent"; });
    return row_;
  }

 private:
  Communicator& world_;
  Check* check_;
  KeptTensors* kept_;
  UlyssesResult row_;
  double seconds_ = 0;
  int64_t sent_ = 0;
};

/// Deals documents to ranks in blocks, as data loaders do, gathers the lists and splits them.
void exchange_lists(ExchangeStep& step, const PackedHeader& header) {
  const int64_t each = header.documents / step.ranks();
  std::vector<int64_t> mine, all;
  for (int64_t i = 0; i < each; ++i) mine.push_back(step.rank() * each + i);
  for (int64_t i = 0; i < each * step.ranks(); ++i) all.push_back(i);
  const auto gathered = step.measured(
      [&] { return gather_lists<int64_t>(step.world(), std::span<const int64_t>(mine)); });
  step.compare(gathered, all, "gathered list");
  step.compare(split_list<int64_t>(step.world(), std::span<const int64_t>(gathered)), mine,
               "split list");
}

/// Slices the stream and gathers it again, and splits a gradient.
void slice_bin(ExchangeStep& step, const BinView& bin, int64_t axes) {
  const SlicedInput sliced =
      slice_and_pad(bin.ids, 1, bin.positions, axes, bin.bounds, step.ranks(), step.rank());
  const int64_t n = bin.slots(), pad = (step.ranks() - n % step.ranks()) % step.ranks();
  const int64_t width = (n + pad) / step.ranks(), begin = step.rank() * width;
  step.row().slots += width;
  step.row().padding += pad;
  std::vector<int64_t> ids, positions;
  for (int64_t t = begin; t < begin + width; ++t) ids.push_back(t < n ? bin.ids[t] : 0);
  for (int64_t at = 0; at < std::ssize(bin.positions); at += n)
    for (int64_t t = 0; t < n + pad; ++t)
      positions.push_back(t < n ? bin.positions[at + t] : t - n);
  std::vector<int32_t> real = bin.bounds, padded = bin.bounds;
  if (pad > 0) real.push_back(padded.back()), padded.push_back(static_cast<int32_t>(n + pad));
  const std::string name = fmt::format("bin {}", bin.index);
  step.compare(sliced.ids, ids, name + " ids");
  step.compare(sliced.positions, positions, name + " positions");
  step.compare(sliced.cu_seqlens, real, name + " cu_seqlens");
  step.compare(sliced.cu_seqlens_padded, padded, name + " cu_seqlens_padded");
  step.keep("ids", {}, sliced.ids);
  step.keep("positions", {{axes}, {}, false}, sliced.positions);
  step.keep("cu_seqlens", {{}, {}, false}, sliced.cu_seqlens);
  step.keep("cu_seqlens_padded", {{}, {}, false}, sliced.cu_seqlens_padded);

  const AxisGather gather{{1, width, 1}, 1, sliced.pad, 1};
  const std::vector<double> mine(sliced.ids.begin(), sliced.ids.end());
  const int64_t before = step.sent();
  const auto whole = step.measured([&] {
    return gather_forward_and_unpad<double>(step.world(), std::span<const double>(mine), gather);
  });
  step.compare(whole, std::vector<double>(bin.ids.begin(), bin.ids.end()), name + " gathered");
  std::vector<double> gradient, expected;
  for (int64_t t = 0; t < n; ++t) gradient.push_back(t + 1);
  for (int64_t t = begin; t < begin + width; ++t) expected.push_back(t < n ? (t + 1) : 0);
  const int64_t forward = step.sent() - before;
  const auto own = step.measured([&] {
    return split_backward_and_unpad<double>(step.world(), std::span<const double>(gradient),
                                            gather);
  });
  step.compare(own, expected, name + " gradient");
  // Both directions check that arguments agree. Only forward moves data.
  const int64_t agreement = step.sent() - before - forward;
  step.compare(std::vector<int64_t>{forward - agreement},
               std::vector<int64_t>{(step.ranks() - 1) * width * int64_t{sizeof(double)}},
               name + " bytes");
}

/// A tensor [heads, slots, dim] of the given heads and slots, times `factor`.
std::vector<float> tensor(int64_t first_head, int64_t heads, const std::vector<int32_t>& slots,
                          int64_t dim, float factor = 1) {
  std::vector<float> x;
  x.reserve(static_cast<size_t>(heads) * slots.size() * static_cast<size_t>(dim));
  for (int64_t h = first_head; h < first_head + heads; ++h)
    for (const int32_t slot : slots)
      for (int64_t d = 0; d < dim; ++d) x.push_back(factor * element(h, slot, d));
  return x;
}

/// A token-major tensor [slots, heads, dim].
std::vector<float> token_major(int64_t first_head, int64_t heads, const std::vector<int32_t>& slots,
                               int64_t dim) {
  std::vector<float> x;
  for (const int32_t slot : slots)
    for (int64_t h = first_head; h < first_head + heads; ++h)
      for (int64_t d = 0; d < dim; ++d) x.push_back(element(h, slot, d));
  return x;
}

std::vector<float> exchanged(ExchangeStep& step, const std::vector<float>& x,
                             const AxisExchange& exchange) {
  return step.measured([&] {
    return post_exchange<float>(step.world(), std::span<const float>(x), exchange).finish();
  });
}

/// Slots [begin, begin + count).
std::vector<int32_t> slots_from(int64_t begin, int64_t count) {
  std::vector<int32_t> slots(count);
  for (size_t t = 0; t < slots.size(); ++t)
    slots[t] = static_cast<int32_t>(begin) + static_cast<int32_t>(t);
  return slots;
}

/// Exchanges heads for tokens and back, forward and backward. `mine`: slots of this rank. `joined`:
/// slots of all ranks in rank order. Returns this rank's queries after the exchange.
std::vector<float> exchange_bin(ExchangeStep& step, const UlyssesHeads& heads,
                                const std::vector<int32_t>& mine,
                                const std::vector<int32_t>& joined, const std::string& name) {
  const int64_t ranks = step.ranks(), d = heads.head_dim, own = heads.heads / ranks;
  const UlyssesPlan plan =
      plan_ulysses(step.world(), {1, heads.heads, heads.kv_heads, std::ssize(mine), d});
  const std::vector<float> q = tensor(0, heads.heads, mine, d);
  const std::vector<float> kv = tensor(0, heads.kv_heads, mine, d);
  // The exchanges of queries, keys and values overlap.
  const auto [queries, keys, values] = step.measured([&] {
    auto first = post_exchange<float>(step.world(), std::span<const float>(q), plan.query);
    auto second = post_exchange<float>(step.world(), std::span<const float>(kv), plan.key_value);
    auto third = post_exchange<float>(step.world(), std::span<const float>(kv), plan.key_value);
    auto a = first.finish();
    auto b = second.finish();
    return std::tuple(std::move(a), std::move(b), third.finish());
  });
  const int64_t copies = plan.key_value.scatter_replicas, own_kv = heads.kv_heads * copies / ranks;
  const int64_t first_kv = step.rank() / copies * own_kv;
  step.compare(queries, tensor(step.rank() * own, own, joined, d), name + " queries");
  for (const auto* array : {&keys, &values})
    step.compare(*array, tensor(first_kv, own_kv, joined, d), name + " keys");
  step.compare(exchanged(step, queries, plan.output), q, name + " output");
  const std::vector<float> back =
      exchanged(step, token_major(step.rank() * own, own, joined, d), plan.output_token_major);
  step.compare(back, token_major(0, heads.heads, mine, d), name + " output, tokens first");
  // All copies of a key head have the same gradient, so their sum is `copies` times that.
  const std::vector<float> d_kv = exchanged(step, keys, backward_of(plan.key_value, step.ranks()));
  step.compare(d_kv, tensor(0, heads.kv_heads, mine, d, static_cast<float>(copies)),
               name + " gradient");
  // A rank sends each tensor except its own part.
  const double slots =
      static_cast<double>(std::ssize(mine)) * static_cast<double>(d) * sizeof(float);
  const double q_heads = heads.heads;
  const double kv_heads = heads.kv_heads * copies;
  step.add_formula((ranks - 1) * slots * (3 * q_heads + 3 * kv_heads));
  step.row().slots += std::ssize(mine);
  if (step.row().step == "swapped") {
    step.keep("swapped_index", {}, mine);
    step.keep("swapped_q", {{heads.heads}, {d}}, q);
    step.keep("swapped_q_exchanged", {{own}, {d}}, queries);
    return queries;
  }
  step.keep("q", {{heads.heads}, {d}}, q);
  step.keep("kv", {{heads.kv_heads}, {d}}, kv);
  step.keep("q_exchanged", {{own}, {d}}, queries);
  step.keep("kv_exchanged", {{own_kv}, {d}}, keys);
  step.keep("out_token_major", {{}, {heads.heads, d}}, back);
  step.keep("d_kv", {{heads.kv_heads}, {d}}, d_kv);
  return queries;
}

void exchange_slices(ExchangeStep& step, const UlyssesHeads& heads, const BinView& bin) {
  const int64_t width = (bin.slots() + step.ranks() - 1) / step.ranks();
  step.row().padding += width * step.ranks() - bin.slots();
  exchange_bin(step, heads, slots_from(step.rank() * width, width),
               slots_from(0, width * step.ranks()), fmt::format("bin {}", bin.index));
}

/// Exchanges dual-chunk-swap shards. Tokens arrive in rank order and are put in stream order.
void exchange_swapped(ExchangeStep& step, const UlyssesHeads& heads, const BinView& bin) {
  LayoutOptions options;
  options.cp = step.ranks();
  const Layout layout = dual_chunk_swap({bin.bounds, bin.bounds}, options);
  std::vector<int32_t> joined;
  for (int r = 0; r < step.ranks(); ++r) {
    const std::vector<int32_t> index = shard_index(layout, r);
    joined.insert(joined.end(), index.begin(), index.end());
  }
  const std::string name = fmt::format("bin {}", bin.index);
  const std::vector<float> arrived =
      exchange_bin(step, heads, shard_index(layout, step.rank()), joined, name);
  const int64_t own = heads.heads / step.ranks(), first = step.rank() * own, d = heads.head_dim;
  const auto ordered = to_sequence_order<float>(layout, std::span<const float>(arrived), own, d);
  step.compare(ordered, tensor(first, own, slots_from(0, bin.slots()), d), name + " in order");
  step.compare(to_rank_order<float>(layout, std::span<const float>(ordered), own, d), arrived,
               name + " in rank order");
  step.keep("swapped_q_ordered", {{own}, {d}}, ordered);
}

BinView bin_view(const PackedHeader& header, const PackedSlots& slots, int64_t b) {
  const auto padded = header.cu_seqlens_padded(b);
  const int64_t first = header.slot_offsets()[b], count = padded.back();
  const int64_t axes = header.position_axes;
  const auto part = [&](const std::vector<int32_t>& all, int64_t width) {
    return transposed(std::span(all).subspan(first * width, count * width), count, width);
  };
  const std::vector<int32_t> ids = part(slots.ids, 1), positions = part(slots.positions, axes);
  return {b,
          {ids.begin(), ids.end()},
          {positions.begin(), positions.end()},
          {padded.begin(), padded.end()}};
}

/// Dual-chunk-swap requires that the slots of each segment are a multiple of 2·ranks.
bool can_be_swapped(const PackedHeader& header, int ranks) {
  for (int64_t b = 0; b < header.bin_count(); ++b)
    for (const int32_t bound : header.cu_seqlens_padded(b))
      if (bound % (2 * ranks) != 0) return false;
  return true;
}

const Table<UlyssesResult>& ulysses_table() {
  using Row = UlyssesResult;
  static const Table<Row> table({
      {"step", "", 9, 0, &Row::step, Align::left},
      {"ranks", "", 6, 0, [](const Row& r) { return int64_t{r.ranks}; }},
      {"slots", "rank", 9, 0, &Row::slots},
      {"padding", "slots", 8, 0, &Row::padding},
      {"sent", "B", 14, 0, &Row::bytes},
      {"formula", "B", 14, 0, &Row::formula},
      {"t", "ms", 10, 3, &Row::step_ms},
      {"check", "", 6, 0, &Row::check, Align::left},
  });
  return table;
}

/// Runs the steps over the ranks of `world` for every bin of the streams (the same on all ranks;
/// ids, no embeddings) and adds to `checks`:
///
///     lists      the ranks' documents are gathered in rank order and split again
///     slices     the stream is padded to a multiple of the ranks and cut into contiguous slices of
///                ids, with whole positions; gathered slices, unpadded, are the stream; gradients
///                are split back
///     exchange   each rank gets its heads of q, k and v for all tokens; backward sums over the
///                copies of a key head; the output goes back, in both of its memory orders
///     swapped    exchange, from dual-chunk-swap shards, with tokens reordered as in the stream
///
/// Each element's value encodes its head, slot and lane, so its place is checked, too. Throws a
/// usage error with the nearest valid number if heads do not divide over the ranks. `kept`, if not
/// null, gets the tensors. Collective.
std::vector<UlyssesResult> run_ulysses(const PackedHeader& header, const PackedSlots& slots,
                                       const UlyssesHeads& heads, Communicator& world, bool check,
                                       Verification& checks, KeptTensors* kept) {
  run_agreed(world, "--ulysses", [&] {
    if (header.hidden_size > 0)
      throw_usage("--ulysses slices ids; these streams hold embeddings of {}", header.hidden_size);
  });
  Verification mine(checks.tolerance_scale());
  std::vector<UlyssesResult> rows;
  ExchangeStep lists("lists", world, mine, check, nullptr);
  exchange_lists(lists, header);
  rows.push_back(lists.finish());
  const auto over_bins = [&](const char* name, const auto& work) {
    ExchangeStep step(name, world, mine, check, kept);
    for (int64_t b = 0; b < header.bin_count(); ++b) work(step, bin_view(header, slots, b));
    rows.push_back(step.finish());
  };
  over_bins("slices", [&](ExchangeStep& step, const BinView& bin) {
    slice_bin(step, bin, header.position_axes);
  });
  over_bins("exchange",
            [&](ExchangeStep& step, const BinView& bin) { exchange_slices(step, heads, bin); });
  if (can_be_swapped(header, world.size()))
    over_bins("swapped",
              [&](ExchangeStep& step, const BinView& bin) { exchange_swapped(step, heads, bin); });
  mine.merge_over(world);
  for (UlyssesResult& row : rows)
    if (check) row.check = mine.check(row.step, 0).passed() ? "ok" : "FAILED";
  checks.merge(mine);
  return rows;
}

}  // namespace

ExitCode run_heads_for_tokens(const ShardOptions& o, const PackedHeader& header,
                              const PackedSlots& slots, AppContext& context, RunReport& report) {
  Communicator& world = context.world;
  KeptTensors kept;
  const double slots_of_all = header.slot_offsets().back() + header.bin_count() * world.size();
  constexpr double tensors = 6;  // of queries; half as many of keys, some with copies of heads
  if (o.files().wanted())
    check_arrays_fit(
        tensors * (o.heads + 2 * o.kv_heads) * o.head_dim * sizeof(float) * slots_of_all, context);
  std::vector<UlyssesResult> rows =
      run_ulysses(header, slots, {o.heads, o.kv_heads, o.head_dim}, world, o.check != "none",
                  report.verification, o.files().wanted() ? &kept : nullptr);
  for (UlyssesResult& row : rows)
    if (check_text(report, report.verification) == "-") row.check = "-";
  std::string notes;
  if (o.files().wanted()) {
    std::vector<int64_t> offsets{0};
    for (int64_t b = 0; b < header.bin_count(); ++b)
      offsets.push_back(offsets.back() +
                        ceil_div(header.cu_seqlens_padded(b).back(), int64_t{world.size()}));
    ArrayFile made{.schema = ulysses_schema,
                   .group = "/ulysses",
                   .numbers = {{"ranks", world.size()},
                               {"heads", o.heads},
                               {"kv_heads", o.kv_heads},
                               {"head_dim", o.head_dim}},
                   .input_sha256 = checksum_of(report, o.input),
                   .arrays = kept.arrays(world),
                   .provenance = provenance_of(context, o.input.empty() ? o.generate : o.input)};
    made.arrays.push_back({"slot_offsets", {std::ssize(offsets)}, offsets});
    notes = write_and_compare(made, o.files(), o.check != "none", context, report.verification);
  }
  return present(o, context, report, ulysses_table(), rows, "step", notes);
}

}  // namespace gyre

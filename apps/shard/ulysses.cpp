// Ulysses on packed streams: exchanges heads for tokens between the ranks of the run.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "apps/shard/heads_for_tokens.hpp"
#include "apps/shard/kept_tensors.hpp"
#include "apps/shard/present.hpp"
#include "comm/agree.hpp"
#include "core/index.hpp"
#include "harness/row.hpp"
#include "io/schemas/packed_file.hpp"
#include "runtime/clock.hpp"
#include "sharding/layouts.hpp"
#include "sharding/slices.hpp"
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

/// Slots [0, count).
std::vector<int32_t> first_slots(int64_t count) {
  std::vector<int32_t> slots(count);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

/// An array [slots, heads, dim] of these ranges of heads, one after the other.
std::vector<float> tensor(const std::vector<HeadRange>& ranges, const std::vector<int32_t>& slots,
                          int64_t dim) {
  std::vector<float> x;
  for (const int32_t slot : slots)
    for (const HeadRange& heads : ranges)
      for (int64_t h = heads.begin; h < heads.end(); ++h)
        for (int64_t d = 0; d < dim; ++d) x.push_back(element(h, slot, d));
  return x;
}

/// x [slots, heads, dim] as [heads, slots, dim].
std::vector<float> heads_first(const std::vector<float>& x, int64_t heads, int64_t dim) {
  const int64_t slots = std::ssize(x) / std::max<int64_t>(heads * dim, 1);
  std::vector<float> turned;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t t = 0; t < slots; ++t) {
      const auto row = x.begin() + (t * heads + h) * dim;
      turned.insert(turned.end(), row, row + dim);
    }
  return turned;
}

/// The keys [kv_heads, slots, dim] of keys and values [slots, 2, kv_heads, dim].
std::vector<float> keys_of(const std::vector<float>& x, int64_t kv_heads, int64_t dim) {
  std::vector<float> both = heads_first(x, 2 * kv_heads, dim);
  both.resize(both.size() / 2);
  return both;
}

/// Number of ranks whose query heads read KV head h, for all heads.
std::vector<int64_t> copies_of_heads(const HeadShape& shape, int ranks) {
  std::vector<int64_t> copies(shape.kv_heads, 0);
  for (int r = 0; r < ranks; ++r) {
    const HeadRange read = kv_heads_read(assigned_heads(shape.heads, ranks, r), shape.group());
    for (int64_t h = read.begin; h < read.end(); ++h) ++copies[h];
  }
  return copies;
}

std::vector<float> values_of(MatrixView<float> x) {
  return {x.data, x.data + x.rows * x.cols};
}

/// Exchanges the shards of `layout` for heads and back, forward and backward. Returns this rank's
/// queries after the exchange, [slots, heads, dim], in the order of the stream.
std::vector<float> exchange_bin(ExchangeStep& step, const HeadShape& shape, const Layout& layout,
                                const std::string& name) {
  HeadsForTokens exchange(step.world(), layout, shape);
  const int64_t d = shape.head_dim, k = shape.kv_heads;
  const std::vector<int32_t> mine = shard_index(layout, step.rank()),
                             all = first_slots(layout.padded_slots);
  const HeadRange q_here = exchange.range(ArrayKind::q), kv_here = exchange.range(ArrayKind::kv);
  // Values are the heads after those of the keys, so that an exchange of both is noticed.
  const auto of_kv = [&](HeadRange keys) {
    return std::vector{keys, {keys.begin + k, keys.count}};
  };
  const std::vector<float> q = tensor({{0, shape.heads}}, mine, d),
                           kv = tensor(of_kv({0, k}), mine, d), q_all = tensor({q_here}, all, d),
                           kv_all = tensor(of_kv(kv_here), all, d);
  const auto fill = [](MatrixView<float> array, const std::vector<float>& values) {
    std::ranges::copy(values, array.data);
  };
  fill(exchange.tokens(ArrayKind::q), q);
  fill(exchange.tokens(ArrayKind::kv), kv);
  step.measured([&] { return exchange.run(Pass::forward); });
  const std::vector<float> queries = values_of(exchange.heads(ArrayKind::q)),
                           keys = values_of(exchange.heads(ArrayKind::kv));
  step.compare(queries, q_all, name + " queries");
  step.compare(keys, kv_all, name + " keys and values");

  fill(exchange.heads(ArrayKind::out), queries);
  fill(exchange.heads(ArrayKind::d_q), queries);
  fill(exchange.heads(ArrayKind::d_kv), keys);
  step.measured([&] { return exchange.run(Pass::backward); });
  const std::vector<float> out = values_of(exchange.tokens(ArrayKind::out)),
                           d_kv = values_of(exchange.tokens(ArrayKind::d_kv));
  step.compare(out, q, name + " output");
  step.compare(values_of(exchange.tokens(ArrayKind::d_q)), q, name + " gradient of queries");
  std::vector<float> sums = kv;
  const std::vector<int64_t> copies = copies_of_heads(shape, step.ranks());
  for (size_t i = 0; i < sums.size(); ++i) sums[i] *= copies[i / d % k];
  step.compare(d_kv, sums, name + " gradient of keys and values");
  // A rank sends each array except its own part: q, out and d_q, and two planes of kv and d_kv.
  const double heads = 3 * shape.heads + 4 * kv_heads_assigned(shape.heads, k, step.ranks());
  step.add_formula((step.ranks() - 1) * heads * d * sizeof(float) * mine.size());
  step.row().slots += std::ssize(mine);
  if (step.row().step == "swapped") {
    step.keep("swapped_index", {}, mine);
    step.keep("swapped_q", {{shape.heads}, {d}}, heads_first(q, shape.heads, d));
    return queries;
  }
  step.keep("q", {{shape.heads}, {d}}, heads_first(q, shape.heads, d));
  step.keep("kv", {{k}, {d}}, keys_of(kv, k, d));
  step.keep("q_exchanged", {{q_here.count}, {d}}, heads_first(queries, q_here.count, d));
  step.keep("kv_exchanged", {{kv_here.count}, {d}}, keys_of(keys, kv_here.count, d));
  step.keep("out_token_major", {{}, {shape.heads, d}}, out);
  step.keep("d_kv", {{k}, {d}}, keys_of(d_kv, k, d));
  return queries;
}

void exchange_slices(ExchangeStep& step, const HeadShape& shape, const BinView& bin) {
  const SlicedInput sliced = slice_and_pad(bin.ids, 1, {}, 1, bin.bounds, step.ranks(), 0);
  step.row().padding += sliced.pad;
  LayoutOptions options;
  options.cp = step.ranks();
  exchange_bin(step, shape, contiguous(sliced.bounds(), options), fmt::format("bin {}", bin.index));
}

/// Exchanges dual-chunk-swap shards. Exchanged arrays have the order of the stream.
void exchange_swapped(ExchangeStep& step, const HeadShape& shape, const BinView& bin) {
  const Layout layout = dual_chunk_swap({bin.bounds, bin.bounds}, step.ranks());
  const std::vector<float> ordered =
      exchange_bin(step, shape, layout, fmt::format("bin {}", bin.index));
  const int64_t own = assigned_heads(shape.heads, step.ranks(), step.rank()).count;
  const int64_t row = own * shape.head_dim;
  std::vector<float> by_ranks;
  for (int r = 0; r < step.ranks(); ++r)
    for (const int32_t slot : shard_index(layout, r))
      by_ranks.insert(by_ranks.end(), ordered.begin() + slot * row,
                      ordered.begin() + (slot + 1) * row);
  const KeptTensors::Form form{{own}, {shape.head_dim}};
  step.keep("swapped_q_exchanged", form, heads_first(by_ranks, own, shape.head_dim));
  step.keep("swapped_q_ordered", form, heads_first(ordered, own, shape.head_dim));
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
///     exchange   each rank gets its heads of q, k and v for all tokens; the output and gradients go
///                back, and gradients of the copies of a key head are summed
///     swapped    exchange, of dual-chunk-swap shards
///
/// Each element's value encodes its head, slot and lane, so its place is checked, too. `kept`, if
/// not null, gets the tensors. Collective.
std::vector<UlyssesResult> run_ulysses(const PackedHeader& header, const PackedSlots& slots,
                                       const HeadShape& shape, Communicator& world, bool check,
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
            [&](ExchangeStep& step, const BinView& bin) { exchange_slices(step, shape, bin); });
  if (can_be_swapped(header, world.size()))
    over_bins("swapped",
              [&](ExchangeStep& step, const BinView& bin) { exchange_swapped(step, shape, bin); });
  mine.merge_over(world);
  for (UlyssesResult& row : rows)
    if (check) row.check = mine.check(row.step, 0).passed() ? "ok" : "FAILED";
  checks.merge(mine);
  return rows;
}

/// Throws a usage error unless all ranks get equal numbers of query heads and of KV heads, as the
/// arrays of a file need.
void check_heads_of_file(int64_t heads, int64_t kv_heads, int64_t ranks) {
  ConfigErrors errors;
  if (heads % ranks != 0)
    errors.add(
        "{} query heads do not divide over {} ranks, as a file needs; the nearest number "
        "is {}",
        heads, ranks, round_up(heads, ranks));
  if (kv_heads % ranks != 0 && ranks % kv_heads != 0)
    errors.add(
        "{} KV heads neither divide {} ranks nor are a multiple of them, as a file needs; "
        "the nearest number is {}",
        kv_heads, ranks, std::gcd(kv_heads, ranks));
  errors.throw_if_any("--ulysses cannot write or compare files");
}

}  // namespace

ExitCode run_heads_for_tokens(const ShardOptions& o, const PackedHeader& header,
                              const PackedSlots& slots, AppContext& context, RunReport& report) {
  Communicator& world = context.world;
  const int64_t heads = o.attention.heads, kv_heads = o.attention.kv_heads,
                head_dim = o.attention.head_dim;
  if (o.files().wanted())
    run_agreed(world, "--ulysses", [&] { check_heads_of_file(heads, kv_heads, world.size()); });
  KeptTensors kept;
  const double slots_of_all = header.slot_offsets().back() + header.bin_count() * world.size();
  constexpr double tensors = 6;  // of queries; half as many of keys, some with copies of heads
  if (o.files().wanted())
    check_arrays_fit(tensors * (heads + 2 * kv_heads) * head_dim * sizeof(float) * slots_of_all,
                     context);
  std::vector<UlyssesResult> rows =
      run_ulysses(header, slots, {heads, kv_heads, head_dim}, world, o.check != "none",
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
                               {"heads", heads},
                               {"kv_heads", kv_heads},
                               {"head_dim", head_dim}},
                   .input_sha256 = checksum_of(report, o.input),
                   .arrays = kept.arrays(world),
                   .provenance = provenance_of(context, o.input.empty() ? o.generate : o.input)};
    made.arrays.push_back({"slot_offsets", {std::ssize(offsets)}, offsets});
    notes = write_and_compare(made, o.files(), o.check != "none", context, report.verification);
  }
  return present(o, context, report, ulysses_table(), rows, "step", notes);
}

}  // namespace gyre

// Problems that users of packing with context parallelism have hit, one test each: the input
// that broke, and what must come out. Where it helps, the wrong answer is computed beside the right
// one, to show that the input tells them apart.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "attention/kernels/block_kernel.hpp"
#include "attention/schedules/registry.hpp"
#include "close.hpp"
#include "layout_cases.hpp"
#include "logprobs/reference.hpp"
#include "model/elementwise.hpp"
#include "packing/compatibility.hpp"
#include "packing/cp_batch.hpp"
#include "packing/padding.hpp"
#include "sharding/cost.hpp"
#include "sharding/distributed.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;
using test::bounds_of;
using test::full_bounds;
using test::usage_message;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;
using Floats = std::vector<float>;

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

const HeadShape shape = {2, 1, 4, 0.5F};
const int64_t query_width = shape.heads * shape.head_dim;
const int64_t key_width = shape.kv_heads * shape.head_dim;

/// Outputs and log-sum-exps of some slots.
struct Result {
  explicit Result(int64_t slots)
      : out(static_cast<size_t>(slots * query_width), nan),
        lse(static_cast<size_t>(slots * shape.heads), nan) {}
  Floats out;  ///< [slots, heads * head_dim]
  Floats lse;  ///< [slots, heads]
};

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Queries, keys and values of a packed stream; those of padding are NaN and must not be read.
struct Attention {
  explicit Attention(Bounds bounds_) : bounds(std::move(bounds_)) {
    const SegmentBounds b = bounds.view();
    std::mt19937 random(17);
    q.assign(b.slots() * query_width, nan);
    k.assign(b.slots() * key_width, nan);
    v = k;
    for (int64_t i = 0; i < b.segments(); ++i) {
      const auto fill = [&](Floats& x, int64_t width) {
        test::fill_normal(
            std::span(x).subspan(b.begin(i) * width, static_cast<size_t>(b.real_length(i) * width)),
            random);
      };
      fill(q, query_width);
      fill(k, key_width);
      fill(v, key_width);
    }
  }
  Bounds bounds;
  Floats q, k, v;
};

/// Attention by every rank of a ring, and the whole stream put together from it.
struct RingRun {
  Result stream;
  std::vector<Result> ranks;
};

Floats shard_of(const Layout& layout, int rank, const Floats& stream, int64_t width) {
  Floats local(static_cast<size_t>(layout.shard(rank).slots * width));
  shard_rows<float>(layout, rank, stream, local, width, nan);
  return local;
}

/// The rows of an array of a plan, taken from the stream of their owners.
Floats rows_of(const Layout& layout, const PlanArray& array, const Floats& stream, int64_t width) {
  Floats rows;
  for (const RankRows& run : array.rows) {
    const Floats shard = shard_of(layout, run.rank, stream, width);
    const auto begin = shard.begin() + static_cast<std::ptrdiff_t>(run.begin.value() * width);
    rows.insert(rows.end(), begin, begin + static_cast<std::ptrdiff_t>(run.length * width));
  }
  return rows;
}

/// Carries out the Compute steps of a rank's ring; what it would receive is taken from its owner.
Result attend(const Attention& a, const Layout& layout, const RankPlan& plan) {
  const auto kernel = make_cpu_kernel();
  const int64_t slots = layout.shard(plan.rank).slots;
  const Floats q = shard_of(layout, plan.rank, a.q, query_width);
  Result mine(slots);
  std::fill(mine.out.begin(), mine.out.end(), 0.0F);
  std::fill(mine.lse.begin(), mine.lse.end(), -infinity);
  for (const Step& s : plan.forward) {
    const auto* compute = std::get_if<step::Compute>(&s);
    if (compute == nullptr) continue;
    const PlanArray& keys = plan.arrays[compute->kv];
    const Floats k = rows_of(layout, keys, a.k, key_width),
                 v = rows_of(layout, keys, a.v, key_width);
    ForwardBlock block;
    block.heads = {shape.heads, shape.kv_heads, shape.head_dim, shape.group(), 0, shape.scale};
    block.q = MatrixView(q.data(), slots, query_width);
    block.k = MatrixView(k.data(), keys.tokens(), key_width);
    block.v = MatrixView(v.data(), keys.tokens(), key_width);
    block.rectangles = compute->rectangles;
    block.out = MatrixView(mine.out.data(), slots, query_width);
    block.lse = {mine.lse.data(), slots, shape.heads};
    kernel->forward(block);
  }
  return mine;
}

RingRun attend(const Attention& a, const Layout& layout) {
  RingRun run{Result(layout.stream_slots), {}};
  for (const RankPlan& plan : plan_all(find_schedule("ring"), {&layout, shape, {}, {}}).ranks) {
    Result mine = attend(a, layout, plan);
    unshard_rows<float>(layout, plan.rank, mine.out, run.stream.out, query_width);
    unshard_rows<float>(layout, plan.rank, mine.lse, run.stream.lse, shape.heads);
    run.ranks.push_back(std::move(mine));
  }
  return run;
}
RingRun attend(const Attention& a, int cp) {
  return attend(a, dual_chunk_swap(a.bounds.view(), cp));
}

/// What attention must give, by the definition and in double precision: document by document, with
/// no plan, layout or mask of the library.
struct Expected {
  explicit Expected(const Attention& a)
      : out(a.q.size(), 0.0), lse(a.q.size() / static_cast<size_t>(shape.head_dim), -INFINITY) {
    const SegmentBounds b = a.bounds.view();
    for (int64_t i = 0; i < b.segments(); ++i)
      for (int64_t p = 0; p < b.real_length(i); ++p)
        for (int64_t head = 0; head < shape.heads; ++head) add_row(a, b.begin(i), p, head);
  }
  std::vector<double> out, lse;
  double largest_score = 0, largest_value = 0;

  /// Rounding of scores, which weights take over, and of sums over the keys.
  double tolerance() const {
    const auto keys = static_cast<double>(lse.size());
    return test::rounding(keys) * (1 + largest_score) * std::max(1.0, largest_value);
  }

 private:
  /// Position `p` of the document whose first slot is `begin`.
  void add_row(const Attention& a, int64_t begin, int64_t p, int64_t head) {
    const auto at = [](const Floats& x, int64_t i) { return static_cast<double>(x[i]); };
    const int64_t column = (begin + p) * query_width + head * shape.head_dim;
    std::vector<double> weights;
    for (int64_t j = 0; j <= p; ++j) {
      double score = 0;
      for (int64_t d = 0; d < shape.head_dim; ++d)
        score += at(a.q, column + d) * at(a.k, (begin + j) * key_width + d);
      score *= static_cast<double>(shape.scale);
      largest_score = std::max(largest_score, std::abs(score));
      weights.push_back(std::exp(score));
    }
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (int64_t d = 0; d < shape.head_dim; ++d)
      for (int64_t j = 0; j <= p; ++j) {
        const double value = at(a.v, (begin + j) * key_width + d);
        largest_value = std::max(largest_value, std::abs(value));
        out[column + d] += weights[j] / sum * value;
      }
    lse[(begin + p) * shape.heads + head] = std::log(sum);
  }
};

/// Real rows as expected, and rows of padding exactly (0, -inf).
void expect_attention(const Attention& a, const Result& got) {
  const Expected expected(a);
  const auto tolerance = [&](size_t) { return expected.tolerance(); };
  test::expect_close<const double>(got.out, expected.out, tolerance);
  test::expect_close<const double>(got.lse, expected.lse, tolerance);
  const SegmentBounds b = a.bounds.view();
  for (int64_t i = 0; i < b.segments(); ++i)
    for (int64_t p = b.real_length(i); p < b.slot_length(i); ++p)
      for (int64_t c = 0; c < query_width; ++c)
        EXPECT_EQ(got.out[(b.begin(i) + p) * query_width + c], 0.0F);
}

/// A batch of rows; ids 1, 2, ..., labels one more, positions by segment.
BshdBatch make_batch(int64_t slots, const std::vector<Longs>& real,
                     const std::vector<Longs>& padded) {
  BshdBatch batch;
  batch.rows = std::ssize(real);
  batch.slots = slots;
  LengthTable lens{batch.rows, std::ssize(real.front()), {}}, slot_lens = lens;
  PositionIds positions;
  for (size_t row = 0; row < real.size(); ++row) {
    lens.cells.insert(lens.cells.end(), real[row].begin(), real[row].end());
    slot_lens.cells.insert(slot_lens.cells.end(), padded[row].begin(), padded[row].end());
    for (const int64_t length : padded[row])
      for (int64_t p = 0; p < length; ++p) positions.values.push_back(p);
  }
  const auto count = static_cast<size_t>(batch.rows * slots);
  positions.values.resize(count, 0);
  TokenIds ids(count);
  std::iota(ids.begin(), ids.end(), 1);
  for (const int64_t id : ids) batch.labels.push_back(id + 1);
  batch.inputs = std::move(ids);
  batch.positions = std::move(positions);
  batch.seq_lens = std::move(lens);
  batch.seq_lens_padded = std::move(slot_lens);
  return batch;
}

CpBatch part_of(const BshdBatch& batch, int cp, int rank, std::optional<Tail> tail = std::nullopt) {
  CpOptions options;
  options.tail = tail;
  options.cp = cp;
  options.rank = rank;
  return make_cp_batch(batch, options);
}

/// Real tokens on every rank of a batch of one segment, by its local boundaries.
Longs real_tokens(int64_t real, int64_t slots, int cp) {
  Longs counts;
  for (int rank = 0; rank < cp; ++rank) {
    const CpBatch mine = part_of(make_batch(slots, {{real}}, {{slots}}), cp, rank, Tail::keep);
    EXPECT_EQ(mine.cu_seqlens, (Ints{0, static_cast<int32_t>(real)}));
    EXPECT_EQ(mine.cu_seqlens_padded, (Ints{0, static_cast<int32_t>(slots)}));
    EXPECT_EQ(mine.local->cu_seqlens.back(), count_real_tokens(mine.padding_mask));
    counts.push_back(mine.local->cu_seqlens.back());
  }
  return counts;
}

// TransformerEngine: boundaries were compared without the last one, so that padding at the
// end of the stream went unnoticed; lengths were divided by cp; real rows became zero, other ones
// every time.
TEST(KnownProblems, PaddingAtTheEndOfTheStreamLosesNoRealRow) {
  EXPECT_EQ(real_tokens(698, 704, 4), (Longs{170, 176, 176, 176}));  // 698 / 4 is 174 everywhere
  const Attention a(bounds_of({698}, {704}));
  const RingRun first = attend(a, 4), second = attend(a, 4);
  expect_attention(a, first.stream);
  EXPECT_TRUE(same_bits(first.stream.out, second.stream.out));
  EXPECT_TRUE(same_bits(first.stream.lse, second.stream.lse));
  for (size_t slot = 0; slot < 698; ++slot)
    EXPECT_TRUE(std::any_of(first.stream.out.begin() + static_cast<std::ptrdiff_t>(8 * slot),
                            first.stream.out.begin() + static_cast<std::ptrdiff_t>(8 * slot + 8),
                            [](float x) { return x != 0; }))
        << "row " << slot;
}

// TransformerEngine, Megatron-LM: 7 tokens in 8 slots over two ranks were
// treated as 6.
TEST(KnownProblems, SevenTokensOfEightSlotsAreNotSix) {
  EXPECT_EQ(real_tokens(7, 8, 2), (Longs{3, 4}));
  const Attention a(bounds_of({7, 7}, {8, 8}));
  const RingRun run = attend(a, 2);
  expect_attention(a, run.stream);
  const auto lse = [&](int64_t slot) { return run.stream.lse[slot * shape.heads]; };
  for (const int64_t begin : {0, 8}) {
    EXPECT_TRUE(std::isfinite(lse(begin + 6)));
    EXPECT_EQ(lse(begin + 7), -infinity);
  }
}

// TransformerEngine: NaN where all of a rank's second chunk is padding.
TEST(KnownProblems, AChunkOfPaddingOnlyContributesExactlyNothing) {
  EXPECT_EQ(real_tokens(9, 12, 2), (Longs{3, 6}));
  const Attention a(bounds_of({9}, {12}));
  const Layout layout = dual_chunk_swap(a.bounds.view(), 2);
  const RankPlan plan = plan_rank(find_schedule("ring"), {&layout, shape, {}, {}}, 0);
  int blocks = 0;
  for (const Step& s : plan.forward)
    if (const auto* compute = std::get_if<step::Compute>(&s)) {
      EXPECT_EQ(plan.arrays[compute->kv].rows.front().rank, 0);
      ++blocks;
    }
  EXPECT_EQ(blocks, 1);
  expect_attention(a, attend(a, 2).stream);
  // Ranks without any query or key, and documents of no token.
  for (const Bounds& bounds : {bounds_of({1}, {8}), bounds_of({0, 1, 0}, {8, 8, 8}),
                               bounds_of({0}, {16}), bounds_of({9, 1, 3}, {16, 8, 8})}) {
    const Attention b(bounds);
    expect_attention(b, attend(b, 4).stream);
  }
}

// TransformerEngine: on one device the gradient is wrong although the forward pass is right,
// and one segment suffices. A forward check alone must not pass such a set-up.
TEST(KnownProblems, ARightForwardPassDoesNotVouchForTheGradient) {
  const Attention a(bounds_of({16}, {16}));
  expect_attention(a, attend(a, 2).stream);
  ParallelSetup setup;
  setup.packed = true;
  setup.cp = 2;
  setup.attention = {true, true, true};
  setup.device = DeviceCapability{12, 0};
  EXPECT_EQ(usage_message([&] { require_compatible(setup); }),
            "packed rows: the fused attention gradient of this device (12.0) is known to be "
            "wrong; turn fused attention off");
  setup.device = DeviceCapability{9, 0};
  EXPECT_EQ(require_compatible(setup).level, Compatibility::Level::warning);
  setup.probe = GradientProbe::differs;
  EXPECT_EQ(usage_message([&] { require_compatible(setup); }),
            "packed rows: the fused attention gradient of this device differs from the "
            "reference; turn fused attention off");
  setup.forward_only = true;
  EXPECT_EQ(require_compatible(setup).level, Compatibility::Level::warning);
}

/// Rows [slots, 4] of one head, rotated.
Floats rotated(Floats x, const Ints& positions) {
  apply_rope({x.data(), std::ssize(positions), 4}, 4, plain_rotary(4, 10000), positions);
  return x;
}

// Megatron-LM: rotary embedding of a shard by global boundaries, or by the
// positions of the first segment: 0 3 0 3 where an absolute table has 0 3 4 7.
TEST(KnownProblems, AShardIsRotatedByThePositionsOfItsTokens) {
  const CpBatch r0 = part_of(make_batch(8, {{4, 4}}, {{4, 4}}), 2, 0);
  EXPECT_EQ(r0.positions.values, (Longs{0, 3, 0, 3}));
  EXPECT_EQ(r0.index, (Ints{0, 3, 4, 7}));

  const Bounds bounds = full_bounds({8, 4, 12});
  const Layout layout = dual_chunk_swap(bounds.view(), 2);
  std::mt19937 random(3);
  Floats x(static_cast<size_t>(bounds.view().slots() * 4));
  test::fill_normal(x, random);
  const Longs positions = packed_positions(bounds.padded);
  const Floats whole = rotated(x, Ints(positions.begin(), positions.end()));
  for (int rank = 0; rank < 2; ++rank) {
    const Ints index = shard_index(layout, rank);
    Ints mine, local(index.size()), by_slices;
    for (const int32_t slot : index) mine.push_back(static_cast<int32_t>(positions[slot]));
    std::iota(local.begin(), local.end(), 0);
    for (int64_t i = 0; i < bounds.view().segments(); ++i)
      for (const PositionRange& slice : rope_slices(bounds.view().slot_length(i) / 2, 2, rank))
        for (int64_t p = slice.begin; p < slice.end; ++p)
          by_slices.push_back(static_cast<int32_t>(p));
    EXPECT_EQ(by_slices, mine);
    const Floats shard = shard_of(layout, rank, x, 4), expected = shard_of(layout, rank, whole, 4);
    EXPECT_TRUE(same_bits(rotated(shard, mine), expected));
    EXPECT_FALSE(same_bits(rotated(shard, local), expected));  // positions of the shard
    EXPECT_FALSE(same_bits(rotated(shard, index), expected));  // slots of the stream
  }
}

/// Every rank's shard of `stream` after the plans of all ranks are carried out.
std::vector<Longs> shift_shards(const Layout& layout, const Ints& bounds, const Longs& stream) {
  std::vector<SlotMoves> plans;
  std::vector<Longs> in, out;
  for (int r = 0; r < layout.cp(); ++r) {
    plans.push_back(plan_shift_left(layout, bounds, r));
    in.emplace_back(static_cast<size_t>(layout.shard(r).slots));
    shard_rows<int64_t>(layout, r, stream, in.back());
    out.emplace_back(in.back().size(), -1);
  }
  const auto move = [&](size_t to, int32_t at, size_t from, int32_t source) {
    out[to][at] = in[from][source];
  };
  for (size_t r = 0; r < plans.size(); ++r) {
    for (const SlotMoves::Move& m : plans[r].moves)
      for (int32_t i = 0; i < m.length; ++i) move(r, m.to + i, r, m.from + i);
    for (const int32_t slot : plans[r].filled) out[r][slot] = ignored_label;
    for (const SlotMoves::Message& recv : plans[r].recvs)
      for (const SlotMoves::Message& send : plans[recv.peer].sends)
        if (send.peer == static_cast<int>(r))
          for (size_t i = 0; i < recv.slots.size(); ++i)
            move(r, recv.slots[i], static_cast<size_t>(recv.peer), send.slots[i]);
  }
  return out;
}

// Megatron-LM: targets of later tokens rolled inside shards, by boundaries without padding.
TEST(KnownProblems, ShiftingAShardIsNoRollAndLeaksNothing) {
  constexpr int64_t none = ignored_label;
  const Bounds one = full_bounds({8});
  const Layout layout = dual_chunk_swap(one.view(), 2);
  const Longs positions = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(shift_shards(layout, one.padded, positions),
            (std::vector<Longs>{{1, 2, 7, none}, {3, 4, 5, 6}}));  // a roll: 1 6 7 and 3 4 5 .

  // Odd lengths; the first document ends in padding, which must not get the second one's tokens.
  const Bounds odd = bounds_of({5, 3, 7}, {8, 4, 8});
  const Layout three = dual_chunk_swap(odd.view(), 2);
  const Longs ids = {11, 12, 13, 14, 15, 0, 0, 0, 21, 22, 23, 0, 31, 32, 33, 34, 35, 36, 37, 0};
  Longs stream = ids;
  for (int depth = 1; depth <= 3; ++depth) {
    const std::vector<Longs> shards = shift_shards(three, odd.padded, stream);
    stream = shift_left<int64_t>(odd.padded, stream, none);
    for (int r = 0; r < 2; ++r) {
      Longs expected(static_cast<size_t>(three.shard(r).slots));
      shard_rows<int64_t>(three, r, stream, expected);
      EXPECT_EQ(shards[r], expected) << "depth " << depth << " rank " << r;
    }
    for (size_t slot = 0; slot < 8; ++slot) EXPECT_LT(stream[slot], 20) << "from the next document";
  }
  EXPECT_EQ(usage_message([&] { plan_shift_left(three, odd.real, 0); }),
            "segment boundaries end at slot 15, but layout dual-chunk-swap is of 20 slots");
}

/// Mean over labels of the cross entropy of attention's output, taken as logits, by the shards.
double mean_loss_of(const BshdBatch& batch, const Attention& a, int cp) {
  const RingRun run = attend(a, cp);
  std::vector<LossSums> sums;
  for (int rank = 0; rank < cp; ++rank) {
    const CpBatch mine = part_of(batch, cp, rank);
    const Result& result = run.ranks[rank];
    Floats losses;
    for (size_t t = 0; t < mine.labels.size(); ++t) {
      const auto row = result.out.begin() + static_cast<std::ptrdiff_t>(t) * query_width;
      const std::vector<double> logits(row, row + query_width);
      losses.push_back(
          mine.labels[t] == ignored_label
              ? nan
              : static_cast<float>(-score_row_reference(logits, mine.labels[t]).logprob));
    }
    sums.push_back(sum_losses(losses, mine.labels));
  }
  return mean_loss(sums);
}

// Megatron-Bridge, NeMo Speech: boundaries sliced as if they were tokens;
// packing with context parallelism crashed, or its loss was not that of one rank.
TEST(KnownProblems, BoundariesAreNotShardedAndTheLossIsThatOfOneRank) {
  BshdBatch batch = make_batch(40, {{7, 3, 21}}, {{8, 8, 24}});
  batch.labels.assign(40, ignored_label);
  for (const int64_t slot : {0, 1, 5, 8, 9, 16, 17, 20, 30, 35})
    batch.labels[slot] = slot % query_width;
  batch.extras["cu_seqlens_argmin"] = make_extra<int32_t>(Ints{3});
  const Attention a(bounds_of({7, 3, 21}, {8, 8, 24}));
  const double one_rank = mean_loss_of(batch, a, 1);
  EXPECT_GT(one_rank, 0);
  for (const int cp : {2, 4}) {
    EXPECT_NEAR(mean_loss_of(batch, a, cp), one_rank, Expected(a).tolerance());
    for (int rank = 0; rank < cp; ++rank) {
      const CpBatch mine = part_of(batch, cp, rank);
      EXPECT_EQ(mine.cu_seqlens, (Ints{0, 7, 10, 31}));
      EXPECT_EQ(mine.cu_seqlens_padded, (Ints{0, 8, 16, 40}));
      EXPECT_EQ(mine.max_seqlen, 24);
      EXPECT_EQ(mine.extras.at("cu_seqlens_argmin").bytes,
                batch.extras.at("cu_seqlens_argmin").bytes);
      EXPECT_EQ(std::ssize(mine.labels), 40 / cp);
    }
  }
}

/// TransformerEngine's index formula without a check of what it assumes: [slots / cp].
Ints unchecked_index(const Ints& bounds, int32_t slots, int32_t cp, int32_t rank) {
  Ints index;
  size_t i = 0;
  for (int32_t t = 0; t < slots / cp; ++t) {
    while (i + 2 < bounds.size() && t >= bounds[i + 1] / cp) ++i;
    const int32_t length = bounds[i + 1] / cp - bounds[i] / cp, within = t - bounds[i] / cp;
    const int32_t chunk = within < length / 2 ? rank : 2 * (cp - 1) - rank;
    index.push_back(bounds[i] / cp * cp + within + chunk * (length / 2));
  }
  return index;
}

struct BrokenContract {
  std::string name;
  Ints bounds;
  int32_t slots;
  Ints rank0, rank1;  ///< what the unchecked formula gives for cp = 2
  bool covers;        ///< whether it is a permutation all the same
  std::string message, layout_message;
};
std::ostream& operator<<(std::ostream& out, const BrokenContract& c) {
  return out << c.name;
}
class BrokenContracts : public testing::TestWithParam<BrokenContract> {};

// labs-molt, flash-linear-attention: padding to cp instead of 2 cp, and totals that do
// not divide, lose tokens without an error. That ranks cover the stream together proves nothing.
TEST_P(BrokenContracts, AreRejectedByName) {
  const BrokenContract& c = GetParam();
  EXPECT_EQ(unchecked_index(c.bounds, c.slots, 2, 0), c.rank0);
  EXPECT_EQ(unchecked_index(c.bounds, c.slots, 2, 1), c.rank1);
  std::set<int32_t> seen(c.rank0.begin(), c.rank0.end());
  seen.insert(c.rank1.begin(), c.rank1.end());
  EXPECT_EQ(std::ssize(seen) == c.slots, c.covers);

  Longs lengths;
  for (size_t i = 0; i + 1 < c.bounds.size(); ++i) lengths.push_back(c.bounds[i + 1] - c.bounds[i]);
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_EQ(usage_message([&] { part_of(make_batch(c.slots, {lengths}, {lengths}), 2, rank); }),
              c.message.c_str());
  EXPECT_EQ(usage_message([&] {
              const Layout layout = dual_chunk_swap({c.bounds, c.bounds}, 2);
              const Longs stream(static_cast<size_t>(c.slots));
              Longs local(static_cast<size_t>(layout.shard(0).slots));
              shard_rows<int64_t>(layout, 0, stream, local);
            }),
            c.layout_message.c_str());
}

// clang-format off
const BrokenContract broken_contracts[] = {
    {"OnlyTheTotalDivides", {0, 6, 12}, 12, {0, 3, 4, 6, 9, 10}, {1, 2, 3, 7, 8, 9}, false,
     "row 0, segment 0: slot length 6 is not a multiple of 4 (2·cp); the next valid one is 8",
     "segment 0: slot length 6 is not a multiple of 2·cp = 4; the next valid one is 8"},
    {"APermutationSplitAtTheWrongSlot", {0, 5, 12}, 12, {0, 3, 4, 5, 10, 11}, {1, 2, 6, 7, 8, 9},
     true,
     "row 0, segment 0: slot length 5 is not a multiple of 4 (2·cp); the next valid one is 8",
     "segment 0: slot length 5 is not a multiple of 2·cp = 4; the next valid one is 8"},
    {"TailThatNoSegmentCovers", {0, 8}, 16, {0, 1, 6, 7, 8, 9, 10, 11}, {2, 3, 4, 5, 6, 7, 8, 9},
     false,
     "row 0: seq_lens_padded sums to 8, but a row has 16 slots; a last slot length of 16 instead "
     "of 8 would fill it",
     "layout dual-chunk-swap: the stream has 16 rows; it must have 8"},
    {"MisalignedWithATail", {0, 10}, 12, {0, 1, 6, 7, 8, 9}, {2, 3, 4, 5, 6, 7}, false,
     "row 0, segment 0: slot length 10 is not a multiple of 4 (2·cp); the next valid one is 12",
     "segment 0: slot length 10 is not a multiple of 2·cp = 4; the next valid one is 12"},
};
// clang-format on
INSTANTIATE_TEST_SUITE_P(KnownProblems, BrokenContracts, testing::ValuesIn(broken_contracts),
                         [](const auto& row) { return row.param.name; });

TEST(KnownProblems, SlotsThatAreMultiplesOfCpOnlyAreRejectedEverywhere) {
  // 12 is a multiple of cp = 4 but not of 8; two of them are 24, which is.
  EXPECT_EQ(usage_message([] {
              part_of(make_batch(24, {{9, 12}}, {{12, 12}}), 4, 1);
            }),
            "row 0, segment 0: slot length 12 is not a multiple of 8 (2·cp); the next valid one "
            "is 16");
  EXPECT_EQ(usage_message([] {
              dual_chunk_swap(bounds_of({9, 12}, {16, 12}).view(), 4);
            }),
            "segment 1: slot length 12 is not a multiple of 2·cp = 8; the next valid one is 16");
  RowPackOptions rows;
  rows.row = 12;
  rows.cp = 4;
  EXPECT_EQ(usage_message([&] { pack_rows(Longs{9}, rows); }),
            "row width 12 is not a positive multiple of 8 (2·cp); the nearest are 8 and 16");
  RoundOptions rounding;
  rounding.multiple = 12;
  rounding.cp = 4;
  EXPECT_EQ(usage_message([&] { round_sequences(Longs{9}, rounding); }),
            "the multiple of sequence lengths 12 is not a positive multiple of 8 (2·cp·tp); the "
            "nearest are 8 and 16");
}

// mbridge: a segment that is shorter than its chunk left an empty slice to copy from.
TEST(KnownProblems, ASegmentMayBeShorterThanItsChunk) {
  RoundOptions options;
  options.cp = 2;
  options.tp = 2;
  options.multiple = 8;
  const RoundedStream stream = round_sequences(Longs{2, 1}, options);
  EXPECT_EQ(stream.cu_seqlens, (Ints{0, 2, 3}));
  EXPECT_EQ(stream.cu_seqlens_padded, (Ints{0, 8, 16}));
  EXPECT_EQ(real_tokens(2, 8, 2), (Longs{2, 0}));
  EXPECT_EQ(real_tokens(1, 8, 2), (Longs{1, 0}));
  EXPECT_EQ(real_tokens(3, 8, 4), (Longs{1, 1, 1, 0}));
  const Attention two(bounds_of({2, 1}, {8, 8})), three(bounds_of({3}, {8}));
  expect_attention(two, attend(two, 2).stream);
  expect_attention(three, attend(three, 4).stream);
}

// cudnn-frontend: offsets derived from real lengths address every later segment wrongly.
TEST(KnownProblems, SegmentsLieAtPaddedOffsets) {
  const BshdBatch batch = make_batch(6, {{3, 2}, {6, -1000}}, {{4, 2}, {6, -1000}});
  const ThdBatch thd = to_thd(batch);
  EXPECT_EQ(*thd.cu_seqlens, (Ints{0, 3, 5, 11}));
  EXPECT_EQ(*thd.cu_seqlens_padded, (Ints{0, 4, 6, 12}));
  const Attention a({*thd.cu_seqlens, *thd.cu_seqlens_padded});
  expect_attention(a, attend(a, 1).stream);
  // The same lengths at offsets 0 3 5: the second segment would begin in the padding of the first.
  const Bounds packed = full_bounds({3, 2, 7});
  LayoutOptions options;
  Attention wrong_offsets = a;
  wrong_offsets.bounds = packed;
  const RingRun wrong = attend(wrong_offsets, contiguous(packed.view(), options));
  EXPECT_TRUE(std::isnan(wrong.stream.out[3 * query_width]));
  // In slots that two and four ranks can cut.
  for (const int64_t slots : {4, 8}) {
    const Attention wide(bounds_of({3, 2, 6}, {slots, slots, 8}));
    expect_attention(wide, attend(wide, static_cast<int>(slots / 2)).stream);
  }
}

// NeMo Automodel: the pad id is the end token too, and end tokens were masked as padding.
TEST(KnownProblems, EndTokensThatLookLikePaddingAreContent) {
  constexpr int64_t end = 50;
  BshdBatch batch = make_batch(8, {{3, 3}}, {{4, 4}});
  batch.inputs = TokenIds{7, 8, end, end, 9, 10, end, end};
  CpOptions options;
  options.pad_id = end;
  int64_t real = 0, real_ends = 0;
  for (const int cp : {1, 2}) {
    options.cp = cp;
    for (options.rank = 0; options.rank < cp; ++options.rank) {
      const CpBatch mine = make_cp_batch(batch, options);
      for (size_t t = 0; t < mine.index.size(); ++t) {
        const bool padding = mine.index[t] % 4 == 3;
        EXPECT_EQ(mine.padding_mask[t] != 0, padding) << "slot " << mine.index[t];
        real_ends += !padding && std::get<TokenIds>(mine.inputs)[t] == end;
      }
      real += count_real_tokens(mine.padding_mask);
    }
  }
  EXPECT_EQ(real, 2 * 6);
  EXPECT_EQ(real_ends, 2 * 2);
}

Longs pairs_of(const Layout& layout) {
  Longs pairs;
  for (const RankCost& rank : layout_cost(layout).ranks) pairs.push_back(rank.pairs);
  return pairs;
}

// PyTorch: the balance of each document is lost when its chunks are cut as one row.
TEST(KnownProblems, BalanceIsOfEveryDocumentNotOfTheRow) {
  const Bounds bounds = full_bounds({4, 12});
  LayoutOptions options;
  options.cp = 2;
  EXPECT_EQ(pairs_of(dual_chunk_swap(bounds.view(), 2)), (Longs{44, 44}));
  EXPECT_EQ(pairs_of(zigzag(bounds.view(), options)), (Longs{52, 36}));
  // The chunks of both ranks, document by document (0 3 1 2 | 4-6 13-15 7-12), cut in the middle.
  const auto run = [](int64_t start, int64_t length) {
    return SlotRun{GlobalToken(start), 1, length, {}};
  };
  EXPECT_EQ(pairs_of(make_layout("cut", bounds.view(),
                                 {{run(0, 1), run(3, 1), run(1, 2), run(4, 3), run(13, 1)},
                                  {run(14, 2), run(7, 6)}})),
            (Longs{26, 62}));
}

// Megatron-LM: many short documents starve ranks and move keys that a cut between
// documents would leave where they are.
TEST(KnownProblems, ManyShortDocumentsAreUnevenAndMoveKeysForNothing) {
  const LayoutCost starved =
      layout_cost(dual_chunk_swap(bounds_of(Longs(8, 1), Longs(8, 8)).view(), 4));
  EXPECT_DOUBLE_EQ(starved.pair_ratio(), 4);
  const Bounds eight = full_bounds(Longs(8, 8));
  LayoutOptions options;
  options.cp = 4;
  const LayoutCost between = layout_cost(contiguous(eight.view(), options)),
                   within = layout_cost(dual_chunk_swap(eight.view(), 4));
  EXPECT_DOUBLE_EQ(between.pair_ratio(), 1);
  EXPECT_DOUBLE_EQ(within.pair_ratio(), 1);
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(between.ranks[rank].kv_needed, 0);
    // Its tail chunk, token 7 - rank of each document, needs all before it but the head chunk.
    EXPECT_EQ(within.ranks[rank].kv_needed, 8 * (7 - static_cast<int64_t>(rank) - 1));
  }
  const Bounds uneven = full_bounds({24, 8, 8, 8, 8, 8});
  EXPECT_LT(layout_cost(balanced_joint(uneven.view(), options)).needed_share(),
            layout_cost(dual_chunk_swap(uneven.view(), 4)).needed_share());
}

}  // namespace GYRE_FILE
}  // namespace gyre

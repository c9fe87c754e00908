// Gathering shards, gradients of a gather, and the next-token shift, over all ranks.

#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <random>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "errors.hpp"
#include "mpi_test.hpp"
#include "sharding/distributed.hpp"
#include "sharding/layouts.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::world;
using Ints = std::vector<int32_t>;
using Doubles = std::vector<double>;

constexpr int32_t fill = -100;

struct Bounds {
  Ints real = {0}, padded = {0};
  SegmentBounds view() const { return {real, padded}; }
};

/// Segments with these slot lengths, rounded up to `multiple`; the last slot of every third is
/// padding.
Bounds bounds_of(const std::vector<int64_t>& lengths, int64_t multiple) {
  Bounds bounds;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t slots = round_up(lengths[i], multiple);
    const int64_t real = i % 3 == 2 && slots > 0 ? slots - 1 : slots;
    bounds.real.push_back(bounds.real.back() + static_cast<int32_t>(real));
    bounds.padded.push_back(bounds.padded.back() + static_cast<int32_t>(slots));
  }
  return bounds;
}

struct Sharded {
  Bounds bounds;
  Layout layout;
};

/// A layout of the registry over segments of these lengths, rounded up where it must be.
Sharded make(const LayoutKind& kind, const std::vector<int64_t>& lengths, int cp, int64_t stripe) {
  LayoutOptions options;
  options.cp = cp;
  options.stripe = stripe;
  options.chunk = 3;
  Sharded result{bounds_of(lengths, kind.segment_multiple(cp)), {}};
  result.layout = kind.make(result.bounds.view(), options);
  return result;
}

/// Collective tests draw from this instead of rapidcheck: ranks that fail differently would shrink
/// differently, and hang.
std::vector<int64_t> random_lengths(std::mt19937& random) {
  std::vector<int64_t> lengths(random() % 6);
  for (int64_t& n : lengths) n = static_cast<int64_t>(random() % 23);
  return lengths;
}

template <class T>
std::vector<T> shard_of(const Layout& layout, int rank, const std::vector<T>& stream, int64_t row,
                        T padding) {
  std::vector<T> local(layout.shard(rank).slots * row);
  shard_rows<T>(layout, rank, stream, local, row, padding);
  return local;
}

template <class T>
std::vector<T> counting(int64_t count) {
  std::vector<T> values(count);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(3 * i + 1);
  return values;
}

template <class T>
void expect_gathered(const Layout& layout, int64_t row) {
  const auto stream = counting<T>(layout.stream_slots * row);
  const auto local = shard_of<T>(layout, world().rank(), stream, row, static_cast<T>(-7));
  EXPECT_EQ(gather_stream<T>(layout, world(), local, row), stream);
}

TEST(GatherStream, RestoresEveryLayoutAndTrimsWhatItAppended) {
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 8; ++repeat)
    for (const LayoutKind& kind : layout_kinds()) {
      const Layout layout =
          make(kind, random_lengths(random), world().size(), 1 + repeat % 3).layout;
      SCOPED_TRACE(kind.name + ", slots " + std::to_string(layout.stream_slots));
      expect_gathered<uint8_t>(layout, 1);
      expect_gathered<int64_t>(layout, 1);
      expect_gathered<double>(layout, 3);
    }
}

TEST(GatherStream, RowsOfTenOverFourRanksArePaddedToTwelveAndTrimmed) {
  // A batch of two rows, contiguous without regard to documents, as a frozen target model has it.
  const int64_t n = 10;
  const Ints bounds = {0, n};
  LayoutOptions options;
  options.cp = world().size();
  const Layout layout = contiguous({bounds, bounds}, options);
  const int64_t slots = layout.shard(0).slots;
  EXPECT_EQ(slots, ceil_div(n, world().size()));
  Ints rows, local;
  for (int32_t b = 0; b < 2; ++b)
    for (int32_t t = 0; t < n; ++t) rows.push_back(100 * b + t);
  for (int32_t b = 0; b < 2; ++b)
    for (int64_t t = world().rank() * slots; t < (world().rank() + 1) * slots; ++t)
      local.push_back(t < n ? 100 * b + static_cast<int32_t>(t) : -1);
  EXPECT_EQ(gather_batch<int32_t>(layout, world(), local, 2), rows);
}

TEST(GatherStream, FewerSlotsThanRanksLeaveSomeRanksWithPaddingOnly) {
  const Ints bounds = {0, 1};
  LayoutOptions options;
  options.cp = world().size();
  const Layout layout = contiguous({bounds, bounds}, options);
  const Ints local = {world().rank() == 0 ? 42 : -1};
  EXPECT_EQ(gather_stream<int32_t>(layout, world(), local), (Ints{42}));
}

TEST(GatherStream, MovesTheShardOnceAndAgreesInFourIntegers) {
  const int n = world().size();
  const Layout layout = make(find_layout("zigzag"), {40}, n, 1).layout;
  const Doubles local(layout.shard(0).slots * 2, 1.0);
  const Traffic before = world().traffic();
  gather_stream<double>(layout, world(), local, 2);
  EXPECT_EQ(world().traffic().messages - before.messages, n > 1 ? 3 : 0);
  EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent,
            (n - 1) * (4 * 8 + layout.shard(0).slots * 2 * 8));
}

TEST(GatherStream, ErrorsAreTheSameOnAllRanks) {
  const int n = world().size();
  const Layout layout = make(find_layout("contiguous"), {6 * n}, n, 1).layout;
  const Layout larger = make(find_layout("contiguous"), {6 * n}, n + 1, 1).layout;
  const Ints local(6, 1);
  EXPECT_EQ(agreed_message([&] { gather_stream<int32_t>(larger, world(), local); }),
            fmt::format("layout contiguous is for {} ranks, but the group has {}", n + 1, n));
  EXPECT_EQ(agreed_message([&] { gather_stream<int32_t>(layout, world(), local, 0); }),
            "0 elements a slot; there is at least 1");
  const bool last = world().rank() == n - 1;
  EXPECT_EQ(
      agreed_message([&] { gather_stream<int32_t>(layout, world(), last ? Ints(5, 1) : local); }),
      "gathering a stream: 5 local elements, but 1 rows x 6 slots x 1 elements are 6" +
          (n > 1 ? fmt::format(" (found on rank {})", n - 1) : std::string()));
  if (n == 1) return;
  EXPECT_EQ(agreed_message([&] {
              gather_stream<int32_t>(layout, world(), Ints(last ? 12 : 6, 1), last ? 2 : 1);
            }),
            fmt::format("gathering a stream: the number of elements a slot is 1 on rank 0, but 2 "
                        "on rank {}; it must be the same on all ranks of the group",
                        n - 1));
}

/// A tiny loss of a gathered stream x [slots, 2]: the sum of weight · x² over the slots that
/// `counts` selects.
double loss_of(const Doubles& x, const std::function<bool(size_t)>& counts) {
  double loss = 0;
  for (size_t i = 0; i < x.size(); ++i)
    if (counts(i / 2)) loss += static_cast<double>(1 + i % 5) * x[i] * x[i];
  return loss;
}

Doubles loss_gradient(const Doubles& x, const std::function<bool(size_t)>& counts) {
  Doubles gradient(x.size(), 0.0);
  for (size_t i = 0; i < x.size(); ++i)
    if (counts(i / 2)) gradient[i] = 2 * static_cast<double>(1 + i % 5) * x[i];
  return gradient;
}

/// d(total)/d(local), by central differences; `total` is the loss of the run from a rank's shard.
Doubles differences(const Layout& layout, Doubles local,
                    const std::function<double(const Doubles&)>& total) {
  Doubles gradient(local.size(), 0.0);
  const double step = 1e-3;
  for (int r = 0; r < world().size(); ++r)
    for (size_t i = 0; i < local.size(); ++i) {
      double ends[2];
      for (const int side : {0, 1}) {
        Doubles moved = local;
        if (r == world().rank()) moved[i] += side == 0 ? step : -step;
        ends[side] = total(gather_stream<double>(layout, world(), moved, 2));
      }
      if (r == world().rank()) gradient[i] = (ends[0] - ends[1]) / (2 * step);
    }
  return gradient;
}

void expect_near(const Doubles& got, const Doubles& want, double factor) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], factor * want[i], 1e-8) << i;
}

struct GradientCase {
  Layout layout = make(find_layout("zigzag"), {5, 4, 1}, world().size(), 1).layout;
  Doubles stream, local;
  GradientCase() {
    std::mt19937 random(17);
    std::normal_distribution<double> normal;
    stream.resize(layout.stream_slots * 2);
    for (double& x : stream) x = normal(random);
    local = shard_of<double>(layout, world().rank(), stream, 2, 0);
  }
};

TEST(GatherGradient, SplitIsRightWhenEveryRankHasTheWholeLossAndSumIsTooLargeByTheRanks) {
  const GradientCase c;
  const auto all = [](size_t) { return true; };
  const Doubles true_gradient =
      differences(c.layout, c.local, [&](const Doubles& x) { return loss_of(x, all); });
  const Doubles own = loss_gradient(c.stream, all);
  expect_near(gather_stream_backward<double>(c.layout, world(), own, 2, GatherGradient::split),
              true_gradient, 1);
  expect_near(gather_stream_backward<double>(c.layout, world(), own, 2, GatherGradient::sum),
              true_gradient, world().size());
}

TEST(GatherGradient, SumIsRightWhenLossesArePartsAndSplitLosesWhatOthersCount) {
  const GradientCase c;
  // Rank r counts every W-th slot of the gathered stream, and slot 0 on all of them.
  const auto mine = [](size_t slot) {
    return slot == 0 || static_cast<int>(slot) % world().size() == world().rank();
  };
  const Doubles true_gradient = differences(c.layout, c.local, [&](const Doubles& x) {
    return all_reduce_value(world(), loss_of(x, mine), ReduceOp::sum);
  });
  const Doubles own = loss_gradient(c.stream, mine);
  expect_near(gather_stream_backward<double>(c.layout, world(), own, 2, GatherGradient::sum),
              true_gradient, 1);
  const Doubles split =
      gather_stream_backward<double>(c.layout, world(), own, 2, GatherGradient::split);
  double missing = 0;
  for (size_t i = 0; i < split.size(); ++i) missing += std::abs(true_gradient[i] - split[i]);
  missing = all_reduce_value(world(), missing, ReduceOp::sum);
  if (world().size() > 1)
    EXPECT_GT(missing, 0.1);
  else
    EXPECT_LT(missing, 1e-7);
}

TEST(GatherGradient, NoneIsZeroAndSumOfFloatsGivesPaddingNothing) {
  const int n = world().size();
  const Layout layout = make(find_layout("contiguous"), {n + 1}, n, 1).layout;
  const std::vector<float> grad(n + 1, 1.5f);
  const int64_t slots = layout.shard(0).slots;
  EXPECT_EQ(gather_stream_backward<float>(layout, world(), grad, 1, GatherGradient::none),
            std::vector<float>(slots, 0.0f));
  std::vector<float> expected;
  for (const int32_t slot : shard_index(layout, world().rank()))
    expected.push_back(slot <= n ? 1.5f * static_cast<float>(n) : 0.0f);
  EXPECT_EQ(gather_stream_backward<float>(layout, world(), grad, 1, GatherGradient::sum), expected);
}

TEST(GatherGradient, OnlySumMovesGradients) {
  const int n = world().size();
  const Layout layout = make(find_layout("contiguous"), {4 * n}, n, 1).layout;
  const Doubles grad(4 * n, 1.0);
  for (const GatherGradient convention :
       {GatherGradient::split, GatherGradient::sum, GatherGradient::none}) {
    const Traffic before = world().traffic();
    gather_stream_backward<double>(layout, world(), grad, 1, convention);
    const int64_t data = convention == GatherGradient::sum ? 4 * 8 : 0;
    EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent, (n - 1) * (4 * 8 + data));
  }
}

TEST(GatherGradient, ErrorsAreTheSameOnAllRanks) {
  const int n = world().size();
  const Layout layout = make(find_layout("contiguous"), {2 * n}, n, 1).layout;
  EXPECT_EQ(agreed_message([&] {
              gather_stream_backward<double>(layout, world(), Doubles(3), 1, GatherGradient::sum);
            }),
            fmt::format("gradient of a gathered stream: 3 elements, but {} slots x 1 are {}", 2 * n,
                        2 * n));
  if (n == 1) return;
  EXPECT_EQ(agreed_message([&] {
              gather_stream_backward<double>(
                  layout, world(), Doubles(2 * n), 1,
                  world().rank() == 1 ? GatherGradient::sum : GatherGradient::split);
            }),
            "gradient of a gathered stream: the gradient convention is 0 on rank 0, but 1 on rank "
            "1; it must be the same on all ranks of the group");
}

// The shift. Plans are pure values: all ranks' plans, carried out in memory, are checked for any
// number of ranks; the collective for the ranks of this run.

/// Every rank's shard after the shift, by the plans alone.
std::vector<Ints> run_plans(const std::vector<SlotMoves>& plans, const std::vector<Ints>& locals) {
  std::vector<Ints> out;
  for (size_t r = 0; r < plans.size(); ++r) {
    Ints mine(locals[r].size(), -12345);
    for (const SlotMoves::Move& move : plans[r].moves)
      for (int32_t i = 0; i < move.length; ++i) mine[move.to + i] = locals[r][move.from + i];
    for (const int32_t slot : plans[r].filled) mine[slot] = fill;
    for (const SlotMoves::Message& recv : plans[r].recvs)
      for (const SlotMoves::Message& send : plans[recv.peer].sends)
        if (send.peer == static_cast<int>(r))
          for (size_t i = 0; i < recv.slots.size(); ++i)
            mine[recv.slots[i]] = locals[recv.peer][send.slots.at(i)];
    out.push_back(mine);
  }
  return out;
}

std::vector<SlotMoves> all_plans(const Layout& layout, const Ints& bounds) {
  std::vector<SlotMoves> plans;
  for (int r = 0; r < layout.cp(); ++r) plans.push_back(plan_shift_left(layout, bounds, r));
  return plans;
}

std::vector<Ints> all_shards(const Layout& layout, const Ints& stream) {
  std::vector<Ints> shards;
  for (int r = 0; r < layout.cp(); ++r)
    shards.push_back(shard_of<int32_t>(layout, r, stream, 1, fill));
  return shards;
}

std::vector<int> peers_of(const std::vector<SlotMoves::Message>& messages) {
  std::vector<int> peers;
  for (const SlotMoves::Message& message : messages) peers.push_back(message.peer);
  return peers;
}

TEST(ShiftLeft, GoldenOneSegmentOfEightOnTwoRanks) {
  const Ints bounds = {0, 8}, positions = {0, 1, 2, 3, 4, 5, 6, 7};
  const Layout layout = dual_chunk_swap({bounds, bounds}, 2);
  EXPECT_EQ(run_plans(all_plans(layout, bounds), all_shards(layout, positions)),
            (std::vector<Ints>{{1, 2, 7, fill}, {3, 4, 5, 6}}));
}

TEST(ShiftLeft, BoundsAreThoseOfTheSlotsAndSegmentsDoNotLeak) {
  // Two segments, the second with an odd number of real tokens; the shift ends where slots do.
  const Ints padded = {0, 4, 8}, stream = {10, 11, 12, 13, 20, 21, 22, 0};
  EXPECT_EQ(shift_left<int32_t>(padded, stream, fill), (Ints{11, 12, 13, fill, 21, 22, 0, fill}));
  const Layout layout = dual_chunk_swap({padded, padded}, 2);
  EXPECT_EQ(run_plans(all_plans(layout, padded), all_shards(layout, stream)),
            (std::vector<Ints>{{11, fill, 21, fill}, {12, 13, 22, 0}}));
}

TEST(ShiftLeft, DualChunkSwapTalksToItsNeighboursOnly) {
  const Ints bounds = {0, 16, 16, 40};
  const std::vector<SlotMoves> plans = all_plans(dual_chunk_swap({bounds, bounds}, 4), bounds);
  // Head chunks need the next rank, tail chunks the previous one; two segments, one message.
  EXPECT_EQ(peers_of(plans[0].recvs), (std::vector<int>{1}));
  EXPECT_EQ(peers_of(plans[1].recvs), (std::vector<int>{0, 2}));
  EXPECT_EQ(peers_of(plans[2].recvs), (std::vector<int>{1, 3}));
  EXPECT_EQ(peers_of(plans[3].recvs), (std::vector<int>{2}));
  for (const SlotMoves& plan : plans)
    for (const SlotMoves::Message& message : plan.recvs) EXPECT_EQ(message.slots.size(), 2u);
  // The last rank's chunks are neighbours: one run, cut nowhere.
  EXPECT_EQ(plans[3].moves.size(), 2u);
}

TEST(ShiftLeft, BothEndsOfAMessageUseTheOrderOfTheStreamWhateverTheOrderOfPieces) {
  const Ints bounds = {0, 8}, stream = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto one = [](int64_t slot) { return SlotRun{GlobalToken(slot), 1, 1, {}}; };
  const Layout layout =
      make_layout("opposed", {bounds, bounds},
                  {{one(6), one(4), one(2), one(0)}, {one(1), one(3), one(5), one(7)}});
  EXPECT_EQ(run_plans(all_plans(layout, bounds), all_shards(layout, stream)),
            (std::vector<Ints>{{7, 5, 3, 1}, {2, 4, 6, fill}}));
}

TEST(ShiftLeft, PlansOfEveryLayoutEqualTheShiftBeforeSharding) {
  EXPECT_TRUE(rc::check("for any layout, number of ranks and boundaries", [] {
    const int cp = *rc::gen::inRange(1, 10);
    const auto stripe = *rc::gen::inRange<int64_t>(1, 4);
    const auto& kind = layout_kinds()[*rc::gen::inRange<size_t>(0, layout_kinds().size())];
    const auto lengths =
        *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 40));
    const Sharded s = make(kind, lengths, cp, stripe);
    const Ints stream = counting<int32_t>(s.layout.stream_slots);
    const std::vector<SlotMoves> plans = all_plans(s.layout, s.bounds.padded);
    const Ints shifted = shift_left<int32_t>(s.bounds.padded, stream, fill);
    RC_ASSERT(run_plans(plans, all_shards(s.layout, stream)) == all_shards(s.layout, shifted));
    for (size_t r = 0; r < plans.size(); ++r) {
      // At most one message between two ranks, each with its counterpart.
      const std::vector<int> peers = peers_of(plans[r].recvs);
      RC_ASSERT(std::is_sorted(peers.begin(), peers.end()));
      RC_ASSERT(std::adjacent_find(peers.begin(), peers.end()) == peers.end());
      for (size_t i = 0; i < peers.size(); ++i) {
        RC_ASSERT(peers[i] != static_cast<int>(r));
        const auto& theirs = plans[peers[i]].sends;
        const auto is_mine = [&](const auto& m) { return m.peer == static_cast<int>(r); };
        RC_ASSERT(std::count_if(theirs.begin(), theirs.end(), is_mine) == 1);
        RC_ASSERT(std::find_if(theirs.begin(), theirs.end(), is_mine)->slots.size() ==
                  plans[r].recvs[i].slots.size());
      }
    }
    const auto count = [&](auto member) {
      size_t total = 0;
      for (const SlotMoves& plan : plans) total += (plan.*member).size();
      return total;
    };
    RC_ASSERT(count(&SlotMoves::sends) == count(&SlotMoves::recvs));
  }));
}

template <class T>
void expect_shifted(const Sharded& s) {
  const auto stream = counting<T>(s.layout.stream_slots);
  const auto shifted = shift_left<T>(s.bounds.padded, stream, T{fill});
  const int me = world().rank();
  const auto local = shard_of<T>(s.layout, me, stream, 1, T{-7});
  const SlotMoves plan = plan_shift_left(s.layout, s.bounds.padded, me);
  const Traffic before = world().traffic();
  EXPECT_EQ(shift_left_sharded<T>(plan, world(), local, T{fill}),
            shard_of<T>(s.layout, me, shifted, 1, T{fill}));
  int64_t values = 0;
  for (const SlotMoves::Message& message : plan.sends) values += std::ssize(message.slots);
  EXPECT_EQ(world().traffic().messages - before.messages, std::ssize(plan.sends));
  EXPECT_LT(std::ssize(plan.sends), world().size());
  EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent,
            values * static_cast<int64_t>(sizeof(T)));
  EXPECT_EQ(shift_left_sharded<T>(s.layout, s.bounds.padded, world(), local, T{fill}),
            shard_of<T>(s.layout, me, shifted, 1, T{fill}));
}

TEST(ShiftLeft, ShardedEqualsTheShiftBeforeShardingForEveryLayout) {
  std::mt19937 random(23);
  for (int repeat = 0; repeat < 10; ++repeat)
    for (const LayoutKind& kind : layout_kinds()) {
      const Sharded s = make(kind, random_lengths(random), world().size(), 1 + repeat % 3);
      SCOPED_TRACE(kind.name + ", slots " + std::to_string(s.layout.stream_slots));
      expect_shifted<int32_t>(s);
      expect_shifted<int64_t>(s);
    }
}

TEST(Relayout, RowsOfEveryLayoutBecomeThoseOfEveryOther) {
  std::mt19937 random(29);
  const int n = world().size(), me = world().rank();
  for (const LayoutKind& first : layout_kinds())
    for (const LayoutKind& second : layout_kinds()) {
      std::vector<int64_t> lengths = random_lengths(random);
      for (int64_t& length : lengths) length = round_up(length, 2 * n);
      const Layout from = make(first, lengths, n, 2).layout,
                   to = make(second, lengths, n, 2).layout;
      SCOPED_TRACE(first.name + " to " + second.name);
      const auto stream = counting<int64_t>(from.stream_slots * 2);
      const auto local = shard_of<int64_t>(from, me, stream, 2, -7);
      const auto turned = relayout<int64_t>(from, to, world(), local, 2, -9);
      EXPECT_EQ(turned, shard_of<int64_t>(to, me, stream, 2, -9));
      EXPECT_EQ(relayout<int64_t>(to, from, world(), turned, 2, -7), local);
      const SlotMoves plan = plan_relayout(from, to, me);
      if (first.name == second.name) {
        EXPECT_TRUE(plan.sends.empty() && plan.recvs.empty());
      }
      EXPECT_LT(std::ssize(plan.sends), n);
    }
}

TEST(Relayout, HeadAndTailOfTwoRanksBecomeContiguous) {
  const Ints bounds = {0, 8};
  LayoutOptions options;
  options.cp = 2;
  const SegmentBounds view{bounds, bounds};
  const SlotMoves plan =
      plan_relayout(dual_chunk_swap(view, options), contiguous(view, options), 0);
  ASSERT_EQ(plan.sends.size(), 1u);
  EXPECT_EQ(plan.sends[0].slots, (Ints{2, 3}));  // slots 6 and 7 of the stream
  ASSERT_EQ(plan.recvs.size(), 1u);
  EXPECT_EQ(plan.recvs[0].slots, (Ints{2, 3}));
  ASSERT_EQ(plan.moves.size(), 1u);
  EXPECT_EQ(plan.moves[0].length, 2);
}

// Of 2·cp chunks, rank 0 keeps chunk 0, and rank r chunk 2·cp-1-r if that is 2r or 2r+1: if 3r is
// 2·cp-1 or 2·cp-2, which one r satisfies unless 3 divides cp.
TEST(Relayout, RowsThatCrossBetweenHeadAndTailAndContiguous) {
  for (int cp = 1; cp <= 16; ++cp) {
    const Ints bounds = {0, 6 * cp};
    LayoutOptions options;
    options.cp = cp;
    const SegmentBounds view{bounds, bounds};
    const Layout tails = dual_chunk_swap(view, options), whole = contiguous(view, options);
    int64_t there = 0, back = 0;
    for (int r = 0; r < cp; ++r)
      for (const SlotMoves::Message& m : plan_relayout(tails, whole, r).sends)
        there += std::ssize(m.slots);
    for (int r = 0; r < cp; ++r)
      for (const SlotMoves::Message& m : plan_relayout(whole, tails, r).sends)
        back += std::ssize(m.slots);
    const int64_t kept = 1 + (cp % 3 == 0 ? 0 : 1);
    EXPECT_EQ(there, 3 * (2 * cp - kept)) << cp;
    EXPECT_EQ(back, there) << cp;
  }
}

TEST(Relayout, HalosOfFragmentsComeBehindTheSlots) {
  std::mt19937 random(31);
  const int n = world().size(), me = world().rank();
  int64_t halos = 0;
  for (const LayoutKind& first : layout_kinds())
    for (const LayoutKind& second : layout_kinds()) {
      std::vector<int64_t> lengths = random_lengths(random);
      for (int64_t& length : lengths) length = round_up(length, 2 * n);
      const Layout from = make(first, lengths, n, 2).layout;
      const Layout to = make(second, lengths, n, 2).layout;
      SCOPED_TRACE(first.name + " to " + second.name);
      const auto stream = counting<int64_t>(from.stream_slots);
      auto wanted = shard_of<int64_t>(to, me, stream, 1, 0);
      const std::vector<int32_t> index = shard_index(to, me);
      for (const Fragment& f : to.shard(me).fragments)
        for (int64_t back = std::min<int64_t>(3, f.start.value()); back > 0; --back)
          wanted.push_back(stream[index[f.local_begin.value()] - back]);
      const SlotMoves plan = plan_relayout(from, to, me, 3);
      const auto local = shard_of<int64_t>(from, me, stream, 1, -7);
      std::vector<int64_t> got(plan.slots, -1);
      relayout_rows(plan, world(), std::as_bytes(std::span(local)),
                    std::as_writable_bytes(std::span(got)), sizeof(int64_t));
      EXPECT_EQ(got, wanted);
      halos += plan.slots - to.slots_of_rank();
    }
  EXPECT_GT(all_reduce_value(world(), halos, ReduceOp::sum), 0);
}

TEST(Relayout, ErrorsAreTheSameOnAllRanks) {
  const int n = world().size();
  const Layout six = make(find_layout("contiguous"), {6 * n}, n, 1).layout;
  const Layout four = make(find_layout("contiguous"), {4 * n}, n, 1).layout;
  const auto turn = [&](const Layout& to, size_t values) {
    const Doubles local(values, 1);
    return agreed_message([&] { relayout<double>(six, to, world(), local, 1, 0.0); });
  };
  EXPECT_EQ(turn(four, 6), fmt::format("layouts must have equal slots and ranks: contiguous has {} "
                                       "slots over {} ranks, contiguous has {} over {}",
                                       6 * n, n, 4 * n, n));
  EXPECT_EQ(turn(six, 5), "change of layout: 5 local elements, but 6 slots x 1 elements are 6");
}

TEST(ShiftLeft, ErrorsAreTheSameOnAllRanks) {
  const int n = world().size();
  const Sharded s = make(find_layout("contiguous"), {3 * n}, n, 1);
  const auto shift = [&](const Ints& bounds, const Ints& local) {
    return agreed_message(
        [&] { shift_left_sharded<int32_t>(s.layout, bounds, world(), local, fill); });
  };
  const Ints local(3, 1);
  EXPECT_EQ(
      shift({0, 2}, local),
      fmt::format("segment boundaries end at slot 2, but layout contiguous is of {} slots", 3 * n));
  EXPECT_EQ(shift({1, 3 * n}, local), "segment boundaries must start at 0, not at 1");
  EXPECT_EQ(shift({}, local), "no segment boundaries; there are segments + 1, from 0");
  EXPECT_EQ(shift({0, 2, 1, 3 * n}, local), "segment 1: ends at slot 1, before its begin 2");
  EXPECT_EQ(shift({0, 3 * n}, world().rank() == 0 ? Ints(4, 1) : local),
            std::string("next-token shift: 4 local values, but the rank has 3 slots") +
                (n > 1 ? " (found on rank 0)" : ""));
}

}  // namespace GYRE_FILE
}  // namespace gyre

// Every schedule on real ranks: each rank's O and LSE against the serial twin over the whole
// documents.

#include <cmath>
#include <cstring>
#include <random>

#include "attention/execute.hpp"
#include "attention/schedules/registry.hpp"
#include "mpi_test.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

using test::world;

/// One whole packed stream, identical on all ranks: q [slots, heads · dim], k, v [slots, kv_heads ·
/// dim].
struct Problem {
  HeadShape heads;
  std::vector<int32_t> real = {0}, padded = {0};
  std::vector<float> q, k, v;
  SegmentBounds bounds() const { return {real, padded}; }
};

Problem make_problem(const std::vector<int64_t>& lengths, int cp, HeadShape heads, unsigned seed) {
  Problem p;
  p.heads = heads;
  for (int64_t n : lengths) {
    p.real.push_back(p.real.back() + static_cast<int32_t>(n));
    p.padded.push_back(p.padded.back() + static_cast<int32_t>(round_up(n, 2 * cp)));
  }
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  const auto slots = static_cast<size_t>(p.padded.back());
  p.q.resize(slots * static_cast<size_t>(heads.heads * heads.head_dim));
  p.k.resize(slots * static_cast<size_t>(heads.kv_heads * heads.head_dim));
  p.v.resize(p.k.size());
  for (auto* values : {&p.q, &p.k, &p.v})
    for (float& x : *values) x = normal(generator);
  // What lies in padding must never be read.
  const SegmentBounds bounds = p.bounds();
  for (int64_t s = 0; s < bounds.segments(); ++s)
    for (int64_t t = bounds.real_length(s); t < bounds.slot_length(s); ++t) {
      const auto slot = static_cast<size_t>(p.padded[static_cast<size_t>(s)] + t);
      for (auto* values : {&p.q, &p.k, &p.v}) {
        const size_t width = values->size() / slots;
        std::fill_n(values->begin() + static_cast<std::ptrdiff_t>(slot * width), width, NAN);
      }
    }
  return p;
}

std::vector<float> take_rows(const std::vector<float>& all, size_t slots,
                             const std::vector<int32_t>& index) {
  const size_t width = slots == 0 ? 0 : all.size() / slots;
  std::vector<float> rows;
  for (int32_t slot : index)
    rows.insert(rows.end(),
                all.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(slot) * width),
                all.begin() + static_cast<std::ptrdiff_t>((static_cast<size_t>(slot) + 1) * width));
  return rows;
}

struct Output {
  Buffer<float> out, lse;
};

/// Attention of the whole stream on one rank by the serial twin.
Output whole_stream(const Problem& p, MaskKind mask) {
  const Layout layout = dual_chunk_swap(p.bounds(), 1);
  const int64_t slots = p.padded.back(), width = p.heads.kv_heads * p.heads.head_dim;
  Output o{Buffer<float>(slots * p.heads.heads * p.heads.head_dim),
           Buffer<float>(slots * p.heads.heads)};
  AttentionState state{o.out.matrix(slots, p.heads.heads * p.heads.head_dim),
                       o.lse.matrix(slots, p.heads.heads)};
  const auto kernel = make_reference_kernel();
  kernel->reset(state);
  // cp = 1 cuts a segment into two chunks that are neighbours, so that the stream keeps its order.
  kernel->forward(p.heads, {p.q.data(), slots, p.heads.heads * p.heads.head_dim},
                  {{p.k.data(), slots, width}, {p.v.data(), slots, width}},
                  intersect(layout.shards[0], layout.shards[0], mask), state, [] {});
  return o;
}

Output run_schedule(const Schedule& schedule, const Problem& p, MaskKind mask,
                    BlockKernel& kernel) {
  const int cp = world().size(), rank = world().rank();
  const Layout layout = dual_chunk_swap(p.bounds(), cp);
  const Plan plan = schedule.plan(layout, mask);
  const auto index = shard_index(layout, rank);
  const auto slots = static_cast<size_t>(p.padded.back());
  const auto q = take_rows(p.q, slots, index), k = take_rows(p.k, slots, index),
             v = take_rows(p.v, slots, index);
  const int64_t n = std::ssize(index);
  std::vector<float> kv = k;
  kv.insert(kv.end(), v.begin(), v.end());
  Output o{Buffer<float>(n * p.heads.heads * p.heads.head_dim), Buffer<float>(n * p.heads.heads)};
  AttentionState state{o.out.matrix(n, p.heads.heads * p.heads.head_dim),
                       o.lse.matrix(n, p.heads.heads)};
  const RankPlan& mine = plan.ranks[static_cast<size_t>(rank)];
  KvSlots kv_slots(mine, p.heads.kv_heads * p.heads.head_dim);
  HostStream stream;
  execute_forward(mine, p.heads, {q.data(), n, p.heads.heads * p.heads.head_dim}, kv, kv_slots,
                  kernel, world(), stream, state);
  return o;
}

/// Rounding of dot products of length head_dim and keys, and one merge a block: sqrt(length) · eps,
/// and eps a merge.
double tolerance(const Problem& p) {
  const double keys = p.padded.back();
  return 4 * 1.2e-7 *
         (std::sqrt(static_cast<double>(p.heads.head_dim)) + std::sqrt(keys) +
          static_cast<double>(world().size()));
}

void expect_equal(const Problem& p, const Output& whole, const Output& mine) {
  const auto owner = slot_owners(dual_chunk_swap(p.bounds(), world().size()));
  const int64_t heads = p.heads.heads, width = heads * p.heads.head_dim;
  const SegmentBounds bounds = p.bounds();
  double worst = 0;
  for (int64_t s = 0; s < bounds.segments(); ++s)
    for (int64_t t = 0; t < bounds.slot_length(s); ++t) {
      const int64_t slot = p.padded[static_cast<size_t>(s)] + t;
      const Owner at = owner[static_cast<size_t>(slot)];
      if (at.rank != world().rank()) continue;
      const bool pad = t >= bounds.real_length(s);
      for (int64_t i = 0; i < width; ++i) {
        const float expected = pad ? 0.0f : whole.out[slot * width + i];
        const double error =
            std::abs(static_cast<double>(mine.out[at.local * width + i] - expected));
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
      for (int64_t h = 0; h < heads; ++h) {
        const float lse = mine.lse[at.local * heads + h];
        if (pad)
          EXPECT_EQ(lse, -INFINITY);
        else
          EXPECT_NEAR(lse, whole.lse[slot * heads + h], tolerance(p) * 4);
      }
    }
  EXPECT_LE(worst, tolerance(p));
}

const std::vector<std::vector<int64_t>> document_sets = {
    {64}, {1}, {0, 0}, {3, 0, 1, 2, 5, 7}, {130, 17, 64, 9}, {300}, {1, 1, 1, 1, 1, 1, 1, 1, 1}};

TEST(RingAttention, EveryScheduleEqualsTheSerialTwin) {
  const bool poisoned = poison_new_buffers(true);
  const auto kernel = make_cpu_kernel();
  unsigned seed = 1;
  for (const Schedule& schedule : schedules())
    for (const HeadShape heads :
         {HeadShape{8, 4, 32, 0.18f}, HeadShape{2, 2, 8, 0.35f}, HeadShape{4, 1, 64, 0.125f}})
      for (const MaskKind mask : {MaskKind::causal, MaskKind::full})
        for (const auto& lengths : document_sets) {
          const Problem p = make_problem(lengths, world().size(), heads, seed++);
          expect_equal(p, whole_stream(p, mask), run_schedule(schedule, p, mask, *kernel));
        }
  poison_new_buffers(poisoned);
}

TEST(RingAttention, TheSameRunTwiceGivesTheSameBits) {
  const auto kernel = make_cpu_kernel();
  const Problem p = make_problem({130, 17, 64, 9}, world().size(), {8, 4, 32, 0.18f}, 7);
  const Output a = run_schedule(find_schedule("ring"), p, MaskKind::causal, *kernel);
  const Output b = run_schedule(find_schedule("ring"), p, MaskKind::causal, *kernel);
  EXPECT_EQ(0, std::memcmp(a.out.data(), b.out.data(), static_cast<size_t>(a.out.size()) * 4));
  EXPECT_EQ(0, std::memcmp(a.lse.data(), b.lse.data(), static_cast<size_t>(a.lse.size()) * 4));
}

TEST(RingAttention, BytesOnTheWireEqualThePlan) {
  const auto kernel = make_cpu_kernel();
  const Problem p = make_problem({48, 9}, world().size(), {8, 4, 32, 0.18f}, 3);
  const Traffic before = world().traffic();
  run_schedule(find_schedule("ring"), p, MaskKind::causal, *kernel);
  const int64_t n = world().size();
  EXPECT_EQ(world().traffic().messages - before.messages, n - 1);
  EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent,
            (n - 1) * (p.padded.back() / n) * 2 * 4 * 32 * 4);
}

}  // namespace
}  // namespace gyre

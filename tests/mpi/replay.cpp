// A replay, whose ranks take turns in one process, has the bits of a run on as many ranks.

#include <array>

#include "attention_run.hpp"
#include "comm/agree.hpp"
#include "comm/checked.hpp"
#include "comm/in_process.hpp"
#include "core/checksum.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Attention;
using test::Configuration;
using test::make_problem;
using test::Problem;
using test::ProblemSpec;
using test::world;

constexpr size_t heads = 4;

/// Results of one rank: checksums of arrays, padding included, and the gradients of sinks.
struct Bits {
  uint64_t out, lse, d_q, d_kv;
  std::array<double, heads> d_sinks;
};

Bits run_for_bits(Attention& attention) {
  attention.run();
  AttentionExecutor& run = attention.executor();
  const auto checksum = [](std::initializer_list<ConstMatrixRef> matrices) {
    Checksum sum;
    for (const ConstMatrixRef& matrix : matrices)
      for (int64_t r = 0; r < matrix.rows; ++r)
        for (int64_t c = 0; c < matrix.cols; ++c) {
          const float value = matrix.at(r, c);
          sum.add(bytes_of(std::span<const float>(&value, 1)));
        }
    return sum.value();
  };
  Bits bits{checksum({run.matrix(ArrayKind::out)}),
            checksum({attention.lse_on_host().matrix()}),
            checksum({run.matrix(ArrayKind::d_q)}),
            checksum({run.d_keys(), run.d_values()}),
            {}};
  std::ranges::copy(run.d_sinks(), bits.d_sinks.begin());
  return bits;
}

/// Whether a reduce-scatter of the library sums gradients; the library chooses its order.
bool sums_by_library(const RankPlan& plan) {
  return std::ranges::any_of(plan.backward, [](const Step& step) {
    const auto* exchange = std::get_if<step::Exchange>(&step);
    return exchange != nullptr && exchange->transport == Transport::reduce_scatter;
  });
}

/// Compares a replay on this rank with what the ranks of the run have computed.
void expect_replayed(const Problem& p, const Configuration& c, BlockKernel& kernel,
                     const std::vector<Bits>& run) {
  RanksInProcess ranks(world().size());
  ranks.run([&](int rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    CheckedCommunicator group(ranks.of(rank).split(0));  // finds buffers overwritten in flight
    Attention attention(p, c, group, kernel);
    const Bits replayed = run_for_bits(attention);
    EXPECT_EQ(replayed.out, run[rank].out);
    EXPECT_EQ(replayed.lse, run[rank].lse);
    EXPECT_EQ(replayed.d_q, run[rank].d_q);
    if (!sums_by_library(attention.plan())) {
      EXPECT_EQ(replayed.d_kv, run[rank].d_kv);
    }
    // An all-reduce, in the library's order, sums the gradients of sinks over more than two ranks.
    for (size_t h = 0; h < p.sinks.size(); ++h) {
      const double want = run[rank].d_sinks[h];
      EXPECT_NEAR(replayed.d_sinks[h], want, ranks.size() > 2 ? 1e-14 * std::abs(want) : 0);
    }
    test::expect_results(p, attention, attention.tolerances());
  });
}

TEST(Replay, HasTheBitsOfARunUnderEveryScheduleAndLayout) {
  const auto kernel = make_cpu_kernel();
  int cases = 0;
  for (const DType type : activation_types) {
    const ElementTypes types{type, type, type, type};
    const ProblemSpec spec{{53, 0, 1, 30}, {heads, 2, 8, 0}, {MaskKind::causal, 40}, true, type};
    const Problem p = make_problem(spec);
    for (const Schedule& schedule : schedules())
      for (const LayoutKind& layout : layout_kinds())
        for (const ScheduleOptions& options : test::options_of(schedule)) {
          const Configuration c{schedule, layout, types, options};
          SCOPED_TRACE(name_of(c, spec));
          Attention attention(p, c, world(), *kernel);
          if (attention.refused()) continue;
          const std::vector<Bits> run = all_gather_value(world(), run_for_bits(attention));
          if (cases++ % world().size() == world().rank()) expect_replayed(p, c, *kernel, run);
        }
  }
  EXPECT_GT(cases, 50);
}

}  // namespace GYRE_FILE
}  // namespace gyre

// The host's attention kernel: the suite of every kernel, and tests of what only this one has.

#include <numeric>
#include <thread>

#include "attention_kernel_suite.hpp"

namespace gyre::test::attention_kernel {

GYRE_RUN_ON(host, AttentionKernel);

class HostAttentionKernel : public AttentionKernel {};
GYRE_RUN_ON(host, HostAttentionKernel);

TEST_P(HostAttentionKernel, EveryInstructionSet) {
  on_every_target([&] {
    use(make_cpu_kernel());
    check(Problem(heads_of(6, 2, 30), 100, 120, {full(0, 100, 0, 20), causal(0, 100, 20, 100, 0)},
                  {DType::bf16, DType::f32, DType::bf16}));
    check(Problem(heads_of(2, 1, 8), 20, 20, {causal(0, 20, 0, 20, -5)}));
    check(several_documents(heads_of(4, 2, 40), {1, 7, 8, 9, 33, 64, 100}));
    check(several_documents(heads_of(4, 2, 48), {1, 7, 8, 9, 24, 64}));
    for (const int64_t dim : {6, 16})
      check(Problem(heads_of(2, 1, dim), 20, 20, {causal(0, 20, 0, 20, 3, 5)}, all_bf16));
  });
}

TEST_P(HostAttentionKernel, ManyTinyDocuments) {
  std::vector<Rectangle> documents;
  for (int64_t i = 0; i < 100; ++i) documents.push_back(causal(3 * i, 3, 3 * i, 3, 0));
  check(Problem(heads_of(2, 2, 16), 300, 300, documents));
}

/// Covers the kernels that keep all scores of a row, computed by dot products or not, and the one
/// that keeps blocks of scores.
TEST_P(HostAttentionKernel, ShortAndLongRectangles) {
  for (const int64_t head_dim : {20, 32})
    for (const int64_t length : {1, 3, 7, 8, 9, 15, 24, 25, 63, 64, 65, 255, 256, 257})
      for (const int64_t window : {0, 1, 9, 70}) {
        SCOPED_TRACE(testing::Message() << length << " tokens of " << head_dim << ", " << window);
        check(Problem(heads_of(2, 1, head_dim), length, length,
                      {causal(0, length, 0, length, 0, window)}));
      }
}

TEST_P(HostAttentionKernel, ShortRectanglesWithKeysInCommon) {
  const Problem p(heads_of(4, 2, 24), 40, 40,
                  {full(0, 10, 0, 20), causal(10, 12, 5, 12, 2), full(22, 18, 3, 30)});
  const Forward of = forward(p);
  const Backward one = backward(p, of);
  for (const int threads : {1, 2, 3}) {
    use(make_cpu_kernel(threads));
    check(p);
    EXPECT_TRUE(backward(p, of) == one);
  }
}

TEST_P(HostAttentionKernel, ScalesOfEitherSign) {
  for (const float scale : {-0.7F, 0.0F, 1.5F}) {
    SCOPED_TRACE(scale);
    BlockHeads heads = heads_of(2, 1, 8);
    heads.scale = scale;
    check(several_documents(heads, {5, 40, 300}));
  }
}

TEST_P(HostAttentionKernel, RowsThatShareCacheSets) {
  // Rows that are a multiple of 4 KiB apart are copied.
  check(Problem(heads_of(8, 8, 64), 300, 300, {causal(0, 300, 0, 300, 0)}, {}, 0));
}

TEST_P(HostAttentionKernel, OverwrittenResultsAreThoseThatBeganWithNothing) {
  // Rows that no rectangle covers, too; what was there, NaN, is not read.
  EXPECT_TRUE(kernel().can_overwrite());
  for (int i = 0; i < 100; ++i) {
    SCOPED_TRACE(i);
    use(make_cpu_kernel(static_cast<int>(draw_(1, 3))));
    const Problem p = random_problem(draw_, false);
    Problem everywhere = p;  // cleared in all rows
    everywhere.rectangles = {full(0, p.rows, 0, p.keys)};
    Problem nowhere = p;
    nowhere.rectangles.clear();
    Forward merged = everywhere.cleared(), written = nowhere.cleared();
    Backward added = everywhere.no_gradients(), replaced = nowhere.no_gradients();
    add(p, p.rectangles, merged);
    add(p, p.rectangles, written, true);
    EXPECT_TRUE(written == merged);
    add(p, p.rectangles, merged, added);
    add(p, p.rectangles, merged, replaced, {true, true, true});
    EXPECT_TRUE(replaced == added);
  }
}

TEST_P(HostAttentionKernel, ResultsDoNotDependOnTheNumberOfThreads) {
  for (int i = 0; i < 100; ++i) {
    SCOPED_TRACE(i);
    const Problem p = random_problem(draw_, false);
    use(make_cpu_kernel(1));
    const Forward of = forward(p);
    const Backward gradients = backward(p, of);
    use(make_cpu_kernel(static_cast<int>(draw_(2, 5))));
    EXPECT_TRUE(forward(p) == of);
    EXPECT_TRUE(backward(p, of) == gradients);
  }
}

/// Attention of one head in double precision, straight from the definition.
struct Dense {
  std::vector<double> q, k, v, d_out;  // [rows][dim], [keys][dim]
  int64_t rows, keys, dim;
  double scale;
  Mask mask;

  bool visible(int64_t i, int64_t j) const {
    const int64_t query = mask.offset + i * mask.q_stride, key = j * mask.k_stride;
    return (!mask.causal || key <= query) && (mask.window == 0 || query - key < mask.window);
  }
  /// sum over rows of <O_i, dO_i>
  double loss() const {
    double total = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double weights = 0, sum = 0;
      for (int64_t j = 0; j < keys; ++j) {
        if (!visible(i, j)) continue;
        const auto row = [dim = dim](const std::vector<double>& m, int64_t r) {
          return m.begin() + r * dim;
        };
        const double score = std::inner_product(row(q, i), row(q, i) + dim, row(k, j), 0.0);
        const double weight = std::exp(scale * score);
        weights += weight;
        sum += weight * std::inner_product(row(d_out, i), row(d_out, i) + dim, row(v, j), 0.0);
      }
      if (weights > 0) total += sum / weights;
    }
    return total;
  }
  /// Central differences of the loss by every element of one of the inputs. Truncation errs by h²,
  /// rounding by eps / h: both below 1e-8 for h = 1e-5 and values of order one.
  std::vector<double> differences(std::vector<double>& by) {
    constexpr double h = 1e-5;
    std::vector<double> result;
    for (double& x : by) {
      const double at = x;
      x = at + h;
      const double above = loss();
      x = at - h;
      result.push_back((above - loss()) / (2 * h));
      x = at;
    }
    return result;
  }
};

TEST_P(HostAttentionKernel, ReferenceGradientsAreDerivatives) {
  for (const Mask& mask :
       {Mask{}, Mask{true, 3}, Mask{true, -2}, Mask{true, 2, 1, 1, 3}, Mask{true, 1, 2, 3, 7},
        Mask{false, 2, 1, 1, 1}, Mask{false, 5, 2, 3, 4}}) {
    const int64_t rows = 5, keys = 7, dim = 3;
    const Rectangle r{0, rows, 0, keys, mask};
    const Problem p(heads_of(1, 1, dim), rows, keys, {r});
    const auto values = [](const Matrix& m, int64_t begin) {
      std::vector<double> all;
      for (int64_t i = 0; i < m.rows(); ++i)
        for (int64_t c = begin; c < begin + dim; ++c) all.push_back(m(i, c));
      return all;
    };
    Dense dense{values(p.q, 0),
                values(p.kv, 0),
                values(p.kv, dim),
                values(p.d_out, 0),
                rows,
                keys,
                dim,
                p.heads.scale,
                mask};
    use(make_reference_kernel());
    const Backward g = backward(p, forward(p));
    const double tolerance = tolerance_for(DType::f32, 2 * dim + keys + roundings_per_merge);
    const auto expect_equal = [&](const std::vector<double>& want, const std::vector<double>& got) {
      ASSERT_EQ(want.size(), got.size());
      for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(want[i], got[i], tolerance) << i;
    };
    expect_equal(dense.differences(dense.q), values(g.d_q, 0));
    expect_equal(dense.differences(dense.k), values(g.d_kv, 0));
    expect_equal(dense.differences(dense.v), values(g.d_kv, dim));
  }
}

TEST_P(HostAttentionKernel, CallsProgressBetweenTilesFromTheThreadThatCalled) {
  for (const int threads : {1, 2}) {
    Problem p(heads_of(3, 3, 64), 1024, 1024, {causal(0, 1024, 0, 1024, 0)});
    int calls = 0;
    p.progress = [&calls, caller = std::this_thread::get_id()] {
      ++calls;
      EXPECT_EQ(std::this_thread::get_id(), caller);
    };
    use(make_cpu_kernel(threads));
    const Forward r = forward(p);
    EXPECT_GT(calls,
              threads == 1 ? 50 : -1);  // one of two threads may find nothing left to do
    calls = 0;
    (void)backward(p, r);
    EXPECT_GT(calls, threads == 1 ? 100 : -1);
  }
}

}  // namespace gyre::test::attention_kernel

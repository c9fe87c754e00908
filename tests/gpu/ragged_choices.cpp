// What the kernel around a library decides: what goes to the tiled kernel and why, gradients in a
// fixed order or in any, and which plans, tables and graphs are kept.

#include <set>
#include <string>
#include <vector>

#include "ragged_kernel_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test::ragged_kernel;

/// Calls that the library cannot take any part of, and rectangles that are no entries.
struct ForTheTiledKernel {
  std::string name, reason;
  Problem problem;
};
void PrintTo(const ForTheTiledKernel& x, std::ostream* out) {
  *out << x.name;
}

/// `m` with another gap between its rows.
Matrix with_gap(const Matrix& m, int64_t gap) {
  Matrix result(m.type(), m.rows(), m.cols(), gap);
  for (int64_t r = 0; r < m.rows(); ++r)
    for (int64_t c = 0; c < m.cols(); ++c) result.set(r, c, m(r, c));
  return result;
}

/// Keys that are less than `window` behind, however far ahead: no library's mask.
Rectangle ahead(int64_t q, int64_t rows, int64_t k, int64_t keys, int64_t offset, int64_t window) {
  Rectangle r = causal(q, rows, k, keys, offset, window);
  r.mask.causal = false;
  return r;
}

std::vector<ForTheTiledKernel> for_the_tiled_kernel() {
  const BlockHeads heads = heads_of(2, 1, 16);
  const std::vector<Rectangle> both = {causal(0, 20, 0, 25, 5), full(20, 13, 3, 22)};
  const auto p = [&](BlockHeads h) { return problem(h, 33, 25, both); };
  std::vector<ForTheTiledKernel> cases = {
      {"F32Arrays", "f32 arrays", problem(heads, 33, 25, both, all_f32)},
      {"OddHeadDim", "head_dim or v_head_dim not a multiple of 16", p(heads_of(2, 1, 24))},
      {"OddWidthOfValues", "head_dim or v_head_dim not a multiple of 16",
       p(heads_of(2, 1, 16, 24))},
      {"LastHeadsOfGroups", "parts of head groups", p({6, 2, 16, 4, 2, 0.25F})},
      {"FirstHeadsOfGroups", "parts of head groups", p({6, 2, 16, 4, 0, 0.25F})},
      {"Queries", "rows that are not 16-byte aligned", p(heads)},
      {"Keys", "rows that are not 16-byte aligned", p(heads)},
      {"FixedTiles", "bits that do not depend on the batch", p(heads)},
      {"Windows", "window",
       problem(heads, 33, 25, {ahead(0, 20, 0, 25, 5, 4), ahead(20, 13, 3, 22, 15, 15)})},
      {"Strides", "unequal strides",
       problem(heads, 33, 25,
               {causal(0, 20, 0, 25, 5, 0, 2, 1), causal(20, 13, 3, 22, 7, 0, 3, 5)})}};
  cases[5].problem.q = with_gap(cases[5].problem.q, 4);
  cases[6].problem.kv = with_gap(cases[6].problem.kv, 4);
  cases[7].problem.fixed_tiles = true;
  return cases;
}

class TiledKernelGpu : public PlainKernelGpu,
                       public testing::WithParamInterface<ForTheTiledKernel> {};
INSTANTIATE_TEST_SUITE_P(Takes, TiledKernelGpu, testing::ValuesIn(for_the_tiled_kernel()),
                         [](const auto& x) { return x.param.name; });

TEST_P(TiledKernelGpu, InBothDirections) {
  check(GetParam().problem);
  EXPECT_EQ(remarks(), "tiled kernel for 4 of 4 rectangles (" + GetParam().reason + ")");
  EXPECT_EQ(plain().forward.asked + plain().backward.asked, 0);
}

TEST_F(PlainKernelGpu, OnlyTheBackwardPassReadsGradients) {
  Problem p = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
  p.d_out = with_gap(p.d_out, 4);
  check(p);
  EXPECT_EQ(remarks(), "tiled kernel for 1 of 2 rectangles (rows that are not 16-byte aligned)");
  EXPECT_EQ(plain().forward.executed, 1);
}

TEST_F(PlainKernelGpu, ArraysThatBeginBetweenAlignedAddresses) {
  const Problem p = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
  // `columns` of m, 8 bytes behind an aligned address or none.
  const auto shifted = [&](const Matrix& m, int64_t begin, int64_t columns, bool off) {
    const int64_t lead = off ? 4 : 0;
    Matrix wide(m.type(), m.rows(), columns + 8, 0);
    for (int64_t r = 0; r < m.rows(); ++r)
      for (int64_t c = 0; c < columns; ++c) wide.set(r, lead + c, m(r, begin + c));
    There there = send(wide);
    there.ref = there.ref.columns_from(lead, columns);
    return there;
  };
  for (const int array : {0, 1, 2}) {
    const There q = shifted(p.q, 0, p.q.cols(), array == 0),
                k = shifted(p.kv, 0, p.k_width(), array == 1),
                v = shifted(p.kv, p.k_width(), p.v_width(), array == 2);
    Forward got = p.cleared();
    const There out = send(got.out), lse = send(got.lse);
    ForwardBlock block;
    p.fill(block, q.ref, k.ref, p.rectangles);
    block.k = k.ref;
    block.v = v.ref;
    block.out = out.ref;
    block.lse = lse.ref.as<float>();
    kernel().forward(block);
    fetch(out, got.out);
    fetch(lse, got.lse);
    EXPECT_LE(worst_error(p, got, reference_forward(p)), 1);
  }
  EXPECT_EQ(remarks(), "tiled kernel for 3 of 3 rectangles (rows that are not 16-byte aligned)");
}

TEST_F(PlainKernelGpu, SomeRectanglesOfACallAreForTheTiledKernel) {
  // Some of them are of the same rows.
  Problem p = problem(heads_of(2, 1, 16), 100, 200,
                      {full(0, 40, 0, 50), ahead(10, 60, 60, 70, 5, 12), causal(20, 33, 140, 33, 0),
                       causal(30, 50, 180, 20, 2, 0, 1, 3), causal(70, 30, 0, 30, 0)});
  int64_t progress = 0;
  p.progress = [&] { ++progress; };
  check(p);
  EXPECT_EQ(
      remarks(),
      "tiled kernel for 4 of 10 rectangles (unequal strides, window); results of 80 query rows "
      "and 50 key rows are added to those of earlier batches");
  EXPECT_EQ(plain().forward.executed, 2);
  EXPECT_EQ(plain().backward.executed, 2);
  EXPECT_GE(progress, 4);  // at least once for each batch
}

TEST_F(PlainKernelGpu, RefusedBatches) {
  const std::string why(100, 'x');
  plain().refuses = [&](const AttentionGraphShape& shape) {
    return shape.mask == RaggedMask::causal_end ? why : "";
  };
  const Problem p = problem(heads_of(2, 1, 16), 90, 100,
                            {full(0, 20, 0, 30), causal(20, 33, 30, 33, 0),
                             causal(60, 10, 70, 30, 20), causal(75, 15, 0, 30, 15)});
  check(p);
  EXPECT_EQ(remarks(),
            "tiled kernel for 4 of 8 rectangles (refused by plain: " + why.substr(0, 80) +
                "); results of 0 query rows and 30 key rows are added to those of earlier batches");
  const auto calls = [](const test::PlainAttention::Calls& x) {
    return std::vector<int64_t>{x.asked, x.built, x.executed};
  };
  EXPECT_EQ(calls(plain().forward), (std::vector<int64_t>{3, 2, 2}));
  EXPECT_EQ(calls(plain().backward), (std::vector<int64_t>{4, 2, 2}));  // with and without order
  EXPECT_TRUE(kernel().note().ends_with("; 4 graphs built for 4 batches")) << kernel().note();
  check(p);  // nothing is asked twice, also not what was refused
  EXPECT_TRUE(kernel().note().ends_with("; 4 graphs built for 8 batches")) << kernel().note();
  EXPECT_EQ(calls(plain().forward), (std::vector<int64_t>{3, 2, 4}));
  EXPECT_EQ(calls(plain().backward), (std::vector<int64_t>{4, 2, 4}));
  EXPECT_NE(kernel().note().find("8 of 16 rectangles"), std::string::npos) << kernel().note();
}

TEST_F(PlainKernelGpu, RefusedAmongOthers) {
  // What the tiled kernel gets is in the order of the queries.
  plain().refuses = [](const AttentionGraphShape& shape) {
    return shape.mask == RaggedMask::full ? "no" : "";
  };
  const Problem p =
      problem(heads_of(2, 1, 16), 200, 300,
              {full(0, 40, 0, 50), ahead(10, 60, 60, 70, 5, 12), full(20, 50, 140, 33),
               ahead(70, 66, 200, 66, 0, 9), full(130, 66, 3, 50)});
  check(p);
  EXPECT_EQ(remarks(), "tiled kernel for 10 of 10 rectangles (refused by plain: no, window)");
}

TEST_F(PlainKernelGpu, RefusedGradients) {
  plain().refuses = [](const AttentionGraphShape& shape) {
    return !shape.backward ? "" : shape.deterministic ? "ordered" : "anything";
  };
  check(problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)}));
  EXPECT_EQ(remarks(), "tiled kernel for 1 of 2 rectangles (refused by plain: anything)");
  EXPECT_EQ(plain().forward.executed, 1);
}

TEST_F(PlainKernelGpu, GradientsInNoFixedOrderAreTold) {
  plain().ordered_gradients = false;
  const Problem p = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
  forward(p);
  EXPECT_EQ(remarks(), "");
  check(p);
  EXPECT_EQ(remarks(), "plain's dQ is summed in no fixed order");
  check(problem(heads_of(2, 1, 24), 20, 30, {full(0, 20, 0, 30)}));
  EXPECT_EQ(remarks(),
            "tiled kernel for 2 of 5 rectangles (head_dim or v_head_dim not a multiple of 16); "
            "plain's dQ is summed in no fixed order");
  EXPECT_EQ(plain().backward.executed, 1);
}

TEST_F(PlainKernelGpu, AFixedOrderMayCostAGibibyteOfWorkspace) {
  const auto check_order = [&](bool ordered, int64_t ordered_extra_bytes, int64_t extra_bytes) {
    SCOPED_TRACE(ordered_extra_bytes);
    use(make_kernel(stream()));
    plain().ordered_extra_bytes = ordered_extra_bytes;
    plain().extra_bytes = extra_bytes;
    plain().backward = {};
    check(problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)}));
    EXPECT_EQ(remarks(), ordered ? "" : "plain's dQ is summed in no fixed order");
    EXPECT_EQ(plain().backward.executed, 1);
    EXPECT_EQ(plain().backward.ordered, ordered ? 1 : 0);
  };
  check_order(true, 1 << 20, 0);
  check_order(false, (1 << 30) + 1, 0);
  check_order(true, 1 << 20, 1 << 30);  // any order takes as much
  plain().refuses = [](const AttentionGraphShape& shape) -> std::string {
    return shape.backward && !shape.deterministic ? "no order" : "";
  };
  check_order(true, 1 << 30, 0);  // there is no other
}

class DeterministicGpu : public PlainKernelGpu {
 protected:
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
    return make_ragged_kernel(stream, make_plain_attention(stream, plain()), true);
  }
  Problem p_ = problem(heads_of(2, 1, 16), 20, 30, {full(0, 20, 0, 30)});
};

TEST_F(DeterministicGpu, AFixedOrderMayCostAnything) {
  plain().ordered_extra_bytes = (1 << 30) + 1;
  check(p_);
  EXPECT_EQ(remarks(), "");
  EXPECT_EQ(plain().backward.ordered, 1);
}

TEST_F(DeterministicGpu, WithoutAFixedOrderTheTiledKernelRuns) {
  plain().ordered_gradients = false;
  check(p_);
  EXPECT_EQ(remarks(), "tiled kernel for 1 of 2 rectangles (refused by plain: no fixed order)");
  EXPECT_EQ(plain().forward.executed, 1);
  EXPECT_EQ(plain().backward.executed, 0);
}

TEST_F(DeterministicGpu, AWorkspaceThatDoesNotFitIsRefusedByItsBytes) {
  plain().ordered_extra_bytes = int64_t{1} << 50;
  const Forward of = forward(p_);
  std::string message;
  try {
    (void)backward(p_, of);
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_NE(message.find("no device memory for a buffer of 11258999"), std::string::npos)
      << message;
}

/// Call after call, each with its own rectangles; what is kept of them must be told apart.
class KeptPlansGpu : public PlainKernelGpu {
 protected:
  static Problem with(std::vector<Rectangle> rectangles, BlockHeads heads = heads_of(2, 1, 16)) {
    return problem(heads, 80, 300, std::move(rectangles));
  }
  void expect_built(int64_t graphs) {
    EXPECT_EQ(plain().forward.built, graphs);
    EXPECT_EQ(plain().backward.built, graphs);
  }
  /// Where the lengths of the last call were.
  const void* tables() { return plain().last.at(AttentionTensor::q_lengths); }
};

TEST_F(KeptPlansGpu, TheSameRectanglesHaveTheSameTablesAndGraphs) {
  const Problem one = with({full(0, 20, 0, 30)}), two = with({full(3, 31, 50, 25)});
  check(one);
  expect_built(1);
  const void* gradients = tables();
  forward(one);
  const void* first = tables();
  check(two);  // of the same limits
  expect_built(1);
  EXPECT_NE(tables(), gradients);
  check(one);
  expect_built(1);
  EXPECT_EQ(tables(), gradients);
  forward(one);
  EXPECT_EQ(tables(), first);
  EXPECT_EQ(plain().forward.executed, 5);
  EXPECT_EQ(plain().backward.executed, 3);
}

TEST_F(KeptPlansGpu, OtherRectangles) {
  const Rectangle one = full(0, 20, 0, 30), two = full(20, 20, 30, 30);
  for (const std::vector<Rectangle>& rectangles : std::vector<std::vector<Rectangle>>{
           {one}, {one, two}, {one}, {two}, {causal(0, 20, 0, 30, 10)}, {one}})
    check(with(rectangles));
  expect_built(3);  // batches of two and of one, and another mask
}

TEST_F(KeptPlansGpu, NineEntriesAreABatchOfSixteen) {
  std::vector<Rectangle> rectangles;
  for (int64_t i = 0; i < 12; ++i) rectangles.push_back(full(5 * i, 5, 8 * i, 8));
  rectangles.push_back(full(79, 1, 299, 1));  // rows far beyond those of the others
  for (const int64_t kv_heads : {1, 2}) {
    const std::vector<Rectangle> fewer(rectangles.begin() + 4, rectangles.end());
    check(with(rectangles, heads_of(2, kv_heads, 16)));
    check(with(fewer, heads_of(2, kv_heads, 16)));
    expect_built(kv_heads);
  }
  EXPECT_EQ(plain().largest_batch, 16);
}

TEST_F(KeptPlansGpu, TheFirstOfTheRectangles) {
  const Rectangle one = full(0, 20, 0, 30), two = full(20, 20, 30, 30);
  const Problem both = with({one, two});
  check(both);
  Forward got = both.cleared();
  add(both, {&one, 1}, got);
  for (int64_t row = 0; row < 40; ++row) {
    EXPECT_EQ(got.lse(row, 1) == -infinity, row >= 20) << row;
    EXPECT_EQ(got.out(row, 5) == 0, row >= 20) << row;
  }
}

TEST_F(KeptPlansGpu, OtherLimits) {
  check(with({full(0, 20, 0, 30)}));
  check(with({full(0, 20, 0, 129)}));
  expect_built(2);
  check(with({full(0, 20, 0, 256)}));
  expect_built(2);
  check(with({full(0, 20, 257, 30)}));  // farther behind, as the first
  expect_built(2);
  check(with({full(0, 20, 0, 30), full(20, 20, 257, 30)}));  // far from one another
  expect_built(3);
}

TEST_F(KeptPlansGpu, OtherHeadsAndStrides) {
  const std::vector<Rectangle> rectangles = {full(1, 20, 2, 30)};
  check(with(rectangles));
  check(with(rectangles, heads_of(4, 2, 16)));
  check(with(rectangles, heads_of(2, 2, 16)));
  check(with(rectangles, {2, 1, 16, 2, 0, 0.5F}));
  expect_built(4);
  Problem p = with(rectangles);
  p.q = with_gap(p.q, 16);
  check(p);
  p.kv = with_gap(p.kv, 8);
  check(p);
  p.d_out = with_gap(p.d_out, 24);
  check(p);
  EXPECT_EQ(plain().forward.built, 6);
  EXPECT_EQ(plain().backward.built, 7);
  EXPECT_EQ(remarks(), "");
  p.fixed_tiles = true;
  check(p);
  EXPECT_EQ(remarks(),
            "tiled kernel for 2 of 16 rectangles (bits that do not depend on the batch)");
}

TEST_F(KeptPlansGpu, MoreThanAreKept) {
  std::vector<Rectangle> rectangles;
  for (int64_t i = 0; i < 260; ++i) rectangles.push_back(full(i, 1, 259 - i, 1));
  Problem p = problem(heads_of(1, 1, 16), 260, 260, rectangles);
  p.narrow_partials = false;
  Forward got = p.cleared();
  const There q = send(p.q), kv = send(p.kv), out = send(got.out), lse = send(got.lse);
  for (const Rectangle& r : rectangles) {  // nothing waits for the copies of their tables
    ForwardBlock block;
    p.fill(block, q.ref, kv.ref, {&r, 1});
    block.out = out.ref;
    block.lse = lse.ref.as<float>();
    kernel().forward(block);
  }
  fetch(out, got.out);
  fetch(lse, got.lse);
  EXPECT_LE(worst_error(p, got, reference_forward(p)), 1);
  EXPECT_EQ(plain().forward.executed, 260);
}

}  // namespace GYRE_FILE
}  // namespace gyre

// The kernel around a library that multiplies the rows that it masks: NaN in rows of no rectangle.

#include <string>

#include "attention/kernels/cuda_finite_rows.hpp"
#include "ragged_kernel_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test::ragged_kernel;

class MaskedRowsGpu : public PlainKernelGpu {
 protected:
  void SetUp() override {
    plain().multiplies_masked_rows = plain().says_so = true;
    PlainKernelGpu::SetUp();
  }
  /// Rows of the problem that no rectangle names hold NaN.
  static Problem with_gaps(int64_t more, bool causal, Types types = bf16_in) {
    Lengths lengths;
    for (const int64_t length : around_tiles)
      lengths.add(length, length + more, {causal, causal ? more : 0});
    return lengths.problem(heads_of(4, 2, 16), types, false);
  }
  bool finite(const Problem& p) {
    const Forward want = reference_forward(p);
    return worst_error(p, forward(p), want) <= 1 &&
           worst_error(p, backward(p, want), reference_backward(p, want)) <= 1;
  }
};

TEST_F(MaskedRowsGpu, OutsideOfRectanglesAreFiniteForTheLibrary) {
  for (const Types types : {bf16_in, all_bf16})
    for (const Problem& p :
         {with_gaps(0, false, types), with_gaps(0, true, types), with_gaps(64, true, types)}) {
      EXPECT_TRUE(finite(p));
      EXPECT_EQ(remarks().find("tiled kernel"), std::string::npos) << kernel().note();
    }
}

TEST_F(MaskedRowsGpu, WouldShowWithoutCopies) {
  plain().says_so = false;
  EXPECT_FALSE(finite(with_gaps(0, false)));
  EXPECT_EQ(remarks(), "");
}

TEST_F(MaskedRowsGpu, CopiesAreCounted) {
  const Problem p = with_gaps(0, false);
  forward(p);
  // Rows with their gaps, but for the last; those of K and of V span both.
  const int64_t q = (p.rows - 1) * p.q.stride() + p.q.cols();
  const int64_t of_keys = (p.keys - 1) * p.kv.stride() + p.k_width();
  EXPECT_EQ(remarks(),
            "plain multiplies rows that it masks: " + std::to_string(2 * 2 * (q + 2 * of_keys)) +
                " bytes of copies with rows of zeros");
}

TEST_F(MaskedRowsGpu, NothingIsCopiedWhereAllRowsAreNamed) {
  EXPECT_TRUE(finite(problem(heads_of(2, 1, 16), 70, 90, {full(0, 70, 0, 90)})));
  EXPECT_EQ(remarks(), "");
}

TEST_F(MaskedRowsGpu, OutsideOfEvenBatchesAreNotReadAndThenFinite) {
  plain().least_even_queries = 1;
  Lengths lengths;
  lengths.add(70, 70, {true, 0});
  const Problem even = lengths.problem(heads_of(4, 2, 16), bf16_in, false);
  EXPECT_TRUE(finite(even));
  EXPECT_EQ(remarks(), "");
  for (const int64_t length : around_tiles) lengths.add(length, 40);  // a ragged batch behind it
  EXPECT_TRUE(finite(lengths.problem(heads_of(4, 2, 16), bf16_in, false)));
  EXPECT_NE(remarks(), "");
}

TEST_F(MaskedRowsGpu, AreFoundByARun) {
  AttentionGraphShape shape;
  shape.head_dim = shape.value_dim = 64;
  const auto library = test::make_plain_attention(stream(), plain());
  for (const bool multiplies : {true, false})
    for (const bool backward : {false, true})
      for (const RaggedMask mask : {RaggedMask::full, RaggedMask::causal, RaggedMask::causal_end}) {
        plain().multiplies_masked_rows = multiplies;
        shape.backward = backward;
        shape.mask = mask;
        EXPECT_EQ(find_masked_products(*library, shape, stream()), multiplies)
            << backward << ' ' << name_of(mask);
      }
  plain().refuses = [](const AttentionGraphShape&) { return "all"; };
  EXPECT_FALSE(find_masked_products(*library, shape, stream()));
}

}  // namespace GYRE_FILE
}  // namespace gyre

// Blocks of matrices in device memory: every element arrives, nothing else is written.

#include "device_matrix.hpp"
#include "gpu_test.hpp"
#include "logprobs/cuda_block_copy.hpp"

namespace gyre {
namespace GYRE_FILE {

using BlockCopyTest = test::GpuTest;

/// A number of its own for each element, exact in bf16.
test::Matrix numbered(int64_t rows, int64_t cols, DType type) {
  test::Matrix matrix(rows, cols, type);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) matrix.set(r, c, static_cast<double>((r * 37 + c) % 251));
  return matrix;
}

TEST_F(BlockCopyTest, EveryElementOfABlockArrivesWhereverItLies) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1},
                                     {3, 5},
                                     {40, 8},
                                     {2, 700},
                                     {7, 64},
                                     {300, 3},
                                     {1100, 300}})
      for (const int64_t lead : {0, 1, 2, 8})
        for (const int64_t gap : {0, 1, 8}) {
          if (rows > 1000 && (lead != 1 || gap != 1)) continue;  // more rows than blocks
          SCOPED_TRACE(testing::Message() << rows << " x " << cols << ' ' << name_of(type)
                                          << " from " << lead << " gap " << gap);
          // What lies behind the rows of the source is not what lies behind the others.
          const test::Matrix source = numbered(rows, cols + gap, type);
          const test::DeviceMatrix wide(source.ref(), stream(), lead, 0);
          const ConstMatrixRef from = wide.ref().columns_from(0, cols);
          test::DeviceMatrix to(rows, cols, type, stream(), 8 - lead, 8 - gap);
          cuda_copy_block(block_copy(from, to.ref()), stream());
          const test::Matrix got = to.host();
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < cols; ++c)
              ASSERT_EQ(got.at(r, c), source.at(r, c)) << r << ' ' << c;
        }
}

TEST_F(BlockCopyTest, RowsOfMorePiecesThanThreads) {
  constexpr int64_t cols = 1024 * 256 * 4 + 1000;
  const test::Matrix source = numbered(1, cols, DType::bf16);
  const test::DeviceMatrix from(source.ref(), stream(), 1);
  test::DeviceMatrix to(1, cols, DType::bf16, stream());
  cuda_copy_block(block_copy(from.ref(), to.ref()), stream());
  const test::Matrix got = to.host();
  for (int64_t c = 0; c < cols; ++c) ASSERT_EQ(got.at(0, c), source.at(0, c)) << c;
}

TEST_F(BlockCopyTest, NothingIsNothingToDo) {
  test::DeviceMatrix to(3, 4, DType::f32, stream());
  cuda_copy_block(block_copy(ConstMatrixRef(nullptr, DType::f32, 0, 4, 4),
                             MatrixRef(nullptr, DType::f32, 0, 4, 4)),
                  stream());
  cuda_copy_block(block_copy(ConstMatrixRef(nullptr, DType::f32, 3, 0, 4),
                             MatrixRef(to.ref().data, DType::f32, 3, 0, 7)),
                  stream());
  EXPECT_TRUE(std::isnan(to.host().at(1, 1)));
}

TEST_F(BlockCopyTest, OtherShapesAndTypesAreAnErrorOfTheProgram) {
  const test::DeviceMatrix from(3, 4, DType::f32, stream());
  test::DeviceMatrix wide(3, 5, DType::f32, stream()), half(3, 4, DType::bf16, stream());
  EXPECT_THROW(block_copy(from.ref(), wide.ref()), Error);
  EXPECT_THROW(block_copy(from.ref(), half.ref()), Error);
}

std::byte* at(uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);
}

TEST(BlockCopy, UnitsAreWhatBothSidesOfEveryRowAllow) {
  const auto unit = [](uintptr_t from, uintptr_t to, int64_t from_stride, int64_t to_stride) {
    return BlockCopy{at(from), at(to), 4, 10, from_stride, to_stride}.unit();
  };
  EXPECT_EQ(unit(0x1000, 0x2000, 32, 48), 16);
  EXPECT_EQ(unit(0x1008, 0x2000, 32, 48), 8);
  EXPECT_EQ(unit(0x1000, 0x2004, 32, 48), 4);
  EXPECT_EQ(unit(0x1000, 0x2000, 34, 48), 2);
  EXPECT_EQ(unit(0x1000, 0x2000, 32, 40), 8);
  EXPECT_EQ(unit(0x1000, 0x2000, 32, 41), 1);
}

TEST(BlockCopy, RowsWithoutGapsAreOneLongRow) {
  const auto block = [](int64_t from_stride, int64_t to_stride, int64_t rows) {
    return block_copy(ConstMatrixRef(at(0x1000), DType::bf16, rows, 7, from_stride),
                      MatrixRef(at(0x2000), DType::bf16, rows, 7, to_stride));
  };
  EXPECT_EQ(block(7, 7, 5).rows, 1);
  EXPECT_EQ(block(7, 7, 5).bytes, 70);
  EXPECT_EQ(block(7, 7, 5).unit(), 16);
  EXPECT_EQ(block(7, 8, 5).rows, 5);
  EXPECT_EQ(block(8, 7, 5).bytes, 14);
  EXPECT_EQ(block(8, 8, 5).unit(), 16);
  EXPECT_EQ(block(9, 11, 1).unit(), 16);  // no row follows
}

}  // namespace GYRE_FILE
}  // namespace gyre

// The executor's array operations on the device against those on the host.

#include <cstring>
#include <random>

#include "attention/array_ops.hpp"
#include "attention/cuda_array_ops.cuh"
#include "core/tolerance.hpp"
#include "gpu_test.hpp"

namespace gyre {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

class ArrayOperations : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    host_ = make_host_array_ops();
    device_ = make_array_ops(stream());
  }
  ArrayOps& host() { return *host_; }
  ArrayOps& device() { return *device_; }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  template <class T>
  std::vector<T> normal(int64_t count) {
    std::normal_distribution<float> distribution;
    std::vector<T> values(count);
    for (T& x : values) x = converted<T>(distribution(random_));
    return values;
  }

 private:
  std::unique_ptr<ArrayOps> host_, device_;
  std::mt19937 random_{7};
};

/// The same bytes on the host and on the device; places in both.
struct Arena {
  std::vector<std::byte> host;
  Buffer<std::byte> device;
  RowPlace on_host(RowPlace place) { return moved(place, host.data()); }
  RowPlace on_device(RowPlace place) { return moved(place, device.data()); }
  /// `place.data` counts from null.
  static RowPlace moved(RowPlace place, std::byte* base) {
    place.data = base + reinterpret_cast<uintptr_t>(place.data);
    return place;
  }
};

class Copies : public ArrayOperations {
 protected:
  static constexpr int64_t arena_bytes = 1 << 19;

  /// Numbers of both types: bf16 of about 1, of which two make an f32 of about 1. What was written
  /// as f32 may be NaN as bf16, and a sum with NaN has other bits on another processor.
  void fill_arenas() {
    for (Arena* arena : {&from_, &to_}) {
      const std::vector<bf16> values = normal<bf16>(arena_bytes / 2);
      arena->host.resize(arena_bytes);
      std::memcpy(arena->host.data(), values.data(), arena_bytes);
      arena->device = to_device<std::byte>(arena->host);
    }
  }

  static RowPlace place(int64_t offset, DType type, int64_t row, int64_t plane) {
    return {reinterpret_cast<std::byte*>(offset), type, row, plane};
  }
  DType any_type() { return below(2) == 0 ? DType::f32 : DType::bf16; }

  /// The next piece of the arena for a copy of any shape; packed, or with gaps.
  RowPlace next(int64_t& offset, const RowCopy& c) {
    const DType type = any_type();
    const int64_t size = size_of(type);
    offset = round_up(offset, below(3) == 0 ? size : 16) + (below(4) == 0 ? size : 0);
    const int64_t gap = below(3) == 0 ? below(9) : 8 * below(2);
    const int64_t plane = c.width + gap, row = c.planes * plane + (below(2) == 0 ? gap : 0);
    const RowPlace result = place(offset, type, row, plane);
    offset += c.rows * row * size;
    return result;
  }

  std::vector<RowCopy> any_copies(int count, bool add) {
    std::vector<RowCopy> copies;
    int64_t from = 0, to = 0;
    for (int i = 0; i < count; ++i) {
      RowCopy c;
      c.rows = below(8) == 0 ? 0 : 1 + below(below(10) == 0 ? 150 : 12);
      c.planes = 1 + below(2);
      const int64_t widths[] = {1, 2, 7, 8, 16, 40, 64, 128};
      c.width = widths[below(8)];
      c.via = any_type();
      c.add = add && below(2) == 0;
      c.from = next(from, c);
      c.to = next(to, c);
      if (from > arena_bytes || to > arena_bytes) break;
      copies.push_back(c);
    }
    return copies;
  }

  /// Does the copies on both sides; nothing else may change on the device either.
  void expect_same(const std::vector<RowCopy>& copies) {
    fill_arenas();
    std::vector<RowCopy> here = copies, there = copies;
    for (RowCopy& c : here) c.from = from_.on_host(c.from), c.to = to_.on_host(c.to);
    for (RowCopy& c : there) c.from = from_.on_device(c.from), c.to = to_.on_device(c.to);
    const std::vector<std::byte> before = to_.host;
    host().copy(here);
    device().copy(there);
    EXPECT_TRUE(to_host(to_.device) == to_.host);
    EXPECT_TRUE(to_host(from_.device) == from_.host);
    EXPECT_FALSE(before == to_.host);
  }

 private:
  Arena from_, to_;
};

TEST_F(Copies, OfAnyShapeTypeAndAlignmentAreTheHosts) {
  const std::vector<RowCopy> copies = any_copies(200, false);
  EXPECT_GT(std::ssize(copies), 2 * max_copies);
  expect_same(copies);
}

TEST_F(Copies, AddInTheirOrder) {
  expect_same(any_copies(150, true));
  // Three terms for each element, once as whole rows, twice for some of the rows and columns.
  std::vector<RowCopy> copies;
  for (const DType type : {DType::f32, DType::bf16})
    for (int64_t i = 0; i < 3; ++i) {
      RowCopy c;
      c.rows = i == 0 ? 40 : 17;
      c.width = i == 0 ? 64 : 48;
      c.add = true;
      c.via = type;
      const int64_t begin = type == DType::f32 ? 0 : arena_bytes / 2;
      c.from = place(begin + 30000 * i, type, 64, 0);
      c.to = place(begin + (i == 0 ? 0 : 64 * 5 * size_of(type)), type, 64, 0);
      copies.push_back(c);
    }
  expect_same(copies);
}

TEST_F(Copies, LongLinesAndManyPlanesAreTheHosts) {
  for (const bool add : {false, true})
    for (const auto& [rows, planes, width] :
         {std::array<int64_t, 3>{5, 1, 2112}, {3, 2, 301}, {40, 3, 24}, {3, 200, 2}}) {
      std::vector<RowCopy> copies;
      int64_t from = 0, to = 0;
      for (int i = 0; i < 4; ++i) {
        RowCopy c;
        c.rows = rows, c.planes = planes, c.width = width, c.add = add;
        c.via = any_type();
        c.from = next(from, c);
        c.to = next(to, c);
        copies.push_back(c);
      }
      expect_same(copies);
    }
}

TEST_F(Copies, OfOnePlaneToManyAreTheHosts) {
  RowCopy c{5, 150, 8, {}, {}, DType::f32, false};
  int64_t from = 0, to = 0;
  c.from = next(from, c);
  c.to = next(to, c);
  c.from.plane = 0;
  expect_same({c});
}

TEST(ArrayLines, EveryLineIsWhereItsRowAndPlaneAre) {
  for (int planes = 1; planes <= 127; ++planes) {
    DeviceCopy copy{};
    copy.planes = static_cast<int8_t>(planes);
    for (const int64_t begin : {int64_t{0}, int64_t{32}, int64_t{4096}, int64_t{1} << 33}) {
      const BlockLines block(copy, begin);
      for (int line = 0; line < lines_of_a_block; ++line) {
        const int64_t row = (begin + line) / planes, plane = (begin + line) % planes;
        ASSERT_EQ(block.at(line, 1 << 30, 3), ((row - block.first_row) << 30) + 3 * plane)
            << planes << " planes, line " << begin << " + " << line;
      }
    }
  }
}

TEST(ArrayLines, ThreadsTakeEveryPackOnce) {
  for (const int packs : {1, 3, 32, 255, 256, 257, 700}) {
    std::vector<int> taken(lines_of_a_block * packs);
    for (int thread = 0; thread < array_threads; ++thread)
      for (PackWalk walk(packs, thread); walk.line < lines_of_a_block; walk.advance()) {
        ASSERT_LT(walk.pack, packs);
        ++taken[walk.line * packs + walk.pack];
      }
    EXPECT_EQ(taken, std::vector<int>(taken.size(), 1)) << packs;
  }
}

TEST_F(Copies, OfNothingAreNoLaunch) {
  RowCopy nothing;
  nothing.width = 8;
  EXPECT_TRUE(copy_tables(std::vector<RowCopy>(3, nothing)).empty());
  device().copy({});
  stream().synchronize();
}

TEST_F(Copies, TablesHaveEveryCopyOnceAndInItsBlocks) {
  std::vector<RowCopy> copies;
  for (int64_t i = 0; i < 150; ++i) {
    RowCopy c;
    c.rows = 1 + i % 70;
    c.width = 4;
    c.from = c.to = place(16 + 10000 * i, DType::f32, 4, 4);
    copies.push_back(c);
  }
  size_t next = 0;
  for (const CopyTable& table : copy_tables(copies)) {
    int block = 0;
    for (int i = 0; i < table.count; ++i, ++next) {
      ASSERT_LT(next, copies.size());
      EXPECT_EQ(table.copies[i].from, copies[next].from.data);
      EXPECT_EQ(table.copies[i].lines, copies[next].rows);
      for (int64_t done = 0; done < copies[next].rows; done += lines_of_a_block)
        EXPECT_EQ(copy_of_block(table, block++), i);
    }
    EXPECT_EQ(block, table.blocks);
  }
  EXPECT_EQ(next, copies.size());
}

TEST_F(Copies, MoveEightElementsAtOnceWhereEveryLineIsAligned) {
  RowCopy c;
  c.rows = 3;
  c.planes = 2;
  c.width = 16;
  c.from = place(1024, DType::f32, 40, 24);
  c.to = place(2048, DType::bf16, 32, 16);
  const auto unit = [](const RowCopy& copy) {
    return copy_tables(std::span(&copy, 1)).at(0).copies[0].unit;
  };
  EXPECT_EQ(unit(c), 8);
  const auto expect_one = [&](auto change) {
    RowCopy other = c;
    change(other);
    EXPECT_EQ(unit(other), 1);
  };
  expect_one([](RowCopy& x) { x.width = 12; });
  expect_one([](RowCopy& x) { x.from.data += 8; });
  expect_one([](RowCopy& x) { x.to.data += 8; });
  expect_one([](RowCopy& x) { x.from.row = 44; });
  expect_one([](RowCopy& x) { x.to.row = 36; });
  expect_one([](RowCopy& x) { x.from.plane = 20; });
  expect_one([](RowCopy& x) { x.to.plane = 12; });
  c.planes = 1;
  c.to.plane = 3;  // of no plane
  EXPECT_EQ(unit(c), 8);
}

TEST_F(Copies, ThatAddToTheSameBytesAreInTablesOfTheirOwn) {
  RowCopy c;
  c.rows = 3;
  c.width = 8;
  c.add = true;
  c.from = c.to = place(1024, DType::f32, 8, 0);
  RowCopy behind = c, over = c, inside = c;
  behind.to.data += 3 * 8 * 4;
  over.to.data -= 32;
  inside.rows = 1;
  inside.to.data += 64;
  EXPECT_EQ(copy_tables(std::vector{c, behind}).size(), 1U);
  for (const RowCopy& other : {c, over, inside}) {
    EXPECT_EQ(copy_tables(std::vector{c, other}).size(), 2U);
    EXPECT_EQ(copy_tables(std::vector{other, c, behind}).size(), 2U);
  }
}

/// Rows of two planes, of which one is used; NaN in the other one and behind the rows.
struct TwoPlanes {
  static constexpr int64_t guard = 4;
  int64_t rows, cols;
  std::vector<float> values;
  TwoPlanes(int64_t rows_, int64_t cols_, const std::vector<float>& plane)
      : rows(rows_), cols(cols_), values(static_cast<size_t>((rows_ + guard) * 2 * cols_), NAN) {
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(plane.begin() + r * cols, cols, values.begin() + r * 2 * cols);
  }
  template <class T>
  MatrixView<T> view(T* data) const {
    return {data, rows, cols, 2 * cols};
  }
  /// Whether another one has NaN where this one has, and nowhere else.
  void expect_guarded(const std::vector<float>& other) const {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const bool used = at / (2 * cols) < rows && at % (2 * cols) < cols;
      EXPECT_EQ(std::isnan(other[i]), !used) << "element " << i;
    }
  }
};

TEST_F(ArrayOperations, FillsOnePlane) {
  const TwoPlanes stats(37, 5, normal<float>(37 * 5));
  Buffer<float> there = to_device<float>(stats.values);
  device().fill(stats.view(there.data()), minus_infinity);
  const std::vector<float> got = to_host(there);
  stats.expect_guarded(got);
  for (size_t i = 0; i < got.size(); ++i)
    if (!std::isnan(got[i])) {
      EXPECT_EQ(got[i], minus_infinity) << i;
    }
}

TEST_F(ArrayOperations, SumOverHeadsGoesToTheFirst) {
  for (const auto& [rows, heads, dim, part] :
       {std::array<int64_t, 4>{37, 5, 8, 3}, {300, 2, 24, 24}, {1, 130, 3, 1}, {4, 1, 5, 2}}) {
    std::vector<float> values = normal<float>(rows * heads * dim);
    const std::vector<float> before = values;
    Buffer<float> there = to_device<float>(values);
    host().sum_over_heads({values.data(), rows, heads * dim, heads * dim}, dim, part);
    device().sum_over_heads(there.matrix(rows, heads * dim), dim, part);
    EXPECT_EQ(to_host(there), values);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < dim; ++i) {
        double sum = 0;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = (r * heads + h) * dim + i;
          sum += before[at];
          const float kept = i < dim - part ? before[at] : 0;
          const bool is_sum = i >= dim - part && h == 0;
          EXPECT_TRUE(is_sum || values[at] == kept) << r << ", " << h << ", " << i;
        }
        if (i < dim - part) continue;
        EXPECT_FLOAT_EQ(values[r * heads * dim + i], static_cast<float>(sum)) << r << ", " << i;
      }
  }
}

/// Shapes of statistics: fewer and more rows than warps, heads that no warp divides.
const std::vector<std::array<int64_t, 3>> shapes = {
    {1, 1, 1}, {5, 3, 8}, {70, 4, 20}, {9, 2, 128}, {3, 7, 33}};

template <class T>
class TypedOperations : public ArrayOperations {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(TypedOperations, Types);

TYPED_TEST(TypedOperations, TakeInSinks) {
  using T = TypeParam;
  for (const auto& [rows, heads, dim] : shapes) {
    std::vector<float> lse = this->template normal<float>(rows * heads);
    lse[this->below(rows * heads)] = minus_infinity;
    const std::vector<float> sinks = this->template normal<float>(heads);
    TwoPlanes here(rows, heads, lse);
    std::vector<T> out = this->template normal<T>(rows * heads * dim);
    Buffer<float> stats = this->template to_device<float>(here.values);
    Buffer<T> out_there = this->template to_device<T>(out);
    const Buffer<float> sinks_there = this->template to_device<float>(sinks);
    this->device().take_in_sinks(out_there.matrix(rows, heads * dim), here.view(stats.data()),
                                 sinks_there.data());
    this->host().take_in_sinks(MatrixView<T>(out.data(), rows, heads * dim),
                               here.view(here.values.data()), sinks.data());
    const std::vector<float> got_stats = this->to_host(stats);
    here.expect_guarded(got_stats);
    const std::vector<T> got = this->to_host(out_there);
    // exp, log1p, a sum and a product: each side rounds them.
    const double tolerance = tolerance_for(DType::f32, 4);
    for (size_t i = 0; i < here.values.size(); ++i) {
      const float want = here.values[i];
      if (want == minus_infinity) {
        EXPECT_EQ(got_stats[i], want);
      } else if (!std::isnan(want)) {
        EXPECT_NEAR(got_stats[i], want,
                    tolerance * std::max(1.0, std::abs(static_cast<double>(want))));
      }
    }
    for (size_t i = 0; i < out.size(); ++i) {
      const double want = static_cast<double>(to_float(out[i]));
      EXPECT_NEAR(static_cast<double>(to_float(got[i])), want,
                  std::abs(want) * (tolerance + epsilon_of(dtype_of<T>)));
    }
  }
}

TYPED_TEST(TypedOperations, Deltas) {
  using T = TypeParam;
  for (const auto& [rows, heads, dim] : shapes) {
    const std::vector<float> out = this->template normal<float>(rows * heads * dim);
    const std::vector<T> d_out = this->template normal<T>(rows * heads * dim);
    TwoPlanes here(rows, heads, std::vector<float>(rows * heads, 0));
    Buffer<float> stats = this->template to_device<float>(here.values);
    const Buffer<float> out_there = this->template to_device<float>(out);
    const Buffer<T> d_out_there = this->template to_device<T>(d_out);
    this->device().delta(out_there.matrix(rows, heads * dim), d_out_there.matrix(rows, heads * dim),
                         here.view(stats.data()));
    this->host().delta(MatrixView<const float>(out.data(), rows, heads * dim),
                       MatrixView<const T>(d_out.data(), rows, heads * dim),
                       here.view(here.values.data()));
    const std::vector<float> got = this->to_host(stats);
    here.expect_guarded(got);
    for (int64_t i = 0; i < rows * heads; ++i) {
      double size = 0;  // of the terms, whose sum is in another order
      for (int64_t d = 0; d < dim; ++d) {
        const auto at = static_cast<size_t>(i * dim + d);
        size += std::abs(static_cast<double>(out[at] * to_float(d_out[at])));
      }
      const auto at = static_cast<size_t>(i / heads * 2 * heads + i % heads);
      const auto want = static_cast<double>(here.values[at]);
      EXPECT_NEAR(static_cast<double>(got[at]), want,
                  std::abs(want) * epsilon_of(DType::f32) +
                      size * static_cast<double>(dim) * epsilon_of(DType::f64));
    }
  }
}

TEST_F(ArrayOperations, GradientsOfSinksAddUpInOneOrder) {
  // Fewer rows than a block takes at once and more than all blocks do; one block of heads and two.
  for (const auto& [rows, heads] :
       {std::array<int64_t, 2>{0, 3}, {1, 3}, {31, 1}, {700, 3}, {2100, 33}, {9, 5}}) {
    std::vector<float> lse_values = normal<float>(rows * heads);
    if (rows > 0) lse_values[below(rows * heads)] = minus_infinity;
    const std::vector<float> deltas = normal<float>(rows * heads), sinks = normal<float>(heads);
    const TwoPlanes lse(rows, heads, lse_values), delta(rows, heads, deltas);
    std::vector<double> want(heads, 2.5);
    const Buffer<double> before = to_device<double>(want);
    host().add_sink_gradient(lse.view(lse.values.data()), delta.view(delta.values.data()),
                             sinks.data(), want.data());
    const Buffer<float> lse_there = to_device<float>(lse.values),
                        delta_there = to_device<float>(delta.values),
                        sinks_there = to_device<float>(sinks);
    std::vector<std::vector<double>> results;
    Buffer<float> other(1, MemorySpace::device);
    for (int run = 0; run < 2; ++run) {
      // A third launch, as every second one of the software GPU has its threads in reverse.
      device().fill(other.matrix(1, 1), 0);
      Buffer<double> sums(heads, MemorySpace::device);
      stream().copy(sums.data(), before.data(), want.size() * sizeof(double));
      device().add_sink_gradient(lse.view(lse_there.data()), delta.view(delta_there.data()),
                                 sinks_there.data(), sums.data());
      results.push_back(to_host(sums));
    }
    EXPECT_EQ(results[0], results[1]);
    for (size_t h = 0; h < want.size(); ++h) {
      double size = 2.5;
      for (size_t i = h; i < deltas.size(); i += want.size())
        size += std::abs(sink_gradient_term(sinks[h], lse_values[i], deltas[i]));
      EXPECT_NEAR(results[0][h], want[h],
                  size * static_cast<double>(rows + 1) * epsilon_of(DType::f64));
    }
  }
}

TEST_F(ArrayOperations, HostFillAndHostCopyAreTheWayThereAndBack) {
  const std::vector<bf16> values = normal<bf16>(7 * 12);
  Buffer<bf16> there(7 * 12, MemorySpace::device);
  const MatrixRef all(there.matrix(7, 12));
  HostFill fill(all, stream());
  for (int64_t r = 0; r < 7; ++r)
    for (int64_t c = 0; c < 12; ++c) fill.matrix().as<bf16>()(r, c) = values[r * 12 + c];
  fill.upload();
  EXPECT_EQ(to_host(there), values);
  const HostCopy part(all.columns_from(8, 4), stream());
  for (int64_t r = 0; r < 7; ++r)
    for (int64_t c = 0; c < 4; ++c) EXPECT_EQ(part.at(r, c), to_float(values[r * 12 + 8 + c]));
  EXPECT_THROW(HostFill(all.columns_from(0, 4), stream()), Error);
}

}  // namespace
}  // namespace gyre

// Copies of rows on the device against those on the host.

#include <cstring>
#include <random>

#include "device_matrix.hpp"
#include "gpu_test.hpp"
#include "runtime/cuda_row_copy.cuh"

namespace gyre {
namespace {

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

class Copies : public test::GpuTest {
 protected:
  static constexpr int64_t arena_bytes = 1 << 19;

  /// Numbers of both types: bf16 of about 1, of which two make an f32 of about 1. What was written
  /// as f32 may be NaN as bf16, and a sum with NaN has other bits on another processor.
  void fill_arenas() {
    for (Arena* arena : {&from_, &to_}) {
      std::normal_distribution<float> normal;
      std::vector<bf16> values(arena_bytes / 2);
      for (bf16& x : values) x = to_bf16(normal(random_));
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
    copy_rows(here, host_);
    copy_rows(there, stream());
    EXPECT_TRUE(to_host(to_.device) == to_.host);
    EXPECT_TRUE(to_host(from_.device) == from_.host);
    EXPECT_FALSE(before == to_.host);
  }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  HostStream host_;
  std::mt19937 random_{7};
  Arena from_, to_;
};

TEST_F(Copies, OfAnyShapeTypeAndAlignmentAreTheHosts) {
  const std::vector<RowCopy> copies = any_copies(200, false);
  EXPECT_GT(std::ssize(copies), 2 * CopyTable<DeviceCopy>::most);
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

TEST(PackWalk, ThreadsTakeEveryPackOfEveryLineOnce) {
  for (const auto& [rows, planes, packs] :
       {std::array<int, 3>{7, 1, 700}, {90, 3, 32}, {900, 7, 1}, {11, 5, 257}, {3, 300, 2}}) {
    DeviceCopy copy{};
    copy.planes = planes;
    copy.line_packs = packs;
    copy.packs = int64_t{rows} * planes * packs;
    std::vector<int> taken(copy.packs);
    for (int64_t begin = 0; begin < copy.packs; begin += packs_of_block)
      for (int thread = 0; thread < copy_threads; ++thread) {
        PackWalk walk(copy, begin + thread);
        for (int64_t at = begin + thread; at < begin + packs_of_block; at += copy_threads) {
          if (at < copy.packs) {
            ASSERT_LT(walk.pack, packs);
            ASSERT_LT(walk.plane, planes);
            ++taken[(walk.row * planes + walk.plane) * packs + walk.pack];
          }
          walk.advance();
        }
      }
    EXPECT_EQ(taken, std::vector<int>(taken.size(), 1)) << rows << ' ' << planes << ' ' << packs;
  }
}

TEST(PackWalk, BeginsBeyondFourBillionPacks) {
  DeviceCopy copy{};
  copy.planes = 3;
  copy.line_packs = 1000;
  const int64_t first = (int64_t{1} << 40) + 12345;
  const PackWalk walk(copy, first);
  EXPECT_EQ((walk.row * 3 + walk.plane) * 1000 + walk.pack, first);
  EXPECT_LT(walk.plane, 3);
  EXPECT_LT(walk.pack, 1000);
}

TEST_F(Copies, OfNothingAreNoLaunch) {
  RowCopy nothing;
  nothing.width = 8;
  EXPECT_TRUE(copy_tables(std::vector<RowCopy>(3, nothing)).empty());
  copy_rows({}, stream());
  stream().synchronize();
}

TEST_F(Copies, TablesHaveEveryCopyOnceAndInItsBlocks) {
  std::vector<RowCopy> copies;
  for (int64_t i = 0; i < 150; ++i) {
    RowCopy c;
    c.rows = 1 + 37 * i % 4000;
    c.width = 4;
    c.from = c.to = place(16 + 100000 * i, DType::f32, 8, 0);
    copies.push_back(c);
  }
  size_t next = 0;
  for (const auto& table : copy_tables(copies)) {
    int block = 0;
    for (int i = 0; i < table.count; ++i, ++next) {
      ASSERT_LT(next, copies.size());
      EXPECT_EQ(table.copies[i].from, copies[next].from.data);
      EXPECT_EQ(table.copies[i].packs, copies[next].rows);
      for (int64_t done = 0; done < copies[next].rows; done += packs_of_block)
        EXPECT_EQ(table.copy_of_block(block++), i);
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
  // Without conversion: as many bytes as every line allows, or all lines as one span.
  c.to.type = DType::f32;
  EXPECT_EQ(unit(c), 16);
  c.to.row = 34;
  EXPECT_EQ(unit(c), 8);
  c.width = 15;
  EXPECT_EQ(unit(c), 4);
  c.from.row = c.to.row = 15;
  c.rows = 16;
  EXPECT_EQ(unit(c), 16);
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

TEST_F(Copies, BlocksOfMatricesLeaveWhatIsBesideThem) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {40, 8}, {2, 700}, {300, 3}, {1, 300'001}})
      for (const int64_t lead : {0, 1, 8})
        for (const int64_t gap : {0, 1, 8}) {
          SCOPED_TRACE(testing::Message() << rows << " x " << cols << ' ' << name_of(type)
                                          << " from " << lead << " gap " << gap);
          test::Matrix source(rows, cols + gap, type);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < cols + gap; ++c)
              source.set(r, c, static_cast<double>((r * 37 + c) % 251));  // exact in bf16
          const test::DeviceMatrix wide(source.ref(), stream(), lead, 0);
          const ConstMatrixRef from = wide.ref().columns_from(0, cols);
          test::DeviceMatrix to(rows, cols, type, stream(), 8 - lead, 8 - gap);
          copy_matrix(from, to.ref(), stream());
          const test::Matrix got = to.host();  // checks what lies around
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < cols; ++c)
              ASSERT_EQ(got.at(r, c), source.at(r, c)) << r << ' ' << c;
        }
  EXPECT_THROW(copy_matrix(ConstMatrixRef(nullptr, DType::f32, 3, 4, 4),
                           MatrixRef(nullptr, DType::f32, 3, 5, 5), stream()),
               Error);
}

}  // namespace
}  // namespace gyre

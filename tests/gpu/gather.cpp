// Gathers and scatters of rows against loops on the host, for every unit and alignment.

#include <algorithm>
#include <random>

#include "errors.hpp"
#include "gpu_test.hpp"
#include "runtime/row_copy.hpp"

namespace gyre {
namespace GYRE_FILE {

using Bytes = std::vector<uint8_t>;
constexpr int64_t guard = 64;

Bytes random_bytes(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(static_cast<size_t>(count));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

class Gather : public test::GpuTest {
 protected:
  /// A gather on the device, `in` and `out` being `shift` bytes off 256-byte alignment.
  Bytes gather(const Bytes& in, const std::vector<int32_t>& map, int64_t row_bytes, int64_t shift,
               const RowFill& fill) {
    return move(in, map, std::ssize(map) * row_bytes, row_bytes, shift,
                [&](void* out, const void* from, const int32_t* there) {
                  gather_rows(stream(), out, from, there, std::ssize(map),
                              std::ssize(in) / row_bytes, row_bytes, fill);
                });
  }
  Bytes scatter(const Bytes& in, const std::vector<int32_t>& map, int64_t out_rows,
                int64_t row_bytes, int64_t shift) {
    return move(in, map, out_rows * row_bytes, row_bytes, shift,
                [&](void* out, const void* from, const int32_t* there) {
                  scatter_rows(stream(), out, from, there, std::ssize(map), out_rows, row_bytes);
                });
  }
  static constexpr uint8_t untouched = 0xa5;

 private:
  template <class Move>
  Bytes move(const Bytes& in, const std::vector<int32_t>& map, int64_t out_bytes, int64_t row_bytes,
             int64_t shift, Move run) {
    SCOPED_TRACE(testing::Message() << map.size() << " rows of " << row_bytes << " + " << shift);
    Buffer<uint8_t> from(std::ssize(in) + shift, MemorySpace::device);
    Buffer<uint8_t> to(out_bytes + shift + guard, MemorySpace::device);
    stream().copy(from.data() + shift, in.data(), in.size());
    stream().fill(to.data(), std::byte{untouched}, static_cast<size_t>(to.size()));
    const Buffer<int32_t> there = to_device<int32_t>(map);
    run(to.data() + shift, from.data() + shift, there.data());
    const Bytes all = to_host(to);
    const auto outside = [&](int64_t begin, int64_t end) {
      return std::count(all.begin() + begin, all.begin() + end, untouched) == end - begin;
    };
    EXPECT_TRUE(outside(0, shift)) << "written before the output";
    EXPECT_TRUE(outside(shift + out_bytes, to.size())) << "written behind the output";
    return {all.begin() + shift, all.begin() + shift + out_bytes};
  }
};

struct RowsCase {
  int64_t row_bytes, shift, rows;
};
// Every unit by row length and by alignment; rows shorter and longer than a block's lanes; counts
// around what a block moves.
const RowsCase rows_cases[] = {{1, 0, 1030}, {2, 0, 300},  {3, 0, 70},   {4, 0, 1025}, {4, 0, 0},
                               {4, 0, 1},    {8, 0, 400},  {12, 0, 400}, {16, 0, 700}, {16, 8, 50},
                               {16, 4, 50},  {16, 2, 50},  {48, 1, 20},  {48, 0, 260}, {272, 0, 70},
                               {5000, 0, 9}, {4112, 0, 9}, {8192, 0, 5}};

TEST_F(Gather, RowsByAMapThatNamesSomeTwiceAndSomeNotAtAll) {
  std::mt19937 random(7);
  for (const auto& [row_bytes, shift, rows] : rows_cases) {
    const int64_t in_rows = rows / 2 + 3;
    const Bytes in = random_bytes(in_rows * row_bytes, 5);
    std::vector<int32_t> map;
    for (int64_t i = 0; i < rows; ++i)
      map.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(in_rows + 4)) - 2);
    if (rows > 3) map[3] = static_cast<int32_t>(in_rows);  // the first that is outside
    Bytes expected;
    for (const int32_t entry : map)
      for (int64_t k = 0; k < row_bytes; ++k)
        expected.push_back(entry >= 0 && entry < in_rows ? in[entry * row_bytes + k]
                                                         : uint8_t{0x3c});
    EXPECT_EQ(gather(in, map, row_bytes, shift, RowFill::of(uint8_t{0x3c})), expected)
        << row_bytes << " + " << shift;
  }
}

TEST_F(Gather, TheFillIsOfElements) {
  const std::vector<int32_t> map = {-1, 0, -1};
  const std::vector<int16_t> in = {1, 2, 3};
  const auto* bytes = reinterpret_cast<const uint8_t*>(in.data());
  const Bytes got = gather({bytes, bytes + 6}, map, 6, 0, RowFill::of(int16_t{-100}));
  std::vector<int16_t> values(9);
  std::copy(got.begin(), got.end(), reinterpret_cast<uint8_t*>(values.data()));
  EXPECT_EQ(values, (std::vector<int16_t>{-100, -100, -100, 1, 2, 3, -100, -100, -100}));
}

TEST_F(Gather, ScatteredRowsLeaveTheOthersAlone) {
  std::mt19937 random(11);
  for (const auto& [row_bytes, shift, rows] : rows_cases) {
    const int64_t out_rows = rows + 5;
    const Bytes in = random_bytes(rows * row_bytes, 6);
    std::vector<int32_t> map;  // a permutation of -2 .. out_rows + 1, or the beginning of one
    for (int32_t i = -2; i < out_rows + 2; ++i) map.push_back(i);
    std::shuffle(map.begin(), map.end(), random);
    map.resize(rows);
    Bytes expected(static_cast<size_t>(out_rows * row_bytes), untouched);
    for (int64_t i = 0; i < rows; ++i)
      if (const int64_t entry = map[i]; entry >= 0 && entry < out_rows)
        std::copy_n(in.begin() + i * row_bytes, row_bytes, expected.begin() + entry * row_bytes);
    EXPECT_EQ(scatter(in, map, out_rows, row_bytes, shift), expected)
        << row_bytes << " + " << shift;
  }
}

TEST_F(Gather, WhatCannotBeIsAUsageError) {
  test::expect_usage("gather_rows: rows of 0 bytes; the least is 1",
                     [&] { gather_rows(stream(), nullptr, nullptr, nullptr, 1, 1, 0); });
  test::expect_usage("scatter_rows: -1 and 4 rows; the least is 0",
                     [&] { scatter_rows(stream(), nullptr, nullptr, nullptr, -1, 4, 4); });
}

}  // namespace GYRE_FILE
}  // namespace gyre

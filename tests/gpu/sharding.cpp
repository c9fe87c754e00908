// Layouts on the device: shards and streams bit for bit as on the host.

#include "gpu_test.hpp"
#include "layout_cases.hpp"
#include "sharding/stream_shards.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Bounds;

/// Layouts of every kind, with padding of their own, empty segments and short documents.
std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const LayoutKind& kind : layout_kinds())
    for (const int cp : {1, 2, 3, 5}) {
      LayoutOptions options;
      options.cp = cp;
      options.stripe = 3;
      const int64_t multiple = kind.segment_multiple(cp);
      Bounds bounds;
      for (const int64_t length : {37, 0, 5, 1, 64})
        bounds.add(length, round_up(length, multiple) + (length == 5 ? multiple : 0));
      all.push_back(kind.make(bounds.view(), options));
    }
  return all;
}

template <class T>
std::vector<T> numbered(int64_t count, T first) {
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(first + static_cast<T>(i));
  return values;
}

class DeviceSharding : public test::GpuTest {
 protected:
  /// Shards of every rank, and back, of rows of `row` elements, from and to streams of `rows` rows.
  template <class T>
  void expect_as_on_the_host(const Layout& layout, int64_t rows, int64_t row) {
    SCOPED_TRACE(layout.name + " over " + std::to_string(layout.cp()) + ", rows of " +
                 std::to_string(row) + ", stream of " + std::to_string(rows));
    const T fill{-100}, old{-7};
    const int64_t slots = layout.slots_of_rank(), bytes = row * static_cast<int64_t>(sizeof(T));
    const std::vector<T> values = numbered<T>(rows * row, T{1});
    const auto there = make_stream_shards(layout, stream());
    const Buffer<T> from = to_device<T>(values);
    std::vector<T> restored(values.size(), old);
    Buffer<T> back = to_device<T>(restored);
    for (int r = 0; r < layout.cp(); ++r) {
      std::vector<T> mine(slots * row, old), stream_of_rank(values.size(), old);
      Buffer<T> local = to_device<T>(mine), one = to_device<T>(stream_of_rank);
      there->shard(r, from.data(), rows, local.data(), bytes, RowFill::of(fill));
      shard_rows<T>(layout, r, values, mine, row, fill);
      EXPECT_EQ(to_host(local), mine) << "rank " << r;
      there->unshard(r, local.data(), one.data(), rows, bytes);
      unshard_rows<T>(layout, r, mine, stream_of_rank, row);
      EXPECT_EQ(to_host(one), stream_of_rank) << "rank " << r;
      there->unshard(r, local.data(), back.data(), rows, bytes);
    }
    EXPECT_EQ(to_host(back), values);
  }
};

TEST_F(DeviceSharding, IdsOfAllLayouts) {
  bool padded = false;
  for (const Layout& layout : layouts()) {
    expect_as_on_the_host<int32_t>(layout, layout.stream_slots, 1);
    if (layout.padded_slots == layout.stream_slots) continue;
    padded = true;
    expect_as_on_the_host<int32_t>(layout, layout.padded_slots, 1);
  }
  EXPECT_TRUE(padded) << "no layout of these appends padding";
}

TEST_F(DeviceSharding, EmbeddingsOfAllLayouts) {
  for (const Layout& layout : layouts()) {
    expect_as_on_the_host<float>(layout, layout.stream_slots, 3);
    expect_as_on_the_host<double>(layout, layout.stream_slots, 8);
  }
}

TEST_F(DeviceSharding, AnEmptyStreamIsNothingToDo) {
  LayoutOptions options;
  options.cp = 2;
  expect_as_on_the_host<int32_t>(contiguous(test::full_bounds({0}).view(), options), 0, 1);
}

TEST_F(DeviceSharding, AStreamOfAnotherLengthIsAUsageError) {
  LayoutOptions options;
  options.cp = 4;
  const Layout layout = contiguous(test::full_bounds({10}).view(), options);
  const auto there = make_stream_shards(layout, stream());
  Buffer<int32_t> data(16, MemorySpace::device);
  test::expect_usage("layout contiguous: the stream has 11 rows; it must have 10 or, padded, 12",
                     [&] { there->shard(0, data.data(), 11, data.data(), 4, {}); });
}

}  // namespace GYRE_FILE
}  // namespace gyre

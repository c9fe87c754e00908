// Shards of a run's ranks on their devices: gathered and shifted as on the host.

#include <numeric>

#include "comm/cuda_device.hpp"
#include "comm/staged.hpp"
#include "gpu_test.hpp"
#include "layout_cases.hpp"
#include "sharding/distributed.hpp"
#include "sharding/stream_shards.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

class ShardsOnDevices : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    bind_device(world(), true);
    comm_ = make_staged_communicator(world());
  }
  /// Segments with padding, empty ones and a long one, and a layout of each kind for all ranks.
  static std::vector<std::pair<test::Bounds, Layout>> cases() {
    std::vector<std::pair<test::Bounds, Layout>> all;
    for (const LayoutKind& kind : layout_kinds()) {
      LayoutOptions options;
      options.cp = world().size();
      options.stripe = 2;
      test::Bounds bounds;
      for (const int64_t length : {41, 0, 3, 1, 50})
        bounds.add(length, round_up(length, 2 * options.cp) + (length == 3 ? 2 * options.cp : 0));
      Layout layout = kind.make(bounds.view(), options);
      all.emplace_back(std::move(bounds), std::move(layout));
    }
    return all;
  }
  Communicator& comm() { return *comm_; }

 private:
  std::unique_ptr<Communicator> comm_;
};

TEST_F(ShardsOnDevices, AGatherRestoresTheStreamOnEveryRank) {
  for (const auto& [bounds, layout] : cases()) {
    SCOPED_TRACE(layout.name);
    std::vector<float> values(layout.stream_slots * 3);
    std::iota(values.begin(), values.end(), 1.F);
    const auto there = make_stream_shards(layout, stream());
    const Buffer<float> whole = to_device<float>(values);
    Buffer<float> local(layout.slots_of_rank() * 3, MemorySpace::device);
    Buffer<float> gathered = to_device<float>(std::vector<float>(values.size() + 8, -7));
    there->shard(world().rank(), whole.data(), layout.stream_slots, local.data(), 12, {});
    there->gather(comm(), local.data(), gathered.data(), 12);
    values.resize(values.size() + 8, -7);  // nothing is written behind the stream
    EXPECT_EQ(to_host(gathered), values);
  }
}

TEST_F(ShardsOnDevices, AShiftIsThatOfTheHost) {
  for (const auto& [bounds, layout] : cases()) {
    SCOPED_TRACE(layout.name);
    std::vector<int32_t> ids(layout.stream_slots);
    std::iota(ids.begin(), ids.end(), 100);
    std::vector<int32_t> mine(layout.slots_of_rank());
    shard_rows<int32_t>(layout, world().rank(), ids, mine, 1, -5);
    const auto there = make_stream_shards(layout, stream());
    const Buffer<int32_t> local = to_device<int32_t>(mine);
    Buffer<int32_t> out = to_device<int32_t>(std::vector<int32_t>(mine.size() + 4, -7));
    there->shift_left(comm(), bounds.padded, local.data(), out.data(), -100);
    std::vector<int32_t> expected =
        shift_left_sharded<int32_t>(layout, bounds.padded, world(), mine, -100);
    expected.resize(mine.size() + 4, -7);
    EXPECT_EQ(to_host(out), expected);
  }
}

TEST_F(ShardsOnDevices, AGroupOfAnotherSizeIsAUsageError) {
  LayoutOptions options;
  options.cp = world().size() + 1;
  const Layout layout = contiguous(test::full_bounds({24}).view(), options);
  const auto there = make_stream_shards(layout, stream());
  Buffer<float> data(24, MemorySpace::device);
  EXPECT_THROW(there->gather(comm(), data.data(), data.data(), 4), Error);
}

}  // namespace GYRE_FILE
}  // namespace gyre

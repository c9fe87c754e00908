// The executor of recurrences on the device: schedules under layouts, forward and backward, against
// the definition; the bits of a run that is repeated.

#include "comm/staged.hpp"
#include "gpu_test.hpp"
#include "recurrence_layer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Layer;
using test::Mix;
using test::Sharding;
using test::world;

class RecurrenceOnDevice : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) group_ = make_staged_communicator(world());
  }
  /// Runs both passes, twice, from NaN.
  void check(const RecurrenceShape& shape, DType type, const StateSchedule& schedule,
             const Sharding& sharding) {
    const int64_t ranks = world().size();
    const Mix mix{"documents that end inside ranks", {30 * ranks, 3, 7, 6 * ranks, 1}};
    Layer layer(shape, type, schedule, mix, sharding, *group_, &stream());
    std::vector<std::vector<float>> results;
    for (int i = 0; i < 2; ++i) {
      layer.executor.overwrite(std::byte{0xff});
      layer.check_traffic(Pass::forward);
      layer.check_traffic(Pass::backward);
      results.push_back(layer.results());
    }
    std::string text;
    EXPECT_LT(layer.worst_error(text), 1)
        << schedule.name << ", " << sharding.layout << ", " << name_of(type) << ", rank "
        << layer.rank << ": " << text;
    EXPECT_EQ(results[0], results[1]) << schedule.name << ", " << sharding.layout;
  }

  std::unique_ptr<Communicator> group_;
};

TEST_F(RecurrenceOnDevice, EveryScheduleUnderLayoutsAgreesWithTheDefinition) {
  const int cp = world().size();
  const Sharding layouts[] = {{"contiguous"}, {"dual-chunk-swap"}, {"striped", 10}};
  int next = 0;
  for (const StateSchedule& schedule : state_schedules())
    for (const Sharding& sharding : layouts) {
      const RecurrenceKind& kind = recurrence_kinds()[next % recurrence_kinds().size()];
      RecurrenceShape shape(kind, cp, 2 * cp, 8, 6);
      if (cp > 2) shape = {kind, cp, cp, 4, 5};
      shape.convolution = next % 5 == 0 ? 0 : 4;
      check(shape, next % 2 == 0 ? DType::f32 : DType::bf16, schedule, sharding);
      ++next;
    }
}

}  // namespace GYRE_FILE
}  // namespace gyre

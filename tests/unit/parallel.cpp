#include "runtime/parallel.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace gyre {
namespace GYRE_FILE {

TEST(Parallel, SmallLoopsAreOneTask) {
  sharing_limits = {};
  EXPECT_EQ(items_of_task(0, 10), 1);
  EXPECT_EQ(items_of_task(9999, 10), 9999);   // 99.99 us
  EXPECT_EQ(items_of_task(10000, 10), 2000);  // tasks of 20 us
  EXPECT_EQ(items_of_task(3, 50e3), 1);
  EXPECT_EQ(items_of_task(1, 1e9), 1);
  sharing_limits = {0, 0};  // as in other tests
  EXPECT_EQ(items_of_task(5, 10), 1);
  EXPECT_EQ(items_of_task(5, 0), 5);
}

TEST(Parallel, EachItemIsInOnePart) {
  for (const SharingLimits limits : {SharingLimits{0, 0}, SharingLimits{0, 70}, SharingLimits{}})
    for (const int64_t count : {0, 1, 2, 6, 7, 8, 100}) {
      sharing_limits = limits;
      std::vector<int> calls(count, 0);
      for_each_part(3, count, 10, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t i = begin; i < end; ++i) calls[i] += 1 + 100 * (thread / 3);
      });
      EXPECT_EQ(calls, std::vector<int>(count, 1));
    }
  sharing_limits = {0, 0};
}

}  // namespace GYRE_FILE
}  // namespace gyre

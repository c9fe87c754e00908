// Labels of further tokens ahead: whole streams and shards of them against the definition.

#include "packing/labels_ahead.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

using Ints = std::vector<int32_t>;

TEST(LabelsAhead, StayInTheirDocuments) {
  const Ints real{0, 3, 3, 5, 6}, padded{0, 4, 6, 10, 11};
  const Ints labels{1, 2, -100, -100, -100, -100, 8, -100, -100, -100, -100};
  const auto ahead = labels_ahead({real, padded}, labels, 4, "bin 0");
  ASSERT_EQ(ahead.size(), 3U);
  EXPECT_EQ(ahead[0], (Ints{2, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100}));
  EXPECT_EQ(ahead[1], Ints(11, -100));
  EXPECT_TRUE(labels_ahead({real, padded}, labels, 1, "bin 0").empty());
}

TEST(LabelsAhead, AreThoseOfTheDefinition) {
  EXPECT_TRUE(rc::check("any segments", [] {
    Ints real{0}, padded{0}, labels;
    const auto lengths = *rc::gen::container<std::vector<uint8_t>>(rc::gen::inRange<uint8_t>(0, 9));
    for (const uint8_t length : lengths) {
      const int32_t padding = *rc::gen::inRange(0, 4);
      real.push_back(real.back() + length);
      padded.push_back(padded.back() + length + padding);
      // Any label may be ignored, as those of a prompt are.
      for (int p = 0; p < length; ++p) labels.push_back(*rc::gen::element(-100, 3, 4, 5, 6));
      labels.insert(labels.end(), padding, -100);
    }
    const auto ahead = labels_ahead({real, padded}, labels, 6, "bin 0");
    for (int depth = 2; depth <= 6; ++depth)
      RC_ASSERT(ahead[depth - 2] == labels_ahead_reference({real, padded}, labels, depth));
  }));
}

TEST(LabelsAhead, OfPaddingWithALabelAreRefused) {
  const Ints real{0, 2, 4}, padded{0, 3, 5}, labels{1, 2, 7, 3, 4};
  test::expect_usage("bin 0: slot 2 is padding of segment 0, and has the label 7; it must be -100",
                     [&] {
                       labels_ahead({real, padded}, labels, 2, "bin 0");
                     });
}

TEST(LabelsAhead, HaveNames) {
  EXPECT_EQ(labels_ahead_name(6), "labels_6");
  EXPECT_EQ(depth_of_labels("labels_6"), 6);
  EXPECT_EQ(depth_of_labels("labels_16"), 16);
  for (const char* other :
       {"labels", "labels_1", "labels_17", "labels_", "labels_06", "my_labels_2"})
    EXPECT_EQ(depth_of_labels(other), 0) << other;
}

}  // namespace GYRE_FILE
}  // namespace gyre

// First-fit decreasing and packed batches.

#include "packing/packing.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>

#include "core/error.hpp"

namespace gyre {
namespace {

TEST(FirstFitDecreasing, GoldenCapacity5) {
  const std::vector<int64_t> lengths = {4, 1, 3, 2, 1, 3, 4, 5};
  EXPECT_EQ(first_fit_decreasing(lengths, 5), (std::vector<Bin>{{7}, {6, 4}, {0, 1}, {5, 3}, {2}}));
}

TEST(FirstFitDecreasing, GoldenCapacity8) {
  const std::vector<int64_t> lengths = {4, 1, 3, 2, 1, 3, 4, 5};
  EXPECT_EQ(first_fit_decreasing(lengths, 8), (std::vector<Bin>{{7, 5}, {6, 0}, {2, 3, 4, 1}}));
}

TEST(FirstFitDecreasing, GoldenCapacity20) {
  EXPECT_EQ(first_fit_decreasing(std::vector<int64_t>{20, 13, 12, 10, 7, 5, 5, 4, 4}, 20),
            (std::vector<Bin>{{0}, {1, 4}, {2, 6}, {3, 5, 8}, {7}}));
  EXPECT_EQ(first_fit_decreasing(std::vector<int64_t>{16, 15, 11, 6, 5, 4}, 20),
            (std::vector<Bin>{{0, 5}, {1, 4}, {2, 3}}));
}

TEST(FirstFitDecreasing, ZeroLengthsAndNothing) {
  EXPECT_EQ(first_fit_decreasing(std::vector<int64_t>{0, 5, 0}, 10), (std::vector<Bin>{{1, 2, 0}}));
  EXPECT_TRUE(first_fit_decreasing(std::vector<int64_t>{}, 10).empty());
}

TEST(FirstFitDecreasing, OversizeItemsGetABinOfTheirOwn) {
  EXPECT_EQ(first_fit_decreasing(std::vector<int64_t>{3, 25, 7}, 10),
            (std::vector<Bin>{{1}, {2, 0}}));
}

TEST(FirstFitDecreasing, TreeEqualsScan) {
  EXPECT_TRUE(rc::check("the tree finds the bin that the scan finds", [] {
    const int64_t capacity = *rc::gen::inRange<int64_t>(1, 60);
    const auto lengths =
        *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 70));
    RC_ASSERT(first_fit_decreasing(lengths, capacity) ==
              first_fit_decreasing_reference(lengths, capacity));
  }));
}

TEST(FirstFitDecreasing, RejectsNegativeLengthsByName) {
  try {
    first_fit_decreasing(std::vector<int64_t>{3, -2}, 10);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_STREQ(error.what(), "length -2 of item 1 is negative");
  }
}

TEST(PackDocuments, RoundsSlotsAndKeepsRealLengths) {
  const auto batches = pack_documents(std::vector<int64_t>{3, 5, 0, 1}, 16, 4);
  ASSERT_EQ(batches.size(), 1u);
  EXPECT_EQ(batches[0].documents, (std::vector<int64_t>{1, 3, 0, 2}));
  EXPECT_EQ(batches[0].cu_seqlens, (std::vector<int32_t>{0, 5, 6, 9, 9}));
  EXPECT_EQ(batches[0].cu_seqlens_padded, (std::vector<int32_t>{0, 8, 12, 16, 16}));
  EXPECT_EQ(causal_pairs(batches[0]), 15 + 1 + 6);
  EXPECT_DOUBLE_EQ(packing_efficiency(batches, 16), 9.0 / 16);
}

TEST(PackDocuments, RejectsCapacityThatIsNoMultipleWithTheNearestOnes) {
  try {
    pack_documents(std::vector<int64_t>{3}, 10, 4);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_STREQ(
        error.what(),
        "bin capacity 10 is not a positive multiple of 4 (2·cp); the nearest are 8 and 12");
  }
}

TEST(PackDocuments, EveryDocumentOnceInSlotsOfItsOwn) {
  EXPECT_TRUE(rc::check("documents are packed once, aligned, in order of slots", [] {
    const int64_t multiple = 2 * *rc::gen::inRange<int64_t>(1, 9);
    const int64_t capacity = multiple * *rc::gen::inRange<int64_t>(1, 20);
    const auto lengths =
        *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 200));
    std::vector<int> seen(lengths.size(), 0);
    for (const PackedBatch& batch : pack_documents(lengths, capacity, multiple)) {
      // Only the first document of a bin can be too long for it; empty ones may keep it company.
      const int64_t rest = batch.slots() - batch.bounds().slot_length(0);
      RC_ASSERT(batch.slots() <= capacity || rest == 0);
      for (size_t i = 0; i < batch.documents.size(); ++i) {
        const auto document = static_cast<size_t>(batch.documents[i]);
        ++seen[document];
        RC_ASSERT(batch.bounds().real_length(static_cast<int64_t>(i)) == lengths[document]);
        RC_ASSERT(batch.bounds().slot_length(static_cast<int64_t>(i)) ==
                  round_up(lengths[document], multiple));
      }
    }
    for (int times : seen) RC_ASSERT(times == 1);
  }));
}

TEST(BalanceOverGroups, HeaviestFirstToTheLightest) {
  EXPECT_EQ(balance_over_groups(std::vector<double>{1, 5, 2, 4}, 2),
            (std::vector<std::vector<int64_t>>{{0, 1}, {2, 3}}));
  EXPECT_EQ(balance_over_groups(std::vector<double>{3}, 3),
            (std::vector<std::vector<int64_t>>{{0}, {}, {}}));
}

}  // namespace
}  // namespace gyre

// Packed batches of documents.

#include "packing/packing.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <limits>
#include <string>

#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

TEST(PackDocuments, RoundsSlotsAndKeepsRealLengths) {
  const auto batches = pack_documents(std::vector<int64_t>{3, 5, 0, 1}, 16, 4);
  ASSERT_EQ(batches.size(), 1u);
  EXPECT_EQ(batches[0].documents, (std::vector<int64_t>{1, 3, 0, 2}));
  EXPECT_EQ(batches[0].cu_seqlens, (std::vector<int32_t>{0, 5, 6, 9, 9}));
  EXPECT_EQ(batches[0].cu_seqlens_padded, (std::vector<int32_t>{0, 8, 12, 16, 16}));
  EXPECT_DOUBLE_EQ(packing_efficiency(batches, 16), 9.0 / 16);
}

TEST(PackDocuments, RejectsCapacityThatIsNoMultipleWithTheNearestOnes) {
  test::expect_usage(
      "bin capacity 10 is not a positive multiple of 4 (2·cp); the nearest are 8 and 12",
      [] { pack_documents(std::vector<int64_t>{3}, 10, 4); });
}

TEST(PackDocuments, OversizeDocumentsGetABinOfTheirOwn) {
  const auto batches = pack_documents(std::vector<int64_t>{3, 25, 7}, 12, 4);
  ASSERT_EQ(batches.size(), 2U);
  EXPECT_EQ(batches[0].documents, (std::vector<int64_t>{1}));
  EXPECT_EQ(batches[0].cu_seqlens_padded, (std::vector<int32_t>{0, 28}));
  EXPECT_EQ(batches[1].documents, (std::vector<int64_t>{2, 0}));
}

void expect_usage_error(const std::vector<int64_t>& lengths, int64_t multiple, const char* packer,
                        const BinOptions& options, const std::string& message) {
  test::expect_usage(message,
                     [&] { pack_documents(lengths, multiple, find_bin_packer(packer), options); });
}

TEST(PackDocuments, AnyPackerSeesTheRoundedLengths) {
  // Real lengths would all fit into one bin of 16; in slots of 4 they need 8 + 4 + 8.
  const std::vector<int64_t> lengths = {5, 3, 6};
  BinOptions options;
  options.capacity = 16;
  const auto batches = pack_documents(lengths, 4, find_bin_packer("next-fit"), options);
  ASSERT_EQ(batches.size(), 2U);
  EXPECT_EQ(batches[0].documents, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(batches[0].cu_seqlens, (std::vector<int32_t>{0, 5, 8}));
  EXPECT_EQ(batches[0].cu_seqlens_padded, (std::vector<int32_t>{0, 8, 12}));
  EXPECT_EQ(batches[1].documents, (std::vector<int64_t>{2}));
  EXPECT_EQ(pack_documents(lengths, 1, find_bin_packer("next-fit"), options).size(), 1U);
}

TEST(PackDocuments, HandsTheOptionsToThePacker) {
  const std::vector<int64_t> lengths = {5, 3, 6, 1};
  const BinOptions options = options_for_ranks(BinOptions{.capacity = 16}, 4);
  for (const BinPacker& packer : bin_packers())
    EXPECT_EQ(pack_documents(lengths, 4, packer, options).size(), 4U) << packer.name;
  // The document of 17 tokens takes 20 slots.
  expect_usage_error({3, 17}, 4, "balanced", BinOptions{.capacity = 16},
                     "length 20 of item 1 exceeds the bin capacity 16");
}

TEST(PackDocuments, RejectsLengthsThatNoStreamCanHold) {
  BinOptions options{.capacity = 16, .oversize = Oversize::own_bin};
  expect_usage_error({3, -2}, 4, "next-fit", options, "length -2 of document 1 is negative");
  for (int64_t length : {int64_t{2147483645}, std::numeric_limits<int64_t>::max()})
    expect_usage_error({3, length}, 4, "next-fit", options,
                       "document 1 of " + std::to_string(length) +
                           " tokens: the packed stream would exceed the int32 range of cu_seqlens");
  EXPECT_EQ(pack_documents(std::vector<int64_t>{2147483644}, 16, 4)[0].slots(), 2147483644);
  // Two documents that fit one by one but not together.
  options.capacity = int64_t{1} << 32;
  expect_usage_error(
      {1 << 30, 1 << 30}, 4, "next-fit", options,
      "document 1 of 1073741824 tokens: the packed stream would exceed the int32 range of "
      "cu_seqlens");
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

}  // namespace GYRE_FILE
}  // namespace gyre

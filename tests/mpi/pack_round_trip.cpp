// Documents -> bins -> packed file -> shards -> shards file -> gather -> unpack, on real ranks:
// every token, label and position comes back.

#include <gtest/gtest.h>

#include <random>

#include "apps/pack/report.hpp"
#include "apps/shard/report.hpp"
#include "io/schemas/batch_file.hpp"
#include "io_files.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::SharedFolder;
using test::world;
using Ints = std::vector<int32_t>;

/// Documents of random lengths, empty and one-token ones among them. The same on all ranks.
Documents random_documents(unsigned seed) {
  std::mt19937 random(seed);
  Documents documents;
  const auto count = 1 + random() % 40;
  for (size_t i = 0; i < count; ++i) {
    const auto length = random() % 5 == 0 ? random() % 3 : random() % 90;
    for (size_t k = 0; k < length; ++k)
      documents.tokens.push_back(static_cast<int32_t>(random() % 259));
    documents.offsets.push_back(std::ssize(documents.tokens));
    documents.names.push_back("document " + std::to_string(i));
  }
  return documents;
}

std::vector<int64_t> lengths_of(const Documents& documents) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < documents.count(); ++i) lengths.push_back(documents.length(i));
  return lengths;
}

/// Packs the documents with a packer and writes them to `path`. Collective.
void pack_to(const std::string& path, const Documents& documents, const BinPacker& packer,
             int64_t multiple, Verification& checks) {
  PackedHeader header;
  header.documents = documents.count();
  header.vocab_size = documents.vocab_size;
  header.tokenizer = documents.tokenizer;
  header.algorithm = packer.name;
  header.names = documents.names;
  BinOptions options;
  options.capacity = 40 * multiple;
  options.seed = 5;
  options.oversize = Oversize::own_bin;
  set_bins(header, pack_documents(lengths_of(documents), multiple, packer, options),
           options.capacity, multiple);
  const auto parts = split_bins(header, world().size());
  const int64_t first = parts[world().rank()];
  const int64_t last = parts[world().rank() + 1];
  Outputs outputs(world());
  const PackedSlots slots = fill_slots(header, first, last, tokens_of(documents));
  write_checked({path, header, slots, slots, first, last}, world(), checks, outputs);
  outputs.publish("");
}

/// Checks a layout, writes its shards to `output`, and checks these.
void shard_checked(ShardingPlan& plan, const PackedSlots& slots, OutputFile& output,
                   Verification& checks) {
  check_layout(plan, slots, world(), checks);
  const ShardsHeader shards = shards_header(plan);
  fill_shards(output, shards, make_shard_rows(plan, slots, world()));
  check_shard_file(plan, slots, output.temporary_path(), shards, world(), checks);
}

TEST(PackRoundTrip, EveryTokenLabelAndPositionComesBackUnderEveryLayout) {
  const int cp = world().size();
  for (unsigned seed = 1; seed <= 3; ++seed) {
    const SharedFolder folder;
    const Documents documents = random_documents(seed);
    const BinPacker& packer = bin_packers()[seed % 3];  // those that take empty documents
    Verification checks;
    pack_to(folder.file("packed.h5"), documents, packer, 2 * cp, checks);
    const PackedHeader header = read_packed_header(world(), folder.file("packed.h5"));
    const PackedSlots slots =
        read_packed_slots(world(), folder.file("packed.h5"), header, 0, header.bin_count());
    for (const LayoutKind& kind : layout_kinds()) {
      LayoutOptions options;
      options.cp = cp;
      options.chunk = 4;
      options.stripe = seed;
      ShardingPlan plan(header, kind, options, false);
      OutputFile output(world(), folder.file(kind.name + ".h5"));
      shard_checked(plan, slots, output, checks);
    }
    EXPECT_TRUE(checks.passed()) << checks.text();
    // round trip, pairs, keys, gathered, shifted, shards file; packed file: tables and slots
    EXPECT_EQ(checks.checks().size(), 8u);

    Outputs outputs(world());
    unpack_file(world(), folder.file("packed.h5"), folder.file("back.h5"), {}, outputs);
    outputs.publish("");
    const Documents back = read_documents(world(), folder.file("back.h5"));
    EXPECT_EQ(back.tokens, documents.tokens);
    EXPECT_EQ(back.offsets, documents.offsets);
    EXPECT_EQ(back.names, documents.names);
  }
}

TEST(PackRoundTrip, MoreShardsThanRanksAndRepaddedSegments) {
  const SharedFolder folder;
  const Documents documents = random_documents(9);
  Verification checks;
  pack_to(folder.file("packed.h5"), documents, find_bin_packer("next-fit"), 2, checks);
  const PackedHeader header = read_packed_header(world(), folder.file("packed.h5"));
  const PackedSlots slots =
      read_packed_slots(world(), folder.file("packed.h5"), header, 0, header.bin_count());
  LayoutOptions options;
  options.cp = 11;
  ShardingPlan strict(header, find_layout("dual-chunk-swap"), options, false);
  std::vector<RankCost> costs;
  test::expect_error(ExitCode::usage, "is not a multiple of 2·cp = 22",
                     [&] { plan_layout(strict, {}, world(), costs); });
  ShardingPlan plan(header, find_layout("dual-chunk-swap"), options, true);
  const ShardingResult row = plan_layout(plan, {}, world(), costs);
  EXPECT_EQ(row.slots % 2, 0);
  EXPECT_EQ(costs.size(), 11u);
  check_layout(plan, slots, world(), checks);
  OutputFile output(world(), folder.file("shards.h5"));
  const ShardsHeader shards = shards_header(plan);
  fill_shards(output, shards, make_shard_rows(plan, slots, world()));
  check_shard_file(plan, slots, output.temporary_path(), shards, world(), checks);
  EXPECT_TRUE(checks.passed()) << checks.text();
}

TEST(PackRoundTrip, ChecksNoticeADifferentFile) {
  const SharedFolder folder;
  const Documents documents = random_documents(4);
  Verification checks;
  pack_to(folder.file("packed.h5"), documents, bin_packers()[1], 2 * world().size(), checks);
  const PackedHeader header = read_packed_header(world(), folder.file("packed.h5"));
  PackedSlots slots =
      read_packed_slots(world(), folder.file("packed.h5"), header, 0, header.bin_count());
  LayoutOptions options;
  options.cp = world().size();
  ShardingPlan plan(header, find_layout("zigzag"), options, false);
  OutputFile output(world(), folder.file("shards.h5"));
  const ShardsHeader shards = shards_header(plan);
  fill_shards(output, shards, make_shard_rows(plan, slots, world()));
  slots.ids.back() ^= 1;
  check_shard_file(plan, slots, output.temporary_path(), shards, world(), checks);
  EXPECT_FALSE(checks.passed());
  EXPECT_NE(checks.text().find("shards file"), std::string::npos) << checks.text();
}

/// Adds to packed streams an extra of slots, of three bytes each, one of rows, and a mask that
/// counts as any other here: programs leave it out before they shard.
void add_extras(PackedHeader& header, PackedSlots& slots) {
  const h5::StoredType bytes =
      read_bshd(world(), test::input("golden/rows_extras.h5")).extras.at(attention_mask_extra).type;
  const std::vector<uint8_t> weights{1, 2, 3, 4};
  header.extras["weight"] = {
      make_extra(std::span<const uint8_t>(weights), Extra::Aligned::rows), bytes, {}};
  header.extras["image"] = {{Extra::Aligned::slots, 3, nullptr}, bytes, {3}};
  ExtraSlots& image = slots.extras["image"];
  image.item_bytes = 3;
  for (size_t i = 0; i < 3 * slots.labels.size(); ++i)
    image.bytes.push_back(static_cast<std::byte>(i % 251));
}

TEST(PackRoundTrip, ExtrasComeBackUnderEveryLayout) {
  const int cp = world().size();
  const SharedFolder folder;
  const Documents documents = random_documents(6);
  Verification checks;
  pack_to(folder.file("packed.h5"), documents, bin_packers()[1], 2, checks);
  PackedHeader header = read_packed_header(world(), folder.file("packed.h5"));
  PackedSlots slots =
      read_packed_slots(world(), folder.file("packed.h5"), header, 0, header.bin_count());
  add_extras(header, slots);
  for (const LayoutKind& kind : layout_kinds()) {
    LayoutOptions options;
    options.cp = cp;
    options.chunk = 4;
    options.stripe = 3;
    ShardingPlan plan(header, kind, options, true);
    OutputFile output(world(), folder.file(kind.name + ".h5"));
    shard_checked(plan, slots, output, checks);
    const ShardsHeader shards = shards_header(plan);
    EXPECT_TRUE(checks.passed()) << kind.name << checks.text();

    Verification other;
    PackedSlots changed = slots;
    changed.extras.at("image").bytes.back() ^= std::byte{1};
    check_shard_file(plan, changed, output.temporary_path(), shards, world(), other);
    EXPECT_NE(other.text().find("extra image"), std::string::npos) << other.text();
    Verification rows;
    ShardsHeader narrow = shards;
    narrow.extras.erase("weight");
    check_shard_file(plan, slots, output.temporary_path(), narrow, world(), rows);
    EXPECT_NE(rows.text().find("extra weight is in one of the two"), std::string::npos)
        << rows.text();
  }
}

/// A header of one bin of two segments, 3 and 2 tokens in 4 and 4 slots.
PackedHeader small_header() {
  PackedHeader header;
  header.documents = 2;
  header.vocab_size = 10;
  header.tokenizer = "test";
  header.algorithm = "test";
  header.slot_multiple = 4;
  header.bins.bin_capacity = 8;
  const std::vector<int64_t> documents{0, 1};
  const std::vector<int32_t> real{0, 3, 5}, padded{0, 4, 8};
  header.bins.add_bin(documents, real, padded);
  return header;
}

std::string problem_of(const PackedHeader& header) {
  ConfigErrors problems;
  check_packed(problems, header);
  return problems.empty() ? "" : problems.messages().front();
}

TEST(PackedTables, BadOnesAreRejectedByBinAndSegment) {
  EXPECT_EQ(problem_of(small_header()), "");
  PackedHeader header = small_header();
  header.bins.cu_seqlens = {0, 5, 5};
  EXPECT_EQ(problem_of(header),
            "bin 0, segment 0: real length 5 in 4 slots; 0 <= real <= slots must hold");
  header = small_header();
  header.bins.cu_seqlens_padded = {0, 4, 10};
  EXPECT_EQ(problem_of(header),
            "bin 0, segment 1: 6 slots are not a multiple of slot_multiple 4; the next one is 8");
  header = small_header();
  header.bins.document[1] = 2;
  EXPECT_EQ(problem_of(header), "bin 0, segment 1: document 2; it must be 0 to 1");
  header = small_header();
  header.bins.cu_seqlens[0] = 1;
  EXPECT_EQ(problem_of(header),
            "bin 0: boundaries begin at 1 (cu_seqlens) and 0 (cu_seqlens_padded), not at 0");
  header = small_header();
  header.bins.bin_offsets = {0, 3};
  EXPECT_EQ(problem_of(header),
            "/packed/bin_offsets[1], the last, is 3; it must be 2, the elements of "
            "/packed/document");
}

TEST(PackedSlotsRejected, IdsLabelsAndPositionsOutOfRange) {
  const SharedFolder folder;
  PackedHeader header = small_header();
  const PackedSlots good{
      {1, 2, 3, 0, 4, 5, 0, 0},
      {},
      {2, 3, ignored_label, ignored_label, 5, ignored_label, ignored_label, ignored_label},
      {0, 1, 2, 3, 0, 1, 2, 3},
      {}};
  const auto rejected = [&](const PackedSlots& slots, const std::string& message) {
    OutputFile output(world(), folder.file("packed.h5"));
    fill_packed(output, header, world().rank() == 0 ? slots : PackedSlots());
    output.commit();
    test::expect_error(ExitCode::usage, message, [&] {
      read_packed_slots(world(), folder.file("packed.h5"), header, 0, 1);
      if (message.empty()) throw AgreedError(ExitCode::usage, "");
    });
  };
  rejected(good, "");
  PackedSlots bad = good;
  bad.ids[2] = 10;
  rejected(bad, "/packed/ids[2] is 10; it must be 0 to 9");
  bad = good;
  bad.labels[5] = -1;
  rejected(bad, "/packed/labels[5] is -1; it must be 0 to 9, or -100");
  bad = good;
  bad.positions[7] = -4;
  rejected(bad, "/packed/positions[7] is -4");
  header.position_axes = 2;
  bad.positions.assign(16, 3);
  rejected(bad, "");
  bad.positions[11] = -2;
  rejected(bad, "/packed/positions[1, 5] is -2; it must be 0 or more");
}

TEST(PackedFile, PositionsOfSeveralAxesAreReadAsTheyWereWritten) {
  const SharedFolder folder;
  PackedHeader header = small_header();
  header.position_axes = 3;
  PackedSlots slots{Ints(8, 1), {}, Ints(8, ignored_label), {}, {}};
  for (int32_t i = 0; i < 24; ++i) slots.positions.push_back(7 * i % 24);
  OutputFile output(world(), folder.file("packed.h5"));
  fill_packed(output, header, world().rank() == 0 ? slots : PackedSlots());
  output.commit();
  const PackedHeader read = read_packed_header(world(), folder.file("packed.h5"));
  EXPECT_EQ(read.position_axes, 3);
  EXPECT_EQ(read_packed_slots(world(), folder.file("packed.h5"), read, 0, 1).positions,
            slots.positions);
}

TEST(PackedFile, PaddingCountsOnFromTheLastPositionOfEachAxis) {
  Ints positions = {9, 9, 4, 7};
  count_on(positions, 2, 2, 2);
  EXPECT_EQ(positions, (Ints{9, 9, 4, 7, 5, 8, 6, 9}));
  count_on(positions, positions.size(), 2, 2);  // a segment without tokens
  EXPECT_EQ(positions, (Ints{9, 9, 4, 7, 5, 8, 6, 9, 0, 0, 1, 1}));
  EXPECT_EQ(transposed(Ints{0, 1, 2, 3, 4, 5}, 2, 3), (Ints{0, 3, 1, 4, 2, 5}));
}

}  // namespace GYRE_FILE
}  // namespace gyre

// Rows of a file as a batch: rows without tables, slot lengths that are missing, extras; and the
// checks of programs that convert and shard them.

#include "apps/common/bshd_rows.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "apps/pack/inputs.hpp"
#include "apps/shard/batch.hpp"
#include "core/rolled_labels.hpp"
#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::usage_message;
using test::world;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

constexpr int64_t pad = 9;

/// Rows of `slots` ids, every label 1.
BshdArrays rows_of(const Longs& ids, int64_t slots) {
  BshdArrays arrays;
  arrays.rows = std::ssize(ids) / slots;
  arrays.slots = slots;
  arrays.vocab_size = 10;
  arrays.pad_id = pad;
  arrays.ids = ids;
  arrays.labels.assign(ids.size(), 1);
  return arrays;
}

/// Adds an extra whose bytes count on, `width` of them for each of `items`.
void add_extra(BshdArrays& arrays, const std::string& name, Extra::Aligned aligned, size_t items,
               int64_t width) {
  std::vector<uint8_t> values(items * static_cast<size_t>(width));
  std::iota(values.begin(), values.end(), uint8_t{1});
  StoredExtra stored;
  stored.extra = make_extra(std::span<const uint8_t>(values), aligned, width);
  stored.item = {width};
  arrays.extras.emplace(name, std::move(stored));
}

/// 4 rows of 8 slots with extras of every alignment, an attention mask among them.
BshdArrays rows_with_extras() {
  BshdArrays arrays = rows_of(Longs(32, 3), 8);
  add_extra(arrays, "image", Extra::Aligned::slots, 32, 3);
  add_extra(arrays, attention_mask_extra, Extra::Aligned::slots, 32, 1);
  add_extra(arrays, "weight", Extra::Aligned::rows, 4, 2);
  add_extra(arrays, "grid", Extra::Aligned::none, 1, 5);
  return arrays;
}

BshdBatch with_tables(const BshdArrays& arrays, int64_t chunks) {
  BshdBatch batch = batch_of(arrays);
  add_tables_of_rows(batch, arrays, chunks);
  return batch;
}

TEST(RowsWithoutTables, AreDocumentsThatEndWherePaddingBegins) {
  const BshdArrays arrays = rows_of({1, 2, 3, 4, 5, pad, pad, pad}, 2);
  const BshdBatch batch = with_tables(arrays, 1);
  EXPECT_EQ(batch.seq_lens->cells, (Longs{2, 2, 1, length_sentinel}));
  EXPECT_EQ(batch.seq_lens_padded->cells, (Longs{2, 2, 2, length_sentinel}));
  EXPECT_EQ(real_slots(arrays), (std::vector<uint8_t>{1, 1, 1, 1, 1, 0, 0, 0}));
  EXPECT_EQ(batch.positions->values, (Longs{0, 1, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(max_documents_of_row(arrays), 1);
  const ThdBatch stream = to_thd(batch, {.tail = Tail::own_segment, .slot_multiple = 1});
  EXPECT_EQ(*stream.cu_seqlens, (Ints{0, 2, 4, 5, 5, 5}));
}

TEST(RowsWithoutTables, EachMayEndInPaddingAsAStreamOfItsOwn) {
  const BshdArrays arrays = rows_of({1, 2, pad, 3, pad, pad, pad, pad, pad}, 3);
  EXPECT_EQ(usage_message([&] { with_tables(arrays, 1); }),
            "row 0, slot 2 holds the pad id 9 before real tokens: without seq_lens padding is only "
            "known at the end of the stream; --chunks 3 makes a stream of each row");
  EXPECT_EQ(with_tables(arrays, 3).seq_lens->cells, (Longs{2, 1, length_sentinel}));
  // Padding in front of content: no stream of any row would do.
  EXPECT_EQ(usage_message([&] {
              with_tables(rows_of({pad, 2, 3, 4}, 2), 1);
            }),
            "row 0, slot 0 holds the pad id 9 before real tokens: without seq_lens padding is only "
            "known at the end of the stream");
  EXPECT_EQ(usage_message([&] { with_tables(arrays, 2); }),
            "a batch of 3 rows cannot be cut into 2 equal chunks; the nearest counts are 1 and 3");
}

TEST(RowsWithoutTables, KeyMasksKnowPaddingAtBothEndsOfARow) {
  check_padding_of_rows(rows_of({pad, 1, 2, pad, pad, pad, pad, pad, 3, 3, 3, 3}, 4));
  EXPECT_EQ(usage_message([] {
              check_padding_of_rows(rows_of({1, 2, 3, 1, pad, 1}, 3));
            }),
            "row 1, slot 1 holds the pad id 9 between other ids: without seq_lens padding is only "
            "known at the ends of a row");
}

TEST(RowsWithoutSlotLengths, HaveTheirRealOnes) {
  BshdArrays arrays = rows_of({1, 2, 3, 4}, 4);
  arrays.segments_per_row = 2;
  arrays.seq_lens = Longs{3, 1};
  arrays.positions = {0, 1, 2, 0};
  const ThdBatch stream = to_thd(batch_of(arrays));
  EXPECT_EQ(*stream.cu_seqlens, (Ints{0, 3, 4}));
  EXPECT_FALSE(stream.cu_seqlens_padded);
  EXPECT_EQ(real_slots(arrays), (std::vector<uint8_t>{1, 1, 1, 1}));
  EXPECT_EQ(tail_of(arrays, "absorb"), Tail::keep);
  EXPECT_EQ(tail_of(arrays, "own-segment"), Tail::own_segment);
  arrays.seq_lens_padded = arrays.seq_lens;
  EXPECT_EQ(tail_of(arrays, "absorb"), Tail::absorb);
  EXPECT_EQ(tail_of(arrays, "keep"), Tail::keep);
}

TEST(PackedRows, LabelsRolledByUnpaddedBoundariesAreNamed) {
  BshdArrays arrays;
  arrays.rows = 2, arrays.slots = 8, arrays.segments_per_row = 2, arrays.vocab_size = 99;
  arrays.ids = {11, 12, 13, 0, 21, 22, 0, 0, 31, 32, 33, 34, 35, 36, 0, 0};
  arrays.labels.assign(16, ignored_label);
  arrays.seq_lens = Longs{3, 2, 6, length_sentinel};
  arrays.seq_lens_padded = Longs{4, 4, 8, length_sentinel};
  const auto text = [&](size_t slot, int64_t label) {
    BshdArrays wrong = arrays;
    wrong.labels[slot] = label;
    return usage_message([&] { check_labels(wrong); });
  };
  EXPECT_EQ(text(3, 21), fmt::format("row 0, slot 3 {}", rolled_label_text));
  EXPECT_EQ(text(7, 31), fmt::format("row 0, slot 7 {}", rolled_label_text));
  EXPECT_EQ(text(3, 22), "no error") << "no roll leaves it there";
  EXPECT_EQ(text(5, 0), "no error") << "the label of a token is the loader's business";
  arrays.seq_lens->at(0) = 0;  // padding in front of the only document of the row
  EXPECT_EQ(text(3, 21), "no error");
}

TEST(PackedRows, ChecksNoticeExtrasOfOtherSlotsAndRows) {
  const BshdArrays arrays = rows_with_extras();
  for (const int64_t chunks : {1, 2, 4}) {
    const ConvertedBatch good = convert("file", arrays, chunks, 1, "own-segment", world());
    Verification checks;
    check_converted(arrays, good, checks);
    EXPECT_TRUE(checks.passed()) << checks.text();
    EXPECT_EQ(good.header.extras.at("weight").extra.bytes->size(), 8u);
    EXPECT_EQ(good.header.extras.at("image").extra.bytes, nullptr);
    EXPECT_EQ(good.slots.extras.at("image").bytes.size(), 96u);

    ConvertedBatch bad = good;
    std::vector<std::byte>& image = bad.slots.extras.at("image").bytes;
    std::rotate(image.begin(), image.begin() + 3, image.end());  // by a slot
    Verification slots;
    check_converted(arrays, bad, slots);
    EXPECT_NE(slots.text().find("image row 3 slot 7"), std::string::npos) << slots.text();

    bad = good;
    bad.header.extras.at("weight").extra.bytes = arrays.extras.at("grid").extra.bytes;
    Verification rows;
    check_converted(arrays, bad, rows);
    EXPECT_NE(rows.text().find("weight: 5 bytes, not 8"), std::string::npos) << rows.text();
  }
}

TEST(PackedRows, ChecksNoticeDocumentsOfOtherLengths) {
  const BshdArrays arrays = rows_of({1, 2, 3, 4, 5, pad, pad, pad}, 4);
  const ConvertedBatch good = convert("file", arrays, 1, 1, "keep", world());
  Verification checks;
  check_converted(arrays, good, checks);
  EXPECT_TRUE(checks.passed()) << checks.text();
  ConvertedBatch bad = good;
  bad.header.bins.cu_seqlens = {0, 4, 6};
  Verification longer;
  check_converted(arrays, bad, longer);
  EXPECT_NE(longer.text().find("tokens of row[1]: got 2, expected 1"), std::string::npos)
      << longer.text();
}

/// The text of the checks of sharding the rows; "" if they pass.
std::string shard_checks(const BshdArrays& arrays, const std::string& format, int cp,
                         const std::string& layout, int64_t chunks = 1) {
  BatchJob job;
  job.options.format = format;
  job.options.chunks = chunks;
  job.cp = cp;
  job.layout = layout;
  job.layout_options.stripe = layout == "striped" ? 3 : 1;
  job.mask = format == "thd" ? AttentionMask::causal_segments : AttentionMask::causal;
  Verification checks(1);
  shard_batch("file", arrays, job, world(), checks);
  EXPECT_EQ(std::count_if(checks.checks().begin(), checks.checks().end(),
                          [](const Check& check) { return check.name() == "extras"; }),
            arrays.extras.empty() ? 0 : 1);
  return checks.passed() ? "" : checks.text();
}

TEST(ShardedRows, ExtrasAreThoseOfTheSlotsUnderEveryLayout) {
  const BshdArrays arrays = rows_with_extras();
  for (const int cp : {1, 2, 4})
    for (const char* layout : {"dual-chunk-swap", "contiguous", "zigzag", "striped"})
      for (const int64_t chunks : {1, 2})
        EXPECT_EQ(shard_checks(arrays, "thd", cp, layout, chunks), "");
  for (const int cp : {1, 2, 3}) EXPECT_EQ(shard_checks(arrays, "bshd", cp, "dual-chunk-swap"), "");
}

TEST(ShardedRows, WithoutTablesAreDocumentsOrMaskedByTheirIds) {
  const BshdArrays at_the_end = rows_of({1, 2, 3, 4, 5, pad, pad, pad}, 4);
  EXPECT_EQ(shard_checks(at_the_end, "thd", 2, "dual-chunk-swap"), "");
  const BshdArrays everywhere = rows_of({1, 2, pad, pad, pad, 3, 4, pad}, 4);
  EXPECT_EQ(shard_checks(everywhere, "bshd", 2, "dual-chunk-swap"), "");
  EXPECT_NE(usage_message([&] {
              shard_checks(everywhere, "thd", 2, "dual-chunk-swap");
            }).find("'file': row 0, slot 2 holds the pad id 9 before real tokens"),
            std::string::npos);
}

}  // namespace GYRE_FILE
}  // namespace gyre

// Packing of utterances of text and audio: what is where, and that it teaches what the unpacked
// path teaches.

#include "packing/salm.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <functional>

#include "core/index.hpp"
#include "errors.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::usage_message;
using Longs = std::vector<int64_t>;
using Ints = std::vector<int32_t>;

constexpr int64_t pad = 0, audio_id = 99, none = -100;

/// A batch with embeddings that tell where they come from: 2 values a slot, (1 + 100 · row + slot,
/// 0.5) for text and (-(1 + 100 · audio + frame), 0.25) for frames.
struct Batch {
  std::vector<Longs> ids, targets;
  Longs frames;
  Longs flat_ids, flat_targets;
  std::vector<float> text;
  std::vector<std::vector<float>> audio;
  std::vector<MatrixView<const float>> views;

  Batch(std::vector<Longs> ids_, std::vector<Longs> targets_, Longs frames_)
      : ids(std::move(ids_)), targets(std::move(targets_)), frames(std::move(frames_)) {
    for (size_t b = 0; b < ids.size(); ++b)
      for (size_t t = 0; t < ids[b].size(); ++t) {
        flat_ids.push_back(ids[b][t]);
        flat_targets.push_back(targets[b][t]);
        text.push_back(text_value(b, t));
        text.push_back(0.5f);
      }
    for (size_t k = 0; k < frames.size(); ++k) {
      std::vector<float>& values = audio.emplace_back();
      for (int64_t f = 0; f < frames[k]; ++f) {
        values.push_back(frame_value(k, f));
        values.push_back(0.25f);
      }
    }
    for (size_t k = 0; k < frames.size(); ++k)
      views.emplace_back(audio[k].data(), frames[k], int64_t{2});
  }
  static float text_value(size_t row, size_t slot) {
    return static_cast<float>(1 + 100 * row + slot);
  }
  static float frame_value(size_t item, int64_t frame) {
    return -static_cast<float>(1 + 100 * static_cast<int64_t>(item) + frame);
  }
  SalmBatch view() const { return {std::ssize(ids), 2, flat_ids, text, flat_targets, views}; }
};

SalmOptions options_of(int cp, int tp, TpRounding rounding = TpRounding::per_rank) {
  return {pad, audio_id, cp, tp, rounding};
}

/// Two rows: audio of 4 and 3 frames in the first, of 2 in the second, which is padded on the left.
Batch example() {
  return {{{7, audio_id, 1, 2, audio_id, 1}, {0, 0, 3, audio_id, 4, 5}},
          {{none, none, none, none, none, 1}, {none, none, none, none, 4, 5}},
          {4, 3, 2}};
}

TEST(Salm, SplicesAndShiftsInsideEachRow) {
  const SalmPacked packed = pack_salm(example().view(), options_of(1, 1));
  EXPECT_EQ(packed.seq_lens, (Longs{11, 5}));
  EXPECT_EQ(packed.seq_lens_padded, (Longs{11, 5}));
  EXPECT_EQ(packed.cu_seqlens, (Ints{0, 11, 16}));
  EXPECT_EQ(packed.cu_seqlens_padded, (Ints{0, 11, 16}));
  EXPECT_EQ(packed.max_seqlen, 11);
  Longs labels(16, none);
  labels[9] = 1;
  labels[13] = 4;
  labels[14] = 5;
  EXPECT_EQ(packed.labels, labels);
  EXPECT_EQ(packed.positions, (Longs{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4}));
  const std::vector<float> expected = {1,    -1,   -2, -3,  -4,   3,    4,   -101,
                                       -102, -103, 6,  103, -201, -202, 105, 106};
  for (size_t t = 0; t < expected.size(); ++t) {
    EXPECT_EQ(packed.embeddings[2 * t], expected[t]) << t;
    EXPECT_EQ(packed.embeddings[2 * t + 1], expected[t] > 0 ? 0.5f : 0.25f) << t;
  }
}

TEST(Salm, RowsArePaddedForTwoChunksARank) {
  const SalmPacked two = pack_salm(example().view(), options_of(2, 1));
  EXPECT_EQ(two.seq_lens, (Longs{11, 5}));
  EXPECT_EQ(two.seq_lens_padded, (Longs{12, 8}));
  EXPECT_EQ(two.cu_seqlens, (Ints{0, 11, 16}));
  EXPECT_EQ(two.cu_seqlens_padded, (Ints{0, 12, 20}));
  EXPECT_EQ(two.max_seqlen, 12);
  EXPECT_EQ(two.tokens(), 16);
  EXPECT_EQ(two.slots(), 20);
  EXPECT_EQ(std::ssize(two.embeddings), 2 * 20);
  // Padding: no embedding, no label, positions that count on.
  for (const size_t t : {11u, 17u, 18u, 19u}) {
    EXPECT_EQ(two.embeddings[2 * t], 0.0f);
    EXPECT_EQ(two.embeddings[2 * t + 1], 0.0f);
    EXPECT_EQ(two.labels[t], none);
  }
  EXPECT_EQ(two.positions[11], 11);
  EXPECT_EQ(Longs(two.positions.begin() + 12, two.positions.end()),
            (Longs{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(pack_salm(example().view(), options_of(4, 1)).seq_lens_padded, (Longs{16, 8}));
}

TEST(Salm, TensorParallelismEnlargesTheLastRow) {
  const auto padded = [](const Batch& batch, int cp, int tp, TpRounding rounding) {
    return pack_salm(batch.view(), options_of(cp, tp, rounding)).seq_lens_padded;
  };
  const Batch b = example();
  EXPECT_EQ(padded(b, 1, 3, TpRounding::per_rank), (Longs{11, 7}));
  EXPECT_EQ(padded(b, 1, 3, TpRounding::total), (Longs{11, 7}));
  // 24 slots divide by 8, but the 12 of each rank do not.
  EXPECT_EQ(padded(b, 2, 8, TpRounding::total), (Longs{12, 12}));
  EXPECT_EQ(padded(b, 2, 8, TpRounding::per_rank), (Longs{12, 20}));
  const Batch fives = {
      {{1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}}, {{none, 2, 3, 4, 5}, {none, 7, 8, 9, 10}}, {}};
  EXPECT_EQ(padded(fives, 2, 6, TpRounding::total), (Longs{8, 16}));
  EXPECT_EQ(padded(fives, 2, 6, TpRounding::per_rank), (Longs{8, 16}));
}

TEST(Salm, ALabelDoesNotLeakFromTheNextRow) {
  const Batch fives = {
      {{1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}}, {{1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}}, {}};
  EXPECT_EQ(pack_salm(fives.view(), options_of(1, 1)).labels,
            (Longs{2, 3, 4, 5, none, 7, 8, 9, 10, none}));
}

TEST(Salm, ARowOfPaddingOnlyKeepsOneSlotWithoutLabel) {
  const Batch batch = {{{0, 0, 0}, {0, 4, 5}}, {{1, 2, 3}, {none, 4, 5}}, {}};
  const SalmPacked packed = pack_salm(batch.view(), options_of(1, 1));
  EXPECT_EQ(packed.seq_lens, (Longs{1, 2}));
  EXPECT_EQ(packed.labels, (Longs{none, 5, none}));
}

TEST(Salm, PaddingInsideARowIsContentWithoutLabel) {
  // The pad id is also the end token: only the run on the left is stripped.
  const Batch batch = {{{0, 4, 0, 5, 0}}, {{7, 7, 7, 7, 7}}, {}};
  const SalmPacked packed = pack_salm(batch.view(), options_of(1, 1));
  EXPECT_EQ(packed.seq_lens, (Longs{4}));
  EXPECT_EQ(packed.labels, (Longs{none, 7, none, none}));
}

/// What a loss sees: an input embedding, and the token to be predicted from it.
struct Pair {
  std::vector<float> embedding;
  int64_t label;
  friend bool operator==(const Pair&, const Pair&) = default;
};

/// The unpacked path: every row spliced, padded on the left to the longest; then inputs without the
/// last column and targets without the first.
std::vector<Pair> unpacked_pairs(const Batch& batch) {
  std::vector<std::vector<Pair>> rows;
  size_t longest = 0, item = 0;
  for (size_t b = 0; b < batch.ids.size(); ++b) {
    std::vector<Pair>& row = rows.emplace_back();
    for (size_t t = 0; t < batch.ids[b].size(); ++t) {
      const int64_t id = batch.ids[b][t];
      if (id == audio_id) {
        for (int64_t f = 0; f < batch.frames[item]; ++f)
          row.push_back({{Batch::frame_value(item, f), 0.25f}, none});
        ++item;
      } else if (id == pad) {
        if (!row.empty()) row.push_back({{Batch::text_value(b, t), 0.5f}, none});
      } else {
        row.push_back({{Batch::text_value(b, t), 0.5f}, batch.targets[b][t]});
      }
    }
    longest = std::max(longest, row.size());
  }
  std::vector<Pair> pairs;
  for (std::vector<Pair>& row : rows) {
    row.insert(row.begin(), longest - row.size(), Pair{{0, 0}, none});
    for (size_t t = 0; t + 1 < row.size(); ++t)
      if (row[t + 1].label != none) pairs.push_back({row[t].embedding, row[t + 1].label});
  }
  return pairs;
}

/// Rows of one rank may be odd, which dual-chunk-swap does not cut.
Layout layout_of(const SalmPacked& packed, int cp) {
  return cp == 1 ? contiguous(packed.bounds(), {}) : dual_chunk_swap(packed.bounds(), cp);
}

/// The pairs of all ranks' shards, in the order of the stream.
std::vector<Pair> packed_pairs(const SalmPacked& packed, int cp) {
  const Layout layout = layout_of(packed, cp);
  std::vector<std::pair<int32_t, Pair>> found;
  for (int rank = 0; rank < cp; ++rank) {
    const SalmShard shard = shard_salm(packed, layout, rank);
    const Ints index = shard_index(layout, rank);
    for (size_t t = 0; t < index.size(); ++t)
      if (shard.labels[t] != none)
        found.push_back(
            {index[t], {{shard.embeddings[2 * t], shard.embeddings[2 * t + 1]}, shard.labels[t]}});
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Pair> pairs;
  for (const auto& [slot, pair] : found) pairs.push_back(pair);
  return pairs;
}

void expect_same_lessons(const Batch& batch) {
  const std::vector<Pair> expected = unpacked_pairs(batch);
  for (const int cp : {1, 2, 4})
    for (const int tp : {1, 2, 3, 6, 8})
      for (const TpRounding rounding : {TpRounding::per_rank, TpRounding::total}) {
        SCOPED_TRACE(fmt::format("cp {} tp {}", cp, tp));
        const SalmPacked packed = pack_salm(batch.view(), options_of(cp, tp, rounding));
        EXPECT_EQ(packed_pairs(packed, cp), expected);
        const int64_t divided =
            rounding == TpRounding::per_rank ? packed.slots() / cp : packed.slots();
        EXPECT_EQ(divided % tp, 0);
      }
}

TEST(SalmPairs, Basic) {
  expect_same_lessons(example());
  const std::vector<Pair> pairs = unpacked_pairs(example());
  EXPECT_EQ(pairs, (std::vector<Pair>{{{-103, 0.25f}, 1}, {{-202, 0.25f}, 4}, {{105, 0.5f}, 5}}));
}

TEST(SalmPairs, LeftPaddedWithLongTargetsOverChunkEnds) {
  expect_same_lessons({{{0, 0, 0, 0, 1, audio_id, 2, 3, 4, 5},
                        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
                        {0, 0, 0, 0, 0, 0, 0, 0, 0, 1}},
                       {{none, none, none, none, none, 8, 2, 3, 4, 5},
                        {none, none, 2, 3, 4, 5, 6, 7, 8, 9},
                        {none, none, none, none, none, none, none, none, none, none}},
                       {13}});
}

TEST(SalmPairs, AnyBatch) {
  EXPECT_TRUE(rc::check("packed and unpacked rows teach the same", [] {
    const int64_t rows = *rc::gen::inRange<int64_t>(1, 5), width = *rc::gen::inRange(1, 12);
    std::vector<Longs> ids, targets;
    Longs frames;
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t pads = *rc::gen::inRange<int64_t>(0, width);
      Longs row, target;
      for (int64_t t = 0; t < width; ++t) {
        const bool is_audio = t > pads && *rc::gen::inRange(0, 4) == 0;
        row.push_back(t < pads ? pad
                               : (is_audio ? audio_id : *rc::gen::inRange(t > pads ? 0 : 1, 5)));
        if (is_audio) frames.push_back(*rc::gen::inRange(0, 5));
        // The first token of a short row would be learnt from padding on the unpacked path.
        target.push_back(t > pads && *rc::gen::inRange(0, 2) == 0 ? 10 * b + t : none);
      }
      ids.push_back(row);
      targets.push_back(target);
    }
    const Batch batch(ids, targets, frames);
    const std::vector<Pair> expected = unpacked_pairs(batch);
    const int tp = *rc::gen::inRange(1, 9);
    const TpRounding rounding = *rc::gen::element(TpRounding::per_rank, TpRounding::total);
    for (const int cp : {1, 2, 3, 4}) {
      const SalmPacked packed = pack_salm(batch.view(), options_of(cp, tp, rounding));
      RC_ASSERT(packed_pairs(packed, cp) == expected);
      RC_ASSERT((rounding == TpRounding::total ? packed.slots() : packed.slots() / cp) % tp == 0);
    }
  }));
}

std::string error_of(const Batch& batch, const SalmOptions& options = options_of(2, 1)) {
  return usage_message([&] { pack_salm(batch.view(), options); });
}

TEST(SalmErrors, PlaceholdersAndAudioMustMatch) {
  const std::vector<Longs> ids = {{1, 2, audio_id}, {audio_id, audio_id, 3}};
  const std::vector<Longs> targets(2, Longs(3, none));
  EXPECT_EQ(error_of({ids, targets, {2, 2}}),
            "row 1, slot 1: no audio for placeholder 3 of 3; there are 2");
  EXPECT_EQ(error_of({ids, targets, {}}),
            "row 0, slot 2: no audio for placeholder 1 of 3; there are 0");
  EXPECT_EQ(error_of({ids, targets, {2, 2, 2, 2}}),
            "audio 3 has no placeholder: 4 audio for 3 placeholders");
  Batch other = {ids, targets, {2, 2, 2}};
  other.views[1].cols = 3;
  EXPECT_EQ(error_of(other), "audio 1 has frames of 3 values; text embeddings have 2");
}

TEST(SalmErrors, EveryRowNeedsASlotAndEveryBatchARow) {
  EXPECT_EQ(error_of({{{1, 2}, {0, audio_id}}, {{none, 2}, {none, none}}, {0}}),
            "row 1: its only content is audio of no frames; leave the row out");
  EXPECT_EQ(error_of({{}, {}, {}}), "a batch of 0 rows; at least 1 is needed");
}

TEST(SalmErrors, SizesAndOptionsThatDoNotFit) {
  Batch batch = example();
  batch.flat_targets.pop_back();
  EXPECT_EQ(error_of(batch), "11 targets for 12 ids");
  batch = example();
  batch.text.pop_back();
  EXPECT_EQ(error_of(batch), "23 embedding values, but 12 ids x 2 are 24");
  batch = example();
  batch.flat_ids.pop_back();
  EXPECT_EQ(error_of(batch), "11 ids are not 2 rows of equal width");
  EXPECT_EQ(error_of(example(), options_of(0, 1)), "cp must be at least 1, not 0");
  EXPECT_EQ(error_of(example(), options_of(1, 0)), "tp must be at least 1, not 0");
  EXPECT_EQ(error_of(example(), {pad, pad, 1, 1, TpRounding::total}),
            "id 0 is both padding and the placeholder of audio");
}

TEST(SalmShard, ALayoutThatDoesNotFitIsAnError) {
  const SalmPacked packed = pack_salm(example().view(), options_of(2, 1));
  const Layout layout = dual_chunk_swap(packed.bounds(), 2);
  EXPECT_EQ(usage_message([&] { shard_salm(packed, layout, 2); }), "rank 2 of a layout of 2 ranks");
  EXPECT_EQ(shard_salm(packed, layout, 0).positions, (Longs{0, 1, 2, 9, 10, 11, 0, 1, 6, 7}));
}

}  // namespace GYRE_FILE
}  // namespace gyre

// Packing and sharding: types, tails chunk by chunk, a round trip, and what is refused.

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "io/schemas/packed_file.hpp"
#include "layout_cases.hpp"
#include "mpi_test.hpp"
#include "packing/cp_batch.hpp"
#include "packing/salm.hpp"
#include "sharding/bshd.hpp"
#include "sharding/distributed.hpp"
#include "sharding/encoder_work.hpp"
#include "sharding/slices.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::usage_message;
using test::world;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;
using Floats = std::vector<float>;

// Boundaries are int32, ids, labels and positions int64, masks a byte; embeddings stay floats.
template <class Batch>
constexpr bool has_the_types_of_a_stream() {
  return std::is_same_v<decltype(Batch::labels), Longs> &&
         std::is_same_v<decltype(Batch::padding_mask), std::vector<uint8_t>> &&
         std::is_same_v<decltype(Batch::inputs), std::variant<TokenIds, TokenEmbeddings>>;
}
static_assert(has_the_types_of_a_stream<ThdBatch>() && has_the_types_of_a_stream<CpBatch>());
static_assert(std::is_same_v<TokenIds, Longs>);
static_assert(std::is_same_v<decltype(PositionIds::values), Longs>);
static_assert(std::is_same_v<decltype(TokenEmbeddings::values), Floats>);
static_assert(std::is_same_v<decltype(ThdBatch::cu_seqlens), std::optional<Ints>>);
static_assert(std::is_same_v<decltype(CpBatch::index), Ints>);

TEST(Chunks, OneWithAWideTailAndOneWithAShortOne) {
  // Five documents of 112 in the first row, nine in the second, which is nearly full.
  constexpr int64_t slots = 1024, none = length_sentinel;
  BshdBatch batch;
  batch.rows = 2;
  batch.slots = slots;
  batch.inputs = TokenIds(2048, 1);
  batch.labels.assign(2048, 1);
  LengthTable real{2, 9, {112, 112, 112, 112, 112, none, none, none, none}};
  real.cells.insert(real.cells.end(), 9, 112);
  LengthTable padded = real;
  padded.cells[4] = 576;
  padded.cells[17] = 128;
  batch.seq_lens = std::move(real);
  batch.seq_lens_padded = std::move(padded);
  const std::vector<ThdBatch> chunks = split_into_chunks(batch, 2);
  const ChunkBounds bounds = stack_chunk_bounds(chunks);
  EXPECT_EQ(bounds.max_seqlen, (Ints{576, 128}));
  EXPECT_FALSE(bounds.cu_seqlens_padded);
  EXPECT_EQ(bounds.cu_seqlens.cells,
            (Ints{0, 112, 224, 336, 448, 1024, -1000, -1000, -1000, -1000,  //
                  0, 112, 224, 336, 448, 560,  672,   784,   896,   1024}));
  EXPECT_EQ(count_real_tokens(chunks[0].padding_mask), 560);
  EXPECT_EQ(count_real_tokens(chunks[1].padding_mask), 1008);
  // Converted together, only the tail of the last row could be absorbed, and the first forbids it.
  const ThdBatch whole = to_thd(batch);
  EXPECT_FALSE(whole.absorbed);
  EXPECT_EQ(whole.max_seqlen, 112);
}

TEST(RoundTrip, ThreeSegmentsOnFourRanks) {
  const Ints bounds = {0, 8, 24, 40};
  const Layout layout = dual_chunk_swap({bounds, bounds}, 4);
  Longs ids(40), ids_back(40, -1);
  Floats embeddings(120), embeddings_back(120, -1);
  std::iota(ids.begin(), ids.end(), 100);
  std::iota(embeddings.begin(), embeddings.end(), 0.5F);
  for (int rank = 0; rank < 4; ++rank) {
    Longs my_ids(10);
    Floats my_embeddings(30);
    shard_rows<int64_t>(layout, rank, ids, my_ids);
    shard_rows<float>(layout, rank, embeddings, my_embeddings, 3);
    EXPECT_EQ(my_ids.front(), 100 + rank);     // chunks of one slot,
    EXPECT_EQ(my_ids[2], 108 + 2 * rank);      // of two,
    EXPECT_EQ(my_ids.back(), 139 - 2 * rank);  // and the last one of the last segment
    unshard_rows<int64_t>(layout, rank, my_ids, ids_back);
    unshard_rows<float>(layout, rank, my_embeddings, embeddings_back, 3);
  }
  EXPECT_EQ(ids_back, ids);
  EXPECT_EQ(embeddings_back, embeddings);
}

TEST(RoundTrip, NeedsALayoutThatWasMade) {
  Longs stream(4), local(2);
  try {
    shard_rows<int64_t>(Layout(), 0, stream, local);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::runtime);
    EXPECT_NE(std::string(error.what()).find("layout : rank 0 of 0"), std::string::npos)
        << error.what();
  }
}

TEST(Refused, StreamsOfUtterancesBeyondInt32) {
  const Longs ids = {1, 2}, targets = {1, 2};
  const Floats embeddings(2);
  const auto message = [&](int64_t rows, int cp, int tp) {
    const SalmBatch batch = {rows, 1, ids, embeddings, targets, {}};
    return usage_message([&] { pack_salm(batch, {0, -1, cp, tp, TpRounding::per_rank}); });
  };
  // One token takes 2·cp slots.
  EXPECT_EQ(message(2, 1 << 30, 1),
            "row 0: the stream grows to 2147483648 slots, more than the int32 range of "
            "boundaries");
  EXPECT_EQ(message(2, 2, 1 << 30),
            "row 1: the stream grows to 2147483648 slots, more than the int32 range of "
            "boundaries");
  const SalmBatch flat = {2, 0, ids, {}, targets, {}};
  EXPECT_EQ(usage_message([&] { pack_salm(flat, {}); }),
            "embeddings of 0 values; at least 1 is needed");
}

TEST(Refused, RowsBeyondInt32) {
  const Floats embeddings(4);
  const Longs mask(4, 1);
  EXPECT_EQ(usage_message([&] { shard_bshd<float>(embeddings, mask, mask, 1, 1, 2, 0, 1 << 29); }),
            "rows of 2147483648 slots exceed the int32 range of index lists");
  EXPECT_EQ(usage_message([] { bshd_padded_width(-1, 2, 1); }),
            "rows of -1 slots; the width is at least 0");
}

TEST(Refused, SizesBelowTheLeast) {
  EXPECT_EQ(usage_message([] { distribute_items(-1, 2); }), "-1 items; there are at least 0");
  EXPECT_EQ(usage_message([] { distribute_items(3, 0); }),
            "items over 0 ranks; there is at least 1");
  const Floats samples(4);
  const Longs one = {4}, two = {2, 2};
  const AudioEncoder encode = [](std::span<const float>, int64_t) { return Floats(1); };
  const AudioBatch item = {{samples.data(), 1, 4}, one}, other = {{samples.data(), 1, 4}, two};
  EXPECT_EQ(usage_message([&] { encode_distributed(world(), item, encode, {0}); }),
            "encodings of 0 values; at least 1 is needed");
  EXPECT_EQ(usage_message([&] { encode_distributed(world(), other, encode, {1}); }),
            "2 lengths for 1 audio items");
  const Ints bounds = {0, 4};
  const Layout layout = contiguous({bounds, bounds}, {});
  EXPECT_EQ(usage_message([&] { gather_batch<float>(layout, world(), samples, -1); }),
            "a batch of -1 rows; there are at least 0");
  EXPECT_EQ(usage_message([&] {
              gather_forward_and_unpad<float>(world(), samples, {{-2, 2}, 0, 0, -1});
            }),
            "gathering an axis: an extent of -2");
  EXPECT_EQ(usage_message([&] {
              gather_forward_and_unpad<float>(world(), samples, {{2, 2}, 0, -1, 0});
            }),
            "gathering an axis: padding of -1 entries");
}

TEST(Refused, HeadersOfPackedFilesWithImpossibleSizes) {
  PackedHeader header;
  header.slot_multiple = 0;
  header.vocab_size = 0;
  header.hidden_size = -1;
  const Ints bounds = {0, 4};
  header.documents = 1;
  header.bins.add_bin(Longs{0}, bounds, bounds);
  ConfigErrors problems;
  check_packed(problems, header);
  ASSERT_EQ(problems.messages().size(), 3u);
  EXPECT_EQ(problems.messages()[0], "slot_multiple of '/packed' is 0; it must be 1 to 2147483647");
  EXPECT_EQ(problems.messages()[1], "vocab_size of '/packed' is 0; it must be 1 to 2147483647");
  EXPECT_EQ(problems.messages()[2], "hidden_size of '/packed' is -1; it must be at least 0");
}

}  // namespace GYRE_FILE
}  // namespace gyre

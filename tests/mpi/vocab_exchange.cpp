// Columns for rows and back: every element arrives once, bit by bit, wherever the matrices lie.

#include "logprobs/vocab_exchange.hpp"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <type_traits>

#include "errors.hpp"
#include "score_checks.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::differs;
using test::on_last_rank;
using test::world;

/// The bits of the logit (token, column), of any of the patterns of T.
template <class T>
T pattern(int64_t token, int64_t column) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  const uint64_t bits = splitmix64_mix(static_cast<uint64_t>(token * 1009 + column + 1));
  return std::bit_cast<T>(static_cast<Bits>(bits));
}

/// A matrix with a gap behind each row; what nobody fills has a pattern of its own.
template <class T>
struct Block {
  int64_t rows, cols, stride;
  std::vector<T> data;

  Block(int64_t rows_, int64_t cols_, int64_t gap)
      : rows(rows_), cols(cols_), stride(cols_ + gap), data(rows_ * stride, pattern<T>(-1, -1)) {}
  MatrixView<T> view() { return {data.data(), rows, cols, stride}; }
  void fill(int64_t first_row, int64_t first_column) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) view()(r, c) = pattern<T>(first_row + r, first_column + c);
  }
  bool operator==(const Block& other) const {
    return rows == other.rows && cols == other.cols && stride == other.stride &&
           (data.empty() ||
            std::memcmp(data.data(), other.data.data(), data.size() * sizeof(T)) == 0);
  }
};

template <class T>
void expect_round_trip(int64_t tokens, const VocabPartition& vocab, int64_t gap_of_columns,
                       int64_t gap_of_rows) {
  const int me = world().rank();
  const VocabExchange exchange(tokens, vocab, dtype_of<T>, world());
  Block<T> columns(tokens, vocab.columns(me), gap_of_columns), back = columns;
  Block<T> rows(exchange.rows(), vocab.padded(), gap_of_rows), expected = rows;
  columns.fill(0, vocab.begin(me));
  expected.fill(exchange.first_row(me), 0);
  HostStream stream;
  exchange.to_sequence(columns.view(), stream, rows.view());
  EXPECT_TRUE(rows == expected) << "columns to rows";
  exchange.to_vocab(rows.view(), stream, back.view());
  EXPECT_TRUE(back == columns) << "and back";
}

TEST(VocabExchange, EveryElementArrivesAndComesBack) {
  for (const int64_t tokens : {0, 1, 3, 8, 17})
    for (const VocabPartition& vocab : test::partitions(37, world().size()))
      for (const int64_t gap_of_columns : {0, 3})
        for (const int64_t gap_of_rows : {0, 5}) {
          SCOPED_TRACE(fmt::format("{} tokens, offsets {}, gaps {} {}", tokens,
                                   fmt::join(vocab.offsets, " "), gap_of_columns, gap_of_rows));
          expect_round_trip<float>(tokens, vocab, gap_of_columns, gap_of_rows);
          expect_round_trip<bf16>(tokens, vocab, gap_of_columns, gap_of_rows);
        }
}

TEST(VocabExchange, RowsAreDealtInOrderAndAsEvenlyAsCanBe) {
  const int n = world().size();
  for (const int64_t tokens : {0, 1, 5, 24, 25}) {
    const VocabExchange exchange(tokens, balanced_partition(9, n), DType::f32, world());
    EXPECT_EQ(exchange.first_row(0), 0);
    EXPECT_EQ(exchange.first_row(n), tokens);
    for (int r = 0; r < n; ++r) {
      const int64_t rows = exchange.first_row(r + 1) - exchange.first_row(r);
      EXPECT_EQ(rows, tokens / n + (r < tokens % n ? 1 : 0));
    }
    EXPECT_EQ(exchange.rows(),
              exchange.first_row(world().rank() + 1) - exchange.first_row(world().rank()));
  }
}

TEST(VocabExchange, OneMessageToEachRankThatHasARow) {
  const int n = world().size(), me = world().rank();
  for (const int64_t tokens : {1, 4, 11})
    for (const VocabPartition& vocab : test::partitions(37, n)) {
      const VocabExchange exchange(tokens, vocab, DType::bf16, world());
      const auto rows_of = [&](int r) { return exchange.first_row(r + 1) - exchange.first_row(r); };
      int64_t messages = 0, messages_back = 0;
      for (int r = 0; r < n; ++r) {
        if (r != me && rows_of(r) > 0 && vocab.columns(me) > 0) ++messages;
        if (r != me && rows_of(me) > 0 && vocab.columns(r) > 0) ++messages_back;
      }
      Block<bf16> columns(tokens, vocab.columns(me), 3), rows(exchange.rows(), vocab.padded(), 0);
      HostStream stream;
      const test::TrafficSince there(world());
      exchange.to_sequence(columns.view(), stream, rows.view());
      EXPECT_EQ(there.messages(), messages);
      EXPECT_EQ(there.bytes(), (tokens - exchange.rows()) * vocab.columns(me) * 2);
      const test::TrafficSince back(world());
      exchange.to_vocab(rows.view(), stream, columns.view());
      EXPECT_EQ(back.messages(), messages_back);
      EXPECT_EQ(back.bytes(), exchange.rows() * (vocab.padded() - vocab.columns(me)) * 2);
    }
}

TEST(VocabExchange, WrongArgumentsEndAllRanksAlike) {
  const int n = world().size();
  const auto error = [](int64_t tokens, const VocabPartition& vocab, DType type) {
    return agreed_message([&] { VocabExchange(tokens, vocab, type, world()); });
  };
  const VocabPartition vocab = even_partition(8 * n, 8 * n, n);
  const bool last = on_last_rank();
  const std::string what = "exchange of columns for rows";
  EXPECT_EQ(error(4, vocab, DType::f32), "no error");
  EXPECT_EQ(error(last ? 6 : 4, vocab, DType::f32),
            differs(what, "the number of tokens", "4", "6"));
  EXPECT_EQ(error(4, vocab, last ? DType::bf16 : DType::f32),
            differs(what, "the number of bytes of a logit", "4", "2"));
  EXPECT_EQ(error(last ? -3 : 4, vocab, DType::f32),
            "-3 tokens; the fewest are 0" + test::found_on(n - 1));
  VocabPartition other = vocab;
  other.vocab_size -= last ? 2 : 0;
  EXPECT_EQ(error(4, other, DType::f32), differs(what, "the number of ids of the vocabulary",
                                                 std::to_string(8 * n), std::to_string(8 * n - 2)));
  EXPECT_EQ(error(4, balanced_partition(9, n + 1), DType::f32),
            fmt::format("a vocabulary in {} shards for a group of {} ranks; it must be one shard a "
                        "rank",
                        n + 1, n));
}

}  // namespace GYRE_FILE
}  // namespace gyre

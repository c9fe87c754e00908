// Columns for rows and back between ranks that share a GPU: every element arrives once, bit by bit,
// wherever the matrices lie, and nothing else is written.

#include <bit>

#include "comm/cuda_device.hpp"
#include "comm/staged.hpp"
#include "device_matrix.hpp"
#include "gpu_test.hpp"
#include "logprobs/vocab_exchange.hpp"
#include "score_checks.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

class VocabExchangeGpu : public test::GpuTest {
 protected:
  void SetUp() override {
    if (usable_cuda_devices() > 0) bind_device(world(), true);
    GpuTest::SetUp();
    if (!IsSkipped()) {
      staging_ = world().split(0);
      arrays_ = make_staged_communicator(*staging_);
    }
  }
  Communicator& arrays() { return *arrays_; }

  /// Of a [rows, cols] part of the logits that begins at (first_row, first_column).
  static test::Matrix part(int64_t rows, int64_t cols, DType type, int64_t first_row,
                           int64_t first_column) {
    test::Matrix matrix(rows, cols, type);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) store(matrix.ref(), r, c, first_row + r, first_column + c);
    return matrix;
  }
  static void expect_same(const test::Matrix& got, const test::Matrix& want, const char* what) {
    for (int64_t r = 0; r < want.rows(); ++r)
      for (int64_t c = 0; c < want.cols(); ++c)
        ASSERT_EQ(bits(got.ref(), r, c), bits(want.ref(), r, c)) << what << ' ' << r << ' ' << c;
  }
  void expect_round_trip(int64_t tokens, const VocabPartition& vocab, DType type,
                         int64_t gap_of_columns, int64_t gap_of_rows);

 private:
  static uint32_t bits(ConstMatrixRef m, int64_t r, int64_t c) {
    return m.type == DType::f32 ? std::bit_cast<uint32_t>(m.as<float>()(r, c))
                                : uint32_t{m.as<bf16>()(r, c).bits};
  }
  /// Any pattern of bits, NaN included.
  static void store(MatrixRef m, int64_t r, int64_t c, int64_t token, int64_t column) {
    const uint64_t pattern = splitmix64_mix(static_cast<uint64_t>(token * 1009 + column + 1));
    if (m.type == DType::f32)
      m.as<float>()(r, c) = std::bit_cast<float>(static_cast<uint32_t>(pattern));
    else
      m.as<bf16>()(r, c).bits = static_cast<uint16_t>(pattern);
  }

  std::unique_ptr<Communicator> staging_;  // counts for itself what arrays_ has counted
  std::unique_ptr<Communicator> arrays_;
};

void VocabExchangeGpu::expect_round_trip(int64_t tokens, const VocabPartition& vocab, DType type,
                                         int64_t gap_of_columns, int64_t gap_of_rows) {
  const int me = world().rank();
  const VocabExchange exchange(tokens, vocab, type, world(), &arrays());
  const test::Matrix by_columns = part(tokens, vocab.columns(me), type, 0, vocab.begin(me));
  const test::Matrix by_rows =
      part(exchange.rows(), vocab.padded(), type, exchange.first_row(me), 0);
  const test::DeviceMatrix from(by_columns.ref(), stream(), 1, gap_of_columns);
  test::DeviceMatrix there(by_rows.rows(), by_rows.cols(), type, stream(), 0, gap_of_rows);
  test::DeviceMatrix back(tokens, by_columns.cols(), type, stream(), 2, gap_of_columns);
  exchange.to_sequence(from.ref(), stream(), there.ref());
  expect_same(there.host(), by_rows, "columns to rows");
  exchange.to_vocab(there.ref(), stream(), back.ref());
  expect_same(back.host(), by_columns, "and back");
}

TEST_F(VocabExchangeGpu, EveryElementArrivesAndComesBack) {
  for (const int64_t tokens : {0, 1, 3, 17})
    for (const VocabPartition& vocab : test::partitions(37, world().size()))
      for (const int64_t gap_of_columns : {0, 3})
        for (const int64_t gap_of_rows : {0, 5}) {
          SCOPED_TRACE(testing::Message()
                       << tokens << " tokens, " << vocab.columns(world().rank())
                       << " columns, gaps " << gap_of_columns << ' ' << gap_of_rows);
          expect_round_trip(tokens, vocab, DType::f32, gap_of_columns, gap_of_rows);
          expect_round_trip(tokens, vocab, DType::bf16, gap_of_columns, gap_of_rows);
        }
}

TEST_F(VocabExchangeGpu, ComesBehindWhatWritesItsInputAndBeforeWhatReadsItsOutput) {
  // All of it is submitted before anything is waited for.
  const int64_t tokens = 9;
  const int me = world().rank();
  const VocabPartition vocab = balanced_partition(41, world().size());
  const VocabExchange exchange(tokens, vocab, DType::f32, world(), &arrays());
  const int64_t columns = vocab.columns(me), count = exchange.rows() * vocab.padded();
  const test::Matrix want =
      part(exchange.rows(), vocab.padded(), DType::f32, exchange.first_row(me), 0);
  const test::DeviceMatrix source(part(tokens, columns, DType::f32, 0, vocab.begin(me)).ref(),
                                  stream(), 0, 0);
  Buffer<float> from(tokens * columns, MemorySpace::device), to(count, MemorySpace::device),
      last(count, MemorySpace::device);
  stream().fill(from.data(), std::byte{0xff}, from.span().size_bytes());
  stream().copy(from.data(), source.ref().data, from.span().size_bytes());
  exchange.to_sequence(from.matrix(tokens, columns), stream(),
                       to.matrix(exchange.rows(), vocab.padded()));
  stream().copy(last.data(), to.data(), last.span().size_bytes());
  stream().fill(to.data(), std::byte{0xff}, to.span().size_bytes());
  const std::vector<float> got = to_host(last);
  for (int64_t r = 0; r < want.rows(); ++r)
    for (int64_t c = 0; c < want.cols(); ++c)
      ASSERT_EQ(std::bit_cast<uint32_t>(got[r * want.cols() + c]),
                std::bit_cast<uint32_t>(want.ref().as<float>()(r, c)))
          << r << ' ' << c;
}

TEST_F(VocabExchangeGpu, SendsWhatTheHostsSends) {
  const int n = world().size(), me = world().rank();
  for (const VocabPartition& vocab : test::partitions(37, n)) {
    const VocabExchange exchange(11, vocab, DType::bf16, world(), &arrays());
    test::DeviceMatrix columns(11, vocab.columns(me), DType::bf16, stream()),
        rows(exchange.rows(), vocab.padded(), DType::bf16, stream());
    int64_t messages = 0;
    for (int r = 0; r < n; ++r)
      if (r != me && exchange.first_row(r + 1) > exchange.first_row(r) && vocab.columns(me) > 0)
        ++messages;
    const test::TrafficSince nothing(world()), there(arrays());
    exchange.to_sequence(columns.ref(), stream(), rows.ref());
    EXPECT_EQ(there.messages(), messages);
    EXPECT_EQ(there.bytes(), (11 - exchange.rows()) * vocab.columns(me) * 2);
    EXPECT_EQ(nothing.messages(), 0);
    stream().synchronize();
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

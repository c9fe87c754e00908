#include "logprobs/vocab_exchange.hpp"

#include <vector>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/buffer.hpp"
#include "runtime/row_copy.hpp"

namespace gyre {
namespace {

/// Block of a matrix that is sent to a rank or received from it.
template <class Byte>
struct Block {
  BasicMatrixRef<Byte> matrix;
  int64_t row, rows, column, columns;

  size_t line_bytes() const { return columns * size_of(matrix.type); }
  Byte* line(int64_t r) const {
    return matrix.data + ((row + r) * matrix.stride + column) * size_of(matrix.type);
  }
  bool empty() const { return rows == 0 || columns == 0; }

  /// Adds the block to a message: one slice per line, or a single one if contiguous in memory.
  template <class Slice>
  void add_to(int peer, std::vector<Slice>& slices) const {
    if (empty()) return;
    const int64_t run = columns == matrix.stride ? rows : 1;
    for (int64_t r = 0; r < rows; r += run)
      add_slices(peer, std::span(line(r), run * line_bytes()), slices);
  }
};

using From = Block<const std::byte>;
using To = Block<std::byte>;

/// Returns the elements of a block as a matrix.
template <class Byte>
BasicMatrixRef<Byte> matrix_of(const Block<Byte>& block) {
  return {block.line(0), block.matrix.type, block.rows, block.columns, block.matrix.stride};
}

void copy(const From& from, const To& to, Stream& stream) {
  if (!from.empty()) copy_matrix(matrix_of(from), matrix_of(to), stream);
}

/// Contiguous copies of blocks with gaps between rows, sent or received instead of them. Unused on
/// the host.
template <class Byte>
class Packed {
 public:
  explicit Packed(const Stream& stream) : packs_(stream.space() == MemorySpace::device) {}

  /// Returns the block to pass to the communicator.
  Block<Byte> stand_in(const Block<Byte>& block) {
    if (!packs_ || block.empty() || block.rows == 1 || block.columns == block.matrix.stride)
      return block;
    Buffer<std::byte>& memory =
        memory_.emplace_back(block.rows * block.line_bytes(), MemorySpace::device);
    blocks_.push_back(block);
    return packed(block, memory);
  }
  /// Fills the copies from their blocks.
  void pack(Stream& stream) {
    for (size_t i = 0; i < blocks_.size(); ++i)
      copy(blocks_[i], packed<std::byte>(blocks_[i], memory_[i]), stream);
  }
  /// Copies the received data to their blocks.
  void unpack(Stream& stream) {
    for (size_t i = 0; i < blocks_.size(); ++i)
      copy(packed<const std::byte>(blocks_[i], memory_[i]), blocks_[i], stream);
  }

 private:
  template <class As = Byte>
  static Block<As> packed(const Block<Byte>& like, Buffer<std::byte>& memory) {
    return {{memory.data(), like.matrix.type, like.rows, like.columns, like.columns},
            0,
            like.rows,
            0,
            like.columns};
  }

  bool packs_;
  std::vector<Block<Byte>> blocks_;
  std::vector<Buffer<std::byte>> memory_;
};

/// Sends from(peer) to every rank and receives to(peer) from every rank.
template <class FromOf, class ToOf>
void exchange_blocks(Communicator& tp, Stream& stream, std::string_view what, FromOf from,
                     ToOf to) {
  GYRE_CHECK(tp.space() == stream.space(), "a stream of {} memory, a communicator of {}",
             name_of(stream.space()), name_of(tp.space()));
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  Packed<const std::byte> leaving(stream);
  Packed<std::byte> arriving(stream);
  for (int peer = 0; peer < tp.size(); ++peer) {
    if (peer == tp.rank()) continue;
    leaving.stand_in(from(peer)).add_to(peer, sends);
    arriving.stand_in(to(peer)).add_to(peer, recvs);
  }
  leaving.pack(stream);
  WorkPtr work = tp.size() == 1 ? completed_work() : tp.exchange(sends, recvs, stream, what);
  copy(from(tp.rank()), to(tp.rank()), stream);
  work->wait_on_stream();
  arriving.unpack(stream);
  work->wait();
}

}  // namespace

VocabExchange::VocabExchange(int64_t tokens, const VocabPartition& vocab, DType type,
                             Communicator& tp, Communicator* arrays)
    : tokens_(tokens), vocab_(vocab), type_(type), tp_(arrays == nullptr ? tp : *arrays) {
  GYRE_CHECK(tp_.rank() == tp.rank() && tp_.size() == tp.size(),
             "rank {} of {} in the group of arrays, {} of {} in the other", tp_.rank(), tp_.size(),
             tp.rank(), tp.size());
  constexpr std::string_view what = "exchange of columns for rows";
  const auto check = [&] {
    check_tokens(tokens);
    check_partition(vocab, tp.size());
  };
  agree_on_arguments(
      tp, what, check,
      {{"the number of tokens", tokens}, {"the number of bytes of a logit", size_of(type)}});
  agree_on_partition(tp, what, vocab);
}

int64_t VocabExchange::first_row(int rank) const {
  return first_dealt(tokens_, tp_.size(), rank);
}

int64_t VocabExchange::rows_of(int rank) const {
  return first_row(rank + 1) - first_row(rank);
}

int64_t VocabExchange::rows() const {
  return rows_of(tp_.rank());
}

void VocabExchange::check(ConstMatrixRef by_columns, ConstMatrixRef by_rows) const {
  const int64_t columns = vocab_.columns(tp_.rank());
  GYRE_CHECK(by_columns.rows == tokens_ && by_columns.cols == columns,
             "{} x {} logits by columns, not {} x {}", by_columns.rows, by_columns.cols, tokens_,
             columns);
  GYRE_CHECK(by_rows.rows == rows() && by_rows.cols == vocab_.padded(),
             "{} x {} logits by rows, not {} x {}", by_rows.rows, by_rows.cols, rows(),
             vocab_.padded());
  GYRE_CHECK(by_columns.type == type_ && by_rows.type == type_, "logits of {} and {}, not {}",
             name_of(by_columns.type), name_of(by_rows.type), name_of(type_));
}

void VocabExchange::to_sequence(ConstMatrixRef by_columns, Stream& stream,
                                MatrixRef by_rows) const {
  check(by_columns, by_rows);
  exchange_blocks(
      tp_, stream, "columns for rows",
      [&](int peer) {
        return From{by_columns, first_row(peer), rows_of(peer), 0, by_columns.cols};
      },
      [&](int peer) {
        return To{by_rows, 0, by_rows.rows, vocab_.begin(peer), vocab_.columns(peer)};
      });
}

void VocabExchange::to_vocab(ConstMatrixRef by_rows, Stream& stream, MatrixRef by_columns) const {
  check(by_columns, by_rows);
  exchange_blocks(
      tp_, stream, "rows for columns",
      [&](int peer) {
        return From{by_rows, 0, by_rows.rows, vocab_.begin(peer), vocab_.columns(peer)};
      },
      [&](int peer) {
        return To{by_columns, first_row(peer), rows_of(peer), 0, by_columns.cols};
      });
}

}  // namespace gyre

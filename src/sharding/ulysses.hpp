#pragma once
// Sequence parallelism that exchanges heads for tokens (DeepSpeed-Ulysses; helpers after LightRFT's
// parallel utilities).
//
//     before attention   a rank holds all heads of its tokens       [b, h, n/W, d]
//                        all-to-all: scatter heads, gather tokens   [b, h/W, n, d]
//     attention          over the whole sequence, heads h/W a rank
//     after attention    all-to-all: scatter tokens, gather heads   [b, h, n/W, d]
//     backward           each exchange is reversed: its two axes are swapped
//
// W is the size of the communicator that every collective here takes. There is no process-wide
// group, which could be forgotten and silently mean all ranks. W = 2, two heads A B of four tokens:
//
//     rank 0   A0 A1 / B0 B1    ->   A0 A1 A2 A3    ->   A0 A1 / B0 B1
//     rank 1   A2 A3 / B2 B3    ->   B0 B1 B2 B3    ->   A2 A3 / B2 B3
//
// With fewer key/value heads than ranks, each is sent to the W / h_kv ranks whose query heads it
// serves; backward sums their gradients. An exchange joins tokens in rank order. Where shards are
// not contiguous (dual-chunk-swap), call to_sequence_order after it, and to_rank_order before the
// return exchange.

#include <numeric>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "sharding/layout.hpp"

namespace gyre {

namespace detail {
std::vector<int64_t> bytes_of_all(Communicator& comm, size_t mine);
void check_split(Communicator& comm, size_t items);
}  // namespace detail

/// All-gathers the items of all ranks in rank order. Counts may differ (then split_list is not the
/// inverse). T is any trivially copyable type. Collective.
template <class T>
std::vector<T> gather_lists(Communicator& comm, std::span<const T> mine) {
  const std::vector<int64_t> bytes = detail::bytes_of_all(comm, mine.size_bytes());
  const size_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  std::vector<T> all(total / sizeof(T));
  HostStream stream;
  comm.all_gather_v(bytes_of(mine), writable_bytes_of(std::span<T>(all)), bytes, stream,
                    "gathering a list")
      ->wait();
  return all;
}

/// Returns this rank's block of W equal consecutive blocks. All ranks throw the same usage error
/// when W does not divide the length. Collective.
template <class T>
std::vector<T> split_list(Communicator& comm, std::span<const T> all) {
  detail::check_split(comm, all.size());
  const size_t count = all.size() / comm.size();
  const auto mine = all.subspan(comm.rank() * count, count);
  return {mine.begin(), mine.end()};
}

/// One rank's part of padded input rows.
struct SlicedInput {
  std::vector<int64_t> ids;                ///< [batch, n'/ranks]; padding holds id 0
  std::vector<int64_t> positions;          ///< [axes, n'] of the whole row; padding restarts at 0
  std::vector<int32_t> cu_seqlens;         ///< [segments + 1] real tokens; padding has none
  std::vector<int32_t> cu_seqlens_padded;  ///< [segments + 1] slots
  int64_t pad = 0;                         ///< n' - n
  SegmentBounds bounds() const { return {cu_seqlens, cu_seqlens_padded}; }
};

/// Pads ids [batch, n] on the right to n', the next multiple of `ranks`, and takes block `rank` of
/// each row. Positions [axes, n] (or empty: none) are padded with 0, 1, ... and not sliced, because
/// rotary embedding runs after the exchange, on whole sequences. `bounds` [documents + 1] are those
/// of the documents in the row, from 0 to n; the result adds the padding as a segment without real
/// tokens. Boundaries must not be inferred from zeros of the positions: padding would become a
/// document. No communication. Throws a usage error when a size or a boundary does not match.
///     n = 10, 4 ranks, one document: pad 2; ids 0 1 2 | 3 4 5 | 6 7 8 | 9 . .
///     positions 0 .. 9 0 1 on every rank; segments end at slots 10 and 12, real tokens at 10
SlicedInput slice_and_pad(std::span<const int64_t> ids, int64_t batch,
                          std::span<const int64_t> positions, int64_t axes,
                          std::span<const int32_t> bounds, int ranks, int rank);

/// Gathers all ranks' parts of a tensor along one axis, then removes the padding.
struct AxisGather {
  std::vector<int64_t> shape;  ///< of the local tensor, the same on all ranks
  int dim = 0;                 ///< axis along which the ranks' tensors are joined
  int64_t pad = 0;             ///< entries to drop at the end of axis unpad_dim of the result
  int unpad_dim = -1;          ///< needed when pad > 0
};

/// The tensors of all ranks joined along gather.dim, without the last gather.pad entries of
/// gather.unpad_dim. T is float or double. Collective; all ranks throw the same usage error when an
/// axis does not exist, gather.pad has no axis or exceeds it, or x has another size.
template <class T>
std::vector<T> gather_forward_and_unpad(Communicator& comm, std::span<const T> x,
                                        const AxisGather& gather);

/// Backward of gather_forward_and_unpad: pads the gradient with zeros and takes the local block of
/// gather.dim. No reduction over ranks and no scaling (GatherGradient::split): right when all ranks
/// compute the same whole loss. Moves no data. Collective; throws as the forward function does.
template <class T>
std::vector<T> split_backward_and_unpad(Communicator& comm, std::span<const T> grad,
                                        const AxisGather& gather);

/// Exchanges a tensor so that one axis is divided over the ranks and another one is joined.
struct AxisExchange {
  std::vector<int64_t> shape;    ///< of the local tensor before the exchange, the same on all ranks
  int scatter = 0;               ///< axis that is cut into W / scatter_replicas parts
  int gather = 0;                ///< another axis, along which W / gather_replicas parts are joined
  int64_t scatter_replicas = 1;  ///< each part goes to this many consecutive ranks
  int64_t gather_replicas = 1;   ///< terms of a part from this many consecutive ranks are summed
};

std::vector<int64_t> exchanged_shape(const AxisExchange& exchange, int ranks);

/// The inverse exchange, for gradients: axes and replicas swapped, on exchanged_shape.
AxisExchange backward_of(const AxisExchange& exchange, int ranks);

/// An exchange in progress. finish() must be called before destruction.
template <class T>
class PendingExchange {
 public:
  PendingExchange(Communicator& comm, std::span<const T> x, AxisExchange exchange);
  /// Waits, then returns the local tensor after the exchange.
  std::vector<T> finish();

 private:
  AxisExchange exchange_;
  int ranks_;
  std::vector<T> send_, recv_;
  WorkPtr work_;
};

/// Starts an exchange of x [exchange.shape] (T is float or double). Several may be in progress:
/// post all, then finish in the same order, so that the next transfer overlaps with unpacking. An
/// exchange that W does not divide is a programming error: shapes come from plan_ulysses.
template <class T>
PendingExchange<T> post_exchange(Communicator& comm, std::span<const T> x,
                                 const AxisExchange& exchange) {
  return PendingExchange<T>(comm, x, exchange);
}

/// Dimensions of the local Q, K and V of one rank, with all heads.
struct UlyssesShape {
  int64_t batch = 1;
  int64_t heads = 1;     ///< query heads
  int64_t kv_heads = 1;  ///< key/value heads; a divisor of `heads`
  int64_t tokens = 0;    ///< per rank, padding included
  int64_t dim = 1;       ///< head dimension
};

/// The exchanges around attention.
struct UlyssesPlan {
  AxisExchange query;               ///< [b, h, n/W, d] -> [b, h/W, n, d]
  AxisExchange key_value;           ///< [b, h_kv, n/W, d] -> [b, max(1, h_kv/W), n, d]
  AxisExchange output;              ///< [b, h/W, n, d] -> [b, h, n/W, d]
  AxisExchange output_token_major;  ///< [b, n, h/W, d] -> [b, n/W, h, d]
};

/// Checks that heads divide over the group and makes the exchanges. Collective; all ranks throw the
/// same usage error, with the nearest valid values, unless W divides `heads`, kv_heads divides
/// `heads`, and W divides kv_heads or kv_heads divides W; and when the shape differs between ranks.
UlyssesPlan plan_ulysses(Communicator& comm, const UlyssesShape& shape);

/// Permutes x [planes, padded_slots, row] from rank order (rank 0's shard, rank 1's, ...) to stream
/// order. Planes are the product of the axes before the token axis: batch · heads. T is float or
/// double. No communication; throws a usage error when x has another size.
template <class T>
std::vector<T> to_sequence_order(const Layout& layout, std::span<const T> x, int64_t planes,
                                 int64_t row);
/// Inverse of to_sequence_order.
template <class T>
std::vector<T> to_rank_order(const Layout& layout, std::span<const T> x, int64_t planes,
                             int64_t row);

}  // namespace gyre

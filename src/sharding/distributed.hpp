#pragma once
// Streams and their shards across the ranks of a context-parallel group.
//
//     gather_stream            all-gather the shards; put each block on its rank's slots; trim
//     gather_stream_backward   gradient of gather_stream, by one of three conventions
//     shift_left_sharded       every slot gets the value of the next slot of its segment
//     relayout                 every row moves to its rank and place under another layout
//
// Serial pseudo-code of the shift:
//
//     for each segment [begin, end) of the stream
//       for t in [begin, end - 1)   out[t] = in[t + 1]
//       out[end - 1] = fill
//
// Shift before sharding (shift_left, then shard_rows) wherever the whole stream is available: a
// roll of a shard is wrong at the end of every run of slots. Only values that are computed sharded
// need shift_left_sharded, which fetches the successors of those ends. One segment of 8 slots,
// value = position, cp = 2, dual-chunk-swap:
//
//     rank 0 holds 0 1 | 6 7   gets 1 2 | 7 fill   2 comes from rank 1, 7 ends the segment
//     rank 1 holds 2 3 | 4 5   gets 3 4 | 5 6      4 is local, 6 comes from rank 0
//     a roll of each shard would give  1 6 7 fill  and  3 4 5 fill
//
// In general, under dual-chunk-swap, the end of rank r's head chunk needs the first slot of chunk r
// + 1: from rank r + 1, or from its own tail chunk when r = cp - 1. The end of its tail chunk needs
// the first slot of the next chunk, from rank r - 1; on rank 0 it ends the segment. The code here
// has no case for this: it reads the owner of a successor from the layout.
//
// relayout with 8 slots, cp = 2, from dual-chunk-swap to contiguous: rows that change their rank
// are sent, once; a gather of the whole stream would bring every row to every rank.
//
//     rank 0 holds 0 1 | 6 7   sends 6 7 to rank 1, keeps 0 1, gets 2 3      ->  0 1 2 3
//     rank 1 holds 2 3 | 4 5   sends 2 3 to rank 0, keeps 4 5, gets 6 7      ->  4 5 6 7
//
// With a halo of 2, rank 1 also gets 2 3, the rows before its part of the document, behind its own:
// 4 5 6 7 | 2 3. It keeps copies of 2 and 3, which it sends to rank 0.

#include <span>
#include <vector>

#include "comm/agree.hpp"
#include "comm/communicator.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// Convention for the gradient of a gathered stream. All three are in use, and the wrong one
/// silently scales by cp or returns zeros; therefore there is no default.
enum class GatherGradient {
  split,  ///< local slots of the local gradient: right when every rank computes the same whole loss
  sum,    ///< sum over ranks, then local slots: right when the ranks' losses are parts of one sum
  none,   ///< zero: the gathered stream counts as a constant
};

namespace detail {
void check_gather(const Layout& layout, Communicator& comm, int64_t elements, int64_t batch,
                  int64_t row);
void gather_bytes(const Layout& layout, Communicator& comm, std::span<const std::byte> local,
                  int64_t batch, std::span<std::byte> stream, int64_t row_bytes);
}  // namespace detail

/// Gathers local [batch, slots, row] of each rank into [batch, stream_slots, row] on every rank.
/// One layout cuts all rows of the batch; padding that the layout appended is trimmed. T is any
/// trivially copyable type. Collective over the context-parallel group; all ranks throw the same
/// usage error when the layout has another number of ranks, when `local` has another size, or when
/// batch, row or slots differ between ranks.
template <class T>
std::vector<T> gather_batch(const Layout& layout, Communicator& comm, std::span<const T> local,
                            int64_t batch, int64_t row = 1) {
  detail::check_gather(layout, comm, local.size(), batch, row);
  std::vector<T> stream(batch * layout.stream_slots * row);
  detail::gather_bytes(layout, comm, std::as_bytes(local), batch,
                       std::as_writable_bytes(std::span<T>(stream)), row * sizeof(T));
  return stream;
}

/// gather_batch of one row: local [slots, row] of each rank to [stream_slots, row] on every rank.
template <class T>
std::vector<T> gather_stream(const Layout& layout, Communicator& comm, std::span<const T> local,
                             int64_t row = 1) {
  return gather_batch(layout, comm, local, 1, row);
}

/// Gradient of gather_stream: grad [slots, row] of the local shard from the gradient [stream_slots,
/// row] of this rank's gathered stream. Padding of the layout gets 0. `sum` is a reduce-scatter;
/// the other conventions move no data. T is float or double. Collective; throws as gather_batch
/// does, and when the convention differs between ranks.
template <class T>
std::vector<T> gather_stream_backward(const Layout& layout, Communicator& comm,
                                      std::span<const T> grad_stream, int64_t row,
                                      GatherGradient convention);

/// One rank's part of a shift or of a change of layout. Slots are local; sender and receiver list
/// them in stream order.
struct SlotMoves {
  struct Move {  ///< out[to + i] = in[from + i]
    int32_t from, to, length;
  };
  struct Message {
    int peer;
    std::vector<int32_t> slots;  ///< sent: in[slot]; received: out[slot]
  };
  std::vector<Move> moves;
  std::vector<int32_t> filled;  ///< slots of the result that get the fill value: padding of the
                                ///< layout; of a shift also the last slots of segments
  std::vector<Message> sends;   ///< ascending by peer, at most one per peer
  std::vector<Message> recvs;   ///< likewise
  int64_t held = 0;             ///< slots of the rank before
  int64_t slots = 0;            ///< slots of the rank afterwards
};

/// The plan of `rank`. `bounds` are slot ranges of segments (padded boundaries), [segments + 1]; a
/// shift by real boundaries would pull the first token of a segment into the padding before it.
/// Throws a usage error unless they run from 0 to layout.stream_slots without decreasing. Time and
/// memory O(stream_slots).
SlotMoves plan_shift_left(const Layout& layout, std::span<const int32_t> bounds, int rank);

/// Shifts local [slots] left by one slot inside each segment, across all ranks; returns [slots].
/// One grouped exchange, at most one message per peer. T is int32_t or int64_t. Collective; all
/// ranks throw the same usage error when the layout has another number of ranks, or when the
/// boundaries or the length of `local` do not match it.
template <class T>
std::vector<T> shift_left_sharded(const Layout& layout, std::span<const int32_t> bounds,
                                  Communicator& comm, std::span<const T> local, T fill);

/// Shifts by a given plan; local.size() == plan.held.
template <class T>
std::vector<T> shift_left_sharded(const SlotMoves& plan, Communicator& comm,
                                  std::span<const T> local, T fill);

/// The halo of each fragment of `rank`: the up to `rows` tokens of its document before it, as slots
/// of the stream, in order. Precondition: strides are 1.
std::vector<std::vector<int32_t>> halos_of(const Layout& layout, int rank, int64_t rows);

/// The plan of `rank`: rows of its shard of `from` become those of its shard of `to`. Behind them
/// come the halos of its fragments of `to`, of up to `halo` rows. Throws a usage error unless both
/// layouts are of the same stream slots and ranks. Time and memory O(stream_slots).
SlotMoves plan_relayout(const Layout& from, const Layout& to, int rank, int64_t halo = 0);

/// Turns the ranks' shards [slots, row] of `from` into those of `to`; padding of `to` gets `fill`.
/// One grouped exchange, at most one message per peer; a row is sent only if its rank changes. The
/// gradient is the relayout back, with fill 0: rows are permuted, so nothing is summed. T is
/// int32_t, int64_t, float or double. Collective; all ranks throw the same usage error when the
/// layouts differ in slots or have another number of ranks than the group, or when the size of
/// `local` does not match.
template <class T>
std::vector<T> relayout(const Layout& from, const Layout& to, Communicator& comm,
                        std::span<const T> local, int64_t row, T fill);

/// Moves rows by a given plan; local.size() == plan.held * row.
template <class T>
std::vector<T> relayout(const SlotMoves& plan, Communicator& comm, std::span<const T> local,
                        int64_t row, T fill);

/// Moves rows of `row_bytes` bytes by a given plan: local [plan.held] to out [plan.slots]; padding
/// gets 0.
void relayout_rows(const SlotMoves& plan, Communicator& comm, std::span<const std::byte> local,
                   std::span<std::byte> out, int64_t row_bytes);

/// Shifts a whole stream [bounds.back()], before sharding.
template <class T>
std::vector<T> shift_left(std::span<const int32_t> bounds, std::span<const T> stream, T fill) {
  std::vector<T> out(stream.size(), fill);
  for (size_t i = 0; i + 1 < bounds.size(); ++i)
    for (int32_t t = bounds[i]; t + 1 < bounds[i + 1]; ++t) out[t] = stream[t + 1];
  return out;
}

}  // namespace gyre

#pragma once
// Streams and their shards over the ranks of a context-parallel group.
//
//     gather_stream            all-gather the shards; put each rank's block on its slots; trim
//     gather_stream_backward   the way back of a gradient, by one of three conventions
//     shift_left_sharded       every slot gets the value of the next slot of its segment
//
// The shift, serially:
//
//     for each segment [begin, end) of the stream
//       for t in [begin, end - 1)   out[t] = in[t + 1]
//       out[end - 1] = fill
//
// Shift before sharding (shift_left, then shard_rows) wherever the whole stream is at hand: a roll
// of a shard is wrong at the end of every run of slots. Only values that are born sharded need
// shift_left_sharded, which fetches the successors of those ends. One segment of 8 slots, value =
// position, cp = 2, dual-chunk-swap:
//
//     rank 0 holds 0 1 | 6 7   gets 1 2 | 7 fill   2 comes from rank 1, 7 ends the segment
//     rank 1 holds 2 3 | 4 5   gets 3 4 | 5 6      4 is its own, 6 comes from rank 0
//     a roll of the shard      1 6 7 fill and 3 4 5 fill
//
// In general, under dual-chunk-swap rank r needs the first slot of chunk r + 1 for the end of its
// head chunk: from rank r + 1, or from its own tail chunk when r = cp - 1. The end of its tail
// chunk needs the first slot of the next chunk, from rank r - 1; on rank 0 it is the segment's end.
// No routine here contains that case: who owns a successor is read from the layout.

#include <span>
#include <vector>

#include "comm/agree.hpp"
#include "comm/communicator.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// How the gradient of a gathered stream comes back to the shards. All three are in use, and the
/// wrong one is a silent factor of cp or a silent zero, so that there is no default.
enum class GatherGradient {
  split,  ///< own slots of this rank's gradient: right when every rank computes the same whole loss
  sum,    ///< sum over ranks, then own slots: right when the ranks' losses are parts of one sum
  none,   ///< zero: the gather is a constant
};

namespace detail {
void check_gather(const Layout& layout, Communicator& comm, size_t elements, int64_t batch,
                  int64_t row);
void gather_bytes(const Layout& layout, Communicator& comm, std::span<const std::byte> local,
                  int64_t batch, std::span<std::byte> stream, int64_t row_bytes);
}  // namespace detail

/// [batch, stream_slots, row] on every rank <- local [batch, slots, row] of each: all rows of a
/// batch are cut by the same layout, and padding that the layout appended is trimmed. T is any
/// trivially copyable type. Collective over the context-parallel group; all ranks throw the same
/// usage error when the layout is of another number of ranks, when `local` is of another size, or
/// when batch, row or slots differ between ranks.
template <class T>
std::vector<T> gather_batch(const Layout& layout, Communicator& comm, std::span<const T> local,
                            int64_t batch, int64_t row = 1) {
  detail::check_gather(layout, comm, local.size(), batch, row);
  std::vector<T> stream(static_cast<size_t>(batch * layout.stream_slots * row));
  detail::gather_bytes(layout, comm, std::as_bytes(local), batch,
                       std::as_writable_bytes(std::span<T>(stream)),
                       row * static_cast<int64_t>(sizeof(T)));
  return stream;
}

/// stream [stream_slots, row] on every rank <- local [slots, row] of each. As gather_batch.
template <class T>
std::vector<T> gather_stream(const Layout& layout, Communicator& comm, std::span<const T> local,
                             int64_t row = 1) {
  return gather_batch(layout, comm, local, 1, row);
}

/// The gradient of gather_stream: grad [slots, row] of this rank's shard from the gradient
/// [stream_slots, row] of what this rank gathered. Padding of the layout gets 0. `sum` is a
/// reduce-scatter; the other two move no data. T is float or double. Collective; same errors, and
/// one when the convention differs between ranks.
template <class T>
std::vector<T> gather_stream_backward(const Layout& layout, Communicator& comm,
                                      std::span<const T> grad_stream, int64_t row,
                                      GatherGradient convention);

/// What one rank does in a shift. Slots are local; both ends of a message list them in the order of
/// the stream.
struct ShiftPlan {
  struct Move {  ///< out[to + i] = in[from + i]
    int32_t from, to, length;
  };
  struct Message {
    int peer;
    std::vector<int32_t> slots;  ///< sent: in[slot]; received: out[slot]
  };
  std::vector<Move> moves;
  std::vector<int32_t> ends;   ///< last slots of segments, and padding of the layout: out[slot] =
                               ///< fill
  std::vector<Message> sends;  ///< ascending in peer, at most one a peer
  std::vector<Message> recvs;  ///< likewise
  int64_t slots = 0;
};

/// The plan of `rank`. `bounds` are the segments' slot ranges (padded boundaries) [segments + 1]: a
/// shift by real boundaries would pull the first token of a segment into the padding before it.
/// Throws a usage error unless they run from 0 to layout.stream_slots without decreasing. Time and
/// memory O(stream_slots).
ShiftPlan plan_shift_left(const Layout& layout, std::span<const int32_t> bounds, int rank);

/// out [slots] <- local [slots], shifted left by one slot inside each segment over all ranks. One
/// grouped exchange, at most one message to each other rank. T is int32_t or int64_t. Collective;
/// all ranks throw the same usage error when the layout is of another number of ranks, or when the
/// boundaries or the length of `local` do not fit it.
template <class T>
std::vector<T> shift_left_sharded(const Layout& layout, std::span<const int32_t> bounds,
                                  Communicator& comm, std::span<const T> local, T fill);

/// The same by a plan that was made before; local.size() == plan.slots.
template <class T>
std::vector<T> shift_left_sharded(const ShiftPlan& plan, Communicator& comm,
                                  std::span<const T> local, T fill);

/// The shift of a whole stream [bounds.back()], before sharding.
template <class T>
std::vector<T> shift_left(std::span<const int32_t> bounds, std::span<const T> stream, T fill) {
  std::vector<T> out(stream.size(), fill);
  for (size_t i = 0; i + 1 < bounds.size(); ++i)
    for (int32_t t = bounds[i]; t + 1 < bounds[i + 1]; ++t)
      out[static_cast<size_t>(t)] = stream[static_cast<size_t>(t) + 1];
  return out;
}

}  // namespace gyre

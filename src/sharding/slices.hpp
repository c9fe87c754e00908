#pragma once
// Slices of sequences over the ranks of a group, and their gathers (after LightRFT's parallel
// utilities). Heads are exchanged for tokens by the steps of a plan:
// attention/schedules/builder/head_exchange.hpp.
//
// Every collective here takes its communicator. There is no process-wide group, which could be
// forgotten and silently mean all ranks.

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

}  // namespace gyre

#pragma once
// Gathers the records of all ranks and merges them in their memory space, host or device.

#include <span>
#include <string_view>

#include "comm/communicator.hpp"

namespace gyre {

/// Calls merge(records) with `own`, or with several ranks with `all`, [ranks, own] in rank order,
/// after one all-gather by `arrays`, in the memory space of both; merge() waits for the work that
/// it submits. Returns the seconds that `stream`, which makes and merges the records, waited for
/// other ranks. Collective.
template <class T, class Merge>
double merge_gathered(int ranks, std::span<const T> own, std::span<T> all, Communicator& arrays,
                      Stream& stream, std::string_view what, Merge merge) {
  if (ranks == 1) {
    merge(own);
    return 0;
  }
  const MarkPtr before = stream.mark();
  const WorkPtr gathering = arrays.all_gather(bytes_of(own), writable_bytes_of(all), stream, what);
  gathering->wait_on_stream();
  const MarkPtr arrived = stream.mark();
  merge(std::span<const T>(all));
  gathering->wait();
  return arrived->seconds() - before->seconds();
}

}  // namespace gyre

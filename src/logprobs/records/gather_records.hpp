#pragma once
// Gathers the records of all ranks and merges them in their memory space, host or device.

#include <span>
#include <string_view>

#include "comm/communicator.hpp"

namespace gyre {

/// On one rank, calls merge(own). On several, gathers `own` of all ranks in rank order to `all`, by
/// an all-gather of `arrays` in their memory space, and calls merge(all). merge() must wait for the
/// work that it submits. Returns the seconds that `stream`, which makes and merges the records,
/// waited for other ranks. Collective.
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

#pragma once
// Records of all ranks, gathered where they lie, on the host or on a device, and merged there.

#include <span>
#include <string_view>

#include "comm/communicator.hpp"

namespace gyre {

/// merge(records): own's, or on several ranks `all`, [ranks, own], in rank order, behind one
/// all-gather by `arrays`, which is of the memory of both; merge() waits for what it submits.
/// Returns the seconds that `stream`, on which the records are made and merged, waited for other
/// ranks. Collective.
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

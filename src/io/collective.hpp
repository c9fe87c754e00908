#pragma once
// Small collectives for file access: broadcasting and gathering lists.

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

/// The texts of rank 0 on every rank. Collective.
std::vector<std::string> broadcast_texts(Communicator& comm, const std::vector<std::string>& texts);

/// The texts of all ranks in rank order. Collective.
std::vector<std::string> all_gather_texts(Communicator& comm,
                                          const std::vector<std::string>& texts);

/// The largest single transfer of file data, between ranks or with a file: longer ones are cut into
/// rounds, because MPI counts bytes in an int.
int64_t transfer_limit_bytes();
/// Sets the limit, the same on all ranks, and returns the old one. Tests force several rounds by
/// it.
int64_t set_transfer_limit_bytes(int64_t bytes);

/// The bytes of all ranks in rank order, in rounds of at most the transfer limit. Collective.
std::vector<std::byte> all_gather_bytes(Communicator& comm, std::span<const std::byte> mine);

/// The elements of all ranks in rank order. Collective.
template <class T>
std::vector<T> all_gather_elements(Communicator& comm, std::span<const T> mine) {
  const std::vector<std::byte> bytes = all_gather_bytes(comm, std::as_bytes(mine));
  const T* begin = reinterpret_cast<const T*>(bytes.data());
  const size_t count = bytes.size() / sizeof(T);
  return std::vector<T>(begin, begin + count);
}

}  // namespace gyre

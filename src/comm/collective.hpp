#pragma once
// Collectives over lists of texts, bytes and elements.

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

/// Sends the texts of rank 0 to every rank. Collective.
std::vector<std::string> broadcast_texts(Communicator& comm, const std::vector<std::string>& texts);

/// Gathers the texts of all ranks, in rank order. Collective.
std::vector<std::string> all_gather_texts(Communicator& comm,
                                          const std::vector<std::string>& texts);

/// Largest single transfer of file data, between ranks or with a file. Longer ones are cut into
/// rounds, because MPI counts bytes in an int.
int64_t transfer_limit_bytes();
/// Sets the limit, which must be the same on all ranks, and returns the old one. Tests use it to
/// force several rounds.
int64_t set_transfer_limit_bytes(int64_t bytes);

/// Gathers the bytes of all ranks in rank order, in rounds of transfer_limit_bytes(). Collective.
std::vector<std::byte> all_gather_bytes(Communicator& comm, std::span<const std::byte> mine);

/// Gathers the elements of all ranks in rank order. Collective.
template <class T>
std::vector<T> all_gather_elements(Communicator& comm, std::span<const T> mine) {
  const std::vector<std::byte> bytes = all_gather_bytes(comm, std::as_bytes(mine));
  const T* begin = reinterpret_cast<const T*>(bytes.data());
  const size_t count = bytes.size() / sizeof(T);
  return std::vector<T>(begin, begin + count);
}

}  // namespace gyre

#pragma once
// Small collectives that file work needs: broadcast and gathering of lists.

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

/// The texts of rank 0 on every rank. Collective.
std::vector<std::string> broadcast_texts(Communicator& comm, const std::vector<std::string>& texts);

/// Everyone's texts in rank order. Collective.
std::vector<std::string> all_gather_texts(Communicator& comm,
                                          const std::vector<std::string>& texts);

/// The largest single transfer of file data, between ranks or with a file: longer ones are cut into
/// rounds, because MPI counts bytes in an int.
int64_t transfer_limit_bytes();
/// Sets the limit (tests make rounds with it) and returns the old one. All ranks must agree.
int64_t set_transfer_limit_bytes(int64_t bytes);

/// Everyone's bytes in rank order, in as many rounds as the transfer limit asks for. Collective.
std::vector<std::byte> all_gather_bytes(Communicator& comm, std::span<const std::byte> mine);

/// Everyone's elements in rank order. Collective.
template <class T>
std::vector<T> all_gather_elements(Communicator& comm, std::span<const T> mine) {
  const std::vector<std::byte> bytes = all_gather_bytes(comm, std::as_bytes(mine));
  const T* begin = reinterpret_cast<const T*>(bytes.data());
  return std::vector<T>(begin, begin + bytes.size() / sizeof(T));
}

}  // namespace gyre

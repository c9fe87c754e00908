#include "comm/collective.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {
namespace {

int64_t the_transfer_limit = int64_t{1} << 30;

/// Encodes texts as one byte string: 8 bytes with the length before each text.
std::string encode(const std::vector<std::string>& texts) {
  std::string encoded;
  for (const std::string& text : texts) {
    const auto length = std::ssize(text);
    char bytes[sizeof(length)];
    std::memcpy(bytes, &length, sizeof(length));
    encoded.append(bytes, sizeof(length)).append(text);
  }
  return encoded;
}

std::vector<std::string> decode(std::string_view encoded) {
  std::vector<std::string> texts;
  while (!encoded.empty()) {
    std::ptrdiff_t length = 0;
    std::memcpy(&length, encoded.data(), sizeof(length));
    encoded.remove_prefix(sizeof(length));
    texts.emplace_back(encoded.substr(0, length));
    encoded.remove_prefix(length);
  }
  return texts;
}

}  // namespace

std::vector<std::string> broadcast_texts(Communicator& comm,
                                         const std::vector<std::string>& texts) {
  return decode(broadcast_string(comm, comm.rank() == 0 ? encode(texts) : std::string(), 0));
}

std::vector<std::string> all_gather_texts(Communicator& comm,
                                          const std::vector<std::string>& texts) {
  const std::string mine = encode(texts);
  const std::vector<char> all = all_gather_elements(comm, std::span<const char>(mine));
  return decode({all.data(), all.size()});
}

int64_t transfer_limit_bytes() {
  return the_transfer_limit;
}
int64_t set_transfer_limit_bytes(int64_t bytes) {
  return std::exchange(the_transfer_limit, bytes);
}

std::vector<std::byte> all_gather_bytes(Communicator& comm, std::span<const std::byte> mine) {
  const std::vector<int64_t> sizes = all_gather_value(comm, std::ssize(mine));
  const size_t ranks = comm.size();
  std::vector<int64_t> begins(ranks, 0);
  std::partial_sum(sizes.begin(), sizes.end() - 1, begins.begin() + 1);
  std::vector<std::byte> all(begins.back() + sizes.back());

  HostStream stream;
  const int64_t part = std::max<int64_t>(1, transfer_limit_bytes() / comm.size());
  const int64_t rounds = ceil_div(*std::max_element(sizes.begin(), sizes.end()), part);
  std::vector<std::byte> received;
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t skip = round * part;
    std::vector<int64_t> counts;
    for (int64_t size : sizes) counts.push_back(std::clamp<int64_t>(size - skip, 0, part));
    received.resize(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    const size_t my_count = counts[comm.rank()];
    const auto my_part =
        my_count == 0 ? std::span<const std::byte>() : mine.subspan(skip, my_count);
    comm.all_gather_v(my_part, received, counts, stream, "gathering data of all ranks")->wait();
    const std::byte* from = received.data();
    for (size_t r = 0; r < ranks; ++r) {
      if (counts[r] == 0) continue;
      std::copy_n(from, counts[r], all.data() + begins[r] + skip);
      from += counts[r];
    }
  }
  return all;
}

}  // namespace gyre

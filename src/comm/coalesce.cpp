#include "comm/coalesce.hpp"

#include <algorithm>
#include <map>

#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {
namespace {

constexpr int64_t alignment = 256;  // of messages in the staging area, as in device allocations

template <class Byte>
using Message = std::vector<std::span<Byte>>;

/// Message of each peer: its slices in order, without empty ones.
template <class Byte, class Slice>
std::map<int, Message<Byte>> messages_of(std::span<const Slice> slices) {
  std::map<int, Message<Byte>> messages;
  for (const Slice& slice : slices)
    if (!slice.data.empty()) messages[slice.peer].emplace_back(slice.data);
  return messages;
}

template <class Byte>
int64_t bytes_of_message(const Message<Byte>& message) {
  int64_t bytes = 0;
  for (const std::span<Byte>& part : message) bytes += std::ssize(part);
  return bytes;
}

/// The whole message if its parts are contiguous in memory and it need not be staged, otherwise an
/// empty span.
template <class Byte>
std::span<Byte> single_span(const Message<Byte>& message, Staged staged) {
  if (staged == Staged::all) return {};
  for (size_t i = 1; i < message.size(); ++i)
    if (message[i - 1].data() + message[i - 1].size() != message[i].data()) return {};
  return {message.front().data(), static_cast<size_t>(bytes_of_message(message))};
}

template <class Byte>
int64_t staged_bytes(const std::map<int, Message<Byte>>& messages, int rank, Staged staged) {
  int64_t bytes = 0;
  for (const auto& [peer, message] : messages)
    if (peer != rank && single_span(message, staged).empty())
      bytes += round_up(bytes_of_message(message), alignment);
  return bytes;
}

/// Appends the copies from a message to the same message cut into other parts. A part that is
/// already in place needs no copy.
void append_copies(std::vector<SpanCopy>& copies, const Message<const std::byte>& from,
                   const Message<std::byte>& to) {
  size_t source = 0, skipped = 0;
  for (std::span<std::byte> target : to)
    while (!target.empty()) {
      const std::span<const std::byte> rest = from[source].subspan(skipped);
      const size_t length = std::min(rest.size(), target.size());
      if (rest.data() != target.data())
        copies.push_back({rest.first(length), target.first(length)});
      target = target.subspan(length);
      skipped += length;
      if (length < rest.size()) continue;
      ++source;
      skipped = 0;
    }
}

/// Hands out the staging area from its beginning.
class Staging {
 public:
  explicit Staging(std::span<std::byte> free) : free_(free) {}

  std::span<std::byte> take(int64_t bytes) {
    const size_t all = round_up(bytes, alignment);
    GYRE_CHECK(all <= free_.size(), "{} bytes of a staging area with {} left", all, free_.size());
    const std::span<std::byte> taken = free_.first(bytes);
    free_ = free_.subspan(all);
    return taken;
  }

 private:
  std::span<std::byte> free_;
};

}  // namespace

int64_t staging_bytes(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs, int rank,
                      Staged staged) {
  return staged_bytes(messages_of<const std::byte>(sends), rank, staged) +
         staged_bytes(messages_of<std::byte>(recvs), rank, staged);
}

CoalescedExchange coalesce(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                           int rank, std::span<std::byte> staging, std::string_view what,
                           Staged staged) {
  auto outgoing = messages_of<const std::byte>(sends);
  auto incoming = messages_of<std::byte>(recvs);
  const int64_t to_self = bytes_of_message(outgoing[rank]);
  const int64_t from_self = bytes_of_message(incoming[rank]);
  GYRE_CHECK(to_self == from_self, "{}: rank {} sends itself {} bytes and receives {}", what, rank,
             to_self, from_self);
  CoalescedExchange result;
  Staging area(staging);
  for (const auto& [peer, message] : outgoing) {
    if (peer == rank) continue;
    std::span<const std::byte> data = single_span(message, staged);
    if (data.empty()) {
      const std::span<std::byte> copy = area.take(bytes_of_message(message));
      append_copies(result.before, message, {copy});
      data = copy;
    }
    result.sends.push_back({peer, data});
  }
  append_copies(result.after, outgoing[rank], incoming[rank]);
  for (const auto& [peer, message] : incoming) {
    if (peer == rank) continue;
    std::span<std::byte> data = single_span(message, staged);
    if (data.empty()) {
      data = area.take(bytes_of_message(message));
      append_copies(result.after, {data}, message);
    }
    result.recvs.push_back({peer, data});
  }
  return result;
}

}  // namespace gyre

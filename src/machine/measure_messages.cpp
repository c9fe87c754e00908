// Message times: ping-pong between two ranks, and a ring of all ranks.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

#include "comm/agree.hpp"
#include "machine/measure_detail.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

constexpr std::array<int64_t, 5> message_bytes = {8, 4 << 10, 64 << 10, 1 << 20, 16 << 20};
constexpr int samples = detail::samples_of_a_message;

/// Sends the first `bytes` of one array and receives into the first `bytes` of another.
class Messenger {
 public:
  Messenger(Communicator& data, Stream& stream)
      : data_(data),
        stream_(stream),
        out_(message_bytes.back(), data.space()),
        in_(message_bytes.back(), data.space()) {
    stream.fill(out_.data(), std::byte{0}, out_.size());
    stream.synchronize();
  }

  /// Sends to rank `to` and receives from rank `from`; -1: none.
  void exchange(int to, int from, int64_t bytes) {
    const size_t count = bytes;
    const SendSlice send{to, {out_.data(), count}};
    const RecvSlice receive{from, {in_.data(), count}};
    data_
        .exchange(std::span(&send, to < 0 ? 0 : 1), std::span(&receive, from < 0 ? 0 : 1), stream_,
                  "a message to be timed")
        ->wait();
    stream_.synchronize();
  }

 private:
  Communicator& data_;
  Stream& stream_;
  Buffer<std::byte> out_, in_;
};

/// Measures `samples` times the seconds per call of `body`. Each sample makes as many calls as fit
/// into a tenth of the window, at least one; `group`, in host memory, agrees on their number.
template <class Body>
std::vector<double> times_of(Communicator& group, double window_seconds, Body body) {
  HostStream host;
  const auto seconds_of = [&](int64_t calls) {
    group.barrier(host, "before messages are timed")->wait();
    const Stopwatch watch;
    for (int64_t i = 0; i < calls; ++i) body();
    return watch.seconds() / static_cast<double>(calls);
  };
  seconds_of(2);  // the first message opens the connections
  const double first = all_reduce_value(group, seconds_of(3), ReduceOp::max);
  const double fit = window_seconds / samples / std::max(first, 1e-9);
  const auto calls = static_cast<int64_t>(std::clamp(fit, 1.0, 10000.0));
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) times.push_back(seconds_of(calls));
  return times;
}

MeasuredLink link_of(std::vector<int> ranks, const std::vector<double>& times) {
  MeasuredLink link;
  link.ranks = std::move(ranks);
  for (size_t i = 0; i < message_bytes.size(); ++i) {
    const auto begin = times.begin() + static_cast<std::ptrdiff_t>(i) * samples;
    link.messages.push_back({message_bytes[i], median_of({begin, begin + samples})});
  }
  const MessageTime& longest = link.messages.back();
  link.alpha_seconds = link.messages.front().seconds.value;
  link.bytes_per_s = static_cast<double>(longest.bytes) / longest.seconds.value;
  return link;
}

/// Measures a ping-pong of ranks a and b while all others sleep.
MeasuredLink measure_pair(int a, int b, const MeasuredTransport& transport, double window) {
  Communicator& world = transport.world;
  const bool takes_part = world.rank() == a || world.rank() == b;
  const std::unique_ptr<Communicator> data = transport.data.split(takes_part ? 0 : 1);
  const std::unique_ptr<Communicator> group = world.split(takes_part ? 0 : 1);
  std::vector<double> times(message_bytes.size() * samples);
  detail::sleep_until_all_are_here(world);
  if (takes_part) {
    Messenger messenger(*data, transport.stream);
    auto next = times.begin();
    for (const int64_t bytes : message_bytes) {
      const auto there_and_back = [&] {
        if (world.rank() == a) messenger.exchange(1, -1, bytes);
        messenger.exchange(-1, world.rank() == a ? 1 : 0, bytes);
        if (world.rank() == b) messenger.exchange(0, -1, bytes);
      };
      for (const double time : times_of(*group, window, there_and_back)) *next++ = time / 2;
    }
  }
  detail::sleep_until_all_are_here(world);
  HostStream host;
  world.broadcast(writable_bytes_of(std::span<double>(times)), a, host, "times of messages")
      ->wait();
  return link_of({a, b}, times);
}

/// Measures a ring: every rank sends to the next and receives from the previous one.
MeasuredLink measure_ring(const MeasuredTransport& transport, double window) {
  Communicator& world = transport.world;
  const int rank = world.rank(), n = world.size();
  Messenger messenger(transport.data, transport.stream);
  std::vector<double> times;
  for (const int64_t bytes : message_bytes)
    for (const double time : times_of(
             world, window, [&] { messenger.exchange((rank + 1) % n, (rank + n - 1) % n, bytes); }))
      times.push_back(time);
  for (double& time : times) time = all_reduce_value(world, time, ReduceOp::max);
  std::vector<int> ranks;
  for (int r = 0; r < n; ++r) ranks.push_back(r);
  return link_of(std::move(ranks), times);
}

}  // namespace

MeasuredMessages detail::measure_messages(const MachineIdentity& machine,
                                          const MeasuredTransport& transport,
                                          double window_seconds) {
  MeasuredMessages messages;
  messages.how = fmt::format(
      "one_way_seconds: median of {} samples, each of as many messages as a tenth of the window "
      "takes, by the calls of the programs, unchecked; "
      "two ranks: half of a message there and one back, all others asleep; "
      "all at once: each rank sends to the next one and receives from the one before, the slowest "
      "rank; bytes_per_s: of the longest message; alpha_seconds: of the shortest",
      samples_of_a_message);
  const auto on_host_of = [&](size_t rank) {
    return [&machine, rank](const RankPlacement& other) {
      return other.rank > static_cast<int>(rank) && other.host == machine.ranks[rank].host;
    };
  };
  for (size_t rank = 0; rank < machine.ranks.size(); ++rank) {
    const auto other = std::ranges::find_if(machine.ranks, on_host_of(rank));
    if (other == machine.ranks.end()) continue;
    messages.inside_host =
        measure_pair(static_cast<int>(rank), other->rank, transport, window_seconds);
    break;
  }
  if (const std::vector<int> firsts = first_ranks(machine); firsts.size() > 1)
    messages.between_hosts = measure_pair(firsts[0], firsts[1], transport, window_seconds);
  if (transport.world.size() > 1) messages.all_at_once = measure_ring(transport, window_seconds);
  return messages;
}

}  // namespace gyre

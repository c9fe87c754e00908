#pragma once
// Communication of one group of ranks.
//
// Every operation is asynchronous: it returns a Work that completes later, and the caller must not
// touch its buffers until then. All ranks of the group submit the same operations in the same
// order. Buffers live in the communicator's memory space; on a device, an operation starts after
// the work already on `stream`.
//
// Wire bytes are counted here, in the same way for every backend: the bytes that one rank must send
// with the bandwidth-optimal algorithm for n ranks and b bytes:
//     exchange        the bytes of its messages to other ranks
//     all-gather      (n-1) · own b            reduce-scatter  (n-1)/n · b
//     all-to-all      b that leave the rank    all-reduce      2 (n-1)/n · b
//     broadcast       b at the root            barrier         0

#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "runtime/stream.hpp"

namespace gyre {

enum class ReduceOp { sum, max, min };

struct SendSlice {
  int peer;  ///< rank in this communicator
  std::span<const std::byte> data;
};
struct RecvSlice {
  int peer;
  std::span<std::byte> data;
};

/// Traffic that a rank has sent so far, in a communicator and its subgroups.
struct Traffic {
  int64_t bytes_sent = 0;
  int64_t messages = 0;  ///< point-to-point messages sent, one to each peer of an
                         ///< exchange, plus one for each collective
};

/// An operation in flight. wait() must be called before it is destroyed. One that was recorded
/// (Stream::record) is in flight while its stream has work.
class Work {
 public:
  virtual ~Work() = default;
  /// Drives the operation without blocking; true once it is complete.
  virtual bool test() = 0;
  /// Blocks, politely (poll, then yield the core), until it is complete.
  virtual void wait() = 0;
  /// Orders work that is submitted to the operation's stream from now on behind the operation. The
  /// host does not wait where the device can keep this order; wait() must still be called.
  virtual void wait_on_stream() { wait(); }
};
using WorkPtr = std::unique_ptr<Work>;

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual MemorySpace space() const = 0;
  virtual std::string_view backend() const = 0;  ///< "mpi", "nccl", "staged", "mpi-gpu"
  /// Ranks of equal `color` form a new communicator, in order of their rank here. Collective.
  virtual std::unique_ptr<Communicator> split(int color) = 0;
  /// The communicator of `ranks` (ascending, this one among them), which this one keeps: itself,
  /// where they are all. Collective over this communicator when they are asked for first: every
  /// rank names a group then, and groups do not overlap.
  Communicator& subgroup(const std::vector<int>& ranks);
  /// From now on a wait for an operation that is submitted later sleeps `seconds` between two
  /// polls, less when an event is known to come; 0, as at first: it yields the core. For ranks that
  /// share cores and sleep for most of their time. Holds for what split() makes of this later, too.
  /// Without effect where waits do not poll MPI.
  virtual void sleep_between_polls(double /*seconds*/) {}
  /// When, on the clock of monotonic_seconds(), the next poll is due that an operation needs;
  /// infinity: no such time is known.
  virtual double next_event() const { return std::numeric_limits<double>::infinity(); }
  /// Whether operations of a stream that records (Stream::record) are recorded with its other work:
  /// no host takes part in them.
  virtual bool can_record() const { return false; }
  /// Lets all-gathers use `memory` where it lies, without copies through buffers of the library (a
  /// symmetric window of NCCL's), as long as the result lives; this communicator must outlive it.
  /// They then begin at its first byte, and send and receive in such memory only. nullptr on all
  /// ranks where one of them cannot, or has another size. Collective.
  virtual std::shared_ptr<void> register_window(std::span<std::byte> /*memory*/) { return nullptr; }
  /// Counts what recorded operations send once more.
  void count_again(const Traffic& sent) { count(sent.bytes_sent, sent.messages); }
  /// What carries the bytes in the end: this, or for one that adds to another, that one's carrier.
  virtual const Communicator& carrier() const { return *this; }

  /// Grouped point-to-point: all slices form one operation. Slices to one peer travel as one
  /// message, in their order. A message has the same length at both ends; its slices may differ.
  /// `what` names the step in the watchdog's report.
  WorkPtr exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                   Stream& stream, std::string_view what);
  /// recv [size * send.size()] <- every rank's `send`, in rank order; equal sizes.
  WorkPtr all_gather(std::span<const std::byte> send, std::span<std::byte> recv, Stream& stream,
                     std::string_view what);
  /// As all_gather, with `recv_bytes[r]` bytes from rank r, packed in rank order.
  WorkPtr all_gather_v(std::span<const std::byte> send, std::span<std::byte> recv,
                       std::span<const int64_t> recv_bytes, Stream& stream, std::string_view what);
  /// Sends equal blocks of `send` to all ranks in rank order; receives likewise.
  WorkPtr all_to_all(std::span<const std::byte> send, std::span<std::byte> recv, Stream& stream,
                     std::string_view what);
  /// `send_bytes[r]` bytes to rank r, `recv_bytes[r]` from it; both sides packed in rank order.
  WorkPtr all_to_all_v(std::span<const std::byte> send, std::span<const int64_t> send_bytes,
                       std::span<std::byte> recv, std::span<const int64_t> recv_bytes,
                       Stream& stream, std::string_view what);
  /// recv [count] <- element-wise reduction over ranks of block `rank` of send [size * count].
  WorkPtr reduce_scatter(const void* send, void* recv, int64_t count, DType type, ReduceOp op,
                         Stream& stream, std::string_view what);
  /// In place: data [count] <- element-wise reduction over all ranks.
  WorkPtr all_reduce(void* data, int64_t count, DType type, ReduceOp op, Stream& stream,
                     std::string_view what);
  WorkPtr broadcast(std::span<std::byte> data, int root, Stream& stream, std::string_view what);
  WorkPtr barrier(Stream& stream, std::string_view what);

  Traffic traffic() const;

 protected:
  virtual WorkPtr do_exchange(std::span<const SendSlice>, std::span<const RecvSlice>, Stream&,
                              std::string_view what) = 0;
  virtual WorkPtr do_all_gather_v(std::span<const std::byte> send, std::span<std::byte> recv,
                                  std::span<const int64_t> recv_bytes, Stream&,
                                  std::string_view what) = 0;
  virtual WorkPtr do_all_to_all_v(std::span<const std::byte> send,
                                  std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                                  std::span<const int64_t> recv_bytes, Stream&,
                                  std::string_view what) = 0;
  virtual WorkPtr do_reduce_scatter(const void* send, void* recv, int64_t count, DType, ReduceOp,
                                    Stream&, std::string_view what) = 0;
  virtual WorkPtr do_all_reduce(void* data, int64_t count, DType, ReduceOp, Stream&,
                                std::string_view what) = 0;
  virtual WorkPtr do_broadcast(std::span<std::byte> data, int root, Stream&,
                               std::string_view what) = 0;
  virtual WorkPtr do_barrier(Stream&, std::string_view what) = 0;

 private:
  void count(int64_t bytes, int64_t messages);
  Traffic traffic_;
  std::map<std::vector<int>, std::unique_ptr<Communicator>> subgroups_;
};

/// A Work that was complete when it was made (groups of one rank).
WorkPtr completed_work();

/// Typed spans as bytes.
template <class T>
std::span<const std::byte> bytes_of(std::span<const T> data) {
  return std::as_bytes(data);
}
template <class T>
std::span<std::byte> writable_bytes_of(std::span<T> data) {
  return std::as_writable_bytes(data);
}

}  // namespace gyre

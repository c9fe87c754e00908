#pragma once
// Communication of one group of ranks.
//
// Every operation is asynchronous: it returns a Work that completes later, and the caller must not
// touch its buffers until then. All ranks of the group submit the same operations in the same
// order. Buffers live in the communicator's memory space; on a device, an operation starts after
// the work already on `stream`.
//
// Wire bytes are counted here, equally for every backend: the bytes that a rank must send with the
// bandwidth-optimal algorithm for n ranks and b bytes:
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

/// A collective operation. Blocks that belong to ranks are packed in rank order.
struct Collective {
  enum class Kind { all_gather, all_to_all, reduce_scatter, all_reduce, broadcast, barrier };
  Kind kind = Kind::barrier;
  std::span<const std::byte> send = {};      ///< input of all_gather, all_to_all and reduce_scatter
  std::span<std::byte> recv = {};            ///< the result; also the input if in_place()
  std::span<const int64_t> send_bytes = {};  ///< of all_to_all: bytes to each rank
  std::span<const int64_t> recv_bytes = {};  ///< of all_gather and all_to_all: from each rank
  DType type = DType::f32;                   ///< of reductions
  ReduceOp op = ReduceOp::sum;
  int root = 0;  ///< of broadcast

  bool in_place() const { return kind == Kind::all_reduce || kind == Kind::broadcast; }
  /// Number of elements of `recv`, in reductions.
  int64_t count() const { return std::ssize(recv) / static_cast<int64_t>(size_of(type)); }
};

/// Traffic sent so far by this rank, in a communicator and its subgroups.
struct Traffic {
  int64_t bytes_sent = 0;
  int64_t messages = 0;  ///< point-to-point messages sent, one per peer of an exchange, plus one
                         ///< per collective
};

/// An operation in flight. wait() must be called before it is destroyed. A recorded operation
/// (Stream::record) is in flight while its stream has work.
class Work {
 public:
  virtual ~Work() = default;
  /// Progresses the operation without blocking; returns true once it is complete.
  virtual bool test() = 0;
  /// Blocks until the operation is complete; polls and yields the core between polls.
  virtual void wait() = 0;
  /// Work submitted to the operation's stream after this call runs after the operation. The host
  /// does not wait if the device can keep this order; wait() must still be called.
  virtual void wait_on_stream() { wait(); }
};
using WorkPtr = std::unique_ptr<Work>;

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual MemorySpace space() const = 0;
  virtual std::string_view backend() const = 0;  ///< "mpi", "nccl", "staged", "mpi-gpu", "emulated"
  /// Ranks of equal `color` form a new communicator, in order of their rank here. Collective.
  virtual std::unique_ptr<Communicator> split(int color) = 0;
  /// Returns the communicator of `ranks` (ascending, including this rank); this communicator owns
  /// it. If these are all ranks, returns *this. The first request is collective over this
  /// communicator: every rank names its group, and groups do not overlap.
  Communicator& subgroup(const std::vector<int>& ranks);
  /// Sets the sleep between two polls, in seconds, in waits for operations submitted later; the
  /// sleep ends early if an event is due. 0 (initial): yield the core. For ranks that share cores
  /// and sleep most of the time. Also applies to communicators that split() makes later. No effect
  /// if waits do not poll MPI.
  virtual void sleep_between_polls(double /*seconds*/) {}
  /// Time of the next poll that an operation needs, on the clock of monotonic_seconds(); infinity
  /// if none is known.
  virtual double next_event() const { return std::numeric_limits<double>::infinity(); }
  /// Whether operations on a recording stream (Stream::record) are recorded with its other work, so
  /// that the host takes no part in them.
  virtual bool can_record() const { return false; }
  /// Lets all-gathers use `memory` without copies through library buffers (a symmetric NCCL window)
  /// while the result lives; this communicator must outlive it. Such all-gathers must begin at the
  /// first byte of `memory`, and send and receive only in such memory. Returns nullptr on all ranks
  /// if one cannot register or has another size. Collective.
  virtual std::shared_ptr<void> register_window(std::span<std::byte> /*memory*/) { return nullptr; }
  /// Adds `sent` to the traffic when recorded operations run again.
  void count_again(const Traffic& sent) { count(sent.bytes_sent, sent.messages); }
  /// Communicator that transports the bytes: this one, or the one that this one decorates.
  virtual const Communicator& transport() const { return *this; }
  /// Number of ranks of the run to which the ranks of this group belong. Ask transport().
  virtual int ranks_of_run() const;

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
  /// Sends a block of `send` to each rank and receives one from it; equal sizes, in rank order.
  WorkPtr all_to_all(std::span<const std::byte> send, std::span<std::byte> recv, Stream& stream,
                     std::string_view what);
  /// Sends `send_bytes[r]` bytes to rank r and receives `recv_bytes[r]` from it; both packed in
  /// rank order.
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
  /// Starts the collective that `call` describes, one of those above.
  WorkPtr collective(const Collective& call, Stream& stream, std::string_view what);

  Traffic traffic() const;

 protected:
  virtual WorkPtr do_exchange(std::span<const SendSlice>, std::span<const RecvSlice>, Stream&,
                              std::string_view what) = 0;
  virtual WorkPtr do_collective(const Collective&, Stream&, std::string_view what) = 0;

 private:
  void count(int64_t bytes, int64_t messages);
  void check(const Collective& call, std::string_view what) const;
  int64_t bytes_sent_by(const Collective& call) const;
  Traffic traffic_;
  std::map<std::vector<int>, std::unique_ptr<Communicator>> subgroups_;
};

/// Returns a Work that is already complete (groups of one rank).
WorkPtr completed_work();

template <class T>
std::span<const std::byte> bytes_of(std::span<const T> data) {
  return std::as_bytes(data);
}
template <class T>
std::span<std::byte> writable_bytes_of(std::span<T> data) {
  return std::as_writable_bytes(data);
}

}  // namespace gyre

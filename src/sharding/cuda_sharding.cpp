#include "sharding/cuda_sharding.hpp"

#include <vector>

#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/row_copy.hpp"
#include "sharding/distributed.hpp"

namespace gyre {
namespace {

/// Copies to the device and waits, so that `values` may be freed on return.
Buffer<int32_t> upload(std::span<const int32_t> values, Stream& stream) {
  Buffer<int32_t> there(std::ssize(values), MemorySpace::device);
  stream.copy(there.data(), values.data(), values.size_bytes());
  stream.synchronize();
  return there;
}

std::vector<int32_t> index_of_all_ranks(const Layout& layout) {
  std::vector<int32_t> all;
  for (int r = 0; r < layout.cp(); ++r) {
    const std::vector<int32_t> mine = shard_index(layout, r);
    all.insert(all.end(), mine.begin(), mine.end());
  }
  return all;
}

std::vector<int32_t> owner_rows(const Layout& layout) {
  std::vector<int32_t> rows;
  for (const Owner& owner : slot_owners(layout))
    rows.push_back(owner.rank * static_cast<int32_t>(layout.slots_of_rank()) + owner.local);
  return rows;
}

const std::byte* bytes_at(const void* data, int64_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}

/// A rank's part of a next-token shift (see distributed.hpp), on the device.
class DeviceShift {
 public:
  DeviceShift(const SlotMoves& plan, Stream& stream) : stream_(stream), slots_(plan.slots) {
    std::vector<int32_t> outgoing, result(plan.slots, -1);
    for (const SlotMoves::Move& move : plan.moves)
      for (int32_t i = 0; i < move.length; ++i) result[move.to + i] = move.from + i;
    for (const SlotMoves::Message& message : plan.sends) {
      sends_.push_back({message.peer, sent_, std::ssize(message.slots)});
      outgoing.insert(outgoing.end(), message.slots.begin(), message.slots.end());
      sent_ += std::ssize(message.slots);
    }
    for (const SlotMoves::Message& message : plan.recvs) {
      recvs_.push_back({message.peer, received_, std::ssize(message.slots)});
      for (const int32_t slot : message.slots)
        result[slot] = static_cast<int32_t>(slots_ + received_++);
    }
    outgoing_ = upload(outgoing, stream);
    result_ = upload(result, stream);
  }

  /// Shifts local [slots] into out [slots]. Complete in stream order on return.
  void shift(Communicator& comm, const int32_t* local, int32_t* out, int32_t fill) const {
    constexpr int64_t bytes = sizeof(int32_t);
    Buffer<int32_t> outgoing(sent_, MemorySpace::device);
    Buffer<int32_t> joined(slots_ + received_, MemorySpace::device);
    gather_rows(stream_, outgoing.data(), local, outgoing_.data(), sent_, slots_, bytes);
    stream_.copy(joined.data(), local, slots_ * bytes);
    std::vector<SendSlice> sends;
    std::vector<RecvSlice> recvs;
    for (const Message& m : sends_)
      sends.push_back({m.peer, std::as_bytes(part_of(outgoing, m.begin, m.count))});
    for (const Message& m : recvs_)
      recvs.push_back({m.peer, std::as_writable_bytes(part_of(joined, slots_ + m.begin, m.count))});
    const WorkPtr work = comm.exchange(sends, recvs, stream_, "next-token shift");
    work->wait_on_stream();
    gather_rows(stream_, out, joined.data(), result_.data(), slots_, slots_ + received_, bytes,
                RowFill::of(fill));
    work->wait();
  }

 private:
  struct Message {
    int peer;
    int64_t begin, count;
  };
  static std::span<int32_t> part_of(Buffer<int32_t>& buffer, int64_t begin, int64_t count) {
    return buffer.span().subspan(begin, count);
  }

  Stream& stream_;
  int64_t slots_, sent_ = 0, received_ = 0;
  std::vector<Message> sends_, recvs_;
  Buffer<int32_t> outgoing_;  ///< [sent] local slots, grouped by message
  Buffer<int32_t> result_;    ///< [slots] row of [local, received]; -1: the fill
};

class CudaStreamShards final : public StreamShards {
 public:
  CudaStreamShards(const Layout& layout, Stream& stream)
      : layout_(layout),
        stream_(stream),
        slots_(layout.slots_of_rank()),
        index_(upload(index_of_all_ranks(layout), stream)),
        owners_(upload(owner_rows(layout), stream)) {}

  void shard(int rank, const void* stream, int64_t rows, void* local, int64_t row_bytes,
             const RowFill& fill) override {
    check_rows(rows);
    gather_rows(stream_, local, stream, index_of(rank), slots_, rows, row_bytes, fill);
  }
  void unshard(int rank, const void* local, void* stream, int64_t rows,
               int64_t row_bytes) override {
    check_rows(rows);
    scatter_rows(stream_, stream, local, index_of(rank), slots_, rows, row_bytes);
  }
  void gather(Communicator& comm, const void* local, void* stream, int64_t row_bytes) override {
    if (layout_.cp() != comm.size())
      throw_usage("layout {} is for {} ranks, but the group has {}", layout_.name, layout_.cp(),
                  comm.size());
    const int64_t bytes = slots_ * row_bytes;
    Buffer<std::byte> shards(bytes * comm.size(), MemorySpace::device);
    const WorkPtr work = comm.all_gather({bytes_at(local, 0), static_cast<size_t>(bytes)},
                                         shards.span(), stream_, "gathering a stream");
    work->wait_on_stream();
    gather_rows(stream_, stream, shards.data(), owners_.data(), layout_.stream_slots,
                layout_.cp() * slots_, row_bytes);
    work->wait();
  }
  void shift_left(Communicator& comm, std::span<const int32_t> bounds, const int32_t* local,
                  int32_t* out, int32_t fill) override {
    const DeviceShift shift(plan_shift_left(layout_, bounds, comm.rank()), stream_);
    shift.shift(comm, local, out, fill);
  }

 private:
  void check_rows(int64_t rows) const {
    if (rows != layout_.stream_slots && rows != layout_.padded_slots)
      throw_usage(
          "layout {}: the stream has {} rows; it must have {}", layout_.name, rows,
          layout_.stream_slots == layout_.padded_slots
              ? fmt::format("{}", layout_.stream_slots)
              : fmt::format("{} or, padded, {}", layout_.stream_slots, layout_.padded_slots));
  }
  const int32_t* index_of(int rank) const {
    GYRE_CHECK(rank >= 0 && rank < layout_.cp(), "layout {}: rank {} of {}", layout_.name, rank,
               layout_.cp());
    return index_.data() + rank * slots_;
  }

  const Layout& layout_;
  Stream& stream_;
  int64_t slots_;
  Buffer<int32_t> index_;   ///< [cp, slots] slot of the stream
  Buffer<int32_t> owners_;  ///< [padded_slots] row in the concatenated shards of all ranks
};

}  // namespace

std::unique_ptr<StreamShards> make_cuda_stream_shards(const Layout& layout, Stream& stream) {
  return std::make_unique<CudaStreamShards>(layout, stream);
}

}  // namespace gyre

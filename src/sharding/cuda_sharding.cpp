#include "sharding/cuda_sharding.hpp"

#include "core/error.hpp"

namespace gyre {
namespace {

/// A copy on the device, complete on return: the caller's may go.
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

}  // namespace

DeviceLayout::DeviceLayout(const Layout& layout, Stream& stream)
    : name_(layout.name),
      stream_(stream),
      cp_(layout.cp()),
      slots_(layout.slots_of_rank()),
      stream_slots_(layout.stream_slots),
      padded_slots_(layout.padded_slots),
      index_(upload(index_of_all_ranks(layout), stream)),
      owners_(upload(owner_rows(layout), stream)) {}

void DeviceLayout::check_rows(int64_t rows) const {
  if (rows != stream_slots_ && rows != padded_slots_)
    throw_usage("layout {}: the stream has {} rows; it must have {}", name_, rows,
                stream_slots_ == padded_slots_
                    ? fmt::format("{}", stream_slots_)
                    : fmt::format("{} or, padded, {}", stream_slots_, padded_slots_));
}

const int32_t* DeviceLayout::index_of(int rank) const {
  GYRE_CHECK(rank >= 0 && rank < cp_, "layout {}: rank {} of {}", name_, rank, cp_);
  return index_.data() + rank * slots_;
}

void DeviceLayout::shard(int rank, const void* stream, int64_t rows, void* local, int64_t row_bytes,
                         const RowFill& fill) const {
  check_rows(rows);
  gather_rows(stream_, local, stream, index_of(rank), slots_, rows, row_bytes, fill);
}

void DeviceLayout::shard_all(const void* stream, int64_t rows, void* shards, int64_t row_bytes,
                             const RowFill& fill) const {
  check_rows(rows);
  gather_rows(stream_, shards, stream, index_.data(), cp_ * slots_, rows, row_bytes, fill);
}

void DeviceLayout::unshard(int rank, const void* local, void* stream, int64_t rows,
                           int64_t row_bytes) const {
  check_rows(rows);
  scatter_rows(stream_, stream, local, index_of(rank), slots_, rows, row_bytes);
}

void DeviceLayout::unshard_all(const void* shards, void* stream, int64_t rows,
                               int64_t row_bytes) const {
  check_rows(rows);
  gather_rows(stream_, stream, shards, owners_.data(), rows, cp_ * slots_, row_bytes);
}

void gather_stream(const DeviceLayout& layout, Communicator& comm, Stream& on, const void* local,
                   void* stream, int64_t row_bytes) {
  if (layout.cp() != comm.size())
    throw_usage("the layout is for {} ranks, but the group has {}", layout.cp(), comm.size());
  const int64_t bytes = layout.slots() * row_bytes;
  Buffer<std::byte> shards(bytes * comm.size(), MemorySpace::device);
  const WorkPtr work = comm.all_gather({bytes_at(local, 0), static_cast<size_t>(bytes)},
                                       shards.span(), on, "gathering a stream");
  work->wait_on_stream();
  layout.unshard_all(shards.data(), stream, layout.stream_slots(), row_bytes);
  work->wait();
}

DeviceShift::DeviceShift(const ShiftPlan& plan, Stream& stream)
    : stream_(stream), slots_(plan.slots) {
  std::vector<int32_t> outgoing, result(static_cast<size_t>(plan.slots), -1);
  for (const ShiftPlan::Move& move : plan.moves)
    for (int32_t i = 0; i < move.length; ++i)
      result[static_cast<size_t>(move.to + i)] = move.from + i;
  for (const ShiftPlan::Message& message : plan.sends) {
    sends_.push_back({message.peer, sent_, std::ssize(message.slots)});
    outgoing.insert(outgoing.end(), message.slots.begin(), message.slots.end());
    sent_ += std::ssize(message.slots);
  }
  for (const ShiftPlan::Message& message : plan.recvs) {
    recvs_.push_back({message.peer, received_, std::ssize(message.slots)});
    for (const int32_t slot : message.slots)
      result[static_cast<size_t>(slot)] = static_cast<int32_t>(slots_ + received_++);
  }
  outgoing_ = upload(outgoing, stream);
  result_ = upload(result, stream);
}

void DeviceShift::shift(Communicator& comm, const void* local, void* out, int64_t bytes,
                        const RowFill& fill) const {
  Buffer<std::byte> outgoing(sent_ * bytes, MemorySpace::device);
  Buffer<std::byte> joined((slots_ + received_) * bytes, MemorySpace::device);
  gather_rows(stream_, outgoing.data(), local, outgoing_.data(), sent_, slots_, bytes);
  stream_.copy(joined.data(), local, static_cast<size_t>(slots_ * bytes));
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  for (const Message& m : sends_)
    sends.push_back(
        {m.peer,
         {bytes_at(outgoing.data(), m.begin * bytes), static_cast<size_t>(m.count * bytes)}});
  for (const Message& m : recvs_)
    recvs.push_back(
        {m.peer,
         {joined.data() + (slots_ + m.begin) * bytes, static_cast<size_t>(m.count * bytes)}});
  const WorkPtr work = comm.exchange(sends, recvs, stream_, "next-token shift");
  work->wait_on_stream();
  gather_rows(stream_, out, joined.data(), result_.data(), slots_, slots_ + received_, bytes, fill);
  work->wait();
}

}  // namespace gyre

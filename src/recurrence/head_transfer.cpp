#include "recurrence/head_transfer.hpp"

#include <algorithm>
#include <cstring>

#include "runtime/row_copy.hpp"

namespace gyre {

using state_step::HeadExchange;

RecurrenceData new_arrays(const RecurrenceShape& shape, DType type, int64_t rows, MemorySpace space,
                          std::vector<Buffer<std::byte>>& buffers) {
  RecurrenceData data;
  for (int a = 0; a < recurrence_arrays; ++a) {
    const auto array = static_cast<RecurrenceArray>(a);
    if (!has_array(shape, array)) continue;
    const DType stored = stored_type(array, type);
    const int64_t width = width_of(shape, array);
    buffers.emplace_back(rows * width * static_cast<int64_t>(size_of(stored)), space);
    data[array] = {buffers.back().data(), stored, rows, width, width};
  }
  return data;
}

HeadTransfer::HeadTransfer(const StatePlan& plan, const Layout& layout,
                           const RecurrenceShape& layer, Stream& stream)
    : rank_(plan.rank), stream_(stream), send_bytes_(layout.cp()), recv_bytes_(layout.cp()) {
  std::map<int64_t, int64_t> rows_of_documents;
  for (const StatePart& part : plan.parts) rows_of_documents[part.document] = part.row;
  int64_t tokens = 0;
  for (const Shard& shard : layout.shards) {
    std::vector<Rows>& rows = rows_.emplace_back();
    for (const Fragment& f : shard.fragments) {
      rows.push_back({f.local_begin.value(), rows_of_documents.at(f.segment) + f.start.value(),
                      f.stride, f.length});
      tokens += f.length;
    }
  }
  gathered_ = new_arrays(plan.computed(layer), plan.type, tokens, stream.space(), arrays_);
  if (stream.space() == MemorySpace::device) make_maps();
}

void HeadTransfer::make_maps() {
  const auto upload = [&](const std::vector<int32_t>& map) {
    Buffer<int32_t> there(std::ssize(map), MemorySpace::device);
    stream_.copy(there.data(), map.data(), map.size() * sizeof(int32_t));
    return there;
  };
  const int64_t cp = std::ssize(rows_);
  for (int64_t peer = 0; peer < cp; ++peer) {
    std::vector<int32_t> gathered, own;
    for (const Rows& rows : rows_[peer])
      for (int64_t i = 0; i < rows.count; ++i)
        gathered.push_back(static_cast<int32_t>(rows.gathered + i * rows.stride));
    for (const Rows& rows : rows_[rank_])
      for (int64_t i = 0; i < rows.count; ++i)
        own.push_back(static_cast<int32_t>((rows.own + i) * cp + peer));
    gathered_rows_.push_back(upload(gathered));
    own_blocks_.push_back(upload(own));
  }
  stream_.synchronize();
}

void HeadTransfer::overwrite(std::byte value) {
  for (Buffer<std::byte>& array : arrays_) stream_.fill(array.data(), value, array.size());
}

template <class Body>
void HeadTransfer::for_each_row(const HeadExchange& step, bool of_gathered, int peer,
                                const RecurrenceData& own, Body body) const {
  for (const RecurrenceArray array : step.arrays) {
    const MatrixRef& gathered = gathered_[array];
    const MatrixRef matrix =
        of_gathered ? gathered : own[array].columns_from(peer * gathered.cols, gathered.cols);
    for (const Rows& rows : rows_[of_gathered ? peer : rank_])
      for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t row = of_gathered ? rows.gathered + i * rows.stride : rows.own + i;
        body(std::span(matrix.rows_from(row, 1).data, matrix.cols * size_of(matrix.type)));
      }
  }
}

int64_t HeadTransfer::bytes_of(const HeadExchange& step, bool of_gathered, int peer) const {
  int64_t rows = 0, bytes = 0;
  for (const Rows& run : rows_[of_gathered ? peer : rank_]) rows += run.count;
  for (const RecurrenceArray array : step.arrays)
    bytes += rows * gathered_[array].cols * size_of(gathered_[array].type);
  return bytes;
}

void HeadTransfer::copy_on_device(const HeadExchange& step, bool of_gathered, int peer,
                                  const RecurrenceData& own, std::byte* packed, bool pack) {
  const Buffer<int32_t>& map = (of_gathered ? gathered_rows_ : own_blocks_)[peer];
  for (const RecurrenceArray array : step.arrays) {
    const MatrixRef& gathered = gathered_[array];
    const int64_t width = gathered.cols * size_of(gathered.type);
    const MatrixRef& rows = of_gathered ? gathered : own[array];
    const int64_t all = of_gathered ? rows.rows : rows.rows * std::ssize(rows_);
    if (pack)
      gather_rows(stream_, packed, rows.data, map.data(), map.size(), all, width);
    else
      scatter_rows(stream_, rows.data, packed, map.data(), map.size(), all, width);
    packed += map.size() * width;
  }
}

void HeadTransfer::copy(const HeadExchange& step, bool of_gathered, int peer,
                        const RecurrenceData& own, std::byte* packed, bool pack) {
  if (stream_.space() == MemorySpace::device)
    return copy_on_device(step, of_gathered, peer, own, packed, pack);
  for_each_row(step, of_gathered, peer, own, [&](std::span<std::byte> row) {
    std::memcpy(pack ? packed : row.data(), pack ? row.data() : packed, row.size());
    packed += row.size();
  });
}

WorkPtr HeadTransfer::start(const HeadExchange& step, const RecurrenceData& own,
                            Communicator& group) {
  int64_t leaving = 0, arriving = 0;
  for (int peer = 0; peer < std::ssize(rows_); ++peer) {
    leaving += send_bytes_[peer] = bytes_of(step, step.home, peer);
    arriving += recv_bytes_[peer] = bytes_of(step, !step.home, peer);
  }
  sent_ = Buffer<std::byte>(leaving, stream_.space());
  received_ = Buffer<std::byte>(arriving, stream_.space());
  std::byte* to = sent_.data();
  for (int peer = 0; peer < std::ssize(rows_); to += send_bytes_[peer++])
    copy(step, step.home, peer, own, to, true);
  return group.all_to_all_v(sent_.span(), send_bytes_, received_.span(), recv_bytes_, stream_,
                            step.home ? "heads for tokens" : "tokens for heads");
}

void HeadTransfer::finish(const HeadExchange& step, const RecurrenceData& own) {
  std::byte* from = received_.data();
  for (int peer = 0; peer < std::ssize(rows_); from += recv_bytes_[peer++])
    copy(step, !step.home, peer, own, from, false);
}

}  // namespace gyre

#include "recurrence/head_transfer.hpp"

#include <algorithm>
#include <cstring>

namespace gyre {

using state_step::HeadExchange;

RecurrenceData new_arrays(const RecurrenceShape& shape, DType type, int64_t rows,
                          std::vector<Buffer<std::byte>>& buffers) {
  RecurrenceData data;
  for (int a = 0; a < recurrence_arrays; ++a) {
    const auto array = static_cast<RecurrenceArray>(a);
    if (!has_array(shape, array)) continue;
    const DType stored = stored_type(array, type);
    const int64_t width = width_of(shape, array);
    buffers.emplace_back(rows * width * static_cast<int64_t>(size_of(stored)));
    data[array] = {buffers.back().data(), stored, rows, width, width};
  }
  return data;
}

HeadTransfer::HeadTransfer(const StatePlan& plan, const Layout& layout,
                           const RecurrenceShape& layer)
    : rank_(plan.rank), send_bytes_(layout.cp()), recv_bytes_(layout.cp()) {
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
  gathered_ = new_arrays(plan.computed(layer), plan.type, tokens, arrays_);
}

void HeadTransfer::overwrite(std::byte value) {
  for (Buffer<std::byte>& array : arrays_) std::ranges::fill(array.span(), value);
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

WorkPtr HeadTransfer::start(const HeadExchange& step, const RecurrenceData& own,
                            Communicator& group, Stream& stream) {
  sent_.clear();
  std::ranges::fill(recv_bytes_, 0);
  for (int peer = 0; peer < std::ssize(rows_); ++peer) {
    const size_t before = sent_.size();
    for_each_row(step, step.home, peer, own, [&](std::span<const std::byte> row) {
      sent_.insert(sent_.end(), row.begin(), row.end());
    });
    send_bytes_[peer] = static_cast<int64_t>(sent_.size() - before);
    for_each_row(step, !step.home, peer, own,
                 [&](std::span<const std::byte> row) { recv_bytes_[peer] += std::ssize(row); });
  }
  int64_t arriving = 0;
  for (const int64_t bytes : recv_bytes_) arriving += bytes;
  received_.resize(arriving);
  return group.all_to_all_v(sent_, send_bytes_, received_, recv_bytes_, stream,
                            step.home ? "heads for tokens" : "tokens for heads");
}

void HeadTransfer::finish(const HeadExchange& step, const RecurrenceData& own) {
  const std::byte* from = received_.data();
  for (int peer = 0; peer < std::ssize(rows_); ++peer)
    for_each_row(step, !step.home, peer, own, [&](std::span<std::byte> row) {
      std::memcpy(row.data(), from, row.size());
      from += row.size();
    });
}

}  // namespace gyre

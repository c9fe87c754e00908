#include "attention/kernels/cuda_ragged_tables.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/kernels/reversed_rows.hpp"

namespace gyre {
namespace {

/// Concatenates tables, each 16-byte aligned.
class TableWriter {
 public:
  template <class T>
  int64_t add(std::span<const T> values) {
    const auto begin = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(begin + values.size_bytes());
    if (!values.empty()) std::memcpy(bytes_.data() + begin, values.data(), values.size_bytes());
    return begin;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// Writes rounds into the tables; their `pieces` are set once these are in device memory.
class RoundsWriter {
 public:
  explicit RoundsWriter(TableWriter& tables) : tables_(tables) {}
  void add(const Round& round, DeviceRound& to) {
    to.count = std::ssize(round);
    for (const RowPiece& p : round) to.longest = std::max(to.longest, p.length);
    if (!round.empty()) added_.emplace_back(&to, tables_.add<RowPiece>(round));
  }
  void add(const std::vector<Round>& rounds, std::vector<DeviceRound>& to) {
    to.resize(rounds.size());
    for (size_t i = 0; i < rounds.size(); ++i) add(rounds[i], to[i]);
  }
  void place(const std::byte* device) const {
    for (const auto& [round, begin] : added_)
      round->pieces = reinterpret_cast<const RowPiece*>(device + begin);
  }

 private:
  TableWriter& tables_;
  std::vector<std::pair<DeviceRound*, int64_t>> added_;
};

/// `batch` is ready.batch after filled_up().
void add_tables(TableWriter& writer, const TableSizes& sizes, const RaggedBatch& batch,
                PreparedBatch& ready) {
  using Id = AttentionTensor;
  const auto lengths = [&](Id id, RaggedRows rows) {
    ready.tables[id] = {writer.add<int32_t>(ragged_lengths(batch, rows)), 0, 0};
  };
  const auto offsets = [&](TablePlaces& to, Id id, RaggedRows rows, int64_t stride) {
    const std::vector<int64_t> values = ragged_offsets(batch, rows, stride);
    to[id] = {writer.add<int64_t>(values), first_row(batch, rows) * stride, values.front()};
  };
  lengths(Id::q_lengths, RaggedRows::q);
  lengths(Id::k_lengths, RaggedRows::k);
  offsets(ready.tables, Id::q_offsets, RaggedRows::q, sizes.q);
  offsets(ready.tables, Id::k_offsets, RaggedRows::k, sizes.k);
  offsets(ready.tables, Id::v_offsets, RaggedRows::k, sizes.v);
  offsets(ready.tables, Id::d_out_offsets, RaggedRows::q, sizes.d_out);
  // Backward, out and lse have one row per query, for all entries that contain it.
  const RaggedRows results = sizes.backward ? RaggedRows::q : RaggedRows::scratch_q;
  offsets(ready.tables, Id::out_offsets, results, sizes.out_columns);
  offsets(ready.tables, Id::lse_offsets, results, sizes.heads);
  offsets(ready.tables, Id::d_q_offsets, RaggedRows::scratch_q, sizes.q_columns);
  offsets(ready.tables, Id::d_k_offsets, RaggedRows::scratch_k, sizes.k_columns);
  offsets(ready.tables, Id::d_v_offsets, RaggedRows::scratch_k, sizes.v_columns);
  ready.gathered[Id::k_offsets] = ready.tables[Id::d_k_offsets];
  ready.gathered[Id::v_offsets] = ready.tables[Id::d_v_offsets];
  offsets(ready.in_place, Id::out_offsets, RaggedRows::q, sizes.out);
  offsets(ready.in_place, Id::lse_offsets, RaggedRows::q, sizes.lse);
  offsets(ready.in_place, Id::d_q_offsets, RaggedRows::q, sizes.d_q);
}

/// Round that maps the keys of each entry to rows of a scratch array.
Round keys_gathered(const RaggedBatch& batch) {
  Round round;
  for (const RaggedEntry& e : batch.entries)
    for (int64_t i = 0; i < e.k_length; i += longest_piece)
      round.push_back({e.k_row + i, e.k_begin + i, std::min(longest_piece, e.k_length - i)});
  return round;
}

}  // namespace

BatchArrays::BatchArrays(const ReadyPlan& plan, const PreparedBatch& ready, bool even)
    : plan_(plan), ready_(ready), even_(even) {
  using enum AttentionTensor;
  if (even_) return;
  for (const AttentionTensor id : {q_lengths, k_lengths}) addresses_[id] = table(id, ready.tables);
}

void BatchArrays::add_inputs(ConstMatrixRef q, ConstMatrixRef k, ConstMatrixRef v) {
  using Id = AttentionTensor;
  add(Id::q, q, Id::q_offsets, ready_.tables);
  add(Id::k, k, Id::k_offsets, ready_.tables);
  add(Id::v, v, Id::v_offsets, ready_.tables);
}

void BatchArrays::add(AttentionTensor id, ConstMatrixRef m, AttentionTensor table_id,
                      const TablePlaces& tables) {
  const TablePlace& place = tables.at(table_id);
  const int64_t element = place.base + (even_ ? place.first : 0);
  addresses_[id] = const_cast<std::byte*>(m.data) + element * size_of(m.type);
  if (!even_) addresses_[table_id] = table(table_id, tables);
}

void* BatchArrays::table(AttentionTensor id, const TablePlaces& tables) const {
  return const_cast<std::byte*>(plan_.device.data()) + tables.at(id).begin;
}

std::unique_ptr<ReadyPlan> make_ready(std::span<const Rectangle> rectangles,
                                      const TableSizes& sizes, bool fixed_tiles,
                                      const AttentionLibrary& library, Stream& stream) {
  RaggedPlan ragged = plan_of_call(rectangles, fixed_tiles, std::max(sizes.rows, sizes.keys));
  const FirstWriters q = first_writers(ragged.batches, RaggedRows::q, sizes.rows),
                     k = first_writers(ragged.batches, RaggedRows::k, sizes.keys);
  auto plan = std::make_unique<ReadyPlan>();
  plan->rectangles.assign(rectangles.begin(), rectangles.end());
  plan->sizes = sizes;
  plan->fixed_tiles = fixed_tiles;
  plan->others = std::move(ragged.others);
  plan->reasons = ragged.reasons;
  TableWriter writer;
  RoundsWriter rounds(writer);
  plan->batches.resize(ragged.batches.size());  // rounds must not move after this
  for (size_t i = 0; i < plan->batches.size(); ++i) {
    PreparedBatch& ready = plan->batches[i];
    ready.batch = std::move(ragged.batches[i]);
    if (ready.batch.longest_q >= library.least_even_queries()) ready.even = even_batch(ready.batch);
    ready.first_q = q.first[i];
    ready.first_k = k.first[i];
    const RaggedBatch batch = filled_up(ready.batch);
    ready.limits = limits_of(batch);
    ready.entries = std::ssize(batch.entries);
    ready.q_rows = batch.q_rows;
    ready.k_rows = batch.k_rows;
    add_tables(writer, sizes, batch, ready);
    rounds.add(query_rounds(ready.batch), ready.q_rounds);
    rounds.add(key_rounds(ready.batch), ready.k_rounds);
    if (sizes.backward && sizes.q_columns == sizes.k_columns)
      rounds.add(keys_gathered(batch), ready.gathered_keys);
  }
  ReversedRows reversed = reversed_rows(ragged.inverse);
  plan->reversed.rectangles = std::move(reversed.rectangles);
  plan->reversed.q_rows = reversed.q_rows;
  plan->reversed.k_rows = reversed.k_rows;
  rounds.add(exchanged(reversed.queries), plan->reversed.q_reads);
  rounds.add(exchanged(reversed.keys), plan->reversed.k_reads);
  rounds.add(reversed.queries, plan->reversed.q_writes);
  rounds.add(reversed.keys, plan->reversed.k_writes);
  rounds.add(q.rest, plan->q_rest);
  rounds.add(k.rest, plan->k_rest);
  rounds.add(q.touched, plan->q_touched);
  rounds.add(q.outside, plan->q_outside);
  rounds.add(k.outside, plan->k_outside);

  const std::vector<std::byte>& bytes = writer.bytes();
  if (bytes.empty()) return plan;
  plan->pinned = Buffer<std::byte>(std::ssize(bytes), MemorySpace::pinned);
  plan->device = Buffer<std::byte>(std::ssize(bytes), MemorySpace::device);
  std::memcpy(plan->pinned.data(), bytes.data(), bytes.size());
  stream.copy(plan->device.data(), plan->pinned.data(), bytes.size());
  rounds.place(plan->device.data());
  return plan;
}

}  // namespace gyre

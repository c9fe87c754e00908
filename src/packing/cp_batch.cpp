#include "packing/cp_batch.hpp"

#include <algorithm>
#include <numeric>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

void check_rank(int cp, int rank) {
  if (cp < 1) throw_usage("cp must be at least 1, not {}", cp);
  if (rank < 0 || rank >= cp) throw_usage("rank {} of cp {}; ranks are 0 to {}", rank, cp, cp - 1);
}

void check_request(const BshdBatch& batch, const CpOptions& options) {
  if (options.qkv_format != "thd")
    throw_usage("qkv_format '{}' cannot be cut for context parallelism; only 'thd' can",
                options.qkv_format);
  check_rank(options.cp, options.rank);
  const auto need = [](bool present, const char* name) {
    if (!present) throw_usage("the batch has no {}; packed context parallelism needs it", name);
  };
  need(batch.seq_lens.has_value(), "seq_lens");
  need(batch.seq_lens_padded.has_value(), "seq_lens_padded");
  need(batch.positions.has_value(), "position_ids");
}

ThdOptions thd_options(const CpOptions& options) {
  ThdOptions thd;
  thd.sentinel = options.sentinel;
  thd.pad_id = options.pad_id;
  thd.allow_undeclared_tail = options.allow_undeclared_tail;
  thd.tail = options.tail.value_or(options.cp == 1 ? Tail::absorb : Tail::own_segment);
  if (options.cp > 1) thd.slot_multiple = find_layout(options.layout).segment_multiple(options.cp);
  return thd;
}

/// A batch with the metadata of the whole stream only; equal on all ranks, except for cp_rank.
CpBatch stream_metadata(const ThdBatch& stream, int cp, int rank) {
  const SegmentBounds bounds = stream.bounds();
  CpBatch batch;
  batch.cp_size = cp;
  batch.cp_rank = rank;
  batch.cu_seqlens.assign(bounds.real.begin(), bounds.real.end());
  batch.cu_seqlens_padded.assign(bounds.padded.begin(), bounds.padded.end());
  for (int64_t i = 0; i < bounds.segments(); ++i)
    batch.max_seqlen = std::max(batch.max_seqlen, static_cast<int32_t>(bounds.slot_length(i)));
  batch.absorbed = stream.absorbed;
  return batch;
}

/// The whole stream as the part of a single rank.
CpBatch whole_stream(ThdBatch stream) {
  CpBatch batch = stream_metadata(stream, 1, 0);
  batch.index.resize(stream.slots);
  std::iota(batch.index.begin(), batch.index.end(), 0);
  batch.local = LocalBounds{batch.cu_seqlens, batch.cu_seqlens_padded};
  batch.inputs = std::move(stream.inputs);
  batch.labels = std::move(stream.labels);
  batch.positions = *std::move(stream.positions);
  batch.padding_mask = std::move(stream.padding_mask);
  batch.extras = std::move(stream.extras);
  return batch;
}

CpBatch take_part(ThdBatch stream, const CpOptions& options) {
  if (options.cp == 1) return whole_stream(std::move(stream));
  LayoutOptions layout = options.layout_options;
  layout.cp = options.cp;
  // Slots after the last boundary would belong to no rank; shard_thd reports them.
  return shard_thd(stream, find_layout(options.layout).make(stream.bounds(), layout), options.rank,
                   options.pad_id);
}

/// The rank's slots of an array of the stream, with `row` values each; appended slots get `fill`.
template <class T>
std::vector<T> part_of(const Layout& layout, int rank, std::span<const T> stream, int64_t row,
                       T fill) {
  std::vector<T> local(layout.shard(rank).slots * row);
  shard_rows<T>(layout, rank, stream, local, row, fill);
  return local;
}

TokenInputs part_of_inputs(const Layout& layout, int rank, const TokenInputs& inputs,
                           int64_t pad_id) {
  if (const auto* ids = std::get_if<TokenIds>(&inputs))
    return part_of<int64_t>(layout, rank, *ids, 1, pad_id);
  const auto& [hidden, values] = std::get<TokenEmbeddings>(inputs);
  return TokenEmbeddings{hidden, part_of<float>(layout, rank, values, hidden, 0.0F)};
}

PositionIds part_of_positions(const Layout& layout, int rank, const PositionIds& positions,
                              int64_t slots) {
  PositionIds local{positions.axes, {}};
  for (int64_t axis = 0; axis < positions.axes; ++axis) {
    const auto stream = std::span(positions.values).subspan(axis * slots, slots);
    const auto mine = part_of<int64_t>(layout, rank, stream, 1, 0);
    local.values.insert(local.values.end(), mine.begin(), mine.end());
  }
  return local;
}

std::vector<std::byte> part_of_bytes(const Layout& layout, int rank, const Extra& extra) {
  std::vector<std::byte> local(layout.shard(rank).slots * extra.item_bytes);
  detail::shard_bytes(layout, rank, *extra.bytes, padding_element(extra.fill), local,
                      extra.item_bytes);
  return local;
}

Extras part_of_extras(const Layout& layout, int rank, const Extras& extras) {
  Extras local;
  for (const auto& [name, extra] : extras) {
    if (name == attention_mask_extra) continue;
    Extra mine = extra;
    if (extra.aligned == Extra::Aligned::slots)
      mine.bytes =
          std::make_shared<const std::vector<std::byte>>(part_of_bytes(layout, rank, extra));
    local.emplace(name, std::move(mine));
  }
  return local;
}

/// FNV-1a over arrays and their lengths.
class Digest {
 public:
  template <class T>
  void add(const std::vector<T>& values) {
    const uint64_t size = values.size();
    add_bytes(std::as_bytes(std::span<const uint64_t>(&size, 1)));
    add_bytes(std::as_bytes(std::span<const T>(values)));
  }
  int64_t value() const { return hash_; }

 private:
  void add_bytes(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes)
      hash_ = (hash_ ^ static_cast<uint64_t>(byte)) * 0x100000001b3ULL;
  }
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

}  // namespace

std::optional<LocalBounds> local_bounds(const SegmentBounds& bounds,
                                        std::span<const int32_t> index) {
  const std::vector<int32_t> segment_of = segment_ids(bounds.padded);
  const size_t segments = bounds.segments();
  std::vector<int32_t> real(segments, 0), slots(segments, 0);
  int32_t current = 0;
  bool past_the_stream = false;
  for (const int32_t slot : index) {
    if (slot >= bounds.slots()) {
      past_the_stream = true;
      continue;
    }
    const int32_t segment = segment_of[slot];
    if (past_the_stream || segment < current) return std::nullopt;
    current = segment;
    const size_t i = segment;
    if (slot - bounds.begin(segment) < bounds.real_length(segment)) {
      if (real[i] < slots[i]) return std::nullopt;  // a real token after padding
      ++real[i];
    }
    ++slots[i];
  }
  LocalBounds local{{0}, {0}};
  for (size_t i = 0; i < segments; ++i) {
    local.cu_seqlens.push_back(local.cu_seqlens.back() + real[i]);
    local.cu_seqlens_padded.push_back(local.cu_seqlens_padded.back() + slots[i]);
  }
  return local;
}

CpBatch shard_thd(const ThdBatch& stream, const Layout& layout, int rank, int64_t pad_id) {
  check_rank(layout.cp(), rank);
  if (!stream.cu_seqlens)
    throw_usage("the stream has no boundaries (seq_lens); sharding needs them");
  if (!stream.positions) throw_usage("the stream has no position_ids; sharding needs them");
  const SegmentBounds bounds = stream.bounds();
  if (bounds.slots() != stream.slots)
    throw_usage(
        "the boundaries end at slot {} of {}; make the slots behind them a segment of real length "
        "0 (Tail::own_segment)",
        bounds.slots(), stream.slots);
  if (layout.stream_slots != stream.slots)
    throw_usage("the layout is one of {} slots, the stream has {}", layout.stream_slots,
                stream.slots);
  CpBatch batch = stream_metadata(stream, layout.cp(), rank);
  batch.index = shard_index(layout, rank);
  batch.inputs = part_of_inputs(layout, rank, stream.inputs, pad_id);
  batch.labels = part_of<int64_t>(layout, rank, stream.labels, 1, ignored_label);
  batch.positions = part_of_positions(layout, rank, *stream.positions, stream.slots);
  batch.padding_mask = part_of<uint8_t>(layout, rank, stream.padding_mask, 1, uint8_t{1});
  batch.local = local_bounds(bounds, batch.index);
  batch.extras = part_of_extras(layout, rank, stream.extras);
  return batch;
}

CpBatch make_cp_batch(BshdBatch batch, const CpOptions& options) {
  check_request(batch, options);
  return take_part(to_thd(std::move(batch), thd_options(options)), options);
}

std::vector<CpBatch> make_cp_chunks(const BshdBatch& batch, int64_t chunks,
                                    const CpOptions& options) {
  check_request(batch, options);
  std::vector<CpBatch> parts;
  for (ThdBatch& chunk : split_into_chunks(batch, chunks, thd_options(options)))
    parts.push_back(take_part(std::move(chunk), options));
  return parts;
}

void agree_on_batch(Communicator& comm, const BshdBatch& batch) {
  Digest inputs, others, extras;
  if (const auto* ids = std::get_if<TokenIds>(&batch.inputs))
    inputs.add(*ids);
  else
    inputs.add(std::get<TokenEmbeddings>(batch.inputs).values);
  others.add(batch.labels);
  if (batch.positions) others.add(batch.positions->values);
  for (const auto* table : {&batch.seq_lens, &batch.seq_lens_padded})
    if (*table) others.add((*table)->cells);
  for (const auto& [name, extra] : batch.extras) {
    extras.add(std::vector<char>(name.begin(), name.end()));
    if (extra.bytes) extras.add(*extra.bytes);
  }
  agree_on_arguments(comm, "sharding a batch", [] {},
                     {{"the number of rows", batch.rows},
                      {"the number of slots", batch.slots},
                      {"the digest of the inputs", inputs.value()},
                      {"the digest of labels, positions and lengths", others.value()},
                      {"the digest of the extras", extras.value()}});
}

std::array<PositionRange, 2> rope_slices(int64_t local_slots, int cp, int rank) {
  check_rank(cp, rank);
  if (local_slots < 0)
    throw_usage("a rank cannot have {} slots of a segment; the least is 0", local_slots);
  if (local_slots % 2 != 0)
    throw_usage(
        "a rank's {} slots of a segment are not two equal chunks; the nearest are {} and {}",
        local_slots, local_slots - 1, local_slots + 1);
  const int64_t chunk = local_slots / 2, end = cp * local_slots;
  return {{{rank * chunk, (rank + 1) * chunk}, {end - (rank + 1) * chunk, end - rank * chunk}}};
}

}  // namespace gyre

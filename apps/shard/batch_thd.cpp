// Batches as streams of segments: checks each rank's part against the definition of its slots.

#include <fmt/format.h>

#include <algorithm>

#include "apps/common/bshd_rows.hpp"
#include "apps/common/extras.hpp"
#include "apps/shard/batch.hpp"
#include "packing/cp_batch.hpp"

namespace gyre {
namespace {

/// One rank's part of one stream, and the data to compare it with.
struct PartView {
  const BshdArrays& arrays;
  const BshdBatch& batch;
  const std::vector<uint8_t>& real;  ///< mask of real tokens of all rows
  const CpBatch& part;
  size_t first_row = 0, rows = 0;  ///< row range of the stream
  std::string name;                ///< "stream 0 rank 1"
  /// Index of the slot among the slots of all rows.
  size_t whole(int32_t slot) const {
    return first_row * static_cast<size_t>(arrays.slots) + static_cast<size_t>(slot);
  }
};

/// Checks that the slots are those of dual-chunk-swap over the boundaries.
void check_index(Check& check, const PartView& view) {
  const CpBatch& part = view.part;
  std::vector<int32_t> expected;
  const SegmentBounds bounds = part.bounds();
  for (int64_t i = 0; i < bounds.segments(); ++i)
    for (int64_t t = 0; t < bounds.slot_length(i) / part.cp_size; ++t)
      expected.push_back(static_cast<int32_t>(
          swapped_slot(bounds.begin(i), bounds.slot_length(i), part.cp_size, part.cp_rank, t)));
  check.add_all(part.index, expected, view.name + " slots");
}

/// Checks that every array holds the values of the rows at the part's slots.
void check_contents(Check& check, const PartView& view) {
  const CpBatch& part = view.part;
  const PositionIds& positions = *view.batch.positions;
  const size_t slots = std::ssize(part.index);
  const size_t all = view.arrays.rows * view.arrays.slots;
  const auto compare = [&](double actual, double expected, const char* array, size_t t) {
    check.add(actual, expected, [&] { return fmt::format("{} {}[{}]", view.name, array, t); });
  };
  const size_t hidden = std::max<int64_t>(1, view.arrays.hidden);
  for (size_t t = 0; t < slots; ++t) {
    if (part.index[t] >= part.bounds().slots()) continue;  // padding of the layout
    const size_t from = view.whole(part.index[t]);
    compare(part.labels[t], view.arrays.labels[from], "labels", t);
    compare(part.padding_mask[t], 1 - view.real[from], "padding_mask", t);
    for (size_t axis = 0; axis < static_cast<size_t>(positions.axes); ++axis)
      compare(part.positions.values[axis * slots + t], positions.values[axis * all + from],
              "positions", t);
    if (const auto* ids = std::get_if<TokenIds>(&part.inputs))
      compare((*ids)[t], view.arrays.ids[from], "ids", t);
    else
      for (size_t h = 0; h < hidden; ++h)
        compare(std::get<TokenEmbeddings>(part.inputs).values[t * hidden + h],
                view.arrays.embeddings[from * hidden + h], "embeddings", t * hidden + h);
  }
}

/// An extra to test with, for rows without extras: the mask of slots that have a label.
Extra loss_mask_of(const std::vector<int64_t>& labels) {
  std::vector<uint8_t> mask;
  for (const int64_t label : labels) mask.push_back(label != ignored_label ? 1 : 0);
  return make_extra(std::span<const uint8_t>(mask), Extra::Aligned::slots);
}

/// Checks that each slot has the extra of the rows' slot, or its padding where the layout pads.
void check_slot_extra(Check& check, const PartView& view, const std::string& name,
                      const Extra& whole) {
  const std::vector<std::byte>& mine = *view.part.extras.at(name).bytes;
  const size_t width = whole.item_bytes;
  const size_t slots = view.rows * static_cast<size_t>(view.arrays.slots);  // slots of the stream
  if (mine.size() != view.part.index.size() * width)
    return check.add_failure(fmt::format("{} {} of {} bytes", view.name, name, mine.size()));
  for (size_t i = 0; i < mine.size(); ++i) {
    const int32_t slot = view.part.index[i / width];
    const bool given = static_cast<size_t>(slot) < slots;
    const size_t there = given ? view.whole(slot) * width + i % width : 0;
    check.add(
        static_cast<double>(mine[i]),
        static_cast<double>(given ? (*whole.bytes)[there] : padding_byte(whole.fill, i)),
        [&] { return fmt::format("{} {}[{}] byte {}", view.name, name, i / width, i % width); });
  }
}

/// Checks the extras: those of slots, those of the stream's rows, and those that stay whole. A part
/// of several ranks has no attention mask.
void check_extras(Check& check, const PartView& view) {
  for (const auto& [name, whole] : view.batch.extras) {
    const auto where = [&, &name = name] { return fmt::format("{} {}", view.name, name); };
    const bool is_there = view.part.extras.contains(name);
    const bool wanted = view.part.cp_size == 1 || name != attention_mask_extra;
    check.add(is_there ? 1 : 0, wanted ? 1 : 0, where);
    if (!is_there || !wanted) continue;
    if (whole.aligned == Extra::Aligned::slots) {
      check_slot_extra(check, view, name, whole);
      continue;
    }
    std::span<const std::byte> expected = *whole.bytes;
    const size_t width = whole.item_bytes;
    if (whole.aligned == Extra::Aligned::rows)
      expected = expected.subspan(view.first_row * width, view.rows * width);
    compare_bytes(check, *view.part.extras.at(name).bytes, expected, where());
  }
}

/// Checks the part's own boundaries: real tokens (counted in the mask) and slots per segment.
void check_local_bounds(Check& check, const PartView& view) {
  const CpBatch& part = view.part;
  if (!part.local || part.absorbed) return;  // absorbed padding counts as real in the boundaries
  const SegmentBounds local = part.local->view();
  for (int64_t i = 0; i < local.segments(); ++i) {
    int64_t tokens = 0;
    for (int64_t t = local.begin(i); t < local.begin(i) + local.slot_length(i); ++t)
      tokens += view.real[view.whole(part.index[t])];
    check.add(local.real_length(i), tokens,
              [&] { return fmt::format("{} segment {}", view.name, i); });
  }
}

/// Checks that a rank reads the rows of a rotary table that are its positions in each segment.
void check_rotary_rows(Check& check, const PartView& view) {
  const CpBatch& part = view.part;
  if (!part.local) return;
  const SegmentBounds local = part.local->view(), bounds = part.bounds();
  for (int64_t i = 0; i < local.segments(); ++i) {
    size_t t = local.begin(i);
    for (const PositionRange& range : rope_slices(local.slot_length(i), part.cp_size, part.cp_rank))
      for (int64_t position = range.begin; position < range.end; ++position, ++t)
        check.add(position, part.index[t] - bounds.begin(i),
                  [&] { return fmt::format("{} local slot {}", view.name, t); });
  }
}

/// Counts pairs: a real token sees itself and the real tokens before it in its segment.
RankPart counted(const CpBatch& part) {
  RankPart counts;
  counts.rank = part.cp_rank;
  counts.slots = std::ssize(part.index);
  counts.tokens = count_real_tokens(part.padding_mask);
  counts.loss = stand_in_loss(part.labels);
  const std::vector<int32_t> segment = segment_ids(part.cu_seqlens_padded);
  for (size_t t = 0; t < part.index.size(); ++t) {
    const int32_t slot = part.index[t];
    if (part.padding_mask[t] != 0) continue;
    counts.pairs += slot - part.bounds().begin(segment[slot]) + 1;
  }
  return counts;
}

CpOptions cp_options(const BshdArrays& arrays, const BatchJob& job, int rank) {
  CpOptions options;
  options.qkv_format = job.options.format;
  options.cp = job.cp;
  options.rank = rank;
  options.layout = job.layout;
  options.layout_options = job.layout_options;
  options.sentinel = arrays.sentinel;
  const std::string& tail = job.options.tail;
  options.tail = tail_of(arrays, !tail.empty() ? tail : job.cp == 1 ? "absorb" : "own-segment");
  return options;
}

}  // namespace

StreamParts shard_streams(const BshdArrays& arrays, const BatchJob& job, Communicator& world,
                          Verification& checks) {
  BshdBatch batch = batch_of(arrays);
  if (!batch.seq_lens) add_tables_of_rows(batch, arrays, job.options.chunks);
  if (!batch.seq_lens_padded) batch.seq_lens_padded = batch.seq_lens;
  if (batch.extras.empty()) batch.extras["loss_mask"] = loss_mask_of(arrays.labels);
  const std::vector<uint8_t> real = real_slots(arrays);
  const bool swapped = job.layout == default_layout().name && job.cp > 1;
  Check& contents = checks.check("contents", 0);
  Check& extras = arrays.extras.empty() ? contents : checks.check("extras", 0);
  Check* index = swapped ? &checks.check("slots of ranks", 0) : nullptr;
  Check* local = swapped ? &checks.check("local boundaries", 0) : nullptr;
  Check* rotary = swapped ? &checks.check("rotary rows", 0) : nullptr;
  for (Check* check : {&contents, &extras, index, local, rotary})
    if (check != nullptr) check->add_nothing();  // a rank may have no part or no token
  // More chunks than rows are refused below.
  StreamParts streams(std::min(job.options.chunks, std::max<int64_t>(1, arrays.rows)));
  for (const int rank : ranks_of(world, job.cp)) {
    const CpOptions options = cp_options(arrays, job, rank);
    std::vector<CpBatch> parts;
    if (job.options.chunks == 1)
      parts.push_back(make_cp_batch(batch, options));
    else
      parts = make_cp_chunks(batch, job.options.chunks, options);
    for (size_t s = 0; s < parts.size(); ++s) {
      const size_t rows = static_cast<size_t>(arrays.rows) / parts.size();
      const PartView view{.arrays = arrays,
                          .batch = batch,
                          .real = real,
                          .part = parts[s],
                          .first_row = s * rows,
                          .rows = rows,
                          .name = fmt::format("stream {} rank {}", s, rank)};
      check_contents(contents, view);
      check_extras(extras, view);
      if (swapped) {
        check_index(*index, view);
        check_local_bounds(*local, view);
        check_rotary_rows(*rotary, view);
      }
      streams[s].push_back(counted(parts[s]));
    }
  }
  return streams;
}

}  // namespace gyre

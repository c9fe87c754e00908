// Batches as rows with a key mask: checks each rank's part against the definition of its slots.

#include <fmt/format.h>

#include <algorithm>

#include "apps/common/array_output.hpp"
#include "apps/common/bshd_rows.hpp"
#include "apps/shard/batch.hpp"
#include "core/label.hpp"
#include "packing/padding.hpp"
#include "sharding/bshd.hpp"
#include "sharding/distributed.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

/// The rows as arguments of shard_bshd. T is the type of the inputs.
template <class T>
struct Rows {
  const BshdArrays& arrays;
  std::vector<int64_t> mask;
  explicit Rows(const BshdArrays& from) : arrays(from) {
    const std::vector<uint8_t> real = real_slots(from);
    mask.assign(real.begin(), real.end());
  }
  const std::vector<T>& inputs() const {
    if constexpr (std::is_same_v<T, float>)
      return arrays.embeddings;
    else
      return arrays.ids;
  }
  int64_t hidden() const { return std::max<int64_t>(1, arrays.hidden); }
  BshdShard<T> shard(const BatchJob& job, int rank) const {
    return shard_bshd<T>(inputs(), mask, arrays.labels, arrays.rows, hidden(), job.cp, rank,
                         job.options.tp);
  }
};

PadPositions kind_of(const std::string& name) {
  if (name == "counting") return PadPositions::counting;
  return name == "zero" ? PadPositions::zero : PadPositions::restarted;
}

/// The position of the padding slot `behind` slots after the end of a row.
int64_t padded_position(const std::string& kind, int64_t last, int64_t behind) {
  if (kind == "counting") return last + 1 + behind;
  return kind == "zero" ? 0 : behind;
}

/// Checks that the rank's slots of each row are chunks `rank` and 2·cp-1-rank of the padded width.
/// New padding is 0, is no key and has no label.
template <class T>
void check_shard(Check& check, const Rows<T>& rows, const BshdShard<T>& shard, const BatchJob& job,
                 int rank) {
  const BshdArrays& arrays = rows.arrays;
  const int64_t unit = int64_t{2} * job.cp * job.options.tp;
  const int64_t width = (arrays.slots + unit - 1) / unit * unit, count = width / job.cp;
  const int64_t hidden = rows.hidden();
  check.add(shard.slots(), count, [&] { return fmt::format("slots of rank {}", rank); });
  if (shard.slots() != count) return;
  for (int64_t b = 0; b < arrays.rows; ++b)
    for (int64_t t = 0; t < count; ++t) {
      const int64_t slot = swapped_slot(0, width, job.cp, rank, t);
      const bool given = slot < arrays.slots;
      const size_t here = b * count + t;
      const size_t there = b * arrays.slots + slot;
      const auto where = [&] { return fmt::format("rank {} row {} slot {}", rank, b, slot); };
      check.add(shard.key_mask[here], given ? static_cast<double>(rows.mask[there]) : 0, where);
      check.add(static_cast<double>(shard.targets[here]),
                static_cast<double>(given ? arrays.labels[there] : ignored_label), where);
      for (int64_t h = 0; h < hidden; ++h)
        check.add(
            static_cast<double>(shard.inputs[here * static_cast<size_t>(hidden) + h]),
            given ? static_cast<double>(rows.inputs()[there * static_cast<size_t>(hidden) + h]) : 0,
            where);
    }
}

/// Positions of the rank's slots, [axes, batch, slots]: those of each row, padded as in the options
/// and cut like the row.
std::vector<int64_t> cut_positions(const PositionIds& positions, const BshdArrays& arrays,
                                   const Layout& layout, const std::string& kind, int rank) {
  std::vector<int64_t> all, mine(layout.slots_of_rank());
  for (int64_t row = 0; row < positions.axes * arrays.rows; ++row) {
    const auto begin = positions.values.begin() + row * arrays.slots;
    std::vector<int64_t> padded(begin, begin + arrays.slots);
    pad_positions(padded, layout.padded_slots, kind_of(kind));
    shard_rows<int64_t>(layout, rank, padded, mine);
    all.insert(all.end(), mine.begin(), mine.end());
  }
  return all;
}

/// Checks positions [axes, batch, slots] by the definition of the rank's slots.
void check_positions(Check& check, const PositionIds& positions, const std::vector<int64_t>& mine,
                     const BshdArrays& arrays, const Layout& layout, const std::string& kind,
                     int rank) {
  const int64_t count = layout.slots_of_rank();
  for (int64_t row = 0; row < positions.axes * arrays.rows; ++row) {
    const auto begin = positions.values.begin() + row * arrays.slots;
    const int64_t last = arrays.slots == 0 ? -1 : begin[arrays.slots - 1];
    for (int64_t t = 0; t < count; ++t) {
      const int64_t slot = swapped_slot(0, layout.padded_slots, layout.cp(), rank, t);
      const int64_t expected =
          slot < arrays.slots ? begin[slot] : padded_position(kind, last, slot - arrays.slots);
      check.add(mine[row * count + t], expected,
                [&] { return fmt::format("rank {} row {} slot {}", rank, row, slot); });
    }
  }
}

/// Checks that extras of slots are cut like the rows and padded. Others stay whole.
void check_extras(Check& check, const BshdArrays& arrays, const Layout& layout, int rank) {
  const size_t slots = arrays.slots;
  for (const auto& [name, stored] : arrays.extras) {
    if (stored.extra.aligned != Extra::Aligned::slots) continue;
    const size_t width = stored.extra.item_bytes;
    std::vector<std::byte> mine(static_cast<size_t>(layout.slots_of_rank()) * width);
    for (size_t row = 0; row < static_cast<size_t>(arrays.rows); ++row) {
      const auto given = std::span(*stored.extra.bytes).subspan(row * slots * width, slots * width);
      detail::shard_bytes(layout, rank, given, padding_element(stored.extra.fill), mine,
                          stored.extra.item_bytes);
      for (size_t i = 0; i < mine.size(); ++i) {
        const int64_t slot = swapped_slot(0, layout.padded_slots, layout.cp(), rank,
                                          static_cast<int64_t>(i / width));
        const size_t there = static_cast<size_t>(slot) * width + i % width;
        check.add(static_cast<double>(mine[i]),
                  static_cast<double>(slot < arrays.slots ? given[there]
                                                          : padding_byte(stored.extra.fill, i)),
                  [&, &name = name] {
                    return fmt::format("{} rank {} row {} slot {}", name, rank, row, slot);
                  });
      }
    }
  }
}

/// Counts pairs: a real token sees itself and the real keys before it in its row. Causality alone
/// leaves the padding before it visible, too.
template <class T>
RankPart counted(const Rows<T>& rows, const BshdShard<T>& shard, int rank) {
  RankPart part;
  part.rank = rank;
  part.slots = std::ssize(shard.key_mask);
  part.tokens = std::count(shard.key_mask.begin(), shard.key_mask.end(), uint8_t{1});
  part.loss = stand_in_loss(shard.targets);
  const std::vector<int32_t> index = shard_index(shard.layout, rank);
  const int64_t n = rows.arrays.slots;
  for (int64_t b = 0; b < rows.arrays.rows; ++b) {
    std::vector<int64_t> keys(static_cast<size_t>(n) + 1, 0);  // real keys before each slot
    for (size_t t = 0; t < static_cast<size_t>(n); ++t)
      keys[t + 1] = keys[t] + rows.mask[(b * n) + t];
    for (size_t t = 0; t < index.size(); ++t) {
      if (shard.key_mask[static_cast<size_t>(b) * index.size() + t] == 0) continue;
      const int64_t seen = keys[index[t] + 1];
      part.pairs += seen;
      part.hidden_pairs += index[t] + 1 - seen;
    }
  }
  return part;
}

template <class T>
void keep(KeptRows& kept, const BshdShard<T>& shard, const std::vector<int64_t>& positions,
          int rank) {
  const auto append = [](auto& all, const auto& part) {
    all.insert(all.end(), part.begin(), part.end());
  };
  append(kept.index, shard_index(shard.layout, rank));
  append(kept.key_mask, shard.key_mask);
  append(kept.labels, shard.targets);
  append(kept.positions, positions);
  if constexpr (std::is_same_v<T, float>)
    append(kept.embeddings, shard.inputs);
  else
    append(kept.ids, shard.inputs);
}

template <class T>
std::vector<RankPart> shard_rows_of(const Rows<T>& rows, const BatchJob& job, Communicator& world,
                                    Verification& checks, KeptRows* kept) {
  Check& contents = checks.check("rows, key masks, targets", 0);
  Check& positions = checks.check("positions", 0);
  Check* extras = rows.arrays.extras.empty() ? nullptr : &checks.check("extras", 0);
  for (Check* check : {&contents, &positions, extras})
    if (check != nullptr) check->add_nothing();  // a rank may have no part
  std::vector<RankPart> parts;
  const PositionIds whole = *batch_of(rows.arrays).positions;
  const std::string& kind = job.options.pad_positions;
  for (const int rank : ranks_of(world, job.cp)) {
    const BshdShard<T> shard = rows.shard(job, rank);
    const std::vector<int64_t> cut = cut_positions(whole, rows.arrays, shard.layout, kind, rank);
    check_shard(contents, rows, shard, job, rank);
    check_positions(positions, whole, cut, rows.arrays, shard.layout, kind, rank);
    if (extras != nullptr) check_extras(*extras, rows.arrays, shard.layout, rank);
    parts.push_back(counted(rows, shard, rank));
    if (kept == nullptr) continue;
    kept->axes = whole.axes;
    keep(*kept, shard, cut, rank);
  }
  return parts;
}

template <class T>
void check_gathered(const Rows<T>& rows, const BatchJob& job, Communicator& world, Check& check) {
  const BshdArrays& arrays = rows.arrays;
  const BshdShard<T> shard = rows.shard(job, world.rank());
  check.add_all(gather_batch<T>(shard.layout, world, shard.inputs, arrays.rows, rows.hidden()),
                rows.inputs(), "inputs");
  const std::vector<uint8_t> mask =
      gather_batch<uint8_t>(shard.layout, world, shard.key_mask, arrays.rows);
  check.add_all(mask, real_slots(arrays), "key_mask");
  check.add_all(gather_batch<int64_t>(shard.layout, world, shard.targets, arrays.rows),
                arrays.labels, "targets");
}

}  // namespace

StreamParts shard_key_masked_rows(const BshdArrays& arrays, const BatchJob& job,
                                  Communicator& world, Verification& checks, KeptRows* kept) {
  if (arrays.hidden > 0) return {shard_rows_of(Rows<float>(arrays), job, world, checks, kept)};
  return {shard_rows_of(Rows<int64_t>(arrays), job, world, checks, kept)};
}

ArrayFile row_shards_of(const KeptRows& kept, const BshdArrays& arrays, const BatchJob& job,
                        Communicator& world) {
  const int64_t slots = bshd_padded_width(arrays.slots, job.cp, job.options.tp) / job.cp;
  const h5::Shape tokens{job.cp, arrays.rows, slots};
  // A rank without a part does not know the axes.
  const int64_t axes = all_reduce_value(world, kept.axes, ReduceOp::max);
  ArrayFile file{row_shards_schema,
                 "/row_shards",
                 {{"cp", job.cp}, {"tp", job.options.tp}, {"hidden_size", arrays.hidden}},
                 {{"pad_positions", job.options.pad_positions}}};
  const auto add = [&](const char* name, const h5::Shape& shape, const auto& mine) {
    file.arrays.push_back({name, shape, rows_on_root(world, mine, job.cp)});
  };
  add("index", {job.cp, slots}, kept.index);
  if (arrays.hidden > 0)
    add("inputs_embeds", {job.cp, arrays.rows, slots, arrays.hidden}, kept.embeddings);
  else
    add("input_ids", tokens, kept.ids);
  add("key_mask", tokens, kept.key_mask);
  add("labels", tokens, kept.labels);
  add("position_ids", {job.cp, axes, arrays.rows, slots}, kept.positions);
  return file;
}

double row_shard_bytes(const BshdArrays& arrays, const BatchJob& job) {
  const double width = bshd_padded_width(arrays.slots, job.cp, job.options.tp);
  const double inputs = arrays.hidden > 0 ? arrays.hidden * sizeof(float) : sizeof(int64_t);
  const double of_slot = sizeof(int32_t) + (1 + arrays.position_axes) * sizeof(int64_t) + inputs;
  return width * (sizeof(int32_t) + arrays.rows * of_slot);
}

void check_rows_over_ranks(const BshdArrays& arrays, const BatchJob& job, Communicator& world,
                           Verification& checks) {
  Check& gathered = checks.check("gathered over ranks", 0);
  if (arrays.hidden > 0)
    check_gathered(Rows<float>(arrays), job, world, gathered);
  else
    check_gathered(Rows<int64_t>(arrays), job, world, gathered);
}

}  // namespace gyre

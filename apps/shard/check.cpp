// Checks layouts on real slots, and makes the rows of shards files.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "apps/common/extras.hpp"
#include "apps/shard/report.hpp"
#include "apps/shard/slots.hpp"
#include "core/label.hpp"
#include "io/schemas/packed_file.hpp"
#include "packing/cp_batch.hpp"
#include "packing/labels_ahead.hpp"
#include "runtime/buffer.hpp"
#include "sharding/distributed.hpp"
#include "sharding/stream_shards.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

/// The arrays of a bin in the memory of `stream`. Results are in host memory. Layout and stream
/// must outlive this object.
class BinShards {
 public:
  /// With `hidden_size` > 0, embeddings of that width replace the ids.
  BinShards(const Layout& layout, const PackedSlots& bin, int64_t hidden_size, Stream& stream);

  /// The slots of `rank`.
  PackedSlots shard(int rank) const;
  /// The bin, restored from the shards of all ranks in turn.
  PackedSlots round_trip() const;
  /// The bin, gathered over `comm` from the shards that its ranks hold. Collective.
  PackedSlots gathered(Communicator& comm) const;
  /// The ids of this rank's shard, shifted to the left inside the segments of `bounds` over `comm`;
  /// with `fill` at the ends of segments. Collective.
  std::vector<int32_t> shifted_ids(Communicator& comm, std::span<const int32_t> bounds,
                                   int32_t fill) const {
    return shifted(ids_, comm, bounds, fill, 1);
  }
  /// The rank's labels, shifted `times` times.
  std::vector<int32_t> shifted_labels(Communicator& comm, std::span<const int32_t> bounds,
                                      int32_t fill, int times) const {
    return shifted(labels_, comm, bounds, fill, times);
  }

 private:
  /// An array of the bin: rows of bytes.
  struct Array {
    Buffer<std::byte> stream;
    int64_t row_bytes = 0;  ///< 0: the bin has no such array
    RowFill fill;           ///< value of the slots that the layout appends
  };
  template <class T>
  Array make_array(const std::vector<T>& values, int64_t row, T fill) const;
  /// Runs make(array, out) for each array of a stream or shard of `rows` rows, and copies each
  /// `out` to the host.
  template <class Make>
  PackedSlots make_slots(int64_t rows, Make make) const;
  void shard_array(const Array& array, int rank, void* local) const;
  std::vector<int32_t> shifted(const Array& array, Communicator& comm,
                               std::span<const int32_t> bounds, int32_t fill, int times) const;

  Stream& stream_;
  const Layout& layout_;
  std::unique_ptr<StreamShards> shards_;
  Array ids_, embeddings_, labels_, positions_;
  std::map<std::string, Array> extras_;
};

/// Fills memory for results before they are computed. No input holds this value.
constexpr std::byte unwritten{0xa5};

template <class T>
BinShards::Array BinShards::make_array(const std::vector<T>& values, int64_t row, T fill) const {
  Array array{
      Buffer<std::byte>(std::ssize(values) * static_cast<int64_t>(sizeof(T)), stream_.space()),
      row * static_cast<int64_t>(sizeof(T)), RowFill::of(fill)};
  stream_.copy(array.stream.data(), values.data(), array.stream.size());
  stream_.synchronize();
  return array;
}

BinShards::BinShards(const Layout& layout, const PackedSlots& bin, int64_t hidden_size,
                     Stream& stream)
    : stream_(stream),
      layout_(layout),
      shards_(make_stream_shards(layout, stream)),
      labels_(make_array(bin.labels, 1, ignored_label)),
      positions_(make_array(bin.positions, bin.position_axes(), 0)) {
  if (hidden_size > 0)
    embeddings_ = make_array(bin.embeddings, hidden_size, 0.0F);
  else
    ids_ = make_array(bin.ids, 1, 0);
  for (const auto& [name, extra] : bin.extras) {
    Array array = make_array(extra.bytes, extra.item_bytes, std::byte{0});
    array.fill = RowFill::of_bytes(extra.fill);
    extras_.emplace(name, std::move(array));
  }
}

template <class Make>
PackedSlots BinShards::make_slots(int64_t rows, Make make) const {
  PackedSlots slots;
  const auto bring = [&](const Array& array, auto& to) {
    if (array.row_bytes == 0) return;
    using T = typename std::remove_reference_t<decltype(to)>::value_type;
    Buffer<std::byte> out(rows * array.row_bytes, stream_.space());
    const size_t bytes = out.size();
    stream_.fill(out.data(), unwritten, bytes);
    make(array, out);
    to.resize(bytes / sizeof(T));
    stream_.copy(to.data(), out.data(), bytes);
    stream_.synchronize();
  };
  bring(ids_, slots.ids);
  bring(embeddings_, slots.embeddings);
  bring(labels_, slots.labels);
  bring(positions_, slots.positions);
  for (const auto& [name, array] : extras_) {
    ExtraSlots& extra = slots.extras[name];
    extra.item_bytes = array.row_bytes;
    bring(array, extra.bytes);
  }
  return slots;
}

void BinShards::shard_array(const Array& array, int rank, void* local) const {
  shards_->shard(rank, array.stream.data(), layout_.stream_slots, local, array.row_bytes,
                 array.fill);
}

PackedSlots BinShards::shard(int rank) const {
  return make_slots(layout_.slots_of_rank(), [&](const Array& array, Buffer<std::byte>& out) {
    shard_array(array, rank, out.data());
  });
}

PackedSlots BinShards::round_trip() const {
  return make_slots(layout_.stream_slots, [&](const Array& array, Buffer<std::byte>& out) {
    Buffer<std::byte> local(layout_.slots_of_rank() * array.row_bytes, stream_.space());
    for (int r = 0; r < layout_.cp(); ++r) {
      shard_array(array, r, local.data());
      shards_->unshard(r, local.data(), out.data(), layout_.stream_slots, array.row_bytes);
    }
  });
}

PackedSlots BinShards::gathered(Communicator& comm) const {
  return make_slots(layout_.stream_slots, [&](const Array& array, Buffer<std::byte>& out) {
    Buffer<std::byte> local(layout_.slots_of_rank() * array.row_bytes, stream_.space());
    shard_array(array, comm.rank(), local.data());
    shards_->gather(comm, local.data(), out.data(), array.row_bytes);
  });
}

std::vector<int32_t> BinShards::shifted(const Array& array, Communicator& comm,
                                        std::span<const int32_t> bounds, int32_t fill,
                                        int times) const {
  const int64_t slots = layout_.slots_of_rank();
  Buffer<int32_t> local(slots, stream_.space()), out(slots, stream_.space());
  shard_array(array, comm.rank(), local.data());
  for (int i = 0; i < times; ++i) {
    shards_->shift_left(comm, bounds, local.data(), out.data(), fill);
    std::swap(local, out);
  }
  std::vector<int32_t> shifted(slots);
  stream_.copy(shifted.data(), local.data(), shifted.size() * sizeof(int32_t));
  stream_.synchronize();
  return shifted;
}

/// The matrix of needed keys is cp x cp, so it is not made for more ranks.
constexpr int max_ranks_for_matrix = 1024;

void restore_slots(const Layout& layout, int rank, const PackedSlots& mine, int64_t hidden_size,
                   PackedSlots& bin) {
  for (const auto& [name, array] : slot_arrays)
    if (!(mine.*array).empty())
      unshard_rows<int32_t>(layout, rank, mine.*array, bin.*array, width_of(array, mine));
  if (hidden_size > 0)
    unshard_rows<float>(layout, rank, mine.embeddings, bin.embeddings, hidden_size);
  for (const auto& [name, extra] : mine.extras)
    unshard_rows<std::byte>(layout, rank, extra.bytes, bin.extras.at(name).bytes, extra.item_bytes);
}

void compare_slots(Check& check, const PackedSlots& actual, const PackedSlots& expected,
                   int64_t bin) {
  for (const auto& [name, array] : slot_arrays)
    check.add_all(actual.*array, expected.*array, fmt::format("bin {} {}", bin, name));
  check.add_all(actual.embeddings, expected.embeddings, fmt::format("bin {} embeddings", bin));
  compare_slot_extras(check, actual, expected, fmt::format("bin {}", bin));
}

/// Checks that each slot of a rank has the extras of the bin's slot that the layout's index names,
/// or padding if it names none.
void check_extras(Check& check, const Layout& layout, int rank, const PackedSlots& mine,
                  const PackedSlots& bin) {
  const std::vector<int32_t> index = shard_index(layout, rank);
  for (const auto& [name, extra] : bin.extras) {
    const std::vector<std::byte>& held = mine.extras.at(name).bytes;
    const size_t width = extra.item_bytes;
    if (held.size() != index.size() * width) {
      check.add_failure(fmt::format("extra {} of rank {}: {} bytes", name, rank, held.size()));
      continue;
    }
    for (size_t i = 0; i < held.size(); ++i) {
      const auto slot = index[i / width];
      const auto there = static_cast<size_t>(slot) * width + i % width;
      check.add(
          static_cast<double>(held[i]),
          static_cast<double>(slot < layout.stream_slots ? extra.bytes[there]
                                                         : padding_byte(extra.fill, i)),
          [&, &name = name] { return fmt::format("extra {} rank {} slot {}", name, rank, slot); });
    }
  }
}

/// The stream that makes shards and the communicator that gathers them.
struct Place {
  Stream& stream;
  Communicator& comm;
};
/// The place of the backend; without a backend, the host.
Place place_of(Backend* backend, Stream& host, Communicator& world) {
  if (backend == nullptr) return {host, world};
  return {backend->stream(), backend->world()};
}

/// The slots of `bin`, at their places in the layout.
PackedSlots bin_of(const ShardingPlan& plan, const PackedSlots& all, int64_t bin) {
  const PackedHeader& header = plan.header();
  const int64_t count = header.cu_seqlens_padded(bin).back();
  return moved_to(plan.bounds(bin), header, bin,
                  part_of(all, plan.first_slot(bin), count, header.hidden_size));
}

/// Checks the round trips of this rank's bins and the sums of their costs.
void check_own_bins(ShardingPlan& plan, const PackedSlots& all, const Communicator& world,
                    Stream& stream, Verification& checks) {
  const int64_t hidden = plan.header().hidden_size;
  Check& round_trip = checks.check("round trip", 0);
  Check& pairs = checks.check("pairs", 0);
  Check* keys = plan.cp() <= max_ranks_for_matrix ? &checks.check("keys needed", 0) : nullptr;
  Check* extras = all.extras.empty() ? nullptr : &checks.check("extras", 0);
  if (plan.no_slots())
    for (Check* check : {&round_trip, &pairs, keys, extras})
      if (check != nullptr) check->add_nothing();
  for (int64_t b = world.rank(); b < plan.header().bin_count(); b += world.size()) {
    const Layout& layout = plan.layout(b);
    const BinBounds bounds = plan.bounds(b);
    const PackedSlots bin = bin_of(plan, all, b);
    const BinShards shards(layout, bin, hidden, stream);
    compare_slots(round_trip, shards.round_trip(), bin, b);
    for_each_depth(plan.header(), bin, [&](int depth, const std::vector<int32_t>& labels) {
      Check& check = checks.check("labels ahead", 0);
      if (labels.empty()) check.add_nothing();
      check.add_all(labels, labels_ahead_reference(bounds.view(), bin.labels, depth),
                    fmt::format("bin {} {}", b, labels_ahead_name(depth)));
    });
    if (extras != nullptr)
      for (int r = 0; r < plan.cp(); ++r) check_extras(*extras, layout, r, shards.shard(r), bin);

    const LayoutCost cost = layout_cost(layout);
    int64_t expected = 0;
    for (int64_t i = 0; i < bounds.view().segments(); ++i)
      expected += bounds.view().real_length(i) * (bounds.view().real_length(i) + 1) / 2;
    const auto where = [&] { return fmt::format("bin {}", b); };
    pairs.add(cost.pairs(), expected, where);
    if (keys == nullptr) continue;
    const auto traffic = kv_traffic(layout);
    for (size_t r = 0; r < traffic.size(); ++r)
      keys->add(std::accumulate(traffic[r].begin(), traffic[r].end(), int64_t{0}),
                cost.ranks[r].kv_needed, where);
  }
}

/// Checks over ranks: gathers every bin from its shards, and shifts its sharded ids.
void check_over_ranks(ShardingPlan& plan, const PackedSlots& all, const Place& place,
                      Verification& checks) {
  const int64_t hidden = plan.header().hidden_size;
  Check& gathered = checks.check("gathered over ranks", 0);
  Check* shifted = hidden == 0 ? &checks.check("shift after sharding", 0) : nullptr;
  if (plan.no_slots())
    for (Check* check : {&gathered, shifted})
      if (check != nullptr) check->add_nothing();
  for (int64_t b = 0; b < plan.header().bin_count(); ++b) {
    const Layout& layout = plan.layout(b);
    const PackedSlots bin = bin_of(plan, all, b);
    const BinShards shards(layout, bin, hidden, place.stream);
    compare_slots(gathered, shards.gathered(place.comm), bin, b);
    const std::vector<int32_t> bounds = plan.bounds(b).padded;
    std::vector<int32_t> expected(layout.slots_of_rank());
    for_each_depth(plan.header(), bin, [&](int depth, const std::vector<int32_t>& labels) {
      shard_rows<int32_t>(layout, place.comm.rank(), labels, expected, 1, ignored_label);
      Check& check = checks.check("labels shifted after sharding", 0);
      if (plan.no_slots()) check.add_nothing();
      check.add_all(shards.shifted_labels(place.comm, bounds, ignored_label, depth - 1), expected,
                    fmt::format("bin {} {}", b, labels_ahead_name(depth)));
    });
    if (shifted == nullptr) continue;
    shard_rows<int32_t>(layout, place.comm.rank(),
                        shift_left<int32_t>(bounds, bin.ids, ignored_label), expected, 1,
                        ignored_label);
    shifted->add_all(shards.shifted_ids(place.comm, bounds, ignored_label), expected,
                     fmt::format("bin {} shifted ids", b));
  }
}

}  // namespace

void check_layout(ShardingPlan& plan, const PackedSlots& slots, Communicator& world,
                  Verification& checks, Backend* backend) {
  Verification mine(checks.tolerance_scale());
  HostStream host;
  const Place place = place_of(backend, host, world);
  check_own_bins(plan, slots, world, place.stream, mine);
  if (world.size() == plan.cp()) check_over_ranks(plan, slots, place, mine);
  mine.merge_over(world);
  checks.merge(mine);
}

ShardsHeader shards_header(ShardingPlan& plan) {
  ShardsHeader shards;
  shards.layout = plan.kind().name;
  shards.cp = plan.cp();
  shards.hidden_size = plan.header().hidden_size;
  shards.bin_offsets = plan.header().bins.bin_offsets;
  shards.position_axes = plan.header().position_axes;
  shards.extras = plan.header().extras;
  for (int64_t b = 0; b < plan.header().bin_count(); ++b)
    shards.slot_offsets.push_back(shards.slot_offsets.back() + plan.layout(b).shard(0).slots);
  return shards;
}

std::vector<ShardRows> make_shard_rows(ShardingPlan& plan, const PackedSlots& slots,
                                       Communicator& world, Backend* backend) {
  HostStream host;
  std::vector<int> ranks;
  for (int r = world.rank(); r < plan.cp(); r += world.size()) ranks.push_back(r);
  std::vector<ShardRows> rows(ranks.size());
  for (ShardRows& row : rows)
    for (const auto& [name, extra] : slots.extras) row.extras[name].item_bytes = extra.item_bytes;
  const auto append = [](auto& all, const auto& part) {
    all.insert(all.end(), part.begin(), part.end());
  };
  for (int64_t b = 0; b < plan.header().bin_count(); ++b) {
    const PackedSlots bin = bin_of(plan, slots, b);
    const Layout& layout = plan.layout(b);
    const BinBounds bounds = plan.bounds(b);
    const BinShards shards(layout, bin, plan.header().hidden_size,
                           place_of(backend, host, world).stream);
    for (size_t i = 0; i < rows.size(); ++i) {
      const int r = ranks[i];
      const PackedSlots mine = shards.shard(r);
      for (const auto& [name, array] : slot_arrays) append(rows[i].*array, mine.*array);
      append(rows[i].embeddings, mine.embeddings);
      for (const auto& [name, extra] : mine.extras)
        append(rows[i].extras.at(name).bytes, extra.bytes);
      const std::vector<int32_t> index = shard_index(layout, r);
      append(rows[i].index, index);
      const std::optional<LocalBounds> local = local_bounds(bounds.view(), index);
      GYRE_CHECK(local.has_value(), "layout {}: rank {} does not keep the order of the stream",
                 layout.name, r);
      append(rows[i].cu_seqlens, local->cu_seqlens);
      append(rows[i].cu_seqlens_padded, local->cu_seqlens_padded);
    }
  }
  return rows;
}

void check_shard_file(ShardingPlan& plan, const PackedSlots& slots, const std::string& path,
                      const ShardsHeader& shards, Communicator& world, Verification& checks) {
  Verification mine(checks.tolerance_scale());
  Check& check = mine.check("shards file", 0);
  if (plan.no_slots()) check.add_nothing();
  const int64_t hidden = plan.header().hidden_size;
  compare_extras(check, read_shard_extras(world, path, shards), shards.extras);
  const std::vector<ShardRows> rows = read_shard_rows(world, path, shards);
  for (int64_t b = 0; b < plan.header().bin_count(); ++b) {
    const PackedSlots bin = bin_of(plan, slots, b);
    const Layout& layout = plan.layout(b);
    PackedSlots restored = blank_like(bin);
    const int64_t begin = shards.slot_offsets[b];
    for (int r = 0; r < plan.cp(); ++r) {
      const PackedSlots held = part_of(rows[r], begin, layout.shard(r).slots, hidden);
      restore_slots(layout, r, held, hidden, restored);
      check_extras(check, layout, r, held, bin);
    }
    compare_slots(check, restored, bin, b);
  }
  mine.merge_over(world);
  checks.merge(mine);
}

void check_your_shards(std::span<const ShardRows> mine, const std::string& path,
                       const ShardsHeader& shards, Communicator& world, Verification& checks) {
  Verification local(checks.tolerance_scale());
  Check& check = local.check("yours", 0);
  check.add_nothing();  // a rank may have no row, and a row no slot
  compare_extras(check, read_shard_extras(world, path, shards), shards.extras);
  const std::vector<ShardRows> yours = read_shard_rows(world, path, shards);
  for (size_t i = 0; i < mine.size(); ++i) {
    const size_t r = world.rank() + i * world.size();
    const auto compare = [&](const auto& array, const char* name) {
      check.add_all(yours[r].*array, mine[i].*array, fmt::format("rank {} {}", r, name));
    };
    for (const auto& [name, array] : slot_arrays) compare(array, name);
    compare(&ShardRows::embeddings, "embeddings");
    compare(&ShardRows::index, "index");
    compare(&ShardRows::cu_seqlens, "cu_seqlens");
    compare(&ShardRows::cu_seqlens_padded, "cu_seqlens_padded");
    compare_slot_extras(check, yours[r], mine[i], fmt::format("rank {}", r));
  }
  local.merge_over(world);
  checks.merge(local);
}

}  // namespace gyre

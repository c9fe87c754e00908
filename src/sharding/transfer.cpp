#include "sharding/transfer.hpp"

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/error.hpp"
#include "sharding/row_copies.hpp"

namespace gyre {
namespace {

/// Number of rows in `bytes` bytes; throws unless it is `slots` or `padded`.
int64_t check_rows(const Layout& layout, const char* what, size_t bytes, int64_t row_bytes,
                   int64_t slots, int64_t padded) {
  const int64_t size = bytes;
  if (size % row_bytes != 0)
    throw_usage("layout {}: {} bytes of the {} are not whole rows of {} bytes", layout.name, size,
                what, row_bytes);
  const int64_t rows = size / row_bytes;
  if (rows != slots && rows != padded)
    throw_usage("layout {}: the {} has {} rows; it must have {}", layout.name, what, rows,
                slots == padded ? fmt::format("{}", slots)
                                : fmt::format("{} or, padded, {}", slots, padded));
  return rows;
}

void check_row(const Layout& layout, int64_t row_bytes) {
  if (row_bytes < 1) throw_usage("layout {}: a row must have at least 1 element", layout.name);
}

/// Number of rows of the stream; throws when an array has a wrong length.
int64_t check_arrays(const Layout& layout, int rank, size_t stream_bytes, size_t local_bytes,
                     int64_t row_bytes) {
  GYRE_CHECK(rank >= 0 && rank < layout.cp(), "layout {}: rank {} of {}", layout.name, rank,
             layout.cp());
  check_row(layout, row_bytes);
  const int64_t slots = layout.shard(rank).slots;
  check_rows(layout, "shard", local_bytes, row_bytes, slots, slots);
  return check_rows(layout, "stream", stream_bytes, row_bytes, layout.stream_slots,
                    layout.padded_slots);
}

/// check_arrays for the shards of all ranks, which lie `step` bytes apart.
int64_t check_arrays(const Layout& layout, size_t stream_bytes, size_t shard_bytes, int64_t step,
                     int64_t row_bytes) {
  check_row(layout, row_bytes);
  const int64_t slots = layout.slots_of_rank();
  if (step == slots * row_bytes)
    check_rows(layout, "array of all shards", shard_bytes, row_bytes, layout.padded_slots,
               layout.padded_slots);
  else
    GYRE_CHECK(
        step > slots * row_bytes && layout.cp() > 0 &&
            static_cast<int64_t>(shard_bytes) == (layout.cp() - 1) * step + slots * row_bytes,
        "layout {}: {} bytes of shards {} bytes apart", layout.name, shard_bytes, step);
  return check_rows(layout, "stream", stream_bytes, row_bytes, layout.stream_slots,
                    layout.padded_slots);
}

/// Number of slots of a run that lie in a stream of `rows` rows; they are the first of the run.
int64_t slots_inside(const SlotRun& run, int64_t rows) {
  const int64_t left = rows - run.start.value();
  if (run.stride == 1) return std::clamp<int64_t>(left, 0, run.length);  // no division
  return std::clamp<int64_t>(ceil_div(left, run.stride), 0, run.length);
}

constexpr int64_t long_run = 1024;  ///< bytes that outweigh the two partial lines of a run

/// Calls visit(rank, run) for the runs of all ranks in stream order. The next run mostly lies on
/// the next, the same or the previous rank, which takes three comparisons to find; otherwise up to
/// one per rank. Returns false, after any number of visits, if a run has a stride or a rank's runs
/// are not in stream order.
template <class Visit>
bool walk_stream(const Layout& layout, Visit visit) {
  const size_t cp = layout.cp();
  std::vector<const SlotRun*> ahead(cp + 2), ends(cp + 2);  // [1 .. cp]: ranks; others: none
  std::vector<int64_t> begins(cp + 2, -1);
  for (size_t r = 1; r <= cp; ++r) {
    const std::vector<SlotRun>& runs = layout.shards[r - 1].runs;
    ahead[r] = runs.data();
    ends[r] = runs.data() + runs.size();
    if (!runs.empty()) begins[r] = runs.front().start.value();
  }
  size_t r = 1;
  for (int64_t at = 0; at < layout.padded_slots;) {
    if (begins[r + 1] == at)
      ++r;
    else if (begins[r] != at && begins[r - 1] == at)
      --r;
    else if (begins[r] != at)
      r = std::find(begins.begin(), begins.end(), at) - begins.begin();
    if (r > cp) return false;
    const SlotRun& run = *ahead[r];
    if (run.stride != 1) return false;
    visit(r - 1, run);
    at += run.length;
    begins[r] = ++ahead[r] == ends[r] ? -1 : ahead[r]->start.value();
  }
  return true;
}

/// Whether the mean length of the layout's runs is at least `bytes` bytes.
bool mean_run_reaches(int64_t bytes, const Layout& layout, int64_t row_bytes) {
  int64_t runs = 0;
  for (const Shard& shard : layout.shards) runs += std::ssize(shard.runs);
  return layout.padded_slots * row_bytes >= runs * bytes;
}

bool interleaved(const Layout& layout) {
  for (int r = 0; r < layout.cp(); ++r) {
    const std::vector<SlotRun>& runs = layout.shard(r).runs;
    if (runs.size() != 1 || runs[0].start.value() != r || runs[0].stride != layout.cp())
      return false;
  }
  return layout.cp() > 1;
}

/// Moves a layout in which stream slot t is slot t / cp of rank t mod cp. Works in blocks that stay
/// in the L1 cache while every rank takes, or gives, its part of each line. Covers the whole blocks
/// of a stream of `rows` rows; the rest is moved by runs.
struct Interleave {
  int64_t cp, rows;

  template <class Size>
  static constexpr int64_t block(Size size) {
    return size < line ? 4 * line / size : 1;
  }
  int64_t end(int64_t row_bytes) const { return rows / (cp * block(row_bytes)) * block(row_bytes); }

  template <class Size>
  void shard(const std::byte* stream, std::byte* shards, int64_t each, Size size) const {
    alignas(line) std::byte collected[4 * line];
    const int64_t n = block(size), step = cp * size;
    for (int64_t first = 0; first < end(size); first += n)
      for (int64_t r = 0; r < cp; ++r) {
        const std::byte* from = stream + first * step + r * size;
        if (size < line) {
          copy_rows(collected, size, from, step, n, size);
          from = collected;
        }
        stream_bytes(shards + r * each + first * size, from, n * size);
      }
  }
  template <class Size>
  void unshard(const std::byte* shards, int64_t each, std::byte* stream, Size size) const {
    const int64_t n = block(size), step = cp * size;
    std::vector<std::byte> collected(size < line ? static_cast<size_t>(n * step) : 0);
    for (int64_t first = 0; first < end(size); first += n) {
      for (int64_t r = 0; r < cp; ++r) {
        const std::byte* from = shards + r * each + first * size;
        if (size < line)
          copy_rows(collected.data() + r * size, step, from, size, n, size);
        else
          stream_bytes(stream + first * step + r * size, from, size);
      }
      if (size < line) stream_bytes(stream + first * step, collected.data(), n * step);
    }
  }
};

/// The part of a run from slot `first` on.
SlotRun rest_of(const SlotRun& run, int64_t first) {
  return {run.start + first * run.stride, run.stride, run.length - first, run.local_begin + first};
}

/// Copies one run from a stream of `rows` rows into its shard.
inline void shard_run(const SlotRun& run, std::span<const std::byte> stream, int64_t rows,
                      std::span<const std::byte> fill, std::byte* shard, int64_t row_bytes) {
  const int64_t inside = slots_inside(run, rows);
  std::byte* to = shard + run.local_begin.value() * row_bytes;
  const std::byte* from = stream.data() + run.start.value() * row_bytes;
  if (run.stride == 1)
    copy_bytes(to, from, inside * row_bytes);
  else
    gather_rows(to, from, run.stride * row_bytes, inside, row_bytes);
  fill_rows(to + inside * row_bytes, to + run.length * row_bytes, fill);
}

/// Copies one run of a shard into a stream of `rows` rows.
inline void unshard_run(const SlotRun& run, const std::byte* shard, std::byte* stream, int64_t rows,
                        int64_t row_bytes) {
  const int64_t inside = slots_inside(run, rows);
  const std::byte* from = shard + run.local_begin.value() * row_bytes;
  std::byte* to = stream + run.start.value() * row_bytes;
  if (run.stride == 1)
    copy_bytes(to, from, inside * row_bytes);
  else
    scatter_rows(to, run.stride * row_bytes, from, inside, row_bytes);
}

/// Writes the shards of all ranks by non-temporal stores; false if walk_stream returns false.
bool shard_past_caches(const Layout& layout, std::span<const std::byte> stream, int64_t rows,
                       std::span<const std::byte> fill, std::byte* shards, int64_t row_bytes) {
  const int64_t each = layout.slots_of_rank() * row_bytes;
  std::vector<ShardWriter> writers;
  writers.reserve(layout.cp());
  for (int64_t r = 0; r < layout.cp(); ++r) writers.emplace_back(shards + r * each);
  const bool whole = walk_stream(layout, [&](size_t r, const SlotRun& run) {
    const int64_t inside = slots_inside(run, rows);
    writers[r].append(stream.data() + run.start.value() * row_bytes, inside * row_bytes);
    std::byte* to = shards + r * each;
    fill_rows(to + (run.local_begin.value() + inside) * row_bytes,
              to + (run.local_begin.value() + run.length) * row_bytes, fill);
  });
  for (ShardWriter& writer : writers) writer.flush();
  hwy::FlushStream();
  return whole;
}

/// Writes the stream by non-temporal stores; false if walk_stream returns false.
bool unshard_past_caches(const Layout& layout, const std::byte* shards, int64_t step,
                         std::byte* stream, int64_t rows, int64_t row_bytes) {
  const bool whole = walk_stream(layout, [&](size_t r, const SlotRun& run) {
    std::byte* to = stream + run.start.value() * row_bytes;
    const std::byte* from = shards + r * step + run.local_begin.value() * row_bytes;
    const int64_t bytes = slots_inside(run, rows) * row_bytes;
    if (bytes < long_run)
      copy_bytes(to, from, bytes);
    else
      stream_bytes(to, from, bytes);
  });
  hwy::FlushStream();
  return whole;
}

/// Size of the stream that move_all moves.
struct StreamSize {
  int64_t rows, row_bytes;
  int64_t cached_bytes;  ///< a smaller stream is assumed to be in the caches
};

/// Moves the runs of all ranks: by blocks(interleave, row size) if the layout is interleaved; by
/// past_caches() if runs have at least `least_run` bytes on average; else by move(rank, run) in
/// stream order. Streams in the caches, and other layouts, are moved rank by rank.
template <class Move, class Blocks, class PastCaches>
void move_all(const Layout& layout, const StreamSize& stream, int64_t least_run, Move move,
              Blocks blocks, PastCaches past_caches) {
  const bool cached = layout.padded_slots * stream.row_bytes < stream.cached_bytes;
  if (!cached && interleaved(layout)) {
    const Interleave interleave{layout.cp(), stream.rows};
    for_row_size(stream.row_bytes, [&](auto size) { blocks(interleave, size); });
    hwy::FlushStream();
    for (size_t r = 0; r < layout.shards.size(); ++r)
      move(r, rest_of(layout.shards[r].runs[0], interleave.end(stream.row_bytes)));
    return;
  }
  const bool done = !cached && (mean_run_reaches(least_run, layout, stream.row_bytes)
                                    ? past_caches()
                                    : walk_stream(layout, move));
  if (done) return;
  for (size_t r = 0; r < layout.shards.size(); ++r)
    for (const SlotRun& run : layout.shards[r].runs) move(r, run);
}

}  // namespace

void detail::shard_bytes(const Layout& layout, int rank, std::span<const std::byte> stream,
                         std::span<const std::byte> fill, std::span<std::byte> local,
                         int64_t row_bytes) {
  const int64_t rows = check_arrays(layout, rank, stream.size(), local.size(), row_bytes);
  for (const SlotRun& run : layout.shard(rank).runs)
    shard_run(run, stream, rows, fill, local.data(), row_bytes);
}

void detail::unshard_bytes(const Layout& layout, int rank, std::span<const std::byte> local,
                           std::span<std::byte> stream, int64_t row_bytes) {
  const int64_t rows = check_arrays(layout, rank, stream.size(), local.size(), row_bytes);
  for (const SlotRun& run : layout.shard(rank).runs)
    unshard_run(run, local.data(), stream.data(), rows, row_bytes);
}

void detail::shard_all_bytes(const Layout& layout, std::span<const std::byte> stream,
                             std::span<const std::byte> fill, std::span<std::byte> shards,
                             int64_t row_bytes, int64_t cached_bytes) {
  const int64_t each = layout.slots_of_rank() * row_bytes;
  const int64_t rows = check_arrays(layout, stream.size(), shards.size(), each, row_bytes);
  const auto move = [&](size_t r, const SlotRun& run) {
    shard_run(run, stream, rows, fill, shards.data() + r * each, row_bytes);
  };
  move_all(
      layout, {rows, row_bytes, cached_bytes}, line, move,
      [&](const Interleave& blocks, auto size) {
        blocks.shard(stream.data(), shards.data(), each, size);
      },
      [&] { return shard_past_caches(layout, stream, rows, fill, shards.data(), row_bytes); });
}

void detail::unshard_all_bytes(const Layout& layout, std::span<const std::byte> shards,
                               int64_t step, std::span<std::byte> stream, int64_t row_bytes,
                               int64_t cached_bytes) {
  const int64_t rows = check_arrays(layout, stream.size(), shards.size(), step, row_bytes);
  const auto move = [&](size_t r, const SlotRun& run) {
    unshard_run(run, shards.data() + r * step, stream.data(), rows, row_bytes);
  };
  move_all(
      layout, {rows, row_bytes, cached_bytes}, long_run, move,
      [&](const Interleave& blocks, auto size) {
        blocks.unshard(shards.data(), step, stream.data(), size);
      },
      [&] {
        return unshard_past_caches(layout, shards.data(), step, stream.data(), rows, row_bytes);
      });
}

void shard_rows_reference(const Layout& layout, int rank, std::span<const double> stream,
                          std::span<double> local, int64_t row, double fill) {
  size_t to = 0;
  for (const int32_t slot : shard_index(layout, rank))
    for (int64_t i = 0; i < row; ++i, ++to) {
      const size_t from = slot * row + i;
      local[to] = from < stream.size() ? stream[from] : fill;
    }
}

void unshard_rows_reference(const Layout& layout, int rank, std::span<const double> local,
                            std::span<double> stream, int64_t row) {
  size_t from = 0;
  for (const int32_t slot : shard_index(layout, rank))
    for (int64_t i = 0; i < row; ++i, ++from) {
      const size_t to = slot * row + i;
      if (to < stream.size()) stream[to] = local[from];
    }
}

}  // namespace gyre

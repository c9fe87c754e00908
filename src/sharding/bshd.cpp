#include "sharding/bshd.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "core/label.hpp"
#include "sharding/layouts.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

/// The rank's slots of every row of `rows` [batch, n, row], with `fill` in appended padding.
template <class T>
std::vector<T> shard_batch(const Layout& layout, int rank, std::span<const T> rows, int64_t batch,
                           int64_t row, T fill) {
  const size_t whole = layout.stream_slots * row;
  const size_t part = layout.shard(rank).slots * row;
  std::vector<T> shard(batch * part);
  for (int64_t b = 0; b < batch; ++b)
    shard_rows<T>(layout, rank, rows.subspan(b * whole, whole),
                  std::span<T>(shard).subspan(b * part, part), row, fill);
  return shard;
}

/// Dual-chunk-swap of a row of n slots padded to `width`, as if the layout appended the padding.
Layout row_layout(int64_t n, int64_t width, int cp) {
  const std::vector<int32_t> real = {0, static_cast<int32_t>(n)};
  const std::vector<int32_t> padded = {0, static_cast<int32_t>(width)};
  Layout layout = dual_chunk_swap({real, padded}, cp);
  layout.stream_slots = n;
  return layout;
}

}  // namespace

int64_t bshd_padded_width(int64_t n, int cp, int tp) {
  if (n < 0) throw_usage("rows of {} slots; the width is at least 0", n);
  if (cp < 1) throw_usage("cp must be at least 1, not {}", cp);
  if (tp < 0) throw_usage("tp must be at least 0, not {}", tp);
  return round_up(n, int64_t{2} * cp * std::max(1, tp));
}

template <class T>
BshdShard<T> shard_bshd(std::span<const T> inputs, std::span<const int64_t> mask,
                        std::span<const int64_t> targets, int64_t batch, int64_t hidden, int cp,
                        int rank, int tp) {
  if (batch < 1 || hidden < 1)
    throw_usage("{} rows with inputs of {} values; both are at least 1", batch, hidden);
  if (mask.size() != targets.size() || std::ssize(mask) % batch != 0)
    throw_usage("{} mask values and {} targets; both must be {} rows of equal width", mask.size(),
                targets.size(), batch);
  const int64_t n = std::ssize(mask) / batch, width = bshd_padded_width(n, cp, tp);
  if (std::ssize(inputs) != batch * n * hidden)
    throw_usage("{} input values, but {} rows x {} slots x {} are {}", inputs.size(), batch, n,
                hidden, batch * n * hidden);
  if (rank < 0 || rank >= cp) throw_usage("rank {} of cp = {} ranks", rank, cp);
  if (width > std::numeric_limits<int32_t>::max())
    throw_usage("rows of {} slots exceed the int32 range of index lists", width);
  std::vector<uint8_t> is_real(mask.size());
  std::transform(mask.begin(), mask.end(), is_real.begin(),
                 [](int64_t value) { return static_cast<uint8_t>(value != 0 ? 1 : 0); });
  BshdShard<T> shard;
  shard.layout = row_layout(n, width, cp);
  shard.inputs = shard_batch<T>(shard.layout, rank, inputs, batch, hidden, T{0});
  shard.key_mask = shard_batch<uint8_t>(shard.layout, rank, is_real, batch, 1, 0);
  shard.targets = shard_batch<int64_t>(shard.layout, rank, targets, batch, 1, ignored_label);
  return shard;
}

template BshdShard<float> shard_bshd(std::span<const float>, std::span<const int64_t>,
                                     std::span<const int64_t>, int64_t, int64_t, int, int, int);
template BshdShard<int64_t> shard_bshd(std::span<const int64_t>, std::span<const int64_t>,
                                       std::span<const int64_t>, int64_t, int64_t, int, int, int);

}  // namespace gyre

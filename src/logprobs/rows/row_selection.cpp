#include "logprobs/rows/row_selection.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "logprobs/rows/row_selection.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "core/error.hpp"
#include "core/index.hpp"
#include "logprobs/records/row_total.hpp"
#include "logprobs/rows/row_lanes-inl.hpp"
#include "runtime/buffer.hpp"
#include "runtime/parallel.hpp"

#ifndef GYRE_LOGPROBS_ROW_SELECTION_ONCE
#define GYRE_LOGPROBS_ROW_SELECTION_ONCE
namespace gyre {
namespace {

/// Elements that may be among the largest of a row, in column order.
struct Candidates {
  float* values;
  int32_t *ids, *keys;
  int64_t count = 0;
  float bar = -std::numeric_limits<float>::infinity();  ///< candidates are above it, or equal to it
                                                        ///< and earlier
  int64_t at_bar = 0;  ///< elements so far that equal the bar and are no candidates
};

constexpr int64_t max_columns = 1024;  ///< columns per scan

// Keys are integers in the order of the values: both zeros have key 0, any NaN has nan_key.
constexpr int32_t nan_key = std::numeric_limits<int32_t>::max();
constexpr int32_t lowest_key = std::numeric_limits<int32_t>::min();  ///< below the key of -inf

/// Largest value with a key <= `key`. Infinity stands for NaN: as a bar, this keeps rows full of
/// NaN as fast as others.
float value_of(int32_t key) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  if (key >= std::bit_cast<int32_t>(infinity)) return infinity;
  return std::bit_cast<float>(key ^ ((key >> 31) & nan_key));
}

}  // namespace
}  // namespace gyre
#endif  // once

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {

using I = hn::RebindToSigned<F>;

/// Whether the elements of four vectors from `from` on are all below the bar; false with a NaN.
HWY_INLINE bool all_below(F f, V bar, const float* from) {
  const size_t n = hn::Lanes(f);
  const auto a = hn::Lt(hn::LoadU(f, from), bar), b = hn::Lt(hn::LoadU(f, from + n), bar);
  const auto c = hn::Lt(hn::LoadU(f, from + 2 * n), bar);
  const auto d = hn::Lt(hn::LoadU(f, from + 3 * n), bar);
  return hn::AllTrue(f, hn::And(hn::And(a, b), hn::And(c, d)));
}
HWY_INLINE bool all_below(F f, V bar, const bf16* from) {
#if HWY_TARGET == HWY_SCALAR
  (void)f;
  return to_float(from[0]) < hn::GetLane(bar) && to_float(from[1]) < hn::GetLane(bar) &&
         to_float(from[2]) < hn::GetLane(bar) && to_float(from[3]) < hn::GetLane(bar);
#else
  const hn::Repartition<uint16_t, F> halves;
  const hn::RebindToUnsigned<F> words;
  const auto below = [&](const bf16* at) HWY_ATTR {  // even and odd elements
    const auto both = hn::BitCast(words, hn::LoadU(halves, reinterpret_cast<const uint16_t*>(at)));
    const V even = hn::BitCast(f, hn::ShiftLeft<16>(both));
    const V odd = hn::BitCast(f, hn::And(both, hn::Set(words, 0xffff0000U)));
    return hn::And(hn::Lt(even, bar), hn::Lt(odd, bar));
  };
  return hn::AllTrue(f, hn::And(below(from), below(from + hn::Lanes(halves))));
#endif
}

/// Appends the lanes above the bar, including NaN, of a vector at columns from `column` on. Stores
/// whole vectors, because a masked store takes a hundred cycles on Zen 4.
HWY_INLINE void append(F f, V v, int64_t column, Candidates& c) {
  const I i;
  const V bar = hn::Set(f, c.bar);
  const auto wanted = hn::Not(hn::Le(v, bar));
  hn::StoreU(hn::Compress(v, wanted), f, c.values + c.count);
  hn::StoreU(hn::Compress(hn::Iota(i, static_cast<int32_t>(column)), hn::RebindMask(i, wanted)), i,
             c.ids + c.count);
  c.count += hn::CountTrue(f, wanted);
  c.at_bar += hn::CountTrue(f, hn::Eq(v, bar));
}

HWY_INLINE void append(float x, int64_t column, Candidates& c) {
  c.values[c.count] = x;
  c.ids[c.count] = static_cast<int32_t>(column);
  const bool at_bar = x == c.bar;
  c.at_bar += at_bar ? 1 : 0;
  c.count += at_bar || x < c.bar ? 0 : 1;
}

/// Appends the elements of columns [begin, end), at most max_columns, that are above the bar,
/// including NaN. The arrays must have room for all of them and one more vector.
///
/// Once the bar has risen, about one group of vectors in ten has an element above it. A first loop
/// lists these groups without unpredictable branches; a second loop scans them.
template <class T>
HWY_INLINE void scan(const T* row, int64_t begin, int64_t end, Candidates& c) {
  const F f;
  const int64_t n = hn::Lanes(f);
  const V bar = hn::Set(f, c.bar);
  int64_t groups[max_columns / 4];
  int64_t count = 0, at = begin;
  for (; at + 4 * n <= end; at += 4 * n) {
    groups[count] = at;
    count += all_below(f, bar, row + at) ? 0 : 1;
  }
  for (int64_t g = 0; g < count; ++g) {
    uint64_t bits = 0;
    for (int64_t k = 0; k < 4; ++k) {
      const auto some = hn::Not(hn::Lt(load(f, row + groups[g] + k * n), bar));
      uint8_t bytes[8] = {};
      hn::StoreMaskBits(f, some, bytes);
      uint64_t part = 0;
      std::memcpy(&part, bytes, sizeof part);
      bits |= part << (k * n);
    }
    if (std::popcount(bits) > 8) {
      for (int64_t k = 0; k < 4; ++k)
        append(f, load(f, row + groups[g] + k * n), groups[g] + k * n, c);
      continue;
    }
    for (; bits != 0; bits &= bits - 1) {
      const int64_t column = groups[g] + std::countr_zero(bits);
      append(to_float(row[column]), column, c);
    }
  }
  for (; at < end; ++at) append(to_float(row[at]), at, c);
}

void scan_f32(const float* row, int64_t begin, int64_t end, Candidates& c) {
  scan(row, begin, end, c);
}
void scan_bf16(const bf16* row, int64_t begin, int64_t end, Candidates& c) {
  scan(row, begin, end, c);
}

struct KeyRange {
  int32_t least, most;
};

/// Sets the keys of the candidates, and lowest_key in the rest of the last vector.
HWY_INLINE KeyRange make_keys(const Candidates& c) {
  const F f;
  const I i;
  const int64_t n = hn::Lanes(f);
  auto least = hn::Set(i, nan_key), most = hn::Set(i, lowest_key);
  for (int64_t at = 0; at < c.count; at += n) {
    const V v = hn::LoadU(f, c.values + at);
    const auto bits = hn::BitCast(i, hn::Add(v, hn::Zero(f)));
    auto key = hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(i, nan_key)));
    key = hn::IfThenElse(hn::RebindMask(i, hn::IsNaN(v)), hn::Set(i, nan_key), key);
    const auto real = hn::FirstN(i, std::min(n, c.count - at));
    least = hn::Min(least, hn::IfThenElse(real, key, least));
    key = hn::IfThenElse(real, key, hn::Set(i, lowest_key));
    most = hn::Max(most, key);
    hn::StoreU(key, i, c.keys + at);
  }
  return {hn::GetLane(hn::MinOfLanes(i, least)), hn::GetLane(hn::MaxOfLanes(i, most))};
}

HWY_INLINE int64_t count_above(const Candidates& c, int32_t key) {
  const I i;
  const int64_t n = hn::Lanes(i);
  const auto limit = hn::Set(i, key), one = hn::Set(i, 1);
  auto count = hn::Zero(i);
  for (int64_t at = 0; at < c.count; at += n)
    count = hn::Add(count, hn::IfThenElseZero(hn::Gt(hn::LoadU(i, c.keys + at), limit), one));
  return hn::GetLane(hn::SumOfLanes(i, count));
}

/// Drops candidates with keys <= `key`, except the first `equal` of those with this key.
HWY_INLINE void drop_up_to(int32_t key, int64_t equal, Candidates& c) {
  const F f;
  const I i;
  const int64_t n = hn::Lanes(f);
  const auto limit = hn::Set(i, key);
  const int64_t before = c.count;
  int64_t dropped = 0;
  c.count = 0;
  for (int64_t at = 0; at < before; at += n) {
    const auto keys = hn::LoadU(i, c.keys + at);
    const V v = hn::LoadU(f, c.values + at);
    const auto ids = hn::LoadU(i, c.ids + at);
    auto kept = hn::Gt(keys, limit);
    const auto ties = hn::Eq(keys, limit);
    const int64_t found = hn::CountTrue(i, ties);
    if (found <= equal) {
      kept = hn::Or(kept, ties);
      equal -= found;
    } else if (equal > 0) {
      dropped += found - equal;
      HWY_ALIGN int32_t lanes[HWY_MAX_BYTES / sizeof(int32_t)];
      hn::Store(keys, i, lanes);
      for (int64_t k = 0; k < n; ++k) {
        const bool tie = lanes[k] == key && equal > 0;
        equal -= tie ? 1 : 0;
        lanes[k] = tie || lanes[k] > key ? -1 : 0;
      }
      kept = hn::MaskFromVec(hn::Load(i, lanes));
    } else {
      dropped += found;
    }
    hn::StoreU(hn::Compress(v, hn::RebindMask(f, kept)), f, c.values + c.count);
    hn::StoreU(hn::Compress(ids, kept), i, c.ids + c.count);
    c.count += hn::CountTrue(i, kept);
  }
  // If the bar keeps its value, elements that equalled it before still count.
  const float bar = value_of(key);
  c.at_bar = dropped + (bar == c.bar ? c.at_bar : 0);
  c.bar = bar;
}

/// Drops candidates that are not among the `length` largest until at most `most` remain; length <=
/// most < count.
void prune(int64_t length, int64_t most, Candidates& c) {
  const KeyRange range = make_keys(c);
  // At least `length` candidates are above `low`, fewer above `high`.
  int64_t low = static_cast<int64_t>(range.least) - 1, high = range.most;
  int64_t above_low = c.count, above_high = 0;
  while (high - low > 1 && above_low > most) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t above = count_above(c, static_cast<int32_t>(middle));
    if (above >= length)
      low = middle, above_low = above;
    else
      high = middle, above_high = above;
  }
  if (above_low <= most)
    drop_up_to(static_cast<int32_t>(low), 0, c);
  else
    drop_up_to(static_cast<int32_t>(high), length - above_high, c);
}

/// order[rank] = index of the candidate of that rank by (key descending, index ascending).
void rank_candidates(const Candidates& c, int32_t* order) {
  constexpr int64_t quadratic = 512;  // with more, sorting beats comparing all pairs
  const I i;
  const int64_t n = hn::Lanes(i);
  make_keys(c);
  if (c.count > quadratic) {
    std::iota(order, order + c.count, 0);
    std::sort(order, order + c.count, [&](int32_t a, int32_t b) {
      return c.keys[a] != c.keys[b] ? c.keys[a] > c.keys[b] : a < b;
    });
    return;
  }
  for (int64_t k = 0; k < c.count; ++k) {
    const auto key = hn::Set(i, c.keys[k]), one = hn::Set(i, 1);
    auto before = hn::Zero(i);
    for (int64_t at = 0; at < c.count; at += n) {
      const auto keys = hn::LoadU(i, c.keys + at);
      const auto earlier = hn::FirstN(i, std::clamp<int64_t>(k - at, 0, n));
      const auto first = hn::Or(hn::Gt(keys, key), hn::And(hn::Eq(keys, key), earlier));
      before = hn::Add(before, hn::IfThenElseZero(first, one));
    }
    order[hn::GetLane(hn::SumOfLanes(i, before))] = static_cast<int32_t>(k);
  }
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
namespace {
HWY_EXPORT(scan_f32);
HWY_EXPORT(scan_bf16);
HWY_EXPORT(prune);
HWY_EXPORT(rank_candidates);

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
/// Columns per computation of partials, 256 KB of f32, so that the scan reads them from L2. Shorter
/// blocks would fit in L1, but softmax_partials reads the first 4096 columns of a call twice.
constexpr int64_t block = 65536;
constexpr int64_t run = max_columns;   // columns scanned with one bar
constexpr int64_t widest_vector = 64;  // lanes, an upper bound

/// Scratch arrays of one thread.
struct Room {
  explicit Room(int64_t length)
      : limit(2 * length + 64),
        values(limit + run + widest_vector),
        ids(values.size()),
        keys(values.size()),
        order(length) {}
  int64_t limit;  ///< largest number of candidates before they are pruned
  Buffer<float> values;
  Buffer<int32_t> ids, keys, order;
};

class RowSelector {
 public:
  RowSelector(ConstMatrixRef logits, const RowScan& scan, const RowTop& top)
      : logits_(logits), scan_(scan), top_(top) {
    scan_.threads = 1;
  }

  /// Fills row r of the results.
  void select(int64_t r, Room& room, SoftmaxPartial* partials) const {
    Candidates c{room.values.data(), room.ids.data(), room.keys.data()};
    const double scale = scan_.scale[r];
    RowTotal total;
    for (int64_t begin = 0; begin < scan_.columns; begin += block) {
      const int64_t end = std::min(scan_.columns, begin + block);
      if (partials != nullptr) total.add(block_partials(r, begin, end), scale);
      for (int64_t at = begin; at < end; at += run) {
        scan_run(r, at, std::min(end, at + run), c);
        if (c.count > room.limit)
          HWY_DYNAMIC_DISPATCH(prune)(top_.length, top_.length + top_.length / 4 + 8, c);
      }
    }
    if (partials != nullptr)
      *partials = {total.max, static_cast<float>(total.sum),
                   scan_.weighted ? static_cast<float>(total.weighted) : 0};
    const int64_t infinite = c.bar == minus_infinity ? c.at_bar : 0;
    if (c.count > top_.length) HWY_DYNAMIC_DISPATCH(prune)(top_.length, top_.length, c);
    write(r, c, room.order.data(), infinite);
  }

 private:
  SoftmaxPartial block_partials(int64_t r, int64_t begin, int64_t end) const {
    const int64_t size = size_of(logits_.type);
    SoftmaxPartial partials;
    RowScan scan = scan_;
    scan.columns = end - begin;
    scan.scale = scan_.scale[r];
    softmax_partials({logits_.data + (r * logits_.stride + begin) * size, logits_.type, 1,
                      end - begin, end - begin},
                     scan, {&partials, 1});
    return partials;
  }

  void scan_run(int64_t r, int64_t begin, int64_t end, Candidates& c) const {
    if (logits_.type == DType::f32)
      HWY_DYNAMIC_DISPATCH(scan_f32)(logits_.as<float>().row(r), begin, end, c);
    else
      HWY_DYNAMIC_DISPATCH(scan_bf16)(logits_.as<bf16>().row(r), begin, end, c);
  }

  /// Writes row r. `infinite`: number of -inf in the row if all others are candidates, else 0.
  void write(int64_t r, const Candidates& c, int32_t* order, int64_t infinite) const {
    HWY_DYNAMIC_DISPATCH(rank_candidates)(c, order);
    const int64_t length = top_.length;
    float* values = top_.values.data() + r * length;
    for (int64_t k = 0; k < length; ++k)
      values[k] = k < c.count ? c.values[order[k]] : minus_infinity;
    if (!top_.ids.empty()) {
      int32_t* ids = top_.ids.data() + r * length;
      for (int64_t k = 0; k < c.count; ++k) ids[k] = c.ids[order[k]];
      int64_t k = c.count;
      for (int64_t v = 0; k < length && infinite > 0; ++v)
        if (logits_.at(r, v) == minus_infinity) ids[k++] = static_cast<int32_t>(v), --infinite;
      std::fill(ids + k, ids + length, -1);
    }
    if (top_.last.empty()) return;
    const float last = values[length - 1];
    int64_t count = last == c.bar ? c.at_bar : 0;
    for (int64_t k = 0; k < c.count; ++k) count += c.values[k] == last ? 1 : 0;
    top_.last[r] = static_cast<int32_t>(count);
  }

  ConstMatrixRef logits_;
  RowScan scan_;
  const RowTop& top_;
};

}  // namespace

void check_row_top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
                   std::span<const SoftmaxPartial> partials) {
  const int64_t length = top.length;
  GYRE_CHECK(length >= 1 && scan.columns <= logits.cols, "the {} largest of {} of {} columns",
             length, scan.columns, logits.cols);
  GYRE_CHECK(std::ssize(top.values) == logits.rows * length &&
                 (top.ids.empty() || top.ids.size() == top.values.size()) &&
                 (top.last.empty() || std::ssize(top.last) == logits.rows) &&
                 (partials.empty() || std::ssize(partials) == logits.rows),
             "results of {} rows: {} values, {} ids, {} last, {} partials", logits.rows,
             top.values.size(), top.ids.size(), top.last.size(), partials.size());
}

void row_top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
             std::span<SoftmaxPartial> partials) {
  check_row_top(logits, scan, top, partials);
  const int64_t length = top.length;
  std::vector<Room> rooms;
  for (int t = 0; t < std::max(1, scan.threads); ++t) rooms.emplace_back(length);
  const RowSelector selector(logits, scan, top);
  // Sorting a row's list takes a few microseconds in addition to the pass.
  const double nanoseconds = 0.12 * scan.columns + 2000;
  for_each_part(scan.threads, logits.rows, nanoseconds,
                [&](int64_t begin, int64_t end, int thread) {
                  for (int64_t r = begin; r < end; ++r)
                    selector.select(r, rooms[thread], partials.empty() ? nullptr : &partials[r]);
                });
}

}  // namespace gyre
#endif  // HWY_ONCE

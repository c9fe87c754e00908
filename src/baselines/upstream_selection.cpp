// Filters and top-k of upstream.hpp, by sorting.

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "baselines/upstream_detail.hpp"
#include "runtime/parallel.hpp"

namespace gyre::upstream {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// Sort key of an element. The upper half holds its value as an integer in the order of f32, the
/// lower half its position. NaN is the largest value; both zeros are equal.
using Item = uint64_t;

uint32_t key_of(float x) {
  if (std::isnan(x)) return ~0U;
  const auto bits = std::bit_cast<uint32_t>(x + 0.0F);
  return (bits >> 31U) != 0 ? ~bits : bits | 0x80000000U;
}

Item item_of(float x, uint32_t place) {
  return static_cast<Item>(key_of(x)) << 32U | place;
}
uint32_t key_in(Item item) {
  return static_cast<uint32_t>(item >> 32U);
}
uint32_t place_in(Item item) {
  return static_cast<uint32_t>(item);
}
float value_in(Item item) {
  const uint32_t key = key_in(item);
  return std::bit_cast<float>((key >> 31U) != 0 ? key ^ 0x80000000U : ~key);
}

/// Stable LSD radix sort, ascending by value, 8 bits per pass, as on devices. `spare` is as long as
/// `items`.
void sort_by_value(std::span<Item> items, std::span<Item> spare) {
  std::array<std::array<uint32_t, 256>, 4> starts{};
  for (const Item item : items)
    for (size_t digit = 0; digit < 4; ++digit)
      ++starts.at(digit).at((item >> (32 + 8 * digit)) & 255U);
  std::span<Item> from = items, to = spare;
  for (size_t digit = 0; digit < 4; ++digit) {
    std::array<uint32_t, 256>& start = starts.at(digit);
    uint32_t sum = 0;
    for (uint32_t& count : start) sum += std::exchange(count, sum);
    for (const Item item : from) to[start.at((item >> (32 + 8 * digit)) & 255U)++] = item;
    std::swap(from, to);
  }
}

/// Calls body(row, thread) for all rows; one element costs about `nanoseconds`.
template <class Body>
void for_each_row(int threads, MatrixView<const float> z, double nanoseconds, Body body) {
  for_each_part(threads, z.rows, nanoseconds * z.cols + 10,
                [&](int64_t begin, int64_t end, int thread) {
                  for (int64_t r = begin; r < end; ++r) body(r, thread);
                });
}

/// Row-sized arrays of one thread.
struct FilterScratch {
  Buffer<Item> items, spare;
  Buffer<float> exponentials;
  Buffer<double> cumulative;
  explicit FilterScratch(int64_t columns)
      : items(columns), spare(columns), exponentials(columns), cumulative(columns) {}
};

/// Marks the survivors of top_k alone: elements that are at least the k-th largest.
void keep_largest(std::span<Item> items, int64_t k, std::span<uint8_t> kept) {
  const auto kth = items.begin() + (std::ssize(items) - k);
  std::nth_element(items.begin(), kth, items.end());
  const uint32_t bar = key_in(*kth);
  for (const Item item : items) kept[place_in(item)] = key_in(item) >= bar ? 1 : 0;
}

/// Marks the survivors of top_k and top_p: sorts, exponentiates, takes the cumulative sum,
/// compares, and scatters back to the order of the row.
void keep_nucleus(FilterScratch& scratch, const SamplingFilter& filter, std::span<uint8_t> kept) {
  const std::span<Item> items = scratch.items.span();
  const int64_t count = std::ssize(items);
  sort_by_value(items, scratch.spare.span());
  const bool limited = filter.top_k > 0 && filter.top_k < count;
  const uint32_t bar = limited ? key_in(items[count - filter.top_k]) : 0;
  const MatrixView<float> e = scratch.exponentials.matrix(1, count);
  for (int64_t i = 0; i < count; ++i) {
    const Item item = items[i];
    e(0, i) = key_in(item) < bar ? -infinity : value_in(item);
  }
  const float max = e(0, count - 1);
  apply(RowMap::subtract, e, std::span(&max, 1), e, 1);
  apply(Map::exp, e, e, 1);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) scratch.cumulative[i] = sum += e(0, i);
  const double limit = sum * filter.top_p;
  for (int64_t i = 0; i < count; ++i) {
    // False for the largest element and with NaN; true for all elements that top_k has removed.
    const bool beyond = sum - scratch.cumulative[i] >= limit;
    kept[place_in(items[i])] = beyond ? 0 : 1;
  }
}

/// kept [rows, columns] <- 1 for survivors, 0 for other elements.
void filter_rows(MatrixView<const float> z, const SamplingFilter& filter, int threads,
                 Buffer<uint8_t>& kept) {
  std::vector<FilterScratch> scratches;
  for (int t = 0; t < std::max(1, threads); ++t) scratches.emplace_back(z.cols);
  for_each_row(threads, z, 10, [&](int64_t r, int thread) {
    FilterScratch& scratch = scratches[thread];
    for (int64_t c = 0; c < z.cols; ++c)
      scratch.items[c] = item_of(z(r, c), static_cast<uint32_t>(c));
    const auto row = kept.span().subspan(r * z.cols, z.cols);
    if (filter.top_p == 1)
      keep_largest(scratch.items.span(), std::min(filter.top_k, z.cols), row);
    else
      keep_nucleus(scratch, filter, row);
  });
}

/// left <- z where kept, -inf elsewhere.
void mask_rows(MatrixView<const float> z, const Buffer<uint8_t>& kept, int threads,
               MatrixView<float> left) {
  for_each_row(threads, z, 0.3, [&](int64_t r, int) {
    const float* from = z.row(r);
    const uint8_t* keep = kept.data() + r * z.cols;
    float* to = left.row(r);
    for (int64_t c = 0; c < z.cols; ++c) to[c] = keep[c] != 0 ? from[c] : -infinity;
  });
}

/// The log-softmax of whole rows, in the slot `logprobs`, and the softmax, in the slot `shifted`.
MatrixView<float> log_softmax_of_rows(MatrixView<const float> z, Scratch& scratch, int threads) {
  const MatrixView<float> x = scratch.tensor(shifted, z.rows, z.cols);
  const MatrixView<float> e = scratch.tensor(logprobs, z.rows, z.cols);
  Buffer<float> of_row(z.rows);
  reduce(Reduction::max, z, of_row.span(), threads);
  apply(RowMap::subtract, z, of_row.span(), x, threads);
  apply(Map::exp, x, e, threads);
  reduce(Reduction::sum, e, of_row.span(), threads);
  for (float& s : of_row.span()) s = std::log(s);
  apply(RowMap::subtract, x, of_row.span(), e, threads);
  apply(Map::exp, e, x, threads);
  return e;
}

/// Moves the `length` largest items to the front, in descending order.
void largest_first(std::span<Item> items, int64_t length) {
  const auto end = items.begin() + length;
  constexpr int64_t few = 64;  // with at least this many elements per result, a heap is faster
  if (length * few <= std::ssize(items)) {
    std::partial_sort(items.begin(), end, items.end(), std::greater<>());
    return;
  }
  if (end != items.end()) std::nth_element(items.begin(), end, items.end(), std::greater<>());
  std::sort(items.begin(), end, std::greater<>());
}

/// The item of a candidate for top-k. It holds the complement of the id, so that the lower id wins
/// a tie. Id -1 (no element) gives the smallest item of its value.
Item top_item(float x, int64_t id) {
  return item_of(x, ~static_cast<uint32_t>(id));
}
int32_t id_in(Item item) {
  return static_cast<int32_t>(~place_in(item));
}

/// values, ids [rows, length] <- the largest elements of each row; -inf and -1 if it has fewer.
void local_top(MatrixView<const float> z, int64_t first_id, int threads, MatrixView<float> values,
               MatrixView<int64_t> ids) {
  const int64_t length = std::min(values.cols, z.cols);
  std::vector<Buffer<Item>> scratches;
  for (int t = 0; t < std::max(1, threads); ++t) scratches.emplace_back(z.cols);
  for_each_row(threads, z, 3, [&](int64_t r, int thread) {
    Buffer<Item>& items = scratches[thread];
    for (int64_t c = 0; c < z.cols; ++c) items[c] = top_item(z(r, c), first_id + c);
    largest_first(items.span(), length);
    for (int64_t i = 0; i < values.cols; ++i) {
      values(r, i) = i < length ? value_in(items[i]) : -infinity;
      ids(r, i) = i < length ? id_in(items[i]) : -1;
    }
  });
}

}  // namespace

FilteredLogprob::FilteredLogprob(Shape shape, SamplingFilter filter, Communicator& tp)
    : shape_(std::move(shape)),
      filter_(filter),
      tp_(tp),
      exchange_(shape_.tokens, shape_.vocab, DType::f32, tp) {}

void FilteredLogprob::forward(ConstMatrixRef logits, std::span<const int32_t> targets,
                              Stream& stream, std::span<float> logprob) {
  check(shape_, tp_, logits);
  const int threads = shape_.threads;
  MatrixView<const float> mine = in_f32(logits, scratch_, threads);
  if (filter_.temperature != 1) {
    const MatrixView<float> cooled = scratch_.tensor(whole, mine.rows, mine.cols);
    Buffer<float> divisors(mine.rows);
    std::ranges::fill(divisors.span(), static_cast<float>(filter_.temperature));
    apply(RowMap::divide, mine, divisors.span(), cooled, threads);
    mine = cooled;
  }
  const int64_t rows = exchange_.rows(), vocab_size = shape_.vocab.vocab_size;
  const MatrixView<float> all = scratch_.tensor(product, rows, shape_.vocab.padded());
  exchange_.to_sequence(mine, stream, all);
  MatrixView<const float> z = all.columns_from(0, vocab_size);
  if (filter_.active()) {
    if (kept_.size() == 0) kept_ = Buffer<uint8_t>(rows * vocab_size);
    filter_rows(z, filter_, threads, kept_);
    const MatrixView<float> left = scratch_.tensor(whole, rows, vocab_size);
    mask_rows(z, kept_, threads, left);
    z = left;
  }
  const MatrixView<float> logp = log_softmax_of_rows(z, scratch_, threads);
  if (own_.size() == 0) own_ = Buffer<float>(rows);
  const int64_t first = exchange_.first_row(tp_.rank());
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t id = targets[first + r];
    own_[r] = id >= 0 && id < vocab_size ? logp(r, id) : -infinity;
  }
  tp_.all_gather_v(bytes_of(std::as_const(own_).span()), writable_bytes_of(logprob),
                   bytes_of_rows(), stream, "filtered log-probabilities")
      ->wait();
}

std::vector<int64_t> FilteredLogprob::bytes_of_rows() const {
  std::vector<int64_t> bytes;
  for (int r = 0; r < tp_.size(); ++r) {
    const int64_t end = r + 1 < tp_.size() ? exchange_.first_row(r + 1) : shape_.tokens;
    bytes.push_back((end - exchange_.first_row(r)) * sizeof(float));
  }
  return bytes;
}

std::vector<int32_t> FilteredLogprob::survivors(Stream& stream) const {
  const int64_t rows = exchange_.rows(), vocab_size = shape_.vocab.vocab_size;
  std::vector<int32_t> own(rows, static_cast<int32_t>(vocab_size)), all(shape_.tokens);
  if (kept_.size() > 0)
    for (int64_t r = 0; r < rows; ++r)
      own[r] = static_cast<int32_t>(
          std::count(kept_.data() + r * vocab_size, kept_.data() + (r + 1) * vocab_size, 1));
  tp_.all_gather_v(bytes_of(std::span<const int32_t>(own)), writable_bytes_of(std::span(all)),
                   bytes_of_rows(), stream, "numbers of survivors")
      ->wait();
  return all;
}

void FilteredLogprob::backward(std::span<const int32_t> targets, std::span<const float> d_logprob,
                               Stream& stream, MatrixRef d_logits) {
  check(shape_, tp_, d_logits);
  const int threads = shape_.threads;
  const int64_t rows = exchange_.rows(), vocab_size = shape_.vocab.vocab_size;
  const int64_t padded = shape_.vocab.padded(), first = exchange_.first_row(tp_.rank());
  const MatrixView<float> all = scratch_.tensor(logprobs, rows, padded);
  const MatrixView<float> gradient = all.columns_from(0, vocab_size);
  Buffer<float> g(rows);
  for (int64_t r = 0; r < rows; ++r)
    g[r] = d_logprob[first + r] / static_cast<float>(filter_.temperature);
  apply(Map::negate, scratch_.tensor(shifted, rows, vocab_size), gradient, threads);
  apply(RowMap::multiply, gradient, g.span(), gradient, threads);
  for (int64_t r = 0; r < rows; ++r) {
    if (own_[r] != -infinity) gradient(r, targets[first + r]) += g[r];
  }
  clear(MatrixRef(all.columns_from(vocab_size, padded - vocab_size)), threads);
  if (d_logits.type == DType::f32) return exchange_.to_vocab(all, stream, d_logits);
  const MatrixView<float> mine = scratch_.tensor(cast, shape_.tokens, d_logits.cols);
  exchange_.to_vocab(all, stream, mine);
  narrow(mine, d_logits.as<bf16>(), threads);
}

void TopK::run(ConstMatrixRef logits, Stream& stream, std::span<float> values,
               std::span<int32_t> ids) {
  check(shape_, tp_, logits);
  int64_t longest = 0;
  for (int r = 0; r < tp_.size(); ++r) longest = std::max(longest, shape_.vocab.valid(r));
  const int64_t length = std::min(k_, shape_.vocab.vocab_size), of_rank = std::min(k_, longest);
  const ConstMatrixRef valid = logits.columns_from(0, shape_.vocab.valid(tp_.rank()));
  for_each_slice(shape_, [&](Rows rows) {
    const int64_t entries = rows.count * of_rank;
    Buffer<float> own(entries), all(entries * tp_.size());
    Buffer<int64_t> own_ids(entries), all_ids(entries * tp_.size());
    local_top(in_f32(rows_of(valid, rows), scratch_, shape_.threads),
              shape_.vocab.begin(tp_.rank()), shape_.threads, own.matrix(rows.count, of_rank),
              own_ids.matrix(rows.count, of_rank));
    tp_.all_gather(bytes_of(std::as_const(own).span()), writable_bytes_of(all.span()), stream,
                   "largest logits")
        ->wait();
    tp_.all_gather(bytes_of(std::as_const(own_ids).span()), writable_bytes_of(all_ids.span()),
                   stream, "ids of the largest logits")
        ->wait();
    std::vector<Item> items(of_rank * tp_.size());
    for (int64_t r = 0; r < rows.count; ++r) {
      for (int64_t i = 0; i < std::ssize(items); ++i) {
        const int64_t at = i / of_rank * entries + r * of_rank + i % of_rank;
        items[i] = top_item(all[at], all_ids[at]);
      }
      largest_first(items, length);
      for (int64_t i = 0; i < length; ++i) {
        const size_t to = (rows.begin + r) * length + i;
        values[to] = value_in(items[i]);
        ids[to] = id_in(items[i]);
      }
    }
  });
}

}  // namespace gyre::upstream

// Attention of short documents on the CPU.
//
//     for every rectangle, for every KV head:
//       K, V   copied to consecutive rows, unless they are few;
//              Kᵀ [d][key] (backward also Vᵀ)
//       for every query head of that KV head, for every 8 rows:
//         scores [row][key]  = Q · Kᵀ, from the first key that any of the rows sees to the last
//         scores             = exp(scores - top)
//         out    [row][d]    = scores · V, merged into the result; without an earlier result, the
//                              scores are divided by their sums instead
//
// For up to 24 rows and keys nothing is transposed: scores are dot products, [key][row] of 8 rows.
//
// Backward, for up to 64 rows at a time: p and ds like the scores above, dQ = ds · K for every 8
// rows, then dV = pᵀ · dO and dK = dsᵀ · Q for some keys at a time and the rows that see them.
//
// All data of a rectangle fits into the L1 or L2 cache, and no product is called through a table.
// For a document of 8 tokens, setting up the tiles of tile_worker.cpp takes longer than computing.
// Tiles win from several hundred keys on (bench/kernels.cpp).

#include "attention/kernels/one_pass.hpp"

#include <algorithm>

#include "attention/kernels/row_access.hpp"
#include "core/index.hpp"
#include "core/special_values.hpp"

namespace gyre {
namespace {

constexpr int64_t tile_rows = 64;  ///< largest number of rows of a tile, which bounds p and ds
constexpr int64_t max_columns = one_pass_columns(one_pass_keys);

void reserve(Buffer<float>& buffer, int64_t count) {
  if (buffer.size() < count) buffer = Buffer<float>(count);
}

}  // namespace

OnePassSplit split_one_pass(const BlockInput& in) {
  const std::span<const Rectangle> rectangles = in.rectangles;
  const bool served = !in.fixed_tiles && in.heads.scale > 0;
  OnePassSplit split;
  int64_t rows_end = 0, keys_end = 0;  // of all earlier rectangles; of the last in `one_pass`
  for (size_t i = 0; i < rectangles.size(); ++i) {
    const Rectangle& r = rectangles[i];
    const int64_t begin = r.q_begin, end = begin + r.q_length;
    const bool alone = (i == 0 || rows_end <= begin) &&
                       (i + 1 == rectangles.size() || rectangles[i + 1].q_begin >= end);
    rows_end = i == 0 ? end : std::max(rows_end, end);
    if (!served || !alone || r.q_length > one_pass_rows || r.k_length > one_pass_keys) {
      split.others.push_back(r);
      continue;
    }
    if (r.q_length == 0 || r.k_length == 0) continue;
    const int64_t first_key = r.k_begin;
    if (!split.one_pass.empty() && first_key < keys_end) split.keys_apart = false;
    keys_end = first_key + r.k_length;
    split.one_pass.push_back(r);
  }
  return split;
}

void OnePassWorker::start(int64_t head_dim, int64_t value_dim, Progress progress) {
  of_keys_ = {head_dim, round_up(head_dim, one_pass_unit)};
  of_values_ = {value_dim, round_up(value_dim, one_pass_unit)};
  progress_ = progress;
  begin_.resize(one_pass_rows);
  end_.resize(one_pass_rows);
}

/// A query head of a rectangle, and the position of the next one.
struct OnePassWorker::Position {
  const Rectangle& rectangle;
  int64_t kv_head, head;
  bool first_of_kv_head, last_of_kv_head;
  int64_t row_offset, head_offset;  ///< distance to the next head's rows; both 0: none
};

template <class Body>
void OnePassWorker::for_each_head(const BlockInput& in, std::span<const Rectangle> rectangles,
                                  int64_t kv_begin, int64_t kv_end, Body body) {
  const int64_t first = in.heads.head_begin(kv_begin), last = in.heads.head_end(kv_end - 1);
  for (size_t i = 0; i < rectangles.size(); ++i) {
    set_limits(rectangles[i]);
    for (int64_t kv_head = kv_begin; kv_head < kv_end; ++kv_head) {
      const int64_t begin = in.heads.head_begin(kv_head), end = in.heads.head_end(kv_head);
      for (int64_t head = begin; head < end; ++head) {
        Position at{rectangles[i], kv_head, head, head == begin, head + 1 == end, 0, 0};
        if (head + 1 < last) {
          at.head_offset = 1;
        } else if (i + 1 < rectangles.size()) {
          at.row_offset = rectangles[i + 1].q_begin - rectangles[i].q_begin;
          at.head_offset = first - head;
        }
        body(at);
      }
    }
  }
}

void OnePassWorker::set_limits(const Rectangle& r) {
  const auto clip = [&](int64_t key) {
    return static_cast<int32_t>(std::clamp<int64_t>(key, 0, r.k_length));
  };
  for (int64_t i = 0; i < r.q_length; ++i) {
    const size_t at = i;
    begin_[at] = clip(r.mask.begin_key(i));
    end_[at] = clip(r.mask.end_key(i));
  }
}

OnePassTile OnePassWorker::tile(const BlockInput& in, const Rectangle& r, int64_t row,
                                int64_t rows) const {
  return {.rows = rows,
          .keys = r.k_length,
          .columns = one_pass_columns(r.k_length),
          .of_keys = of_keys_,
          .of_values = of_values_,
          .begin = begin_.data() + row,
          .end = end_.data() + row,
          .scale = in.heads.scale};
}

void OnePassWorker::load_panel(ConstMatrixRef from, int64_t row, int64_t count, int64_t head,
                               const HeadWidth& width, Buffer<float>& panel, int64_t capacity) {
  const int64_t column = head * width.dim;
  reserve(panel, capacity * width.padded);
  if (from.type == DType::f32) {
    const MatrixView<const float> rows = from.as<float>();
    pack_panel({rows.row(row) + column, rows.stride, nullptr}, count, width, panel.data());
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    float* to = panel.data() + i * width.padded;
    load_row(from, row + i, column, width.dim, 1, to);
    std::fill(to + width.dim, to + width.padded, 0.0F);
  }
}

HeadRows<const float> OnePassWorker::rows_of(ConstMatrixRef from, int64_t row, int64_t column) {
  return {from.as<float>().row(row) + column, from.stride, nullptr};
}

HeadRows<const float> OnePassWorker::panel_of(const Buffer<float>& panel, const HeadWidth& width) {
  return {panel.data(), width.padded, nullptr};
}

/// Whether rows can be read in their array. A copy pays neither for few rows, which are read about
/// once, nor for rows close together, which do not compete for L1 sets.
bool OnePassWorker::needs_no_panel(ConstMatrixRef from, int64_t count, const HeadWidth& width) {
  constexpr int64_t close_together = int64_t{64} << 10;  // in bytes
  const int64_t bytes = count * from.stride * sizeof(float);
  return from.type == DType::f32 && width.whole() &&
         (count <= 2 * one_pass_strip || bytes <= close_together);
}

void OnePassWorker::load_keys(const BlockInput& in, const Rectangle& r, int64_t kv_head,
                              bool backward) {
  const int64_t first = r.k_begin, columns = one_pass_columns(r.k_length);
  const bool by_dots =
      std::max(r.q_length, r.k_length) <= one_pass_dots && of_keys_.whole() && of_values_.whole();
  // Rows are needed for dot products, and for dQ = ds · K and out = p · V.
  const auto load = [&](ConstMatrixRef from, const HeadWidth& width, bool as_rows,
                        Buffer<float>& panel, bool transposed, Buffer<float>& to) {
    const bool copied = from.type != DType::f32 ||
                        ((as_rows || by_dots) && !needs_no_panel(from, r.k_length, width));
    if (copied) load_panel(from, first, r.k_length, kv_head, width, panel, one_pass_keys);
    const HeadRows<const float> rows =
        copied ? panel_of(panel, width) : rows_of(from, first, kv_head * width.dim);
    if (kv_head + 1 < in.heads.kv_heads)
      prefetch(from, first, r.k_length, (kv_head + 1) * width.dim, width.dim);
    if (!transposed || by_dots) return OnePassKeys{rows, nullptr};
    reserve(to, width.dim * max_columns);
    transpose_rows(rows, r.k_length, width.dim, columns, to.data());
    return OnePassKeys{rows, to.data()};
  };
  keys_ = load(in.k, of_keys_, backward, k_, true, k_transposed_);
  values_ = load(in.v, of_values_, !backward, v_, backward, v_transposed_);
  progress_.account(4.0 * (r.k_length * (of_keys_.dim + of_values_.dim)));
}

void OnePassWorker::forward(const ForwardBlock& block, std::span<const Rectangle> rectangles,
                            int64_t kv_begin, int64_t kv_end) {
  reserve(scores_, tile_rows * max_columns);
  reserve(sums_, one_pass_strip * of_values_.padded);
  const bool in_place = block.q.type == DType::f32, direct = block.out.type == DType::f32;
  for_each_head(block, rectangles, kv_begin, kv_end, [&](const Position& at) {
    const Rectangle& r = at.rectangle;
    const int64_t row = r.q_begin, out_column = at.head * of_values_.dim;
    if (at.first_of_kv_head) load_keys(block, r, at.kv_head, false);
    const auto next = [&](const auto* rows, int64_t stride, const HeadWidth& width) {
      return at.head_offset == 0 && at.row_offset == 0
                 ? nullptr
                 : rows + at.row_offset * stride + at.head_offset * width.dim;
    };
    HeadRows<const float> q{nullptr, of_keys_.padded, nullptr};
    if (in_place) {
      q = rows_of(block.q, row, at.head * of_keys_.dim);
      q.next = next(q.data, q.stride, of_keys_);
    } else {
      load_panel(block.q, row, r.q_length, at.head, of_keys_, q_, one_pass_rows);
      q.data = q_.data();
    }
    HeadRows<float> out{nullptr, of_values_.padded, nullptr};
    if (direct) {
      out.data = block.out.as<float>().row(row) + out_column, out.stride = block.out.stride;
      out.next = next(out.data, out.stride, of_values_);
    } else {
      load_panel(block.out, row, r.q_length, at.head, of_values_, out_, one_pass_rows);
      out.data = out_.data();
    }
    one_pass_forward(tile(block, r, 0, r.q_length), q, keys_, values_.rows, out,
                     block.lse.row(row) + at.head, block.lse.stride, scores_.data(), sums_.data());
    progress_.account(2.0 * (r.q_length * r.k_length * (of_keys_.dim + of_values_.dim)));
    if (direct) return;
    for (int64_t i = 0; i < r.q_length; ++i)
      if (block.lse(row + i, at.head) != -infinity_of<float>)
        store_row(out_.data() + i * of_values_.padded, row + i, out_column, of_values_.dim,
                  block.out);
  });
}

/// Loads the rows of a tile; rows without a gradient become zeros.
void OnePassWorker::load_gradient_rows(const BackwardBlock& block, int64_t row, int64_t rows,
                                       int64_t head) {
  bool all_have = true;
  for (int64_t i = 0; i < rows; ++i) {
    lse_.data()[i] = block.lse(row + i, head);
    delta_.data()[i] = block.heads.scale * block.delta(row + i, head);
    all_have = all_have && lse_.data()[i] != -infinity_of<float>;
  }
  const auto load = [&](ConstMatrixRef from, const HeadWidth& width, Buffer<float>& panel) {
    if (all_have && needs_no_panel(from, rows, width)) return rows_of(from, row, head * width.dim);
    load_panel(from, row, rows, head, width, panel, tile_rows);
    for (int64_t i = 0; i < rows; ++i)
      if (lse_.data()[i] == -infinity_of<float>)
        std::fill_n(panel.data() + i * width.padded, width.padded, 0.0F);
    return panel_of(panel, width);
  };
  q_rows_ = load(block.q, of_keys_, q_);
  d_out_rows_ = load(block.d_out, of_values_, d_out_);
  for (int64_t i = 0; i < rows; ++i) {
    if (lse_.data()[i] != -infinity_of<float>) continue;
    lse_.data()[i] = infinity_of<float>;
    delta_.data()[i] = 0;
  }
}

/// Destination of the key gradients of a rectangle: the result itself, or a panel if rows of the
/// result are not a multiple of a vector.
HeadRows<float> OnePassWorker::open_gradients(MatrixView<float> result, const Rectangle& r,
                                              int64_t kv_head, const HeadWidth& width,
                                              Buffer<float>& panel) {
  if (width.whole()) return {result.row(r.k_begin) + kv_head * width.dim, result.stride, nullptr};
  reserve(panel, one_pass_keys * width.padded);
  std::fill_n(panel.data(), r.k_length * width.padded, 0.0F);
  return {panel.data(), width.padded, nullptr};
}

void OnePassWorker::close_gradients(MatrixView<float> result, const Rectangle& r, int64_t kv_head,
                                    const HeadWidth& width, const Buffer<float>& panel) {
  if (width.whole()) return;
  for (int64_t j = 0; j < r.k_length; ++j) {
    float* row = result.row(r.k_begin + j) + kv_head * width.dim;
    for (int64_t d = 0; d < width.dim; ++d) row[d] += panel.data()[j * width.padded + d];
  }
}

void OnePassWorker::backward(const BackwardBlock& block, std::span<const Rectangle> rectangles,
                             int64_t kv_begin, int64_t kv_end) {
  for (Buffer<float>* buffer : {&scores_, &d_scores_}) reserve(*buffer, tile_rows * max_columns);
  for (Buffer<float>* buffer : {&lse_, &delta_}) reserve(*buffer, tile_rows);
  reserve(sums_, one_pass_strip * of_keys_.padded);
  const bool keys_wanted = block.d_k.data != nullptr, queries_wanted = !block.d_q.empty();
  const bool direct = block.d_q.type == DType::f32;
  HeadRows<float> d_k{}, d_v{};
  for_each_head(block, rectangles, kv_begin, kv_end, [&](const Position& at) {
    const Rectangle& r = at.rectangle;
    const int64_t column = at.head * of_keys_.dim;
    if (at.first_of_kv_head) {
      load_keys(block, r, at.kv_head, true);
      if (keys_wanted) {
        d_k = open_gradients(block.d_k, r, at.kv_head, of_keys_, d_k_);
        d_v = open_gradients(block.d_v, r, at.kv_head, of_values_, d_v_);
      }
    }
    for (int64_t begin = 0; begin < r.q_length; begin += tile_rows) {
      const int64_t rows = std::min(tile_rows, r.q_length - begin);
      const int64_t row = r.q_begin + begin;
      load_gradient_rows(block, row, rows, at.head);
      HeadRows<float> d_q{nullptr, of_keys_.padded, nullptr};
      if (queries_wanted && direct) {
        d_q.data = block.d_q.as<float>().row(row) + column, d_q.stride = block.d_q.stride;
      } else if (queries_wanted) {
        load_panel(block.d_q, row, rows, at.head, of_keys_, out_, tile_rows);
        d_q.data = out_.data();
      }
      one_pass_backward(tile(block, r, begin, rows),
                        {q_rows_, d_out_rows_, keys_, values_, lse_.data(), delta_.data()}, d_q,
                        d_k, d_v, scores_.data(), d_scores_.data(), sums_.data());
      const int64_t panel_rows = queries_wanted && !direct ? rows : 0;
      for (int64_t i = 0; i < panel_rows; ++i)
        store_row(out_.data() + i * of_keys_.padded, row + i, column, of_keys_.dim, block.d_q);
      progress_.account(2.0 * (rows * r.k_length * (3 * of_keys_.dim + 2 * of_values_.dim)));
    }
    if (keys_wanted && at.last_of_kv_head) {
      close_gradients(block.d_k, r, at.kv_head, of_keys_, d_k_);
      close_gradients(block.d_v, r, at.kv_head, of_values_, d_v_);
    }
  });
}

}  // namespace gyre

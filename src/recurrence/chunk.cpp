#include "recurrence/chunk.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/gemm.hpp"

namespace gyre {
namespace {

using Array = RecurrenceArray;

void load_row(const MatrixRef& from, int64_t row, int64_t column, int64_t count, float* to) {
  if (from.type == DType::f32) {
    std::copy_n(&from.as<float>()(row, column), count, to);
    return;
  }
  const bf16* const narrow = &from.as<bf16>()(row, column);
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(narrow[i]);
}

void store_row(const float* from, int64_t count, const MatrixRef& to, int64_t row, int64_t column) {
  if (to.type == DType::f32) {
    std::copy_n(from, count, &to.as<float>()(row, column));
    return;
  }
  bf16* const narrow = &to.as<bf16>()(row, column);
  for (int64_t i = 0; i < count; ++i) narrow[i] = to_bf16(from[i]);
}

float dot_of(const float* a, const float* b, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

/// to += factor · from
void add_multiple(float factor, const float* from, float* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

void multiply_rows(MatrixView<float> matrix, const float* factors) {
  for (int64_t r = 0; r < matrix.rows; ++r)
    for (int64_t c = 0; c < matrix.cols; ++c) matrix(r, c) *= factors[r];
}

void multiply(MatrixView<float> to, MatrixView<const float> by) {
  for (int64_t r = 0; r < to.rows; ++r)
    for (int64_t c = 0; c < to.cols; ++c) to(r, c) *= by(r, c);
}

/// Zeroes elements (t, i) with i > t; with i >= t if `strictly`.
void keep_lower(MatrixView<float> matrix, bool strictly) {
  for (int64_t t = 0; t < matrix.rows; ++t)
    std::fill(matrix.row(t) + t + (strictly ? 0 : 1), matrix.row(t) + matrix.cols, 0.0F);
}

}  // namespace

RecurrenceChunk::RecurrenceChunk(const RecurrenceShape& shape, int64_t state_width)
    : shape_(shape), width_(state_width), beta_(recurrence_chunk), diagonal_(recurrence_chunk) {
  constexpr int64_t most = recurrence_chunk;
  for (Buffer<float>* of_keys :
       {&q_, &k_, &qa_, &ka_, &kb_, &decays_, &until_, &behind_, &d_q_, &row_, &source_, &d_kb_})
    *of_keys = Buffer<float>(most * shape.key_dim);
  for (Buffer<float>* of_values : {&v_, &d_out_, &y_, &d_w_})
    *of_values = Buffer<float>(most * shape.value_dim);
  for (Buffer<float>* of_states : {&residual_, &u_}) *of_states = Buffer<float>(most * width_);
  for (Buffer<float>* of_pairs : {&between_, &p_, &r_, &d_p_, &d_r_})
    *of_pairs = Buffer<float>(most * most);
}

void RecurrenceChunk::load(const RecurrenceData& data, int64_t head, int64_t begin,
                           int64_t tokens) {
  tokens_ = tokens;
  const int64_t key_head = head / shape_.group(), keys = shape_.key_dim, dim = shape_.value_dim;
  for (int64_t t = 0; t < tokens; ++t) {
    load_row(data[Array::q], begin + t, key_head * keys, keys, this->keys(q_).row(t));
    load_row(data[Array::k], begin + t, key_head * keys, keys, this->keys(k_).row(t));
    load_row(data[Array::v], begin + t, head * dim, dim, values(v_).row(t));
    beta_[t] = shape_.delta ? data[Array::beta].at(begin + t, head) : 1;
  }
  load_decays(data, head, begin);
  const auto scaled = [&](Buffer<float>& to, Buffer<float>& rows, Buffer<float>& factors) {
    std::copy_n(rows.data(), tokens * keys, to.data());
    multiply(this->keys(to), this->keys(factors));
  };
  scaled(qa_, q_, until_);
  scaled(ka_, k_, until_);
  scaled(kb_, k_, behind_);
  if (shape_.channel_decay)
    make_channel_pairs();
  else
    make_pairs();
}

void RecurrenceChunk::load_decays(const RecurrenceData& data, int64_t head, int64_t begin) {
  const int64_t dim = shape_.decay_dim(), n = tokens_;
  const MatrixView<float> decays = keys(decays_), until = keys(until_), behind = keys(behind_);
  for (int64_t t = 0; t < n; ++t) {
    load_row(data[Array::g], begin + t, head * dim, dim, decays.row(t));
    for (int64_t c = 0; c < dim; ++c) decays(t, c) = std::exp(decays(t, c));
    if (dim == 1) std::fill_n(decays.row(t), shape_.key_dim, decays(t, 0));
  }
  std::copy_n(decays.row(0), shape_.key_dim, until.row(0));
  std::fill_n(behind.row(n - 1), shape_.key_dim, 1.0F);
  for (int64_t t = 1; t < n; ++t)
    for (int64_t c = 0; c < shape_.key_dim; ++c) {
      until(t, c) = until(t - 1, c) * decays(t, c);
      behind(n - 1 - t, c) = behind(n - t, c) * decays(n - t, c);
    }
}

void RecurrenceChunk::load_d_out(const RecurrenceData& data, int64_t head, int64_t begin) {
  for (int64_t t = 0; t < tokens_; ++t) {
    float* const to = values(d_out_).row(t);
    load_row(data[Array::d_out], begin + t, head * shape_.value_dim, shape_.value_dim, to);
    for (int64_t e = 0; e < shape_.value_dim; ++e) to[e] *= shape_.scale;
  }
}

void RecurrenceChunk::make_pairs() {
  const MatrixView<float> between = pairs(between_);
  for (int64_t i = 0; i < tokens_; ++i) {
    float decay = 1;
    for (int64_t t = i; t < tokens_; ++t) {
      if (t > i) decay *= keys(decays_)(t, 0);
      between(t, i) = decay;
    }
  }
  keep_lower(between, false);
  gemm_b_transposed(keys(q_), keys(k_), pairs(p_));
  multiply(pairs(p_), between);
  if (!shape_.delta) return;
  gemm_b_transposed(keys(k_), keys(k_), pairs(r_));
  multiply(pairs(r_), between);
  keep_lower(pairs(r_), true);
}

void RecurrenceChunk::make_channel_pairs() {
  const int64_t dim = shape_.key_dim;
  std::fill_n(p_.data(), tokens_ * tokens_, 0.0F);
  std::fill_n(r_.data(), tokens_ * tokens_, 0.0F);
  std::vector<float> decayed(dim);
  for (int64_t i = 0; i < tokens_; ++i) {
    std::copy_n(keys(k_).row(i), dim, decayed.data());
    pairs(p_)(i, i) = dot_of(keys(q_).row(i), decayed.data(), dim);
    for (int64_t t = i + 1; t < tokens_; ++t) {
      const float* const decay = keys(decays_).row(t);
      for (int64_t c = 0; c < dim; ++c) decayed[c] *= decay[c];
      pairs(p_)(t, i) = dot_of(keys(q_).row(t), decayed.data(), dim);
      if (shape_.delta) pairs(r_)(t, i) = dot_of(keys(k_).row(t), decayed.data(), dim);
    }
  }
}

void RecurrenceChunk::solve(MatrixView<const float> state) {
  const MatrixView<float> u = view(u_, width_), residual = view(residual_, width_);
  const auto value_of = [&](int64_t t, int64_t e) {
    return e < shape_.value_dim ? values(v_)(t, e) : 0;
  };
  if (shape_.delta) gemm(keys(ka_), state, residual);
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t e = 0; e < width_; ++e)
      residual(t, e) = shape_.delta ? value_of(t, e) - residual(t, e) : value_of(t, e);
    for (int64_t i = 0; shape_.delta && i < t; ++i)
      add_multiple(-pairs(r_)(t, i), u.row(i), residual.row(t), width_);
    for (int64_t e = 0; e < width_; ++e) u(t, e) = beta_[t] * residual(t, e);
  }
}

void RecurrenceChunk::advance(MatrixView<float> state) {
  multiply_rows(state, keys(until_).row(tokens_ - 1));
  gemm_a_transposed(keys(kb_), view(u_, width_), state, true);
}

void RecurrenceChunk::decay(std::span<float> map) {
  for (size_t c = 0; c < map.size(); ++c) map[c] *= keys(until_)(tokens_ - 1, c);
}

void RecurrenceChunk::output(MatrixView<const float> state, const RecurrenceData& data,
                             int64_t head, int64_t begin) {
  const MatrixView<float> out = values(y_);
  gemm(keys(qa_), state, out);
  gemm(pairs(p_), value_columns(u_), out, true);
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t e = 0; e < shape_.value_dim; ++e) out(t, e) *= shape_.scale;
    store_row(out.row(t), shape_.value_dim, data[Array::out], begin + t, head * shape_.value_dim);
  }
}

void RecurrenceChunk::solve_back(MatrixView<const float> d_state) {
  const MatrixView<float> y = values(y_), d_w = values(d_w_);
  gemm_a_transposed(pairs(p_), values(d_out_), y);
  gemm(keys(kb_), d_state, y, true);
  if (!shape_.delta) return;
  for (int64_t t = tokens_ - 1; t >= 0; --t) {
    for (int64_t j = t + 1; j < tokens_; ++j)
      add_multiple(-beta_[j] * pairs(r_)(j, t), y.row(j), y.row(t), shape_.value_dim);
    for (int64_t e = 0; e < shape_.value_dim; ++e) d_w(t, e) = -beta_[t] * y(t, e);
  }
}

void RecurrenceChunk::retreat(MatrixView<float> d_state) {
  multiply_rows(d_state, keys(until_).row(tokens_ - 1));
  gemm_a_transposed(keys(qa_), values(d_out_), d_state, true);
  if (shape_.delta) gemm_a_transposed(keys(ka_), values(d_w_), d_state, true);
}

void RecurrenceChunk::gradients(MatrixView<const float> state, MatrixView<const float> d_state,
                                const RecurrenceData& data, int64_t head, int64_t begin,
                                MatrixView<float> d_q, MatrixView<float> d_k) {
  write_value_gradients(data, head, begin);
  state_gradients(state, d_state);
  if (shape_.channel_decay)
    channel_pair_gradients();
  else
    pair_gradients();
  const int64_t dim = shape_.decay_dim();
  write_decay_gradients(
      state, d_state,
      data[Array::d_g].as<float>().rows_from(begin, tokens_).columns_from(head * dim, dim));
  for (int64_t t = 0; t < tokens_; ++t)
    for (int64_t c = 0; c < shape_.key_dim; ++c) {
      d_q(t, c) += keys(d_q_)(t, c) + diagonal_[t] * keys(k_)(t, c);
      d_k(t, c) += keys(row_)(t, c) + keys(source_)(t, c) + keys(d_kb_)(t, c) +
                   diagonal_[t] * keys(q_)(t, c);
    }
}

void RecurrenceChunk::write_value_gradients(const RecurrenceData& data, int64_t head,
                                            int64_t begin) {
  const int64_t dim = shape_.value_dim;
  std::vector<float> d_v(dim);
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t e = 0; e < dim; ++e) d_v[e] = beta_[t] * values(y_)(t, e);
    store_row(d_v.data(), dim, data[Array::d_v], begin + t, head * dim);
    if (shape_.delta)
      data[Array::d_beta].as<float>()(begin + t, head) =
          dot_of(values(y_).row(t), value_columns(residual_).row(t), dim);
  }
}

void RecurrenceChunk::state_gradients(MatrixView<const float> state,
                                      MatrixView<const float> d_state) {
  const MatrixView<float> u = value_columns(u_);
  gemm_b_transposed(values(d_out_), state, keys(d_q_));
  multiply(keys(d_q_), keys(until_));
  gemm_b_transposed(u, d_state, keys(d_kb_));
  multiply(keys(d_kb_), keys(behind_));
  gemm_b_transposed(values(d_out_), u, pairs(d_p_));
  for (int64_t t = 0; t < tokens_; ++t) diagonal_[t] = pairs(d_p_)(t, t);
  keep_lower(pairs(d_p_), true);
  if (!shape_.delta) {
    std::fill_n(row_.data(), tokens_ * shape_.key_dim, 0.0F);
    return;
  }
  gemm_b_transposed(values(d_w_), state, keys(row_));
  multiply(keys(row_), keys(until_));
  gemm_b_transposed(values(d_w_), u, pairs(d_r_));
  keep_lower(pairs(d_r_), true);
}

void RecurrenceChunk::pair_gradients() {
  multiply(pairs(d_p_), pairs(between_));
  gemm(pairs(d_p_), keys(k_), keys(d_q_), true);
  gemm_a_transposed(pairs(d_p_), keys(q_), keys(source_));
  if (!shape_.delta) return;
  multiply(pairs(d_r_), pairs(between_));
  gemm(pairs(d_r_), keys(k_), keys(row_), true);
  gemm_a_transposed(pairs(d_r_), keys(k_), keys(source_), true);
}

void RecurrenceChunk::channel_pair_gradients() {
  const int64_t dim = shape_.key_dim;
  std::fill_n(source_.data(), tokens_ * dim, 0.0F);
  std::vector<float> decay(dim);
  for (int64_t i = 0; i < tokens_; ++i) {
    std::fill(decay.begin(), decay.end(), 1.0F);
    const float* const key = keys(k_).row(i);
    float* const source = keys(source_).row(i);
    for (int64_t t = i + 1; t < tokens_; ++t) {
      const float d_p = pairs(d_p_)(t, i), d_r = shape_.delta ? pairs(d_r_)(t, i) : 0;
      const float *const q = keys(q_).row(t), *const k = keys(k_).row(t);
      float *const d_q = keys(d_q_).row(t), *const row = keys(row_).row(t);
      const float* const next = keys(decays_).row(t);
#pragma omp simd
      for (int64_t c = 0; c < dim; ++c) {
        decay[c] *= next[c];
        const float decayed = decay[c] * key[c];
        d_q[c] += d_p * decayed;
        row[c] += d_r * decayed;
        source[c] += decay[c] * (d_p * q[c] + d_r * k[c]);
      }
    }
  }
}

void RecurrenceChunk::write_decay_gradients(MatrixView<const float> state,
                                            MatrixView<const float> d_state,
                                            MatrixView<float> d_g) {
  const MatrixView<float> q = keys(q_), k = keys(k_), d_q = keys(d_q_), row = keys(row_),
                          source = keys(source_), d_kb = keys(d_kb_);
  for (int64_t t = 0; t < tokens_; ++t) std::fill_n(d_g.row(t), d_g.cols, 0.0F);
  for (int64_t c = 0; c < shape_.key_dim; ++c) {
    const int64_t to = shape_.channel_decay ? c : 0;
    // g_t decays the state before the chunk, and the terms of tokens before t.
    float before =
        keys(until_)(tokens_ - 1, c) * dot_of(state.row(c), d_state.row(c), shape_.value_dim);
    for (int64_t t = 0; t < tokens_; ++t) {
      d_g(t, to) += before;
      before += k(t, c) * d_kb(t, c);
    }
    // It is in A_t of tokens from t on.
    float behind = 0;
    for (int64_t t = tokens_ - 1; t >= 0; --t) {
      behind += q(t, c) * d_q(t, c) + k(t, c) * (row(t, c) - source(t, c));
      d_g(t, to) += behind;
    }
  }
}

}  // namespace gyre

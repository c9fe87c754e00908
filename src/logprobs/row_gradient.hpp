#pragma once
// The backward pass over a shard of the logits: no communication, driven by what the forward pass
// kept of each row.
//
//     log p_v = (z_v - max) · scale - log_sum        p_v = exp(log p_v)
//     dz_v    = p_v (a + b log p_v) + Σ_k {id_k = v} weight_k
//
// With upstream gradients g_k of the log-probabilities of ids k and h of the entropy H (nats):
//
//     a = -scale (Σ_k g_k + h H)        b = -scale h        weight_k = scale g_k
//
// The sum runs over all ids of the row, on whatever rank they are. The output may be the logits'
// own memory, if it has their type; the bits are the same. A row with a = b = 0 and no weight other
// than 0 costs the writing of its zeros only. Padding columns get 0, and so does a column with p =
// 0 and no weight. Other rows whose normaliser is not finite (a NaN or +inf among the logits, or
// nothing but -inf) become NaN. What is stored in bf16 is rounded to nearest; where an id lies, the
// sum is, and once.
//
// Example, logits 0 1 2 3 4, one id, 4, g = 1: max 4, log_sum 0.452, a = -1, b = 0, weight 1
//     dz = -0.012 -0.032 -0.086 -0.234 -0.636 + 1
//
// Limits: 2 or 4 bytes read and as many written an element. Where it is large and not in place, the
// output is written past the caches. On a Zen 4 core (row_statistics.hpp) 16 elements of bf16 take
// 6.5 cycles at least and measured 8.3, 10.1 with b (8 at least): 28 and 23 GB/s read and written.
// Shares of an update loop in place, with nothing else running: 91 to 95 % with f32; with bf16 51
// to 61 % on one thread and 51 to 77 % on two. Of a copy past the caches elsewhere: 96 to 104 %
// with f32; with bf16 61 to 72 % on one thread and 68 to 99 % on two.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"
#include "logprobs/row_picks.hpp"

namespace gyre {

/// What is kept of a row between the passes: 8 bytes. log p_v = (z_v - max) · scale - log_sum.
struct RowNormalizer {
  float max = 0;
  float log_sum = 0;
};

struct RowSlope {
  float a = 0;
  float b = 0;
};

struct RowPass {
  int64_t columns = 0;  ///< valid ones: the first of each row
  float scale = 1;      ///< 1 / temperature
  int threads = 1;
};

/// d_logits [rows, cols] <- dz of logits [rows, cols], each f32 or bf16 with any stride;
/// normalizers, slopes [rows]. Bits do not depend on the number of threads.
void row_gradient(ConstMatrixRef logits, const RowPass& pass,
                  std::span<const RowNormalizer> normalizers, std::span<const RowSlope> slopes,
                  const RowPicks& picks, MatrixRef d_logits);

/// out [rows, cols] <- log p_v, or p_v when `exponentiate`. Padding columns get -inf, or 0. May be
/// the logits' memory, here and below.
void row_log_softmax(ConstMatrixRef logits, const RowPass& pass,
                     std::span<const RowNormalizer> normalizers, bool exponentiate, MatrixRef out);

/// d_logits [rows, cols] <- scale (g_v - p_v Σ g), the gradient through log p_v of all columns v;
/// d_logprobs [rows, cols] holds g, and sums [rows] Σ g over all shards. A row that is no
/// distribution becomes NaN.
void row_log_softmax_gradient(ConstMatrixRef logits, ConstMatrixRef d_logprobs, const RowPass& pass,
                              std::span<const RowNormalizer> normalizers,
                              std::span<const float> sums, MatrixRef d_logits);

/// d_student [rows, cols] <- g (q_v - p_v) with q, p the distributions of student and teacher;
/// gradients [rows]; a row whose gradient is 0 is not read. pass.scale must be 1.
void row_cross_gradient(ConstMatrixRef student, ConstMatrixRef teacher, const RowPass& pass,
                        std::span<const RowNormalizer> students,
                        std::span<const RowNormalizer> teachers, std::span<const float> gradients,
                        MatrixRef d_student);

/// Columns of a row that survive a filter: those above `threshold`, and those equal to it from
/// column `cut` of the shard on.
struct RowSurvivors {
  float threshold = 0;
  int32_t cut = 0;
};

/// As row_gradient with b = 0 and one id a row (picks.per_row = 1), where p_v is 0 for columns that
/// do not survive, and so is the gradient there, whatever the id.
void row_filtered_gradient(ConstMatrixRef logits, const RowPass& pass,
                           std::span<const RowNormalizer> normalizers,
                           std::span<const RowSurvivors> survivors, std::span<const float> a,
                           const RowPicks& picks, MatrixRef d_logits);

}  // namespace gyre

#pragma once
// Backward pass over a shard of the logits: no communication; uses the values that the forward pass
// kept for each row.
//
//     log p_v = (z_v - max) · scale - log_sum        p_v = exp(log p_v)
//     dz_v    = p_v (a + b log p_v) + c + Σ_k {id_k = v} weight_k
//
// With upstream gradients g_k of the log-probabilities of ids k, h of the entropy H (nats), l of
// the log-sum-exp and m of the mean of log p over the V ids of the vocabulary:
//
//     a = scale (l - m - Σ_k g_k - h H)    b = -scale h    c = scale m / V    weight_k = scale g_k
//
// The sum runs over all ids of the row, on any rank. The output may be in the logits' memory if it
// has their type; the bits are the same. A row with a = b = c = 0 and no nonzero weight only costs
// writing its zeros. Padding columns get 0, as do columns with p = 0 and no weight. Other rows with
// a normaliser that is not finite (NaN or +inf among the logits, or only -inf) become NaN. bf16
// results are rounded to nearest; at an id, the sum is rounded once.
//
// Example, logits 0 1 2 3 4, one id, 4, g = 1: max 4, log_sum 0.452, a = -1, b = 0, weight 1
//     dz = -0.012 -0.032 -0.086 -0.234 -0.636 + 1
//
// A pass reads 2 or 4 bytes per element and writes as many. If the output is large and not in
// place, it bypasses the caches. On a Zen 4 core (row_statistics.hpp), 16 elements of bf16 take at
// least 6.5 cycles if b = 0 (measured: 8.3), else 8 (measured: 10.1): 28 and 23 GB/s read and
// written. Rate relative to a loop that updates memory in place, with nothing else running: f32 91
// to 95 %; bf16 51 to 61 % on one thread and 51 to 77 % on two. Relative to a copy that bypasses
// the caches: f32 96 to 104 %; bf16 61 to 72 % on one thread and 68 to 99 % on two.

#include <cstdint>
#include <span>

#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_scale.hpp"
#include "logprobs/rows/token_ids.hpp"

namespace gyre {

/// Kept for a row between the passes: 8 bytes. log p_v = (z_v - max) · scale - log_sum.
struct RowNormalizer {
  float max = 0;
  float log_sum = 0;
};

struct GradientCoefficients {
  float a = 0;
  float b = 0;
  float c = 0;

  GYRE_HOST_DEVICE bool is_zero() const { return a == 0 && b == 0 && c == 0; }
};

struct RowPass {
  int64_t columns = 0;  ///< number of valid columns, the first of each row
  RowScale scale = 1;   ///< 1 / temperature
  int threads = 1;
};

/// d_logits [rows, cols] <- dz for logits [rows, cols], each f32 or bf16 with any stride;
/// normalizers, coefficients [rows]. The bits do not depend on the number of threads.
void row_gradient(ConstMatrixRef logits, const RowPass& pass,
                  std::span<const RowNormalizer> normalizers,
                  std::span<const GradientCoefficients> coefficients, const RowTokenIds& token_ids,
                  MatrixRef d_logits);

/// out [rows, cols] <- log p_v, or p_v if `exponentiate`. Padding columns get -inf or 0. `out` may
/// be the logits' memory, as in the functions below.
void row_log_softmax(ConstMatrixRef logits, const RowPass& pass,
                     std::span<const RowNormalizer> normalizers, bool exponentiate, MatrixRef out);

/// d_logits [rows, cols] <- scale (g_v - p_v Σ g), the gradient through log p_v of all columns v,
/// with g from d_logprobs [rows, cols] and Σ g over all shards from sums [rows]. A row that is no
/// distribution becomes NaN.
void row_log_softmax_gradient(ConstMatrixRef logits, ConstMatrixRef d_logprobs, const RowPass& pass,
                              std::span<const RowNormalizer> normalizers,
                              std::span<const float> sums, MatrixRef d_logits);

/// d_student [rows, cols] <- g (q_v - p_v) for the distributions q of the student and p of the
/// teacher; g from gradients [rows]; rows with g = 0 are not read. pass.scale must be 1.
void row_cross_gradient(ConstMatrixRef student, ConstMatrixRef teacher, const RowPass& pass,
                        std::span<const RowNormalizer> students,
                        std::span<const RowNormalizer> teachers, std::span<const float> gradients,
                        MatrixRef d_student);

/// Survivors of a filter in a row: columns above `threshold`, and those equal to it from column
/// `cut` of the shard on.
struct RowSurvivors {
  float threshold = 0;
  int32_t cut = 0;
};

/// Like row_gradient with b = 0 and one id per row (token_ids.per_row = 1), but p_v and the
/// gradient are 0 for columns that do not survive, even at the id.
void row_filtered_gradient(ConstMatrixRef logits, const RowPass& pass,
                           std::span<const RowNormalizer> normalizers,
                           std::span<const RowSurvivors> survivors, std::span<const float> a,
                           const RowTokenIds& token_ids, MatrixRef d_logits);

}  // namespace gyre

#pragma once
// One pass over this rank's vocabulary shard of the logits: everything that log-probabilities,
// entropies and cross entropies need of it.
//
// Per row, over the valid columns v, with x_v = (z_v - max) · scale and scale = 1 / temperature:
//
//     max = max z_v        sum = Σ exp(x_v)        weighted = Σ x_v exp(x_v)
//
// Over all shards, with m = max of the max_r and d_r = (max_r - m) · scale:
//
//     s = Σ sum_r e^{d_r}              t = Σ (weighted_r + d_r sum_r) e^{d_r}
//     log p_v = (z_v - m) · scale - log s          entropy = log s - t / s     (nats, >= 0)
//
// m and log s are kept apart: their sum would lose the small differences under a large common
// offset. Terms of -inf logits are selected away, never multiplied (0 · log 0 = 0). A NaN or +inf
// makes all of its row's moments NaN, and with them everything of its row.
//
// Example, logits 0 1 2 on one rank and 3 4 on another:
//     max 2, sum 1 + e^-1 + e^-2 = 1.503, weighted -e^-1 - 2 e^-2 = -0.639
//     max 4, sum 1 + e^-1        = 1.368, weighted -e^-1          = -0.368
//     m = 4, s = 1.503 e^-2 + 1.368 = 1.571, log p_4 = -0.452
//
// Sums run in f32 over 4096 columns, and in f64 over those, so that errors do not grow with the
// vocabulary. The error of the exponential of the largest logit, which is 1, is taken out.
//
// Limits. A pass reads each element once, 2 or 4 bytes. With AVX-512 an element's exponential takes
// five instructions of the FMA pipes and nine in all with its sum, and its conversion from bf16 and
// its share in the range one each. On a Zen 4 core, which does one 512-bit FMA and two 512-bit
// instructions of any kind a cycle, 16 elements take 5.5 cycles at least and measured 7.2, 8.9 with
// the weighted sum (7 at least): the lookup in two registers does not spread over the pipes
// evenly. At 3.7 GHz that is 16 GB/s of bf16 (13 weighted), where the limit is thus its pipes; of
// f32 memory decides. Shares of the rate at which one thread, or two, can read memory, with nothing
// else running: 90 to 99 % with f32; with bf16 66 to 70 % on one thread and 67 to 75 % on two.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"

namespace gyre {

/// A row of a shard in 12 bytes. A shard without columns, or with nothing but -inf, has max = -inf,
/// sum = weighted = 0.
struct RowMoments {
  float max = 0;
  float sum = 0;
  float weighted = 0;
};

struct RowScan {
  int64_t columns = 0;    ///< valid ones: the first of each row
  float scale = 1;        ///< 1 / temperature, positive
  bool weighted = false;  ///< whether `weighted` is wanted; else it is 0
  int threads = 1;
};

/// logits [rows, >= scan.columns], f32 or bf16, any stride; out [rows]. Bits depend neither on the
/// number of threads nor, of max and sum, on `weighted`. `sum` is at least 1 and `weighted` at most
/// 0 where max is a number.
void row_moments(ConstMatrixRef logits, const RowScan& scan, std::span<RowMoments> out);

/// Two rows of one token, of a student and a teacher, in 20 bytes:
///     cross = Σ exp(T_v - teacher_max) (S_v - student_max)
/// so that over all shards, with s_S, s_T and u made of student_sum, teacher_sum and cross,
///     CE = -Σ p^T_v log q^S_v = log s_S - u / s_T
/// A column of which the teacher holds -inf adds nothing to cross; one of which only the student
/// does makes it -inf, and CE +inf.
struct CrossMoments {
  float student_max = 0, student_sum = 0, teacher_max = 0, teacher_sum = 0, cross = 0;
};

/// student, teacher [rows, >= columns], each f32 or bf16; out [rows]. One pass over both.
void row_cross_moments(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns, int threads,
                       std::span<CrossMoments> out);

/// out [rows] <- Σ_v of the first `columns` of each row of `values`, f32 or bf16. In f32 over 4096
/// columns, in f64 over those. Bits do not depend on the number of threads.
void row_sums(ConstMatrixRef values, int64_t columns, int threads, std::span<double> out);

}  // namespace gyre

#pragma once
// One pass over this rank's vocabulary shard of the logits computes all statistics needed for
// log-probabilities, entropies and cross entropies.
//
// Per row, over the valid columns v, with x_v = (z_v - max) · scale and scale = 1 / temperature:
//
//     max = max z_v        sum = Σ exp(x_v)        weighted = Σ x_v exp(x_v)
//     total = Σ z_v · sum_unit, where it is wanted
//
// Over all shards, with m = max of the max_r and d_r = (max_r - m) · scale:
//
//     s = Σ sum_r e^{d_r}              t = Σ (weighted_r + d_r sum_r) e^{d_r}
//     log p_v = (z_v - m) · scale - log s          entropy = log s - t / s     (nats, >= 0)
//
// m and log s are kept apart, because their sum would lose small differences under a large common
// offset. Terms of -inf logits are selected away, never multiplied (0 · log 0 = 0). A NaN or +inf
// makes all partials of its row NaN, and with them all results of the row.
//
// Example, logits 0 1 2 on one rank and 3 4 on another:
//     max 2, sum 1 + e^-1 + e^-2 = 1.503, weighted -e^-1 - 2 e^-2 = -0.639
//     max 4, sum 1 + e^-1        = 1.368, weighted -e^-1          = -0.368
//     m = 4, s = 1.503 e^-2 + 1.368 = 1.571, log p_4 = -0.452
//
// Sums are f32 over 4096 columns and f64 over these blocks, so that errors do not grow with the
// vocabulary. The term of the largest logit is replaced by its exact value, 1.
//
// A pass reads each element once, 2 or 4 bytes. With AVX-512, the exponential of an element takes
// five instructions on the FMA pipes, nine in total with its sum; the conversion from bf16 and the
// range take one more each. A Zen 4 core does one 512-bit FMA and two 512-bit instructions of any
// kind per cycle: 16 elements take at least 5.5 cycles (measured: 7.2); with the weighted sum at
// least 7 (measured: 8.9, because the two-register lookup does not use the pipes evenly). At 3.7
// GHz this is 16 GB/s of bf16 (13 weighted), bound by the pipes; f32 is bound by memory. Rate
// relative to only reading memory with as many threads and nothing else running: f32 90 to 99 %;
// bf16 66 to 70 % on one thread and 67 to 75 % on two.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_scale.hpp"

namespace gyre {

/// Unit of sums of logits: the sum of 2^24 finite ones, or of their differences times factors up to
/// 2^32 (a block's exponentials), is finite in f32.
inline constexpr float sum_unit = 0x1p-64F;

/// Partials of one row of a shard. A shard without columns, or with only -inf, has max = -inf and
/// sum = weighted = 0.
struct SoftmaxPartial {
  float max = 0;
  float sum = 0;
  float weighted = 0;
  float total = 0;  ///< Σ z_v · sum_unit; -inf if a logit is
};

struct RowScan {
  int64_t columns = 0;    ///< number of valid columns, the first of each row
  RowScale scale = 1;     ///< 1 / temperature, positive
  bool weighted = false;  ///< whether to compute `weighted`; else it is 0
  int threads = 1;
  bool total = false;  ///< whether to compute `total`, from a second read of each row in cache
};

/// out [rows] <- partials of logits [rows, >= scan.columns], f32 or bf16, any stride. The bits do
/// not depend on the number of threads; those of max and sum also not on scan.weighted. If max is
/// finite, `sum` is at least 1 and `weighted` at most 0.
void softmax_partials(ConstMatrixRef logits, const RowScan& scan, std::span<SoftmaxPartial> out);

/// Partials of a student's and a teacher's row of one token, 20 bytes:
///     cross = Σ exp(T_v - teacher_max) (S_v - student_max) · sum_unit
/// Over all shards, s_S, s_T and u are merged from student_sum, teacher_sum and cross / sum_unit:
///     CE = -Σ p^T_v log q^S_v = log s_S - u / s_T
/// A column where the teacher has -inf adds nothing to cross; one where only the student has -inf
/// makes cross -inf and CE +inf.
struct CrossPartial {
  float student_max = 0, student_sum = 0, teacher_max = 0, teacher_sum = 0, cross = 0;
};

/// out [rows] <- partials of student and teacher [rows, >= columns], each f32 or bf16, in one pass.
void softmax_cross_partials(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns,
                            int threads, std::span<CrossPartial> out);

/// out [rows] <- sum of the first `columns` of each row of `values`, f32 or bf16. Sums are f32 over
/// 4096 columns and f64 over these blocks. The bits do not depend on the number of threads.
void row_sums(ConstMatrixRef values, int64_t columns, int threads, std::span<double> out);

}  // namespace gyre

#pragma once
// Element-wise and row-wise operations over a whole matrix, as an eager framework runs them. Each
// call reads its operands from memory and writes its result to memory, at memory bandwidth:
// vectorised with run-time dispatch, rows shared among threads.
//
// Comments give bytes per element as read + written; elements are f32 unless said otherwise.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"

namespace gyre::upstream {

/// out <- f(a), 4 + 4 bytes. exp requires a <= 80 and gives 0 below -88.
enum class Map { exp, negate, copy };
void apply(Map f, MatrixView<const float> a, MatrixView<float> out, int threads);

/// out <- a op s, with one s per row, 4 + 4 bytes.
enum class RowMap { subtract, multiply, divide };
void apply(RowMap op, MatrixView<const float> a, std::span<const float> s, MatrixView<float> out,
           int threads);

/// out <- a op b, 8 + 4 bytes. multiply gives 0 where a is 0, whatever b holds.
enum class Zip { subtract, multiply };
void apply(Zip op, MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> out,
           int threads);

/// out [rows] <- max or sum of each row, 4 bytes read; -inf or 0 without columns. A sum is taken in
/// f32 over runs of a row and in f64 over the runs.
enum class Reduction { max, sum };
void reduce(Reduction f, MatrixView<const float> a, std::span<float> out, int threads);
/// out [rows] <- Σ a b of each row, 8 bytes read; terms with a = 0 are 0, whatever b holds.
void dot(MatrixView<const float> a, MatrixView<const float> b, std::span<float> out, int threads);

/// f32 out <- bf16 a: 2 + 4 bytes; bf16 out <- f32 a, rounded to nearest: 4 + 2 bytes.
void widen(MatrixView<const bf16> a, MatrixView<float> out, int threads);
void narrow(MatrixView<const float> a, MatrixView<bf16> out, int threads);

/// PyTorch's one-hot in int64, in three passes (bytes per element): zeros with a 1 at column
/// ids[row] (8), the product of each row with its 0 or 1 (8 + 8), conversion to f32 (8 + 4).
void one_hot(std::span<const int64_t> ids, MatrixView<int64_t> out, int threads);
void multiply_rows(MatrixView<const int64_t> a, std::span<const int64_t> s, MatrixView<int64_t> out,
                   int threads);
void to_float(MatrixView<const int64_t> a, MatrixView<float> out, int threads);

/// Sets a matrix of either type to zero.
void clear(MatrixRef out, int threads);

}  // namespace gyre::upstream

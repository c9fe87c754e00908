#pragma once
// Tolerances of a recurrence and its gradients (the error model: core/tolerance.hpp).
//
// A row's error is relative to the size of its terms (recurrence_reference.hpp), which includes the
// errors of their factors. Let K = key_dim, V = value_dim, C = tokens of a chunk, T = tokens of the
// longest document, M = maps that are applied to a state between ranks. Roundings of each step:
//
//     pair P_ti, R_ti       K + C     dot product; C products of decays
//     update U              K + C     residual: a dot product with the state, and pairs
//     state S               T + M K   sum of the terms k u of all tokens before; a map is a matrix
//     out                   K + C     dot products with the state, and sum over pairs
//     gradient of S         T + M K   sum of the terms q dO and k dU of all tokens behind
//     dv, dbeta             K + C + V dot products with it
//     dq, dk                2 V + C   dot products over values, and sums over pairs
//     dg                    V + K + C sums of products over a chunk
//
//     n_S   = 2 (K + C) + T + M K + 1                    n_out = n_S + K + C
//     n_dv  = n_S + n_out + V                            also of dbeta
//     n_dq  = n_S + 2 V + C                              n_dk  = n_S + n_dv + 2 V + C
//     n_dg  = n_dq + n_dk + K + C
//
// A convolution of width w computes q, k and v, whose errors are then those of factors:
//
//     y                     w + K + 8 a sum, SiLU, and a normalisation: a dot product
//     dx                    n_y + w + K + 8   the same backward, and y again
//     dweight               C + ranks         sums of C tokens; over ranks; between them in double
//
//     n_S and n_out grow by 2 n_y and by n_y; dq, dk and dv by dx; n_dweight = n_dk + dx + C + ranks
//
// States, sums and messages are f32. A result that is stored as bf16 is rounded once.

#include "core/tolerance.hpp"
#include "recurrence/kind.hpp"

namespace gyre {

struct RecurrenceReductions {
  int64_t tokens = 0;  ///< of the longest document
  int64_t maps = 0;    ///< the most maps that are applied to a state one after the other
  int64_t ranks = 1;   ///< whose gradients of the convolution's weights are added
};

/// Tolerance of a result, relative to error_scale() of the row of a head. `type`: that of
/// activations.
double recurrence_tolerance(const RecurrenceShape& shape, const RecurrenceReductions& lengths,
                            RecurrenceArray array, DType type);
/// Tolerance of the gradient of the convolution's weights, which is f32.
double weights_tolerance(const RecurrenceShape& shape, const RecurrenceReductions& lengths);
/// The standard deviation of the errors of a result that is stored as bf16, in the same units; 0 of
/// others.
double recurrence_sigma(const RecurrenceShape& shape, const RecurrenceReductions& lengths,
                        RecurrenceArray array, DType type);

}  // namespace gyre

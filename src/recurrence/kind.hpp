#pragma once
// Recurrent layers as data. One recurrence has all kinds; S [key_dim, value_dim] is the state of a
// value head, D_t a diagonal matrix of decays exp(g_t) <= 1:
//
//     S'_t  = D_t S_{t-1}                                     S = 0 where a document begins
//     u_t   = v_t                                             without the delta rule
//     u_t   = beta_t (v_t - S'_tᵀ k_t)                        with it
//     S_t   = S'_t + k_t u_tᵀ
//     out_t = scale · S_tᵀ q_t
//
// D_t is a multiple of the identity (g_t has one element), or has a decay of each channel of the
// keys. Inputs are what follows projections and gates: g and beta are values of gates. A layer may
// begin with a convolution, which also normalises q and k (convolution.hpp); without one, inputs are
// what follows it.

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"

namespace gyre {

/// An entry of the registry.
struct RecurrenceKind {
  std::string name;
  std::string summary;
  bool channel_decay = false;  ///< a decay of each channel of the keys, or one of a head
  bool delta = false;          ///< the delta rule: what the state holds for k_t is replaced
};

const std::vector<RecurrenceKind>& recurrence_kinds();

/// Tokens of a chunk: a kernel computes these together.
inline constexpr int64_t recurrence_chunk = 64;

/// Value head h reads the queries and keys of key head h / group().
struct RecurrenceShape {
  int64_t key_heads = 1, value_heads = 1, key_dim = 1, value_dim = 1;
  float scale = 1;
  bool channel_decay = false, delta = false;
  int64_t convolution = 0;  ///< tokens that the convolution before it reads; 0: there is none

  RecurrenceShape() = default;
  RecurrenceShape(const RecurrenceKind& kind, int64_t key_heads_, int64_t value_heads_,
                  int64_t key_dim_, int64_t value_dim_)
      : key_heads(key_heads_),
        value_heads(value_heads_),
        key_dim(key_dim_),
        value_dim(value_dim_),
        scale(1 / std::sqrt(static_cast<float>(key_dim_))),
        channel_decay(kind.channel_decay),
        delta(kind.delta) {}

  int64_t group() const { return value_heads / key_heads; }
  /// Elements of g_t of a value head.
  int64_t decay_dim() const { return channel_decay ? key_dim : 1; }
  /// Elements of the state of a value head.
  int64_t state_elements() const { return key_dim * value_dim; }
  /// Elements of the linear part of a value head's map (plan.hpp): a matrix [key_dim, key_dim] with
  /// the delta rule, else the diagonal of one.
  int64_t map_elements() const { return delta ? key_dim * key_dim : decay_dim(); }
  /// Channels of the convolution: all heads of queries, then of keys, then of values.
  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

/// Arrays of a rank, row-major [tokens, heads, dim].
enum class RecurrenceArray {
  q,      ///< queries                key heads, key_dim
  k,      ///< keys                   key heads, key_dim
  v,      ///< values                 value heads, value_dim
  g,      ///< logarithms of decays   value heads, decay_dim; always f32
  beta,   ///< strengths of updates   value heads; always f32; only the delta rule reads it
  d_out,  ///< gradient of out
  out,    ///< output                 value heads, value_dim
  d_q,    ///< gradients of the inputs, as these
  d_k,
  d_v,
  d_g,
  d_beta,
};
inline constexpr int recurrence_arrays = 12;
/// Arrays before this one are inputs.
inline constexpr RecurrenceArray first_result = RecurrenceArray::out;
const char* name_of(RecurrenceArray array);
/// Whether a recurrence of this shape has the array: d_beta and beta belong to the delta rule.
bool has_array(const RecurrenceShape& shape, RecurrenceArray array);
int64_t heads_of(const RecurrenceShape& shape, RecurrenceArray array);
int64_t dim_of(const RecurrenceShape& shape, RecurrenceArray array);
/// Type in which a rank's array is stored: g and beta and their gradients are f32.
DType stored_type(RecurrenceArray array, DType activations);
inline int64_t width_of(const RecurrenceShape& shape, RecurrenceArray array) {
  return heads_of(shape, array) * dim_of(shape, array);
}
/// Bytes of `rows` rows of all arrays.
int64_t bytes_of_arrays(const RecurrenceShape& shape, DType activations, int64_t rows);

}  // namespace gyre

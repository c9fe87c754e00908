#pragma once
// Vectorised part of the CPU attention kernel.
//
// A lane is one (query row, head) pair. All tiles are stored with lanes along the fastest
// dimension, `lane_stride` floats from one row to the next: queries [head_dim][lane], scores
// [key][lane], output [head_dim][lane]. Maxima, sums and rescaling are then vertical: no step needs
// a reduction inside a vector.

#include <cstdint>

namespace gyre {

constexpr int64_t lane_stride = 64;       ///< largest number of lanes in a tile
constexpr int64_t lane_granularity = 16;  ///< lane counts are multiples of this

/// Online softmax of every lane: `sum` is Σ exp(score - top), `out` is the same sum weighted by the
/// values.
struct LaneState {
  float* top;  ///< [lanes] reference maximum, -inf before the first visible key; may be below the
               ///< maximum, see softmax_tile
  float* sum;  ///< [lanes]
  float* out;  ///< [dim][lane_stride]
  int64_t dim;
};

/// packed [head_dim][lane_stride] = scale · rows[lane][head_dim]; `lanes` is a multiple of
/// lane_granularity.
void pack_lanes(const float* const* rows, int64_t lanes, int64_t head_dim, float scale,
                float* packed);

/// Replaces scores [keys][lane_stride] by exp(score - top) and adds them to `sum`. Raises `top`,
/// and rescales `sum` and `out`, only where a score exceeds it by more than 8 (terms up to e^8 cost
/// no accuracy). Hidden scores are -inf and become 0. `lanes` is a multiple of lane_granularity.
void softmax_tile(float* scores, int64_t keys, int64_t lanes, LaneState state);

/// Replaces scores [keys][lane_stride] by p = exp(score - lse[lane]), and products <dO, v>
/// [keys][lane_stride] by p · (product - delta[lane]). A lane with lse = inf gets 0, unless its
/// product or delta is not finite. `lanes` is a multiple of lane_granularity.
void gradient_tile(float* scores, float* products, int64_t keys, int64_t lanes, const float* lse,
                   const float* delta);

/// Merges lanes into the partial results rows[lane] [dim] and lse[lane] by merge_lse. A lane
/// that saw no key leaves its row unchanged. A row with lse = -inf must be 0; it may be overwritten
/// without being read.
void merge_lanes(LaneState state, int64_t lanes, float* const* rows, float* const* lse);

/// rows[lane] [head_dim] += factor · tile [head_dim][lane]
void add_lanes(const float* tile, int64_t lanes, int64_t head_dim, float factor,
               float* const* rows);

}  // namespace gyre

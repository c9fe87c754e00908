#pragma once
// Vectorised part of one-pass attention: rectangles with so few keys that all scores of some rows
// are kept until their softmax is complete.
//
// Scores are [row][columns]. All matrix products have the form
//     to [i][n] (+)= Σ_j weight(i, j) · from [j][n],
// with 4 or 8 rows i in registers at a time.

#include <cstdint>

namespace gyre {

constexpr int64_t one_pass_strip = 8;  ///< rows whose products are computed together
constexpr int64_t one_pass_unit = 16;  ///< padded head dimensions are multiples of this

/// Largest numbers of rows and keys of a rectangle whose scores are computed as dot products. With
/// more rows, reductions within vectors cost more than transposing the keys (bench/kernels.cpp).
constexpr int64_t one_pass_dots = 24;

/// Number of elements in a row of one head, without and with its padding of zeros.
struct HeadWidth {
  int64_t dim, padded;
  bool whole() const { return dim == padded; }
};

/// Some rows of a rectangle and its keys. Row i sees keys [begin[i], end[i]), both nondecreasing.
struct OnePassTile {
  int64_t rows, keys;
  int64_t columns;               ///< between rows of scores: one_pass_columns(keys)
  HeadWidth of_keys, of_values;  ///< width of q, k, d_q, d_k; and of v, out, d_out, d_v
  const int32_t *begin, *end;
  float scale;  ///< > 0: maxima are found before scores are scaled

  /// Rows [row, row + one_pass_strip) of the tile, or fewer at its end.
  OnePassTile strip(int64_t row) const {
    OnePassTile part = *this;
    part.rows = rows - row < one_pass_strip ? rows - row : one_pass_strip;
    part.begin += row, part.end += row;
    return part;
  }
};
/// Columns of scores: `keys` rounded up to 8 or to a multiple of 16, hence whole vectors; above 64
/// never a multiple of 64, since rows at such a distance share few L1 sets.
constexpr int64_t one_pass_columns(int64_t keys) {
  const int64_t unit = keys <= one_pass_strip ? one_pass_strip : one_pass_unit;
  const int64_t columns = (keys + unit - 1) / unit * unit;
  return columns > 64 && columns % 64 == 0 ? columns + unit : columns;
}

/// Rows of an array of one head: [count] [head_dim], `stride` floats apart. `next` is an array of
/// the same shape that is used next and is prefetched; may be null.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride;
  const float* next;
  HeadRows from(int64_t row) const { return {data + row * stride, stride, nullptr}; }
};

/// Keys or values of a rectangle: padded rows, and their transpose [dim][columns]. If the transpose
/// is null, products with rows are dot products, which require rows without padding.
struct OnePassKeys {
  HeadRows<const float> rows;
  const float* transposed;
};

/// panel [count][width.padded] = rows, padded with zeros.
void pack_panel(HeadRows<const float> rows, int64_t count, const HeadWidth& width, float* panel);
/// to [dim][columns] = rows, transposed and padded with zeros.
void transpose_rows(HeadRows<const float> rows, int64_t count, int64_t dim, int64_t columns,
                    float* to);

/// Attention of the rows over the keys, merged into `out` and lse[i · lse_stride] by merge_lse. A
/// row that sees no key stays unchanged; a row with lse = -inf is overwritten without being read.
/// Reads only the transpose of `k`, or its rows if that is null. Rows of `v` are padded.
/// `scores`: [one_pass_strip][columns], `sums`: [one_pass_strip][of_values.padded].
void one_pass_forward(const OnePassTile& tile, HeadRows<const float> q, const OnePassKeys& k,
                      HeadRows<const float> v, HeadRows<float> out, float* lse, int64_t lse_stride,
                      float* scores, float* sums);

/// Inputs of the backward pass of a tile: padded rows of q and d_out; delta times the scale.
/// lse = inf: the row has no gradient; its rows and delta are zeros.
struct OnePassGradientInput {
  HeadRows<const float> q, d_out;
  OnePassKeys k, v;
  const float *lse, *delta;
};
/// Adds to `d_q`, and to `d_k` and `d_v` of padded rows; null outputs are skipped. `p`, `d_scores`:
/// [rows][columns], `sums`: [one_pass_strip][of_keys.padded].
void one_pass_backward(const OnePassTile& tile, const OnePassGradientInput& in, HeadRows<float> d_q,
                       HeadRows<float> d_k, HeadRows<float> d_v, float* p, float* d_scores,
                       float* sums);

}  // namespace gyre

#pragma once
// How long the parts of a decoder take that are not attention.
//
//     linear        launch + 2 m k n / rate(m, sqrt(k n))      [m, k] · [k, n]
//     elementwise   bytes read and written / rate               norms, rotations, activations
//     log-probs     rows · (row + columns · bytes / rate)       one pass over the logits
//     all-reduce    as measured, by the number of ranks; otherwise by a ring over the links:
//                   2 (p - 1) messages of bytes / p, one behind the other

#include <limits>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "predict/rate_surface.hpp"

namespace gyre {

/// Rates of matrix products of one type: rows are those of the activations, keys the side of a
/// square weight of as many elements.
struct LinearSurface : RateSurface {
  DType type = DType::f32;
  double launch_s = 0;  ///< of a call
};

/// Times of a collective operation of the communicator's library, over some ranks of a node.
struct CollectiveTimes {
  struct Point {
    double bytes = 0, seconds = 0;
  };
  int ranks = 0;
  std::vector<Point> points;  ///< ascending in bytes

  /// Linear between two points, in proportion above the last one, that of the first one below.
  double seconds(double bytes) const;
};

struct DecoderModel {
  std::vector<LinearSurface> linears;  ///< none: a scoring pass cannot be predicted
  double elementwise_bytes_per_s = std::numeric_limits<double>::infinity();
  double logprob_bytes_per_s = std::numeric_limits<double>::infinity();  ///< of logits
  double logprob_row_s = 0;
  std::vector<CollectiveTimes> all_reduces;

  /// Seconds of [rows, inner] · [inner, columns]. Throws a usage error without a surface of `type`.
  double linear_seconds(DType type, double rows, double inner, double columns) const;
  std::string why_not(DType type) const;  ///< "" where linear_seconds() has an answer
};

}  // namespace gyre

#pragma once
// Durations of a decoder's operations other than attention.
//
//     linear        launch + 2 m k n / rate(m, sqrt(k n))      [m, k] · [k, n]; also the logits
//     elementwise   bytes read and written / rate               norms, rotations, activations
//     log-probs     rows · (row_s + columns · bytes / rate)     one pass over the logits
//     all-reduce    as measured for this number of ranks; else by a ring over the links:
//                   2 (p - 1) messages of bytes / p, one after the other

#include <limits>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "predict/rate_surface.hpp"

namespace gyre {

/// Rates of matrix products of one type. rows: activation rows; keys: side of the square weight
/// with the same number of elements.
struct LinearSurface : RateSurface {
  DType type = DType::f32;
  double launch_s = 0;  ///< per call
};

/// Durations of one collective of the communicator's library within a node.
struct CollectiveTimes {
  struct Point {
    double bytes = 0, seconds = 0;
  };
  int ranks = 0;
  std::vector<Point> points;  ///< ascending in bytes

  /// Linear between two points, proportional above the last, constant below the first.
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

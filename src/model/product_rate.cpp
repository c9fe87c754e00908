#include "model/product_rate.hpp"

#include <algorithm>
#include <limits>
#include <memory>

#include "model/decoder_ops.hpp"
#include "model/decoder_weights.hpp"

namespace gyre {
namespace {

/// A matrix [side, side] of small values that are not all alike: a product of zeros runs faster.
WeightTensor square(DType type, int64_t side, Stream& stream) {
  WeightTensor x(DType::f32, side, side);
  const MatrixView<float> values = x.matrix().as<float>();
  for (int64_t i = 0; i < side * side; ++i)
    values.data[i] = static_cast<float>(i * 2654435761 % 1021) / 1021 - 0.5F;
  WeightTensor narrow = x.converted(type);
  narrow.move_to(stream);
  return narrow;
}

}  // namespace

ProductRate measure_product(DType type, Stream& stream) {
  const std::unique_ptr<DecoderOps> ops = make_decoder_ops(stream);
  constexpr int64_t first = 64, last = 8192;
  constexpr double enough_s = 1e-3;
  for (int64_t side = first;; side *= 2) {
    const WeightTensor x = square(type, side, stream), w = square(type, side, stream);
    WeightTensor y(type, side, side, stream.space());
    double best = std::numeric_limits<double>::infinity();
    for (int repetition = 0; repetition < 4; ++repetition) {
      const MarkPtr begin = stream.mark();
      ops->linear(x.matrix(), w.matrix(), y.matrix());
      const MarkPtr end = stream.mark();
      stream.synchronize();
      best = std::min(best, end->seconds() - begin->seconds());
    }
    if (best < enough_s && side < last) continue;
    const auto n = static_cast<double>(side);
    return {side, best > 0 ? 2 * n * n * n / best : 0};
  }
}

}  // namespace gyre

#pragma once
// Maps of states as loops over elements (runtime/for_rows.cuh), in the memory of a stream: what a
// GPU runs. See RecurrenceKernel for shapes and meaning.

#include "recurrence/kernel.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

class StateMaps {
 public:
  /// The stream must outlive it.
  StateMaps(const RecurrenceShape& shape, Stream& stream) : shape_(shape), stream_(stream) {}
  void apply(const RunMap& by, bool transposed, std::span<float> into);
  void join(const RunMap& first, const RunMap& second, bool transposed, std::span<float> map,
            std::span<float> state);
  void identity(std::span<float> map, std::span<float> state);
  /// Without the delta rule: map <- the products of all decays of a run. g: rows of the run.
  void decays(MatrixView<const float> g, std::span<float> map);

 private:
  /// into <- left · right (+ added), for all heads; left [K, K] or a diagonal, right [K, columns].
  void multiply(std::span<const float> left, bool transposed, std::span<const float> right,
                int64_t columns, std::span<const float> added, std::span<float> into);
  std::span<float> copy_of(std::span<const float> all, Buffer<float>& copy);

  RecurrenceShape shape_;
  Stream& stream_;
  Buffer<float> first_, second_, product_;
};

}  // namespace gyre

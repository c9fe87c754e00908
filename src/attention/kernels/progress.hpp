#pragma once
// Advances communication while a kernel computes.

#include <functional>

namespace gyre {

/// Calls a function after every 1.5 MFLOP or so (15 to 40 µs).
class Progress {
 public:
  Progress() = default;
  /// `advance` may be null or empty.
  explicit Progress(const std::function<void()>* advance) : advance_(advance) {}
  void account(double flops) {
    flops_ += flops;
    if (flops_ < between_calls) return;
    flops_ = 0;
    if (advance_ != nullptr && *advance_) (*advance_)();
  }

 private:
  static constexpr double between_calls = 1.5e6;
  const std::function<void()>* advance_ = nullptr;
  double flops_ = 0;
};

}  // namespace gyre

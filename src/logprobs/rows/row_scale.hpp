#pragma once
// Factors that multiply the logits of rows, 1 / temperature: one for all rows, or one for each.

#include <cstdint>

#include "core/host_device.hpp"

namespace gyre {

class RowScale {
 public:
  GYRE_HOST_DEVICE RowScale(float all = 1) : all_(all) {}
  /// Factors [rows] in the memory space of the kernels that read them; null: `all` for every row.
  GYRE_HOST_DEVICE RowScale(float all, const float* of_rows) : all_(all), of_rows_(of_rows) {}

  GYRE_HOST_DEVICE float operator[](int64_t row) const {
    return of_rows_ == nullptr ? all_ : of_rows_[row];
  }
  /// Factors of rows `first` and later, as rows 0 and later.
  GYRE_HOST_DEVICE RowScale from(int64_t first) const {
    return {all_, of_rows_ == nullptr ? nullptr : of_rows_ + first};
  }
  const float* of_rows() const { return of_rows_; }
  /// A copy that reads the factors of rows at `of_rows`, if it has such factors.
  RowScale at(const float* of_rows) const {
    return {all_, of_rows_ == nullptr ? nullptr : of_rows};
  }
  bool is_one() const { return of_rows_ == nullptr && all_ == 1; }

 private:
  float all_;
  const float* of_rows_ = nullptr;
};

}  // namespace gyre

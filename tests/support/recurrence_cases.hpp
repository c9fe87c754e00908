#pragma once
// Recurrences that tests run, and the comparison of their results with the definition.

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "core/tolerance.hpp"
#include "recurrence/chunk_kernel.hpp"
#include "recurrence/inputs.hpp"
#include "recurrence/recurrence_reference.hpp"
#include "recurrence/tolerance.hpp"

namespace gyre::test {

inline constexpr uint64_t recurrence_seed = 7;

/// The entry of this name.
template <class Entry>
const Entry& named(const std::vector<Entry>& entries, const std::string& name) {
  return *std::ranges::find(entries, name, &Entry::name);
}

/// Arrays of some rows; results start as NaN.
class RecurrenceArrays {
 public:
  RecurrenceArrays(const RecurrenceShape& shape, DType type, int64_t rows) {
    for (int a = 0; a < recurrence_arrays; ++a) {
      const auto array = static_cast<RecurrenceArray>(a);
      if (!has_array(shape, array)) continue;
      const DType stored = stored_type(array, type);
      const int64_t width = width_of(shape, array);
      bytes_.emplace_back(rows * width * size_of(stored), std::byte{0xff});
      data[array] = {bytes_.back().data(), stored, rows, width, width};
    }
  }
  /// Fills row `row` of all inputs with those of a token.
  void fill(const RecurrenceShape& shape, DType type, int64_t row, int64_t token) {
    for (int a = 0; a < static_cast<int>(first_result); ++a) {
      const auto array = static_cast<RecurrenceArray>(a);
      if (!has_array(shape, array)) continue;
      std::vector<float> values(width_of(shape, array));
      fill_recurrence_row(shape, recurrence_seed, type, array, token, values);
      copy_converted(MatrixView<const float>(values.data(), 1, std::ssize(values)),
                     data[array].rows_from(row, 1));
    }
  }
  RecurrenceData data;

 private:
  std::vector<std::vector<std::byte>> bytes_;
};

/// Copies all arrays, on the host or on a stream's device. Waits for it.
inline void copy_arrays(const RecurrenceData& from, const RecurrenceData& to, Stream& stream) {
  for (int a = 0; a < recurrence_arrays; ++a) {
    const MatrixRef& rows = from.arrays[a];
    if (!rows.empty())
      stream.copy(to.arrays[a].data, rows.data, rows.rows * rows.cols * size_of(rows.type));
  }
  stream.synchronize();
}

inline RecurrenceRows random_recurrence_rows(const RecurrenceShape& shape, DType type) {
  return [&shape, type](RecurrenceArray array, int64_t token, std::span<float> row) {
    fill_recurrence_row(shape, recurrence_seed, type, array, token, row);
  };
}

/// A row of a rank's arrays, and the position in its document that it has.
struct RecurrenceRow {
  int64_t row, position;
};

/// The largest error of each result of a document, in units of its tolerance.
class RecurrenceErrors {
 public:
  RecurrenceErrors(const RecurrenceShape& shape, DType type, RecurrenceReductions lengths)
      : shape_(shape), type_(type), lengths_(lengths) {}

  /// Compares rows of `data`, which are of the document, in all heads.
  void compare(const RecurrenceData& data, const DocumentTokens& document,
               const std::vector<RecurrenceRow>& rows, bool backward) {
    for (int64_t head = 0; head < shape_.key_heads; ++head) {
      const RecurrenceGroupResults want =
          reference_group(shape_, random_recurrence_rows(shape_, type_), document, head, backward,
                          random_weights(shape_, recurrence_seed));
      for (int a = static_cast<int>(first_result); a < recurrence_arrays; ++a)
        if (!want.arrays[a].values.empty())
          for (const RecurrenceRow& row : rows)
            compare_row(data, static_cast<RecurrenceArray>(a), want.arrays[a], head, row);
    }
  }
  /// Compares gradients of weights, of whole documents, with their sum over these.
  void compare_weights(std::span<const float> got, const std::vector<DocumentTokens>& documents) {
    const int64_t width = shape_.convolution, group = shape_.group();
    std::vector<double> want(got.size()), squares(got.size());
    const auto channel_of = [&](int64_t key_head, int64_t i) {
      const int64_t keys = shape_.key_dim, all = shape_.key_heads * keys;
      if (i < keys) return key_head * keys + i;
      if (i < 2 * keys) return all + key_head * keys + i - keys;
      return 2 * all + key_head * group * shape_.value_dim + i - 2 * keys;
    };
    for (const DocumentTokens& document : documents)
      for (int64_t head = 0; head < shape_.key_heads; ++head) {
        const RecurrenceGroupResults results =
            reference_group(shape_, random_recurrence_rows(shape_, type_), document, head, true,
                            random_weights(shape_, recurrence_seed));
        for (size_t i = 0; i < results.d_weights.size(); ++i) {
          const int64_t at = channel_of(head, static_cast<int64_t>(i) / width) * width +
                             static_cast<int64_t>(i) % width;
          want[at] += results.d_weights[i];
          squares[at] += results.d_weight_squares[i];
        }
      }
    double& worst = of_arrays["d_conv_weight"];
    for (size_t i = 0; i < got.size(); ++i) {
      const double scale = std::max(std::sqrt(squares[i]), 1e-30);
      const double error = std::abs(got[i] - want[i]) / scale / weights_tolerance(shape_, lengths_);
      worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
    }
  }
  double worst() const {
    double worst = 0;
    for (const auto& [name, error] : of_arrays) worst = std::max(worst, error);
    return worst;
  }
  std::string text() const {
    std::string text;
    for (const auto& [name, error] : of_arrays) text += name + " " + std::to_string(error) + " ";
    return text;
  }
  std::map<std::string, double> of_arrays;

 private:
  void compare_row(const RecurrenceData& data, RecurrenceArray array, const SizedRows& want,
                   int64_t key_head, const RecurrenceRow& at) {
    const int64_t dim = dim_of(shape_, array);
    const int64_t heads = heads_of(shape_, array) / shape_.key_heads;
    double& worst = of_arrays[name_of(array)];
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t row = at.position * heads + h;
      const std::span<const double> expected = std::span(want.values).subspan(row * dim, dim);
      const double tolerance = recurrence_tolerance(shape_, lengths_, array, type_) *
                               error_scale(expected, want.sizes[row]);
      for (int64_t e = 0; e < dim; ++e) {
        const double got = data[array].at(at.row, (key_head * heads + h) * dim + e);
        const double error = std::abs(got - expected[e]) / tolerance;
        worst =
            std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
      }
    }
  }

  const RecurrenceShape& shape_;
  DType type_;
  RecurrenceReductions lengths_;
};

}  // namespace gyre::test

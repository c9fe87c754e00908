#pragma once
// Comparison of results with a file's answers or with the definition, row by row:
//
//     Check& check = check_of(...)                        the check exists, also without rows
//     for each row   compare_row(array, row, got, expected, answer, check)
//
// A case whose arrays share computations has such a loop. compare_array() is the loop of one array
// that says itself how its rows are read and what is expected of them; such an array also has a
// checksum and can be written to a file.

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/h5.hpp"
#include "report/verify.hpp"

namespace gyre {

/// A row by the definition, in double precision.
struct ExpectedRow {
  std::vector<double> values;  ///< [width]
  std::vector<double> scales;  ///< [width] error scales; negative: the element is not compared
  /// [width] What the file's answers should be where that is not `values`: rounding admits several
  /// right rows, and the file has another one than the result. NaN elsewhere, or empty.
  std::vector<double> stored = {}, stored_scales = {};
  /// [width] Values whose infinities say where results are infinite by definition, independently of
  /// the computation of `values`. Empty: `values`.
  std::vector<double> defined = {};
  /// The distribution is over no element: results must be NaN where `values` are.
  bool undefined = false;
};

struct ResultArray {
  static constexpr int64_t all_rows = std::numeric_limits<int64_t>::max();

  std::string name;      ///< of its dataset in /reference and /results; "": it has none
  h5::Shape shape;       ///< shape of the whole array; its first index selects a row
  std::string check;     ///< name of its check
  double tolerance = 0;  ///< relative to the scales of rows
  double sigma = 0;      ///< expected standard deviation of errors (Check); 0: not checked
  double rounding = 0;   ///< this times the value is added to scales (storage_scale())
  double padding = 0;    ///< expected value of columns beyond the last of the whole array
  int64_t first = 0;     ///< first column here, as a column of the whole array
  int64_t columns = 1;   ///< columns of a row here, including padding
  /// Without answers, about as many of this rank's rows are compared, spread over all of them
  /// (spread_sample).
  int64_t sample_rows = all_rows;
  /// {sampled tokens, all tokens}, if `rows` are already the sample.
  std::optional<std::pair<int64_t, int64_t>> sampled = {};
  /// Indices in the whole array of the rows here; negative: padding. Empty if another rank has the
  /// same rows and shows them.
  std::vector<int64_t> rows = {};
  /// If false, this rank takes part in reading, but another rank shows the result.
  bool shown = true;
  bool whole_numbers = false;            ///< values are integers, such as ids
  bool of_tokens = true;                 ///< rows are tokens, each on one rank; samples count them
  std::vector<std::string> sum_of = {};  ///< answers whose sum is the answer of `name`
  std::vector<double> answers = {};      ///< [shape] from the file; empty: none

  using Batch = std::span<const size_t>;  ///< indices into `rows`
  /// to [batch, columns] <- the results here. Collective for arrays that not all ranks show.
  std::function<void(Batch batch, std::span<double> to)> read = {};
  /// Computes whole rows by the definition.
  std::function<std::vector<ExpectedRow>(Batch batch)> expect = {};
  /// Whether a value in column `column` of the whole array is as right as the expected one because
  /// logits are equal (--ties any). If unset, none is.
  std::function<bool(size_t row, int64_t column, double got, double want)> is_as_right = {};

  int64_t width() const;
  /// "/reference/d_q[5, 1, 7]" for an answer, "d_q[..." for the definition.
  std::string place(size_t row, int64_t column, bool answered) const;
};

/// Makes a ResultArray::read from a function that reads one row.
template <class Read>
std::function<void(ResultArray::Batch, std::span<double>)> read_rows(int64_t columns,
                                                                     const Read& read) {
  return [columns, read](ResultArray::Batch batch, std::span<double> to) {
    const size_t length = columns;
    for (size_t b = 0; b < batch.size(); ++b) read(batch[b], to.subspan(b * length, length));
  };
}

/// Makes a ResultArray::expect from a function that computes one row.
template <class Expect>
std::function<std::vector<ExpectedRow>(ResultArray::Batch)> expect_rows(const Expect& expect) {
  return [expect](ResultArray::Batch batch) {
    std::vector<ExpectedRow> rows;
    for (const size_t r : batch) rows.push_back(expect(r));
    return rows;
  };
}

/// Indices in [0, count): the first, the last, and one of every `step` at a varying offset. Kernels
/// work in tiles, and an error may be at the same offset of each tile.
std::vector<size_t> spread_sample(int64_t count, int64_t step);

/// Indices of the rows that are not padding.
std::vector<size_t> real_rows(std::span<const int64_t> rows);
/// Indices of about `count` rows that are not padding, spread over all of these (spread_sample).
std::vector<size_t> sample_of(std::span<const int64_t> rows, int64_t count);

/// Calls body(batch) for consecutive parts of `rows`, of `width` elements each. A part takes about
/// 16 MB in double precision and has at most `most` rows.
void for_each_batch(std::span<const size_t> rows, int64_t width,
                    const std::function<void(ResultArray::Batch)>& body);

/// Compares an array: in full if it has answers, otherwise its sample. Collective if reading is.
void compare_array(const ResultArray& array, const std::string& label, Verification& checks);

/// Checksum of the rows of this rank that compare_array compares. Collective if reading is.
uint64_t checksum_of(std::span<const ResultArray> arrays);

/// The check "LABEL: WHAT". It passes if `elements` is 0.
Check& check_of(const std::string& label, const std::string& what, double tolerance,
                int64_t elements, Verification& checks, double sigma = 0);

/// The check of an array: "LABEL: CHECK".
Check& check_of(const ResultArray& array, const std::string& label, Verification& checks);

/// Compares row `index` of an array: `got` [array.columns] with `expected`, or with its `answer`
/// [width] if that is not null. Undefined values must be NaN. `where` gives a suffix of the places
/// of values: ", document 0 position 5".
void compare_row(const ResultArray& array, size_t index, std::span<const double> got,
                 const ExpectedRow& expected, const double* answer, Check& check,
                 const std::function<std::string()>& where = {});

}  // namespace gyre

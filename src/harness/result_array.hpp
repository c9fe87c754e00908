#pragma once
// An array of results as it lies on a rank: how its rows are read, and what is expected of them.
// Comparison with a file's answers or with the definition, samples, checksums and files of results
// are made from this description.

#include <cstdint>
#include <functional>
#include <limits>
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
  std::vector<double> scales;  ///< [width] of errors; negative: that element is not compared
  /// [width] what the file's answer must be where rounding admits several right rows and the answer
  /// is nearest to another one than the result; NaN: the same. Empty: the same everywhere.
  std::vector<double> stored = {}, stored_scales = {};
  /// A distribution over nothing: where `values` are NaN, results must be NaN, too.
  bool undefined = false;
};

struct ResultArray {
  static constexpr int64_t all_rows = std::numeric_limits<int64_t>::max();

  std::string name;      ///< in /reference and /results; "": it is in no file
  h5::Shape shape;       ///< of the whole array; a row is what its first index selects
  std::string check;     ///< name of its check
  double tolerance = 0;  ///< relative to the scales of rows
  double padding = 0;    ///< expected value of columns beyond the last of the whole array
  int64_t first = 0;     ///< column of the whole array that is the first here
  int64_t columns = 1;   ///< of a row here, padding included
  /// Rows of this rank that are compared where there are no answers: about as many, spread over all
  /// of them (spread_sample), and `most_rows` of these at most.
  int64_t sample_rows = all_rows, most_rows = all_rows;
  int64_t batch_rows = all_rows;  ///< that are expected at once, at most
  /// True: `rows` are the sample already; `sampled` says of how many tokens out of how many.
  bool samples_itself = false;
  std::pair<int64_t, int64_t> sampled = {0, 0};
  /// The rows here, by their numbers in the whole array; negative: padding. None on a rank that has
  /// the same rows as another, which shows them.
  std::vector<int64_t> rows = {};
  /// False: this rank takes part in reading, and another one shows what was read.
  bool shown = true;
  bool whole_numbers = false;  ///< ids, say
  bool of_tokens = true;  ///< rows are tokens that no other rank has, and a sample is one of tokens
  std::vector<std::string> sum_of = {};  ///< answers that add up to those of `name`
  std::vector<double> answers = {};      ///< [shape] of the file; empty: none

  using Batch = std::span<const size_t>;  ///< indices into `rows`
  /// to [batch, columns] <- what is here. Collective for arrays that are not shown by all ranks.
  std::function<void(Batch batch, std::span<double> to)> read = {};
  /// Whole rows, by the definition.
  std::function<std::vector<ExpectedRow>(Batch batch)> expect = {};
  /// Whether another value than the expected one, in column `column` of the whole array, is as
  /// right, because logits are equal (--ties any); never, unless it is set.
  std::function<bool(size_t row, int64_t column, double got, double want)> is_as_right = {};
  /// Added to the place of a value: ", document 0 position 5".
  std::function<std::string(size_t row)> where = {};

  int64_t width() const;
  /// "/reference/d_q[5, 1, 7], document 0 position 5" of an answer, "d_q[..." of the definition.
  std::string place(size_t row, int64_t column, bool answered) const;
};

/// As ResultArray::read, from a function that reads one row.
template <class Read>
std::function<void(ResultArray::Batch, std::span<double>)> read_rows(int64_t columns, Read read) {
  return [columns, read](ResultArray::Batch batch, std::span<double> to) {
    const auto length = static_cast<size_t>(columns);
    for (size_t b = 0; b < batch.size(); ++b) read(batch[b], to.subspan(b * length, length));
  };
}

/// As ResultArray::expect, from a function that expects one row.
template <class Expect>
std::function<std::vector<ExpectedRow>(ResultArray::Batch)> expect_rows(const Expect& expect) {
  return [expect](ResultArray::Batch batch) {
    std::vector<ExpectedRow> rows;
    for (const size_t r : batch) rows.push_back(expect(r));
    return rows;
  };
}

/// Indices in [0, count): the first, the last, and one of every `step` at a place that varies.
/// Kernels work in tiles, and an error may be at the same place of each.
std::vector<size_t> spread_sample(int64_t count, int64_t step);

/// Indices of the rows that are not padding.
std::vector<size_t> real_rows(std::span<const int64_t> rows);
/// About `count` of them, spread over all (spread_sample).
std::vector<size_t> sample_of(std::span<const int64_t> rows, int64_t count);

/// Calls body(batch) for parts of `rows` of `width` elements each that take some 16 MB in double
/// precision, of at most `most` rows.
void for_each_batch(std::span<const size_t> rows, int64_t width,
                    const std::function<void(ResultArray::Batch)>& body,
                    int64_t most = ResultArray::all_rows);

/// Compares arrays: answered ones in full, others by their sample. Arrays that stand together have
/// the same rows and samples, and expect a batch one after the other: what they have in common can
/// be computed once. Names of checks are "LABEL: CHECK". Collective where reading is.
void compare_arrays(std::span<const ResultArray> together, const std::string& label,
                    Verification& checks);

/// Checksum of the rows of this rank that compare_arrays compares. Collective where reading is.
uint64_t checksum_of(std::span<const ResultArray> arrays);

/// The check "LABEL: WHAT". It passes for an input that has `elements` 0.
Check& check_of(const std::string& label, const std::string& what, double tolerance,
                int64_t elements, Verification& checks);

/// Compares row `index` of an array: `got` [array.columns] with `expected`, or with its `answer`
/// [width], if that is not null. Undefined values must be NaN.
void compare_row(const ResultArray& array, size_t index, std::span<const double> got,
                 const ExpectedRow& expected, const double* answer, Check& check);

}  // namespace gyre

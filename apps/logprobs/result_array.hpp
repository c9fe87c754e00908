#pragma once
// An array of an operation's results, as it lies on a rank: what is compared, and what is written.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/logprobs_file.hpp"

namespace gyre {

/// A row as the definition has it, in double precision.
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
  std::string name;       ///< in /reference and /results; "": it is in no file
  h5::Shape shape;        ///< of the whole array
  std::string check;      ///< what its check is called
  double tolerance = 0;   ///< relative to the scales of rows
  double padding = 0;     ///< what columns behind the last of the whole array must hold
  int64_t first = 0;      ///< column of the whole array that is the first here
  int64_t columns = 1;    ///< of a row here, padding included
  int64_t most_rows = 0;  ///< of a sample; 0: as many as --check-tokens
  /// True: `expect` chooses what is compared where there are no answers; `sampled` says how much.
  bool samples_itself = false;
  std::pair<int64_t, int64_t> sampled = {0, 0};  ///< tokens, of so many
  /// The rows here, by their numbers in the whole array; negative: padding. None on a rank that has
  /// the same rows as another, which shows them.
  std::vector<int64_t> rows = {};
  /// False: this rank takes part in reading, and another one shows what was read.
  bool shown = true;
  bool whole_numbers = false;  ///< ids, say
  bool of_tokens = true;  ///< rows are tokens that no other rank has, and a sample is one of tokens
  std::vector<std::string> sum_of = {};  ///< answers that add up to those of `name`

  using Batch = std::span<const size_t>;  ///< indices into `rows`
  /// to [batch, columns] <- what is here. Collective for arrays that are not shown by all ranks.
  std::function<void(Batch batch, std::span<double> to)> read = {};
  /// Whole rows, by the definition.
  std::function<std::vector<ExpectedRow>(Batch batch)> expect = {};
  /// Whether another value than the expected one, in column `column` of the whole array, is as
  /// right, because logits are equal (--ties any); never, unless it is set.
  std::function<bool(size_t row, int64_t column, double got, double want)> is_as_right = {};

  int64_t width() const;
  /// "/reference/d_logprob[5, 17]" of an answer, "d_logprob[5, 17]" of the definition.
  std::string place(size_t row, int64_t column, bool answered) const;
};

/// As ResultArray::read, of one row at a time.
template <class Read>
std::function<void(ResultArray::Batch, std::span<double>)> read_rows(int64_t columns, Read read) {
  return [columns, read](ResultArray::Batch batch, std::span<double> to) {
    const auto length = static_cast<size_t>(columns);
    for (size_t b = 0; b < batch.size(); ++b) read(batch[b], to.subspan(b * length, length));
  };
}

/// As ResultArray::expect, of one row at a time.
template <class Expect>
std::function<std::vector<ExpectedRow>(ResultArray::Batch)> expect_rows(const Expect& expect) {
  return [expect](ResultArray::Batch batch) {
    std::vector<ExpectedRow> rows;
    for (const size_t r : batch) rows.push_back(expect(r));
    return rows;
  };
}

}  // namespace gyre

#include "harness/result_array.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/checksum.hpp"
#include "core/index.hpp"
#include "core/token_random.hpp"
#include "core/view.hpp"

namespace gyre {
namespace {

std::vector<size_t> rows_to_compare(const ResultArray& array) {
  if (!array.answers.empty() || array.sampled) return real_rows(array.rows);
  return sample_of(array.rows, array.sample_rows);
}

/// Size of a row for batches, which must be equal on all ranks if reading is collective.
int64_t elements_of_row(const ResultArray& array) {
  return std::max(array.width(), array.columns);
}

/// Records how many tokens the comparison covers.
void note_sample(const ResultArray& array, size_t compared, Check& check) {
  if (array.sampled)
    check.add_sample(array.sampled->first, array.sampled->second);
  else if (array.answers.empty() && array.shown && array.of_tokens)
    check.add_sample(compared, std::ssize(real_rows(array.rows)));
}

void compare_batch(const ResultArray& array, ResultArray::Batch batch, Check& check) {
  const size_t width = array.width(), columns = array.columns;
  std::vector<double> got(batch.size() * columns);
  array.read(batch, got);
  const std::vector<ExpectedRow> expected = array.expect(batch);
  for (size_t b = 0; array.shown && b < batch.size(); ++b) {
    const size_t row = array.rows[batch[b]];
    compare_row(array, batch[b], std::span(got).subspan(b * columns, columns), expected[b],
                array.answers.empty() ? nullptr : array.answers.data() + row * width, check);
  }
}

}  // namespace

int64_t ResultArray::width() const {
  int64_t elements = 1;
  for (size_t d = 1; d < shape.size(); ++d) elements *= shape[d];
  return elements;
}

std::string ResultArray::place(size_t row, int64_t column, bool answered) const {
  std::string indices;
  for (size_t d = shape.size(); d-- > 2; column /= shape[d])
    indices = fmt::format(", {}", column % shape[d]) + indices;
  if (shape.size() > 1) indices = fmt::format(", {}", column) + indices;
  return fmt::format("{}{}[{}{}]", answered ? "/reference/" : "", name.empty() ? check : name,
                     rows[row], indices);
}

std::vector<size_t> spread_sample(int64_t count, int64_t step) {
  std::vector<size_t> some;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t block = i / step;
    const uint64_t chosen = (block * splitmix64_golden >> 32) % static_cast<uint64_t>(step);
    if (i % step == static_cast<int64_t>(chosen) || i == 0 || i + 1 == count)
      some.push_back(static_cast<size_t>(i));
  }
  return some;
}

std::vector<size_t> real_rows(std::span<const int64_t> rows) {
  std::vector<size_t> real;
  for (size_t r = 0; r < rows.size(); ++r)
    if (rows[r] >= 0) real.push_back(r);
  return real;
}

std::vector<size_t> sample_of(std::span<const int64_t> rows, int64_t count) {
  const std::vector<size_t> real = real_rows(rows);
  std::vector<size_t> some;
  const int64_t step = std::max<int64_t>(1, ceil_div(std::ssize(real), count));
  for (const size_t i : spread_sample(std::ssize(real), step)) some.push_back(real[i]);
  return some;
}

void for_each_batch(std::span<const size_t> rows, int64_t width,
                    const std::function<void(ResultArray::Batch)>& body) {
  constexpr int64_t max_elements = int64_t{1} << 21;
  const size_t count = std::max<int64_t>(1, max_elements / std::max<int64_t>(1, width));
  for (size_t begin = 0; begin < rows.size(); begin += count)
    body(rows.subspan(begin, std::min(count, rows.size() - begin)));
}

Check& check_of(const std::string& label, const std::string& what, double tolerance,
                int64_t elements, Verification& checks, double sigma) {
  Check& check =
      checks.check(label.empty() ? what : fmt::format("{}: {}", label, what), tolerance, sigma);
  if (elements == 0) check.add_nothing();
  return check;
}

Check& check_of(const ResultArray& array, const std::string& label, Verification& checks) {
  return check_of(label, array.check, array.tolerance, h5::elements_of(array.shape), checks,
                  array.sigma);
}

void compare_array(const ResultArray& array, const std::string& label, Verification& checks) {
  const std::vector<size_t> rows = rows_to_compare(array);
  Check& check = check_of(array, label, checks);
  note_sample(array, rows.size(), check);
  for_each_batch(rows, elements_of_row(array),
                 [&](ResultArray::Batch batch) { compare_batch(array, batch, check); });
}

uint64_t checksum_of(std::span<const ResultArray> arrays) {
  Checksum sum;
  for (const ResultArray& array : arrays)
    for_each_batch(rows_to_compare(array), elements_of_row(array), [&](ResultArray::Batch batch) {
      std::vector<double> values(batch.size() * static_cast<size_t>(array.columns));
      array.read(batch, values);
      sum.add(bytes_of(std::span<const double>(values)));
    });
  return sum.value();
}

void compare_row(const ResultArray& array, size_t index, std::span<const double> got,
                 const ExpectedRow& expected, const double* answer, Check& check,
                 const std::function<std::string()>& where) {
  const auto width = expected.values.size();
  // `defined` is infinite where the definition is; `want` is expected, or is the file's answer.
  const auto compare = [&](size_t at, double value, double want, double defined, double scale,
                           Against against, const char* which = "") {
    const bool answered = against != Against::definition;
    const int64_t column = at;
    if (expected.undefined && !answered && std::isnan(defined) && std::isnan(value))
      return check.add_undefined();
    // Storing rounds the run's values, not those of the file.
    if (against != Against::answer_definition) scale += array.rounding * std::abs(want);
    const bool other = value != want && at < width && array.is_as_right &&
                       array.is_as_right(index, column, value, want);
    check.add(
        value, other ? value : want,
        [&] { return array.place(index, column, answered) + (where ? where() : "") + which; },
        scale, other ? value : defined, against);
  };
  for (size_t c = 0; c < got.size(); ++c) {
    const size_t at = static_cast<size_t>(array.first) + c;
    if (at >= width) {
      compare(at, got[c], array.padding, array.padding, 1, Against::definition);
      continue;
    }
    if (expected.scales[at] < 0) continue;
    const bool differs =
        answer != nullptr && !expected.stored.empty() && !std::isnan(expected.stored[at]);
    const bool answered = answer != nullptr && !differs;
    const double value = expected.values[at];
    compare(at, got[c], answered ? answer[at] : value,
            expected.defined.empty() ? value : expected.defined[at], expected.scales[at],
            answered ? Against::answer : Against::definition);
    if (differs)
      compare(at, answer[at], expected.stored[at], expected.stored[at], expected.stored_scales[at],
              Against::answer_definition, ", the answer itself");
  }
}

}  // namespace gyre

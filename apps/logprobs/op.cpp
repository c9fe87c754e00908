#include "apps/logprobs/op.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>

#include "comm/agree.hpp"

namespace gyre {
namespace {

uint64_t digest(std::span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a, of words
  for (const float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3U;
  return hash;
}

std::vector<size_t> real_rows(std::span<const int64_t> rows) {
  std::vector<size_t> real;
  for (size_t r = 0; r < rows.size(); ++r)
    if (rows[r] >= 0) real.push_back(r);
  return real;
}

/// Calls body(batch) for parts of `rows` that take a few tens of megabytes in double precision.
template <class Body>
void for_each_batch(const std::vector<size_t>& rows, int64_t width, Body body) {
  constexpr int64_t most_elements = int64_t{1} << 21;
  const auto most =
      static_cast<size_t>(std::max<int64_t>(1, most_elements / std::max<int64_t>(1, width)));
  for (size_t begin = 0; begin < rows.size(); begin += most)
    body(std::span(rows).subspan(begin, std::min(most, rows.size() - begin)));
}

}  // namespace

SentTraffic LogprobsOp::all_gather_of(const Communicator& group, int64_t bytes) {
  return {group.size() > 1 ? 1 : 0, (group.size() - 1) * bytes};
}

SentTraffic LogprobsOp::all_reduce_of(const Communicator& group, int64_t bytes) {
  return {group.size() > 1 ? 1 : 0, 2 * (group.size() - 1) * bytes / group.size()};
}

SentTraffic LogprobsOp::reduce_scatter_of(const Communicator& group, int64_t bytes) {
  return {group.size() > 1 ? 1 : 0, (group.size() - 1) * bytes / group.size()};
}

std::vector<double> LogprobsOp::whole_row(int64_t token, TokenTensor tensor) const {
  std::vector<float> row(static_cast<size_t>(vocab().vocab_size));
  c_.inputs.row(tensor, token, 0, row);
  return {row.begin(), row.end()};
}

std::vector<size_t> LogprobsOp::sample(std::span<const int64_t> tokens) const {
  std::vector<size_t> some;
  const std::vector<size_t> real = real_rows(tokens);
  const int64_t budget = std::max<int64_t>(1, c_.options.check_tokens / c_.grid.shape().cp);
  const int64_t count = std::ssize(real), step = std::max<int64_t>(1, ceil_div(count, budget));
  // Not every step-th one: kernels work in tiles, and a fault may sit in the same place of each.
  for (int64_t i = 0; i < count; ++i) {
    const auto block = static_cast<uint64_t>(i / step);
    const auto chosen =
        static_cast<int64_t>((block * splitmix64_golden >> 32) % static_cast<uint64_t>(step));
    if (i % step == chosen || i == 0 || i + 1 == count)
      some.push_back(real[static_cast<size_t>(i)]);
  }
  return some;
}

Check& LogprobsOp::check_of(const std::string& label, const std::string& what, double tolerance,
                            Verification& checks) const {
  Check& check = checks.check(fmt::format("{}: {}", label, what), tolerance);
  if (c_.problem.tokens() == 0) check.add_nothing();
  return check;
}

void LogprobsOp::check_same_bits(const std::string& label, std::span<const float> results,
                                 Communicator& group, Verification& checks) {
  const auto mine = static_cast<int64_t>(digest(results));
  const std::vector<int64_t> all = all_gather_value(group, mine);
  Check& check = checks.check(label + ": same bits on all ranks", 0);
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == all[0])
      check.add_nothing();
    else
      check.add_failure(fmt::format("rank {} of the group differs from rank 0", r));
  }
}

std::vector<double> RowGradientTerms::scales() const {
  std::vector<double> added(logprobs.size(), 0), all;
  for (size_t k = 0; k < ids.size(); ++k)
    if (ids[k] >= 0 && ids[k] < std::ssize(added))
      added[static_cast<size_t>(ids[k])] += std::abs(weights[k]);
  for (size_t v = 0; v < logprobs.size(); ++v)
    all.push_back(logit_gradient_scale(logprobs[v], a, b, added[v]));
  return all;
}

std::vector<int64_t> LogprobsOp::shown_once(std::span<const int64_t> tokens) const {
  if (c_.grid.tp_rank() != 0) return {};
  return {tokens.begin(), tokens.end()};
}

ResultArray LogprobsOp::gradient_array(const char* name, std::span<const int64_t> tokens,
                                       MatrixRef d_logits) {
  ResultArray array{name, {c_.problem.tokens(), vocab().vocab_size}, "d_logits"};
  array.tolerance = logit_gradient_tolerance(c_.problem.type);
  array.first = first_column();
  array.columns = columns();
  array.rows.assign(tokens.begin(), tokens.end());
  array.of_tokens = c_.grid.tp_rank() == 0;  // the others have the same
  array.read = read_rows(columns(), [this, d_logits](size_t r, std::span<double> to) {
    const ConstMatrixRef row = host_row(d_logits, static_cast<int64_t>(r));
    for (int64_t c = 0; c < row.cols; ++c)
      to[static_cast<size_t>(c)] = static_cast<double>(row.at(0, c));
  });
  return array;
}

std::optional<double> LogprobsOp::answer(const std::string& name, int64_t place) const {
  const std::vector<double>* answers = c_.inputs.answers(name);
  if (answers == nullptr) return std::nullopt;
  return answers->at(static_cast<size_t>(place));
}

std::span<const double> LogprobsOp::answer_row(const std::string& name, int64_t token) const {
  const std::vector<double>* answers = c_.inputs.answers(name);
  if (answers == nullptr) return {};
  const auto width = static_cast<size_t>(vocab().vocab_size);
  return std::span(*answers).subspan(static_cast<size_t>(token) * width, width);
}

std::vector<double> LogprobsOp::answers_to(const ResultArray& array) const {
  const bool whole = !array.name.empty() && c_.inputs.answers(array.name) != nullptr;
  const std::vector<std::string> parts =
      whole ? std::vector<std::string>{array.name} : array.sum_of;
  const auto answered = [&](const std::string& part) { return c_.inputs.answers(part) != nullptr; };
  if (parts.empty() || !std::ranges::all_of(parts, answered)) return {};
  std::vector<double> sum(static_cast<size_t>(h5::elements_of(array.shape)), 0);
  for (const std::string& part : parts) {
    c_.compared.insert(part);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += c_.inputs.answers(part)->at(i);
  }
  return sum;
}

void compare_row(const ResultArray& array, size_t index, std::span<const double> got,
                 const ExpectedRow& expected, const double* answer, Check& check) {
  const auto width = expected.values.size();
  // `defined`: the definition of what `value` must be; `want` is the same, or the file's answer.
  const auto compare = [&](size_t at, double value, double want, double defined, double scale,
                           bool answered, const char* which = "") {
    const auto column = static_cast<int64_t>(at);
    if (expected.undefined && !answered && std::isnan(defined) && std::isnan(value))
      return check.add_nothing();
    const bool other = value != want && at < width && array.is_as_right &&
                       array.is_as_right(index, column, value, want);
    check.add(
        value, other ? value : want, [&] { return array.place(index, column, answered) + which; },
        scale, other ? value : defined);
  };
  for (size_t c = 0; c < got.size(); ++c) {
    const size_t at = static_cast<size_t>(array.first) + c;
    if (at >= width) {
      compare(at, got[c], array.padding, array.padding, 1, false);
      continue;
    }
    if (expected.scales[at] < 0) continue;
    const bool differs =
        answer != nullptr && !expected.stored.empty() && !std::isnan(expected.stored[at]);
    const bool answered = answer != nullptr && !differs;
    const double defined = expected.values[at];
    compare(at, got[c], answered ? answer[at] : defined, defined, expected.scales[at], answered);
    if (differs)
      compare(at, answer[at], expected.stored[at], expected.stored[at], expected.stored_scales[at],
              true, ", the answer itself");
  }
}

std::vector<size_t> LogprobsOp::rows_to_compare(const ResultArray& array, bool answered,
                                                Check& check) const {
  std::vector<size_t> rows = real_rows(array.rows);
  if (array.samples_itself) check.add_sample(array.sampled.first, array.sampled.second);
  if (answered || array.samples_itself) return rows;
  const auto all = std::ssize(rows);
  rows = sample(array.rows);
  if (array.most_rows > 0) rows.resize(std::min(rows.size(), static_cast<size_t>(array.most_rows)));
  if (array.shown && array.of_tokens) check.add_sample(std::ssize(rows), all);
  return rows;
}

void LogprobsOp::compare(const ResultArray& array, const std::string& label,
                         Verification& checks) const {
  Check& check = check_of(label, array.check, array.tolerance, checks);
  const std::vector<double> answers = answers_to(array);
  const auto width = static_cast<size_t>(array.width()),
             columns = static_cast<size_t>(array.columns);
  const std::vector<size_t> rows = rows_to_compare(array, !answers.empty(), check);
  for_each_batch(rows, std::max(array.width(), array.columns), [&](ResultArray::Batch batch) {
    std::vector<double> got(batch.size() * columns);
    array.read(batch, got);
    const std::vector<ExpectedRow> expected = array.expect(batch);
    for (size_t b = 0; array.shown && b < batch.size(); ++b) {
      const auto row = static_cast<size_t>(array.rows[batch[b]]);
      compare_row(array, batch[b], std::span(got).subspan(b * columns, columns), expected[b],
                  answers.empty() ? nullptr : answers.data() + row * width, check);
    }
  });
  if (h5::elements_of(array.shape) == 0) check.add_nothing();
}

void LogprobsOp::verify(Pass pass, const std::string& label, Verification& checks) {
  for (const ResultArray& array : results(pass)) compare(array, label, checks);
}

void LogprobsOp::collect(Pass pass, std::vector<LogprobsPart>& output) {
  for (const ResultArray& array : results(pass)) {
    const auto same = [&](const LogprobsPart& part) { return part.name == array.name; };
    if (array.name.empty() || std::ranges::any_of(output, same)) continue;
    const int64_t width = array.width();
    LogprobsPart part{array.name, array.shape};
    part.whole_numbers = array.whole_numbers;
    part.first = array.first;
    part.columns = std::clamp<int64_t>(width - array.first, 0, array.columns);
    for_each_batch(real_rows(array.rows), array.columns, [&](ResultArray::Batch batch) {
      std::vector<double> values(batch.size() * static_cast<size_t>(array.columns));
      array.read(batch, values);
      for (size_t b = 0; array.shown && b < batch.size(); ++b) {
        part.rows.push_back(array.rows[batch[b]]);
        const auto row = values.begin() + static_cast<int64_t>(b) * array.columns;
        if (array.whole_numbers)
          part.integers.insert(part.integers.end(), row, row + part.columns);
        else
          part.values.insert(part.values.end(), row, row + part.columns);
      }
    });
    output.push_back(std::move(part));
  }
}

}  // namespace gyre

#include "apps/logprobs/op.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "core/special_values.hpp"

namespace gyre {

std::string LogprobsOp::label(Pass pass) const {
  return fmt::format("{}, {}, {} tokens", names_, name_of(pass), c_.problem.tokens());
}

void LogprobsOp::prepare(Pass pass, bool poisoned) {
  if (poisoned) poison();
  restore();
  if (pass == Pass::forward) return;
  if (is_first_ || poisoned) forward_();
  is_first_ = false;
  prepare_backward();
}

void LogprobsOp::run(Pass pass) {
  pass == Pass::forward ? forward_() : backward_();
  stream().synchronize();
}

SentTraffic LogprobsOp::sent() const {
  SentTraffic sent;
  const auto add = [&](ProcessGrid& grid) {
    for (const Communicator* group : {&grid.tp(), &grid.cp()})
      sent += {group->traffic().messages, group->traffic().bytes_sent};
  };
  add(c_.backend.grid());
  if (&c_.backend.arrays() != &c_.backend.grid()) add(c_.backend.arrays());
  return sent;
}

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
  std::vector<float> row(vocab().vocab_size);
  c_.inputs.row(tensor, token, 0, row);
  return {row.begin(), row.end()};
}

void LogprobsOp::check_same_bits(std::span<const float> results, Communicator& group,
                                 Verification& checks) const {
  const int64_t mine = checksum_of(bytes_of(results));
  const std::vector<int64_t> all = all_gather_value(group, mine);
  Check& check = checks.check(label(Pass::forward) + ": same bits on all ranks", 0);
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
    if (ids[k] >= 0 && ids[k] < std::ssize(added)) added[ids[k]] += std::abs(weights[k]);
  for (size_t v = 0; v < logprobs.size(); ++v)
    all.push_back(logit_gradient_scale(logprobs[v], a, b, added[v]));
  return all;
}

void LogprobsOp::read_row(ConstMatrixRef matrix, size_t row, std::span<double> to) {
  const ConstMatrixRef here = host_row(matrix, row);
  for (int64_t c = 0; c < here.cols; ++c) to[c] = static_cast<double>(here.at(0, c));
}

ResultArray LogprobsOp::gradient_array(const char* name, std::span<const int64_t> tokens,
                                       MatrixRef d_logits) {
  ResultArray array{name, {c_.problem.tokens(), vocab().vocab_size}, "d_logits"};
  array.tolerance = logit_gradient_tolerance(c_.problem.type);
  array.first = first_column();
  array.columns = columns();
  array.rows.assign(tokens.begin(), tokens.end());
  array.of_tokens = c_.grid.tp_rank() == 0;  // the other ranks have the same tokens
  array.read = read_rows(
      columns(), [this, d_logits](size_t r, std::span<double> to) { read_row(d_logits, r, to); });
  return array;
}

std::optional<double> LogprobsOp::answer(const std::string& name, int64_t place) const {
  const std::vector<double>* answers = c_.inputs.answers(name);
  if (answers == nullptr) return std::nullopt;
  return answers->at(place);
}

std::span<const double> LogprobsOp::answer_row(const std::string& name, int64_t token) const {
  const std::vector<double>* answers = c_.inputs.answers(name);
  if (answers == nullptr) return {};
  const size_t width = vocab().vocab_size;
  return std::span(*answers).subspan(static_cast<size_t>(token) * width, width);
}

std::vector<double> LogprobsOp::answers_to(const ResultArray& array) {
  const bool whole = !array.name.empty() && c_.inputs.answers(array.name) != nullptr;
  const std::vector<std::string> parts =
      whole ? std::vector<std::string>{array.name} : array.sum_of;
  const auto answered = [&](const std::string& part) { return c_.inputs.answers(part) != nullptr; };
  if (parts.empty() || !std::ranges::all_of(parts, answered)) return {};
  std::vector<double> sum(h5::elements_of(array.shape), 0);
  for (const std::string& part : parts) {
    c_.compared.insert(part);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += c_.inputs.answers(part)->at(i);
  }
  return sum;
}

std::vector<ResultArray> LogprobsOp::answered_results(Pass pass) {
  std::vector<ResultArray> arrays = results(pass);
  for (ResultArray& array : arrays) {
    array.sample_rows = sample_rows();
    array.answers = answers_to(array);
  }
  return arrays;
}

std::optional<uint64_t> LogprobsOp::checksum(Pass pass) {
  if (space() != MemorySpace::host) return {};
  return checksum_of(answered_results(pass));
}

void LogprobsOp::verify(Pass pass, Verification& checks) {
  for (const ResultArray& array : answered_results(pass))
    compare_arrays(std::span(&array, 1), label(pass), checks);
}

void LogprobsOp::collect(Pass pass, std::vector<LogprobsPart>& output) {
  for (const ResultArray& array : results(pass)) {
    const auto same = [&](const LogprobsPart& part) { return part.name == array.name; };
    if (array.name.empty() || std::ranges::any_of(output, same)) continue;
    LogprobsPart part{array.name, array.shape};
    part.whole_numbers = array.whole_numbers;
    part.first = array.first;
    part.columns = std::clamp<int64_t>(array.width() - array.first, 0, array.columns);
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

void RowsOp::poison() {
  for (const std::span<float> values : outputs()) std::ranges::fill(values, nan_of<float>);
  rows_.poison();
}

void RowsOp::verify(Pass pass, Verification& checks) {
  LogprobsOp::verify(pass, checks);
  if (pass == Pass::backward) return;
  for (const std::span<float> values : outputs()) check_same_bits(values, tp(), checks);
}

}  // namespace gyre

#include "apps/logprobs/operation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/logprobs/registry.hpp"
#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "core/index.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"
#include "report/value.hpp"

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

ExpectedRow LogprobsOp::scored(std::vector<double> logprobs) {
  ExpectedRow row{std::move(logprobs), {}};
  for (const double logprob : row.values) row.scales.push_back(logprob_scale(logprob));
  return row;
}

ScoreOptions LogprobsOp::score_options(std::span<const int64_t> tokens, int64_t picks,
                                       bool entropy) {
  temperatures_ = c_.temperatures(tokens);
  return {picks,        entropy,      c_.problem.filter.temperature, c_.options.threads, kernels(),
          &tp_arrays(), temperatures_};
}

ExpectedRow LogprobsOp::score_gradient(int64_t token, std::span<const int32_t> ids,
                                       const std::vector<double>& g, double h,
                                       bool rounds_terms) const {
  const std::vector<double> row = whole_row(token);
  const double t = temperature(token);
  double sum = h == 0 ? 0 : h * score_row_reference(row, -1, t).entropy, absolute = std::abs(sum);
  std::vector<double> weights;
  for (const double term : g) {
    sum += term;
    absolute += std::abs(term);
    weights.push_back(term / t);
  }
  const RowGradientTerms terms{log_softmax_reference(row, t), (rounds_terms ? absolute : -sum) / t,
                               -h / t, ids, weights};
  return {score_gradient_reference(row, ids, g, h, t), terms.scales()};
}

void LogprobsOp::read_row(ConstMatrixRef matrix, size_t row, std::span<double> to) {
  const ConstMatrixRef here = host_row(matrix, row);
  for (int64_t c = 0; c < here.cols; ++c) to[c] = here.at(0, c);
}

ResultArray LogprobsOp::gradient_array(const char* name, std::span<const int64_t> tokens,
                                       MatrixRef d_logits) {
  ResultArray array{name, {c_.problem.tokens(), vocab().vocab_size}, "d_logits"};
  array.tolerance = logit_gradient_tolerance(DType::f32);
  array.rounding = storage_scale(c_.problem.type, array.tolerance);
  array.first = first_column();
  array.columns = columns();
  array.rows.assign(tokens.begin(), tokens.end());
  array.of_tokens = c_.grid.tp_rank() == 0;  // other tp ranks have the same tokens
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
    array.sample_rows = std::min(array.sample_rows, sample_rows());
    array.answers = answers_to(array);
  }
  return arrays;
}

std::optional<uint64_t> LogprobsOp::checksum(Pass pass) {
  if (space() != MemorySpace::host) return {};
  return checksum_of(answered_results(pass));
}

void LogprobsOp::verify(Pass pass, Verification& checks) {
  for (const ResultArray& array : answered_results(pass)) compare_array(array, label(pass), checks);
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

int64_t RowsOp::active_rows() const {
  int64_t active = 0;
  for (int64_t r = 0; r < rows_.rows(); ++r) active += has_gradient(r) ? 1 : 0;
  return active;
}

double RowsOp::ideal_bytes(Pass pass) const {
  return shard_bytes(rows_.rows()) + (pass == Pass::forward ? 0 : shard_bytes(active_rows()));
}

void RowsOp::verify(Pass pass, Verification& checks) {
  LogprobsOp::verify(pass, checks);
  if (pass == Pass::backward) return;
  for (const std::span<float> values : outputs()) check_same_bits(values, tp(), checks);
}

namespace {

/// Names an input that the operation reads and the file lacks, or cannot score; empty if there is
/// none.
std::string unfit_input(const InputNeeds& needs, const LogprobsWorkload& problem) {
  for (const std::vector<std::string>& choices : needs) {
    const auto is_there = [&](const std::string& name) { return problem.inputs.contains(name); };
    const auto found = std::ranges::find_if(choices, is_there);
    if (found == choices.end()) {
      std::string names = "/logprobs/" + choices.front();
      for (size_t i = 1; i < choices.size(); ++i) names += " nor /logprobs/" + choices[i];
      return fmt::format("{} has {} {}", problem.origin, choices.size() > 1 ? "neither" : "no",
                         names);
    }
    if (const auto refusal = problem.refused.find(*found); refusal != problem.refused.end())
      return fmt::format("{}: {}", problem.origin, refusal->second);
  }
  return "";
}

}  // namespace

bool LogprobsOperation::reads(const std::string& option) const {
  return std::ranges::find(own_options, option) != own_options.end();
}

std::vector<LogprobsRun> runs_of(const LogprobsOptions& o) {
  std::vector<LogprobsRun> runs;
  for (const LogprobsOperation& operation : logprobs_operations()) {
    if (!o.wants(operation.name) || (o.pass == "bwd" && !operation.has_backward())) continue;
    for (const LogprobsMethod& method : operation.methods)
      if (o.wants_method(method.name)) runs.push_back({operation, method});
  }
  return runs;
}

std::vector<Pass> LogprobsRun::passes(const LogprobsOptions& o) const {
  std::vector<Pass> passes = o.passes();
  if (!operation.has_backward()) std::erase(passes, Pass::backward);
  return passes;
}

std::unique_ptr<LogprobsOp> LogprobsRun::make(LogprobsContext& context) const {
  std::unique_ptr<LogprobsOp> op = method.make(context);
  op->set_names(operation.name, method.name);
  return op;
}

int64_t LogprobsRun::planned_bytes(const LogprobsWorkload& problem, const LogprobsOptions& o,
                                   int rank) const {
  const MemoryCase run{problem, o, rank % o.tp};
  const double picks = std::max({problem.picks, problem.top, problem.projected});
  // A few arrays of one or `picks` numbers per token, and their copies from all ranks.
  const double small = run.tokens() * (40 + 24 * picks + 12 * o.tp * (2 + picks));
  if (operation.bytes_without_logits) return saturated(small + operation.bytes_without_logits(run));
  const MatrixNeeds& needs = operation.matrices;
  const bool differentiates = operation.has_backward() && o.pass != "fwd";
  const double backward = differentiates ? needs.backward : 0;
  double element = run.element_bytes() * (1 + needs.always + backward);
  element += size_of(problem.output_type) * (needs.output + (differentiates ? needs.d_output : 0));
  element += 4 * method.f32_matrices;
  if (!o.output.empty() && backward > 0) element += 4;  // the gradient, kept for the file
  return saturated(small + run.tokens() * run.columns() * element);
}

std::string LogprobsRun::why_not(const LogprobsWorkload& problem, const LogprobsOptions& o,
                                 int64_t memory_bytes, int rank) const {
  if (std::string reason = unfit_input(operation.needs, problem); !reason.empty()) return reason;
  if (std::string reason = method.why_not(problem, o); !reason.empty()) return reason;
  const int64_t bytes = planned_bytes(problem, o, rank);
  if (memory_bytes == 0 || bytes <= memory_bytes) return "";
  const double share = static_cast<double>(memory_bytes) / static_cast<double>(bytes);
  const double fit = std::floor(share * problem.tokens());
  return fmt::format("needs {} a rank, and {} are available; {}", si_text(bytes, "B"),
                     si_text(memory_bytes, "B"),
                     fit > 0 ? fmt::format("about {:.0f} tokens fit", fit)
                             : std::string("not even one token fits: take more ranks"));
}

}  // namespace gyre

// Expected results of an attention: rows recomputed by the definition in double precision
// (attention/attention_reference.hpp), or the answers of a file.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "apps/attention/case.hpp"
#include "attention/attention_reference.hpp"
#include "core/special_values.hpp"
#include "harness/result_array.hpp"

namespace gyre {
namespace {

/// Input rows for the reference; each tensor has its own buffer for one row.
AttentionRows rows_for_reference(const AttentionWorkload& workload, const TensorRows& inputs,
                                 bool with_gradients) {
  AttentionRows rows;
  rows.heads = workload.heads;
  rows.mask = workload.mask;
  rows.sinks = workload.sinks;
  const auto accessor = [&](InputTensor tensor) {
    auto buffer = std::make_shared<std::vector<float>>(static_cast<size_t>(workload.width(tensor)));
    return [&inputs, tensor, buffer](int64_t token) {
      inputs.row(tensor, token, *buffer);
      return static_cast<const float*>(buffer->data());
    };
  };
  rows.q = accessor(InputTensor::q);
  rows.k = accessor(InputTensor::k);
  rows.v = accessor(InputTensor::v);
  if (with_gradients) rows.d_out = accessor(InputTensor::d_out);
  return rows;
}

std::span<const double> row_of(const std::vector<double>& all, size_t index, size_t length) {
  return std::span(all).subspan(index * length, length);
}

/// With answers, the sample that gives the scale of errors has this many times --check-pairs.
/// Recomputing it takes about a second per rank.
constexpr int64_t more_pairs_with_answers = 256;

/// Results of one pass on this rank, and their expected values.
class Verifier {
 public:
  Verifier(AttentionCase& of, Pass pass, Verification& checks)
      : case_(of),
        label_(of.label(pass)),
        checks_(checks),
        workload_(of.workload()),
        backward_(pass == Pass::backward),
        tolerances_(of.tolerances()),
        rows_(rows_for_reference(workload_, of.expectation().inputs, backward_)),
        heads_(static_cast<size_t>(workload_.heads.heads)),
        value_dim_(static_cast<size_t>(workload_.heads.value_dim())),
        lse_(of.statistics(0)),
        queries_(tokens_of(ArrayKind::out)),
        keys_(tokens_of(ArrayKind::kv)) {
    AttentionExecutor& executor = of.executor();
    out_ = {executor.matrix(ArrayKind::out), of.stream()};
    if (!backward_) return;
    d_q_ = {executor.matrix(ArrayKind::d_q), of.stream()};
    d_k_ = {executor.d_keys(), of.stream()};
    d_v_ = {executor.d_values(), of.stream()};
    delta_ = of.statistics(1);
  }

  void verify() {
    verify_queries();
    if (!backward_) return;
    verify_keys();
    if (!workload_.sinks.empty()) verify_sinks();
  }

 private:
  using Answers = std::vector<double> AttentionReference::*;
  using Tolerance = double AttentionTolerances::*;
  /// Tokens of this rank: those whose rows are recomputed, and those that only have answers.
  struct Sample {
    bool keys;
    std::vector<TokenRow> recomputed, others;
  };
  /// An array of results whose rows are being compared.
  struct Compared {
    ResultArray array;
    Check& check;
    const std::vector<double>& answers;  ///< empty: none
    bool keys;                           ///< rows are tokens; else they are queries
  };
  /// An array [tokens, heads, dim], whose elements are columns `part` of `got`.
  struct HeadArray {
    Compared of;
    HeadColumns part;
    const HostCopy& got;
    std::vector<double> largest;  ///< [heads] sizes of the rows so far
  };

  const std::vector<double>& answers(Answers array) const {
    static const std::vector<double> none;
    const AttentionReference* reference = case_.expectation().reference;
    return reference == nullptr ? none : reference->*array;
  }
  /// This rank's tokens in its own array of this kind, in order.
  std::vector<TokenRow> tokens_of(ArrayKind kind) const {
    std::vector<TokenRow> rows = token_rows(workload_, case_.shard(kind));
    std::ranges::sort(rows, {}, &TokenRow::token);
    return rows;
  }
  DocumentMask mask_of(int64_t document) const {
    return {workload_.mask, document, workload_.length(document)};
  }
  int64_t position_of(const TokenRow& own) const {
    return own.token - workload_.offsets[own.document];
  }
  /// Number of visible pairs that have one of these tokens as key, or as query. The tokens must be
  /// in order of documents.
  int64_t pairs_of(const std::vector<TokenRow>& tokens, bool as_keys) const {
    int64_t pairs = 0, document = -1;
    std::vector<int64_t> counts;  // pairs of each position of `document`
    for (const TokenRow& own : tokens) {
      if (own.document != document) {
        document = own.document;
        const DocumentMask mask = mask_of(document);
        counts = as_keys ? mask.queries_of_keys() : mask.keys_of_queries();
      }
      pairs += counts[position_of(own)];
    }
    return pairs;
  }
  Sample sample(bool keys) const {
    const std::vector<TokenRow>& all = keys ? keys_ : queries_;
    int64_t pairs = case_.expectation().pairs;
    const int64_t total = pairs_of(all, keys) * workload_.heads.heads;
    if (case_.expectation().reference != nullptr) pairs *= more_pairs_with_answers;
    const int64_t budget = std::max<int64_t>(1, pairs / case_.world().size());
    const std::vector<size_t> chosen =
        spread_sample(std::ssize(all), std::max<int64_t>(1, ceil_div(total, budget)));
    Sample sample{keys, {}, {}};
    for (size_t i = 0, next = 0; i < all.size(); ++i) {
      const bool recomputes = next < chosen.size() && chosen[next] == i;
      (recomputes ? sample.recomputed : sample.others).push_back(all[i]);
      next += recomputes ? 1 : 0;
    }
    return sample;
  }
  /// Makes the check of an array of which some rows are recomputed. `row_shape`: its dimensions
  /// after the first.
  Compared compared(const char* name, std::initializer_list<int64_t> row_shape, Tolerance tolerance,
                    Answers of, const Sample& rows) const {
    ResultArray array{name,
                      {rows.keys ? workload_.tokens() : workload_.queries()},
                      name,
                      tolerances_.first.*tolerance,
                      tolerances_.second.*tolerance};
    array.shape.insert(array.shape.end(), row_shape);
    Check& check = check_of(array, label_, checks_);
    if (answers(of).empty())
      check.add_sample(std::ssize(rows.recomputed),
                       std::ssize(rows.recomputed) + std::ssize(rows.others));
    return {std::move(array), check, answers(of), rows.keys};
  }
  HeadArray heads_of(const char* name, const HeadColumns& part, Tolerance tolerance, Answers of,
                     const HostCopy& got, const Sample& rows) const {
    return {part.of_all_heads ? compared(name, {part.dim}, tolerance, of, rows)
                              : compared(name, {part.heads, part.dim}, tolerance, of, rows),
            part, got, std::vector<double>(static_cast<size_t>(part.heads), 0.0)};
  }
  /// The row of a token in an array of all ranks.
  int64_t row_in(const Compared& of, const TokenRow& own) const {
    return of.keys ? own.token : workload_.query_row(own.document, own.token);
  }
  void compare(Compared& of, const TokenRow& own, std::span<const double> got,
               const ExpectedRow& expected) const {
    const int64_t row = row_in(of, own);
    of.array.rows = {row};
    const double* answer =
        of.answers.empty() ? nullptr : row_of(of.answers, row, got.size()).data();
    compare_row(of.array, 0, got, expected, answer, of.check, [&] {
      return fmt::format(", document {} position {}", own.document, position_of(own));
    });
  }
  /// Calls recompute(document, tokens) for the rows to be recomputed, and visit(row, i, results)
  /// for each, which is number i of the results. Then calls visit(row, 0, nullptr) for the others.
  template <class Recompute, class Visit>
  void for_each_row(const Sample& sample, Recompute recompute, Visit visit) const {
    constexpr size_t most = 16;  // small: under a short window, every row is recomputed
    const std::vector<TokenRow>& rows = sample.recomputed;
    for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
      const int64_t document = rows[begin].document;
      std::vector<int64_t> tokens;
      for (; end < std::min(rows.size(), begin + most) && rows[end].document == document; ++end)
        tokens.push_back(rows[end].token);
      const auto d = static_cast<size_t>(document);
      const auto results = recompute(
          DocumentRange{workload_.offsets[d], workload_.offsets[d + 1], document}, tokens);
      for (size_t i = begin; i < end; ++i) visit(rows[i], i - begin, &results);
    }
    for (const TokenRow& own : sample.others)
      visit(own, 0, static_cast<decltype(recompute(DocumentRange(), {}))*>(nullptr));
  }
  /// Row i of an array of results; empty without results.
  template <class Results>
  static std::span<const double> part(const Results* results, std::vector<double> Results::*array,
                                      size_t i, size_t length) {
    if (results == nullptr) return {};
    return row_of(results->*array, i, length);
  }

  /// Compares the log-sum-exps of a token. `want`: the recomputed row, or empty. The expected value
  /// is -infinity exactly where the query sees no key.
  void compare_lse(Compared& lse, const TokenRow& own, std::span<const double> want) const {
    if (want.empty() && lse.answers.empty()) return;
    const bool is_empty = mask_of(own.document).keys_of(position_of(own)) == 0;
    ExpectedRow row{std::vector<double>(heads_, is_empty ? -infinity_of<double> : 0),
                    std::vector<double>(heads_, 1)};
    row.defined = row.values;
    if (!want.empty()) row.values.assign(want.begin(), want.end());
    compare(lse, own, row_of(lse_, own.token, heads_), row);
  }
  /// Compares a token's row of an array. `want` [columns of `got`] and `sizes` [heads] are those of
  /// the recomputed row, or empty.
  void compare_heads(HeadArray& heads, const TokenRow& own, std::span<const double> want,
                     std::span<const double> sizes) const {
    if (want.empty() && heads.of.answers.empty()) return;
    const size_t dim = heads.part.dim, width = heads.largest.size() * dim;
    ExpectedRow row;
    std::vector<double> got;
    for (size_t c = 0; c < width; ++c) {
      const int64_t column = heads.part.at(c);
      got.push_back(heads.got.at(own.row, column));
      row.values.push_back(want.empty() ? 0 : want[column]);
    }
    const std::span<const double> compared =
        heads.of.answers.empty() ? row.values
                                 : row_of(heads.of.answers, row_in(heads.of, own), width);
    for (size_t h = 0; h < heads.largest.size(); ++h) {
      const double size = sizes.empty() ? heads.largest[h] : sizes[h];
      heads.largest[h] = std::max(heads.largest[h], size);
      row.scales.insert(row.scales.end(), dim, error_scale(compared.subspan(h * dim, dim), size));
    }
    compare(heads.of, own, got, row);
  }

  void verify_queries() const {
    using Results = QueryResults;
    const HeadShape& shape = workload_.heads;
    const Sample rows = sample(false);
    Compared lse =
        compared("lse", {shape.heads}, &AttentionTolerances::lse, &AttentionReference::lse, rows);
    HeadArray out = heads_of("out", {shape.heads, shape.value_dim()}, &AttentionTolerances::out,
                             &AttentionReference::out, out_, rows);
    std::optional<HeadArray> d_q;
    if (backward_)
      d_q.emplace(heads_of("d_q", {shape.heads, shape.head_dim}, &AttentionTolerances::d_q,
                           &AttentionReference::d_q, d_q_, rows));
    const size_t head_columns = heads_ * shape.head_dim;
    for_each_row(
        rows,
        [&](const DocumentRange& document, const std::vector<int64_t>& tokens) {
          return reference_queries(rows_, document, tokens);
        },
        [&](const TokenRow& own, size_t i, const Results* want) {
          compare_lse(lse, own, part(want, &Results::lse, i, heads_));
          compare_heads(out, own, part(want, &Results::out, i, heads_ * value_dim_),
                        part(want, &Results::out_size, i, heads_));
          if (d_q)
            compare_heads(*d_q, own, part(want, &Results::d_q, i, head_columns),
                          part(want, &Results::d_q_size, i, heads_));
        });
  }
  void verify_keys() const {
    using Results = KeyResults;
    const HeadShape& shape = workload_.heads;
    const Sample rows = sample(true);
    HeadArray d_k = heads_of("d_k", own_key_columns(shape), &AttentionTolerances::d_k,
                             &AttentionReference::d_k, d_k_, rows);
    HeadArray d_v = heads_of("d_v", {shape.kv_heads, shape.value_dim()}, &AttentionTolerances::d_v,
                             &AttentionReference::d_v, d_v_, rows);
    std::optional<HeadArray> d_k_shared;
    if (shape.shared_key_dim > 0)
      d_k_shared.emplace(heads_of("d_k_shared", shared_key_columns(shape),
                                  &AttentionTolerances::d_k_shared, &AttentionReference::d_k_shared,
                                  d_k_, rows));
    const size_t heads = shape.kv_heads, key_columns = heads * shape.head_dim;
    for_each_row(
        rows,
        [&](const DocumentRange& of, const std::vector<int64_t>& tokens) {
          const auto statistics = [&](const std::vector<double>& all) {
            return std::span(all).subspan(static_cast<size_t>(of.begin) * heads_,
                                          static_cast<size_t>(of.length()) * heads_);
          };
          return reference_keys(rows_, of, tokens, statistics(lse_), statistics(delta_));
        },
        [&](const TokenRow& own, size_t i, const Results* want) {
          const std::span<const double> keys = part(want, &Results::d_k, i, key_columns);
          compare_heads(d_k, own, keys, part(want, &Results::d_k_size, i, heads));
          compare_heads(d_v, own, part(want, &Results::d_v, i, heads * value_dim_),
                        part(want, &Results::d_v_size, i, heads));
          if (d_k_shared)
            compare_heads(*d_k_shared, own, keys, part(want, &Results::d_k_shared_size, i, 1));
        });
  }

  /// Sum of squares, over all tokens, of the terms of a sink's gradient, [heads]; a size as in
  /// attention/attention_reference.hpp. Collective.
  std::vector<double> sink_term_squares() const {
    std::vector<float> d_out(heads_ * value_dim_);
    std::vector<double> squares(heads_, 0.0);
    for (const TokenRow& own : queries_) {
      case_.expectation().inputs.row(InputTensor::d_out, own.token, d_out);
      for (size_t h = 0; h < heads_; ++h) {
        double out_squares = 0, d_out_squares = 0;
        for (size_t i = h * value_dim_; i < (h + 1) * value_dim_; ++i) {
          const double o = out_.at(own.row, i);
          const double g = d_out[i];
          out_squares += o * o;
          d_out_squares += g * g;
        }
        const double weight =
            std::exp(workload_.sinks[h] - lse_[static_cast<size_t>(own.token) * heads_ + h]);
        squares[h] += weight * weight * out_squares * d_out_squares / value_dim_;
      }
    }
    HostStream stream;
    case_.world()
        .all_reduce(squares.data(), std::ssize(squares), DType::f64, ReduceOp::sum, stream,
                    "sizes of the gradients of sinks")
        ->wait();
    return squares;
  }
  /// Every rank has the gradients of all sinks and compares some.
  void verify_sinks() const {
    const std::vector<double>& stored = answers(&AttentionReference::d_sinks);
    ResultArray array{"d_sinks",
                      {workload_.heads.heads},
                      "d_sinks",
                      tolerances_.first.d_sinks,
                      tolerances_.second.d_sinks};
    Check& check = check_of(array, label_, checks_);
    const std::vector<double> squares = sink_term_squares();
    for (int64_t h = case_.world().rank(); h < workload_.heads.heads; h += case_.world().size()) {
      double sum = 0;
      for (size_t at = h; at < lse_.size(); at += heads_)
        sum -= std::exp(workload_.sinks[h] - lse_[at]) * delta_[at];
      const double* answer = stored.empty() ? nullptr : &stored[h];
      const double got = case_.executor().d_sinks().at(h);
      const double size = std::sqrt(squares[h]);
      array.rows = {h};
      compare_row(array, 0, {&got, 1},
                  {{sum}, {error_scale({answer == nullptr ? &sum : answer, 1}, size)}}, answer,
                  check);
    }
  }

  AttentionCase& case_;
  std::string label_;
  Verification& checks_;
  const AttentionWorkload& workload_;
  bool backward_;
  std::pair<AttentionTolerances, AttentionTolerances> tolerances_;  // then sigmas
  AttentionRows rows_;
  size_t heads_, value_dim_;
  std::vector<double> lse_, delta_;       // of all tokens, [tokens, heads]
  HostCopy out_, d_q_, d_k_, d_v_;        // results of this rank
  std::vector<TokenRow> queries_, keys_;  // this rank's tokens, sorted
};

}  // namespace

std::vector<double> AttentionCase::statistics(int64_t plane) {
  const int64_t heads = workload_.heads.heads;
  std::vector<double> all(workload_.tokens() * heads, 0.0);
  const PlanArray& stats = plan_.arrays[plan_.stats];
  const HostCopy mine(executor_->final_stats(plane), stream());
  for (const TokenRow& at : token_rows(
           workload_, shard_of(planned_->placed->problem.layout_of(ArrayKind::stats), stats.rows)))
    for (int64_t h = 0; h < stats.heads.count; ++h)
      all[at.token * heads + stats.heads.begin + h] = mine.at(at.row, h);
  HostStream host;
  world()
      .all_reduce(all.data(), std::ssize(all), DType::f64, ReduceOp::sum, host,
                  "statistics of all rows")
      ->wait();
  return all;
}

void AttentionCase::verify(Pass pass, Verification& checks) {
  Verifier(*this, pass, checks).verify();
}

}  // namespace gyre

// Expected results of an attention: rows recomputed by the definition in double precision
// (attention/attention_reference.hpp), or the answers of a file.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

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

/// Recomputed rows of one array: values [rows, width], and the size of each head [rows, heads].
struct Recomputed {
  std::vector<double> values, sizes;
  void append(const std::vector<double>& more_values, const std::vector<double>& more_sizes) {
    values.insert(values.end(), more_values.begin(), more_values.end());
    sizes.insert(sizes.end(), more_sizes.begin(), more_sizes.end());
  }
};

/// Results of one pass on this rank, and their expected values.
class Verifier {
 public:
  Verifier(AttentionCase& of, Pass pass)
      : case_(of),
        workload_(of.workload()),
        backward_(pass == Pass::backward),
        tolerances_(of.tolerances()),
        rows_(rows_for_reference(workload_, of.expectation().inputs, backward_)),
        heads_(static_cast<size_t>(workload_.heads.heads)),
        value_dim_(static_cast<size_t>(workload_.heads.value_dim())),
        lse_(of.statistics(0)),
        own_(token_rows(workload_, of.shard())) {
    std::ranges::sort(own_, {}, &TokenRow::token);
    AttentionExecutor& executor = of.executor();
    out_ = {executor.matrix(ArrayKind::out), of.stream()};
    if (!backward_) return;
    d_q_ = {executor.matrix(ArrayKind::d_q), of.stream()};
    d_k_ = {executor.d_keys(), of.stream()};
    d_v_ = {executor.d_values(), of.stream()};
    delta_ = of.statistics(1);
  }

  void verify(const std::string& label, Verification& checks) {
    for (const bool answered : {false, true}) {
      compare_arrays(query_arrays(answered), label, checks);
      if (backward_) compare_arrays(key_arrays(answered), label, checks);
    }
    if (backward_ && !workload_.sinks.empty())
      compare_arrays(std::vector<ResultArray>{sink_array()}, label, checks);
  }

 private:
  using Answers = std::vector<double> AttentionReference::*;
  using Tolerance = double AttentionTolerances::*;
  /// Recomputed rows, then rows that only have answers.
  struct Rows {
    std::vector<TokenRow> all;
    size_t recomputed = 0;
  };

  const std::vector<double>& answers(Answers array) const {
    static const std::vector<double> none;
    const AttentionReference* reference = case_.expectation().reference;
    return reference == nullptr ? none : reference->*array;
  }
  /// Visible pairs of a token as a key or as a query.
  int64_t pairs_of(const TokenRow& own, bool as_key) const {
    const DocumentMask mask(workload_.mask, own.document, workload_.length(own.document));
    const int64_t position = own.token - workload_.offsets[own.document];
    return as_key ? mask.queries_of(position) : mask.keys_of(position);
  }
  std::shared_ptr<const Rows> rows_of(bool keys, bool answered) const {
    int64_t total = 0, pairs = case_.expectation().pairs;
    for (const TokenRow& own : own_) total += pairs_of(own, keys) * workload_.heads.heads;
    if (case_.expectation().reference != nullptr) pairs *= more_pairs_with_answers;
    const int64_t budget = std::max<int64_t>(1, pairs / case_.world().size());
    auto rows = std::make_shared<Rows>();
    std::vector<bool> chosen(own_.size(), false);
    for (const size_t i :
         spread_sample(std::ssize(own_), std::max<int64_t>(1, ceil_div(total, budget)))) {
      rows->all.push_back(own_[i]);
      chosen[i] = true;
    }
    rows->recomputed = rows->all.size();
    for (size_t i = 0; answered && i < own_.size(); ++i)
      if (!chosen[i]) rows->all.push_back(own_[i]);
    return rows;
  }
  /// An array of these rows. The caller sets its columns.
  ResultArray array_of(const char* name, Tolerance tolerance, Answers of,
                       const std::shared_ptr<const Rows>& rows) const {
    ResultArray array{name,
                      {workload_.tokens()},
                      name,
                      tolerances_.first.*tolerance,
                      tolerances_.second.*tolerance};
    array.answers = answers(of);
    array.samples_itself = true;
    array.batch_rows = 16;  // small: under a short window, every row is recomputed
    if (array.answers.empty())
      array.sampled = {static_cast<int64_t>(rows->recomputed), std::ssize(own_)};
    for (const TokenRow& own : rows->all) array.rows.push_back(own.token);
    array.where = [this, rows](size_t r) {
      const TokenRow& own = rows->all[r];
      return fmt::format(", document {} position {}", own.document,
                         own.token - workload_.offsets[own.document]);
    };
    return array;
  }
  /// An array [tokens, heads, dim] of these elements of the heads in the columns of `got`.
  /// recompute(batch) returns the recomputed rows of the batch: all columns, and a size of each
  /// head of the array.
  ResultArray head_array(const char* name, Tolerance tolerance, Answers of, const HeadColumns& part,
                         const HostCopy& got, const std::shared_ptr<const Rows>& rows,
                         const std::function<const Recomputed&(ResultArray::Batch)>& recompute) {
    ResultArray array = array_of(name, tolerance, of, rows);
    const int64_t heads = part.heads, dim = part.dim, columns = got.matrix().cols;
    if (!part.of_all_heads) array.shape.push_back(heads);
    array.shape.push_back(dim);
    array.columns = array.width();
    array.read = read_rows(array.columns, [&got, rows, part](size_t r, std::span<double> to) {
      for (size_t c = 0; c < to.size(); ++c) to[c] = got.at(rows->all[r].row, part.at(c));
    });
    const auto largest = std::make_shared<std::vector<double>>(static_cast<size_t>(heads), 0.0);
    array.expect = [this, of, rows, recompute, largest, dim, part,
                    columns](ResultArray::Batch batch) {
      const Recomputed& want = recompute(batch);
      const size_t width = largest->size() * dim;
      std::vector<ExpectedRow> all;
      for (size_t b = 0; b < batch.size(); ++b) {
        const bool is_known = batch[b] < rows->recomputed;
        ExpectedRow& row = all.emplace_back();
        row.values.assign(width, 0);
        for (size_t c = 0; is_known && c < width; ++c)
          row.values[c] = want.values[b * columns + part.at(c)];
        const size_t token = rows->all[batch[b]].token;
        const auto compared = answers(of).empty() ? std::span<const double>(row.values)
                                                  : row_of(answers(of), token, width);
        for (size_t h = 0; h < largest->size(); ++h) {
          double size = (*largest)[h];
          if (is_known) size = want.sizes[b * largest->size() + h];
          (*largest)[h] = std::max((*largest)[h], size);
          row.scales.insert(row.scales.end(), dim,
                            error_scale(compared.subspan(h * dim, dim), size));
        }
      }
      return all;
    };
    return array;
  }
  /// Calls f(range of the document, tokens) for each run of recomputed rows of one document.
  template <class F>
  void for_each_document(const Rows& rows, ResultArray::Batch batch, F f) const {
    for (size_t begin = 0, end = 0; begin < batch.size(); begin = end) {
      const int64_t document = rows.all[batch[begin]].document;
      std::vector<int64_t> tokens;
      for (; end < batch.size() && rows.all[batch[end]].document == document; ++end)
        if (batch[end] < rows.recomputed) tokens.push_back(rows.all[batch[end]].token);
      const size_t d = document;
      if (!tokens.empty())
        f(DocumentRange{workload_.offsets[d], workload_.offsets[d + 1], document}, tokens);
    }
  }

  /// Rows of a batch as queries; recomputed once for all arrays that are compared together.
  struct Queries {
    size_t first = SIZE_MAX;  // first row of the batch
    std::vector<double> lse;
    Recomputed out, d_q;
  };
  std::vector<ResultArray> query_arrays(bool answered) {
    const auto rows = rows_of(false, answered);
    const auto memo = std::make_shared<Queries>();
    const auto queries = [this, rows, memo](ResultArray::Batch batch) -> const Queries& {
      if (memo->first == batch.front()) return *memo;
      *memo = {batch.front(), {}, {}, {}};
      for_each_document(*rows, batch,
                        [&](const DocumentRange& of, const std::vector<int64_t>& tokens) {
                          const QueryResults want = reference_queries(rows_, of, tokens);
                          memo->lse.insert(memo->lse.end(), want.lse.begin(), want.lse.end());
                          memo->out.append(want.out, want.out_size);
                          memo->d_q.append(want.d_q, want.d_q_size);
                        });
      return *memo;
    };
    const HeadShape& shape = workload_.heads;
    const int64_t value_dim = shape.value_dim();
    std::vector<ResultArray> arrays{
        lse_array(rows, [queries](ResultArray::Batch b) { return std::span(queries(b).lse); }),
        head_array("out", &AttentionTolerances::out, &AttentionReference::out,
                   {shape.heads, value_dim}, out_, rows,
                   [queries](auto b) -> const Recomputed& { return queries(b).out; })};
    if (backward_)
      arrays.push_back(head_array(
          "d_q", &AttentionTolerances::d_q, &AttentionReference::d_q, {shape.heads, shape.head_dim},
          d_q_, rows, [queries](auto b) -> const Recomputed& { return queries(b).d_q; }));
    return with_answers(std::move(arrays), answered);
  }
  static std::vector<ResultArray> with_answers(std::vector<ResultArray> arrays, bool answered) {
    std::erase_if(arrays, [&](const ResultArray& a) { return a.answers.empty() == answered; });
    return arrays;
  }
  /// The array of log-sum-exps, infinite exactly where a query sees no key.
  template <class Recompute>
  ResultArray lse_array(const std::shared_ptr<const Rows>& rows, const Recompute& recompute) {
    ResultArray array = array_of("lse", &AttentionTolerances::lse, &AttentionReference::lse, rows);
    array.shape.push_back(workload_.heads.heads);
    array.columns = array.width();
    array.read = read_rows(array.columns, [this, rows](size_t r, std::span<double> to) {
      std::ranges::copy(row_of(lse_, rows->all[r].token, heads_), to.begin());
    });
    array.expect = [this, rows, recompute](ResultArray::Batch batch) {
      const std::span<const double> want = recompute(batch);
      std::vector<ExpectedRow> all;
      for (size_t b = 0; b < batch.size(); ++b) {
        const bool is_empty = pairs_of(rows->all[batch[b]], false) == 0;
        ExpectedRow row{std::vector<double>(heads_, is_empty ? -infinity_of<double> : 0),
                        std::vector<double>(heads_, 1)};
        row.defined = row.values;
        if (batch[b] < rows->recomputed)
          std::ranges::copy(want.subspan(b * heads_, heads_), row.values.begin());
        all.push_back(std::move(row));
      }
      return all;
    };
    return array;
  }

  /// Rows of a batch as keys.
  struct Keys {
    size_t first = SIZE_MAX;  // first row of the batch
    Recomputed d_k, d_k_shared, d_v;
  };
  std::vector<ResultArray> key_arrays(bool answered) {
    const auto rows = rows_of(true, answered);
    const auto memo = std::make_shared<Keys>();
    const auto keys = [this, rows, memo](ResultArray::Batch batch) -> const Keys& {
      if (memo->first == batch.front()) return *memo;
      *memo = {batch.front(), {}, {}, {}};
      for_each_document(
          *rows, batch, [&](const DocumentRange& of, const std::vector<int64_t>& tokens) {
            const auto statistics = [&](const std::vector<double>& all) {
              return std::span(all).subspan(static_cast<size_t>(of.begin) * heads_,
                                            static_cast<size_t>(of.end - of.begin) * heads_);
            };
            const KeyResults want =
                reference_keys(rows_, of, tokens, statistics(lse_), statistics(delta_));
            memo->d_k.append(want.d_k, want.d_k_size);
            memo->d_k_shared.append(want.d_k, want.d_k_shared_size);
            memo->d_v.append(want.d_v, want.d_v_size);
          });
      return *memo;
    };
    const HeadShape& shape = workload_.heads;
    const int64_t heads = shape.kv_heads;
    std::vector<ResultArray> arrays{
        head_array("d_k", &AttentionTolerances::d_k, &AttentionReference::d_k,
                   own_key_columns(shape), d_k_, rows,
                   [keys](auto b) -> const Recomputed& { return keys(b).d_k; }),
        head_array("d_v", &AttentionTolerances::d_v, &AttentionReference::d_v,
                   {heads, shape.value_dim()}, d_v_, rows,
                   [keys](auto b) -> const Recomputed& { return keys(b).d_v; })};
    if (shape.shared_key_dim > 0)
      arrays.push_back(
          head_array("d_k_shared", &AttentionTolerances::d_k_shared,
                     &AttentionReference::d_k_shared, shared_key_columns(shape), d_k_, rows,
                     [keys](auto b) -> const Recomputed& { return keys(b).d_k_shared; }));
    return with_answers(std::move(arrays), answered);
  }

  /// Sum of squares, over all tokens, of the terms of a sink's gradient, [heads]; a size as in
  /// attention/attention_reference.hpp. Collective.
  std::vector<double> sink_term_squares() const {
    std::vector<float> d_out(heads_ * value_dim_);
    std::vector<double> squares(heads_, 0.0);
    for (const TokenRow& own : own_) {
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
  /// The array of the sinks' gradients. Every rank has all of them and compares some.
  ResultArray sink_array() const {
    const std::vector<double>& stored = answers(&AttentionReference::d_sinks);
    ResultArray array{"d_sinks",
                      {workload_.heads.heads},
                      "d_sinks",
                      tolerances_.first.d_sinks,
                      tolerances_.second.d_sinks};
    array.answers = stored;
    array.samples_itself = true;
    for (int64_t h = case_.world().rank(); h < workload_.heads.heads; h += case_.world().size())
      array.rows.push_back(h);
    const std::vector<int64_t> shown = array.rows;
    array.read = read_rows(1, [this, shown](size_t r, std::span<double> to) {
      to[0] = case_.executor().d_sinks().at(shown[r]);
    });
    array.expect = expect_rows([this, shown, &stored, squares = sink_term_squares()](size_t r) {
      const size_t h = shown[r];
      double sum = 0;
      for (size_t at = h; at < lse_.size(); at += heads_)
        sum -= std::exp(workload_.sinks[h] - lse_[at]) * delta_[at];
      const double want = stored.empty() ? sum : stored[h];
      return ExpectedRow{{sum}, {error_scale(std::span(&want, 1), std::sqrt(squares[h]))}};
    });
    return array;
  }

  AttentionCase& case_;
  const AttentionWorkload& workload_;
  bool backward_;
  std::pair<AttentionTolerances, AttentionTolerances> tolerances_;  // then sigmas
  AttentionRows rows_;
  size_t heads_, value_dim_;
  std::vector<double> lse_, delta_;  // of all tokens, [tokens, heads]
  HostCopy out_, d_q_, d_k_, d_v_;   // results of this rank
  std::vector<TokenRow> own_;        // this rank's tokens, sorted
};

}  // namespace

std::vector<double> AttentionCase::statistics(int64_t plane) {
  const int64_t heads = workload_.heads.heads;
  std::vector<double> all(workload_.tokens() * heads, 0.0);
  const PlanArray& stats = plan_.arrays[plan_.stats];
  const HostCopy mine(executor_->final_stats(plane), stream());
  for (const TokenRow& at : token_rows(workload_, shard_of(layout(), stats.rows)))
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
  Verifier(*this, pass).verify(label(pass), checks);
}

}  // namespace gyre

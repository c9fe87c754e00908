#include "apps/attention/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "attention/attention_reference.hpp"
#include "core/special_values.hpp"
#include "report/tolerance.hpp"

namespace gyre {

/// One array of results that is compared row by row, with its answers or with recomputed rows.
struct ComparedArray {
  const char* name;
  const HostCopy& got;              ///< [rows, heads * dim]
  std::span<const double> answers;  ///< [tokens, heads * dim], or empty
  size_t heads, dim;
  Check& check;
  std::vector<double> largest = std::vector<double>(heads, 0);  ///< size of a row so far, by head

  /// Compares a token's row with its answer, or with `computed` [heads * dim]. `sizes` [heads]:
  /// see error_scale().
  void add(const TokenRow& own, std::span<const double> computed, std::span<const double> sizes,
           const std::string& place) {
    const size_t width = heads * dim, token = static_cast<size_t>(own.token);
    const auto want = answers.empty() ? computed : answers.subspan(token * width, width);
    for (size_t h = 0; h < heads; ++h) {
      largest[h] = std::max(largest[h], sizes[h]);
      const auto head = want.subspan(h * dim, dim);
      const double scale = error_scale(head, sizes[h]);
      for (size_t i = 0; i < dim; ++i)
        check.add(
            static_cast<double>(got.at(own.row, static_cast<int64_t>(h * dim + i))), head[i],
            [&] {
              return fmt::format("{}{}[{}, {}, {}], {}", answers.empty() ? "" : "/reference/", name,
                                 token, h, i, place);
            },
            scale);
    }
  }
};

namespace {

/// Input rows for the reference; each tensor has its own buffer for one row.
class Accessors {
 public:
  Accessors(const AttentionWorkload& workload, const TensorRows& inputs, bool with_gradients) {
    rows_.heads = workload.heads;
    rows_.mask = workload.mask;
    rows_.sinks = workload.sinks;
    const auto accessor = [&](InputTensor tensor) {
      auto buffer =
          std::make_shared<std::vector<float>>(static_cast<size_t>(workload.width(tensor)));
      return [&inputs, tensor, buffer](int64_t token) {
        inputs.row(tensor, token, *buffer);
        return static_cast<const float*>(buffer->data());
      };
    };
    rows_.q = accessor(InputTensor::q);
    rows_.k = accessor(InputTensor::k);
    rows_.v = accessor(InputTensor::v);
    if (with_gradients) rows_.d_out = accessor(InputTensor::d_out);
  }
  const AttentionRows& rows() const { return rows_; }

 private:
  AttentionRows rows_;
};

std::span<const double> part(const std::vector<double>& all, size_t index, size_t length) {
  return std::span(all).subspan(index * length, length);
}

/// So many times the pairs of a sample are recomputed where there are answers, for the sizes of
/// errors: a second or so a rank.
constexpr int64_t more_pairs_with_answers = 256;

/// Calls f(begin, end) for every run of entries of one document, in batches: expected rows take
/// memory, in double precision, and under a short window every row is in the sample.
template <class Entries, class F>
void for_each_batch(const Entries& entries, F f) {
  constexpr size_t most = 16;
  for (size_t begin = 0; begin < entries.size();) {
    size_t end = begin;
    while (end < entries.size() && end < begin + most &&
           entries[end].document == entries[begin].document)
      ++end;
    f(begin, end);
    begin = end;
  }
}

}  // namespace

std::vector<double> gather_statistics(AttentionRun& run, int64_t plane, Communicator& world) {
  const int64_t heads = run.workload().heads.heads;
  std::vector<double> all(static_cast<size_t>(run.workload().tokens() * heads), 0.0);
  const PlanArray& stats = run.plan().arrays[static_cast<size_t>(run.plan().stats)];
  const HostCopy mine(run.executor().final_stats(plane), run.stream());
  for (const TokenRow& at : token_rows(run.workload(), shard_of(run.layout(), stats.rows)))
    for (int64_t h = 0; h < stats.heads.count; ++h)
      all[static_cast<size_t>(at.token * heads + stats.heads.begin + h)] =
          static_cast<double>(mine.at(at.row, h));
  HostStream stream;
  world
      .all_reduce(all.data(), std::ssize(all), DType::f64, ReduceOp::sum, stream,
                  "statistics of all rows")
      ->wait();
  return all;
}

AttentionChecker::AttentionChecker(AttentionRun& run, const TensorRows& inputs,
                                   const AttentionReference* reference, int64_t pairs,
                                   Communicator& world)
    : run_(run),
      workload_(run.workload()),
      inputs_(inputs),
      reference_(reference),
      pairs_(reference == nullptr ? pairs : pairs * more_pairs_with_answers),
      world_(world),
      own_(token_rows(workload_, run.shard())) {
  std::sort(own_.begin(), own_.end(),
            [](const TokenRow& a, const TokenRow& b) { return a.token < b.token; });
}

int64_t AttentionChecker::pairs_of(const TokenRow& own, bool as_key) const {
  const DocumentMask mask(workload_.mask, own.document, workload_.length(own.document));
  const int64_t position = own.token - workload_.offsets[static_cast<size_t>(own.document)];
  return as_key ? mask.queries_of(position) : mask.keys_of(position);
}

std::vector<TokenRow> AttentionChecker::sample(bool keys) const {
  int64_t total = 0;
  for (const TokenRow& own : own_) total += pairs_of(own, keys) * workload_.heads.heads;
  const int64_t budget = std::max<int64_t>(1, pairs_ / world_.size());
  const int64_t step = std::max<int64_t>(1, ceil_div(total, budget)), count = std::ssize(own_);
  // Not every step-th token: kernels work in tiles, and an error may be at the same place of each.
  const auto chosen = [&](int64_t i) {
    const auto block = static_cast<uint64_t>(i / step);
    return i % step ==
           static_cast<int64_t>((block * 0x9e3779b97f4a7c15U >> 32) % static_cast<uint64_t>(step));
  };
  std::vector<TokenRow> some;
  for (int64_t i = 0; i < count; ++i)
    if (chosen(i) || i == 0 || i + 1 == count) some.push_back(own_[static_cast<size_t>(i)]);
  return some;
}

Check& AttentionChecker::check_of(const char* tensor, double tolerance,
                                  Verification& checks) const {
  Check& check =
      checks.check(fmt::format("{}, {}: {}", run_.name(), name_of(pass_), tensor), tolerance);
  if (workload_.tokens() == 0) check.add_nothing();
  return check;
}

void AttentionChecker::check(Pass pass, Verification& checks) {
  pass_ = pass;
  AttentionExecutor& executor = run_.executor();
  out_ = {executor.matrix(ArrayKind::out), run_.stream()};
  if (pass == Pass::backward) {
    d_q_ = {executor.matrix(ArrayKind::d_q), run_.stream()};
    d_k_ = {executor.d_keys(), run_.stream()};
    d_v_ = {executor.d_values(), run_.stream()};
  }
  const std::vector<double> lse = gather_statistics(run_, 0, world_);
  check_queries(pass, lse, checks);
  if (pass == Pass::forward) return;
  const std::vector<double> delta = gather_statistics(run_, 1, world_);
  check_keys(lse, delta, checks);
  check_sinks(lse, delta, checks);
}

std::span<const double> AttentionChecker::answers(
    std::vector<double> AttentionReference::*array) const {
  if (reference_ == nullptr) return {};
  return reference_->*array;
}

std::string AttentionChecker::place(const TokenRow& own) const {
  return fmt::format("document {} position {}", own.document,
                     own.token - workload_.offsets[static_cast<size_t>(own.document)]);
}

template <class Add>
void AttentionChecker::for_each_other(const std::vector<TokenRow>& sampled, Add add) const {
  auto next = sampled.begin();
  for (const TokenRow& own : own_) {
    if (next != sampled.end() && next->token == own.token)
      ++next;
    else
      add(own);
  }
}

void AttentionChecker::check_others(const std::vector<TokenRow>& sampled,
                                    std::span<ComparedArray* const> arrays) const {
  for (ComparedArray* array : arrays) {
    if (array->answers.empty()) {
      array->check.add_sample(std::ssize(sampled), std::ssize(own_));
      continue;
    }
    const std::vector<double> sizes = array->largest;
    for_each_other(sampled, [&](const TokenRow& own) { array->add(own, {}, sizes, place(own)); });
  }
}

void AttentionChecker::check_lse(const std::vector<TokenRow>& rows,
                                 std::span<const double> computed, std::span<const double> lse,
                                 Check& check) const {
  const auto heads = static_cast<size_t>(workload_.heads.heads);
  const std::span<const double> all = answers(&AttentionReference::lse);
  for (size_t i = 0; i < rows.size(); ++i) {
    const double defined = pairs_of(rows[i], false) == 0 ? -infinity_of<double> : 0;
    for (size_t h = 0; h < heads; ++h) {
      const size_t at = static_cast<size_t>(rows[i].token) * heads + h;
      check.add(
          lse[at], all.empty() ? computed[i * heads + h] : all[at],
          [&] {
            return fmt::format("{}lse[{}, {}], {}", all.empty() ? "" : "/reference/", rows[i].token,
                               h, place(rows[i]));
          },
          1, defined);
    }
  }
}

void AttentionChecker::check_queries(Pass pass, const std::vector<double>& lse,
                                     Verification& checks) {
  const bool gradients = pass == Pass::backward;
  const AttentionTolerances tolerance = run_.tolerances(world_);
  const Accessors inputs(workload_, inputs_, gradients);
  const auto heads = static_cast<size_t>(workload_.heads.heads);
  const auto dim = static_cast<size_t>(workload_.heads.head_dim);
  const std::vector<TokenRow> some = sample(false);
  Check& log_sums = check_of("lse", tolerance.lse, checks);
  ComparedArray out{"out", out_, answers(&AttentionReference::out),
                    heads, dim,  check_of("out", tolerance.out, checks)};
  std::optional<ComparedArray> d_q;
  if (gradients)
    d_q.emplace(ComparedArray{"d_q", d_q_, answers(&AttentionReference::d_q), heads, dim,
                              check_of("d_q", tolerance.d_q, checks)});
  for_each_batch(some, [&](size_t begin, size_t end) {
    const auto document = static_cast<size_t>(some[begin].document);
    std::vector<int64_t> tokens;
    for (size_t i = begin; i < end; ++i) tokens.push_back(some[i].token);
    const QueryResults want = reference_queries(
        inputs.rows(),
        {workload_.offsets[document], workload_.offsets[document + 1], some[begin].document},
        tokens);
    check_lse(
        {some.begin() + static_cast<int64_t>(begin), some.begin() + static_cast<int64_t>(end)},
        want.lse, lse, log_sums);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const TokenRow& own = some[begin + i];
      out.add(own, part(want.out, i, heads * dim), part(want.out_size, i, heads), place(own));
      if (d_q)
        d_q->add(own, part(want.d_q, i, heads * dim), part(want.d_q_size, i, heads), place(own));
    }
  });
  check_others(some, std::vector<ComparedArray*>{&out});
  if (d_q) check_others(some, std::vector<ComparedArray*>{&*d_q});
  if (answers(&AttentionReference::lse).empty())
    log_sums.add_sample(std::ssize(some), std::ssize(own_));
  else
    for_each_other(some, [&](const TokenRow& own) { check_lse({own}, {}, lse, log_sums); });
}

void AttentionChecker::check_keys(const std::vector<double>& lse, const std::vector<double>& delta,
                                  Verification& checks) {
  const AttentionTolerances tolerance = run_.tolerances(world_);
  const Accessors inputs(workload_, inputs_, true);
  const auto heads = static_cast<size_t>(workload_.heads.heads);
  const auto kv_heads = static_cast<size_t>(workload_.heads.kv_heads);
  const auto dim = static_cast<size_t>(workload_.heads.head_dim);
  const std::vector<TokenRow> some = sample(true);
  ComparedArray d_k{"d_k",    d_k_, answers(&AttentionReference::d_k),
                    kv_heads, dim,  check_of("d_k", tolerance.d_k, checks)};
  ComparedArray d_v{"d_v",    d_v_, answers(&AttentionReference::d_v),
                    kv_heads, dim,  check_of("d_v", tolerance.d_v, checks)};
  for_each_batch(some, [&](size_t begin, size_t end) {
    const auto document = static_cast<size_t>(some[begin].document);
    const auto first = static_cast<size_t>(workload_.offsets[document]);
    const auto length = static_cast<size_t>(workload_.length(some[begin].document));
    std::vector<int64_t> tokens;
    for (size_t i = begin; i < end; ++i) tokens.push_back(some[i].token);
    const KeyResults want = reference_keys(
        inputs.rows(),
        {workload_.offsets[document], workload_.offsets[document + 1], some[begin].document},
        tokens, std::span(lse).subspan(first * heads, length * heads),
        std::span(delta).subspan(first * heads, length * heads));
    for (size_t i = 0; i < tokens.size(); ++i) {
      const TokenRow& own = some[begin + i];
      d_k.add(own, part(want.d_k, i, kv_heads * dim), part(want.d_k_size, i, kv_heads), place(own));
      d_v.add(own, part(want.d_v, i, kv_heads * dim), part(want.d_v_size, i, kv_heads), place(own));
    }
  });
  check_others(some, std::vector<ComparedArray*>{&d_k, &d_v});
}

std::vector<double> AttentionChecker::sink_term_squares(const std::vector<double>& lse) const {
  const size_t heads = workload_.sinks.size();
  const auto dim = static_cast<size_t>(workload_.heads.head_dim);
  std::vector<float> d_out(heads * dim);
  std::vector<double> squares(heads, 0.0);
  for (const TokenRow& own : own_) {
    inputs_.row(InputTensor::d_out, own.token, d_out);
    for (size_t h = 0; h < heads; ++h) {
      double out_squares = 0, d_out_squares = 0;
      for (size_t i = h * dim; i < (h + 1) * dim; ++i) {
        const auto o = static_cast<double>(out_.at(own.row, static_cast<int64_t>(i)));
        const auto g = static_cast<double>(d_out[i]);
        out_squares += o * o;
        d_out_squares += g * g;
      }
      const double weight = std::exp(static_cast<double>(workload_.sinks[h]) -
                                     lse[static_cast<size_t>(own.token) * heads + h]);
      squares[h] += weight * weight * out_squares * d_out_squares / static_cast<double>(dim);
    }
  }
  return squares;
}

void AttentionChecker::check_sinks(const std::vector<double>& lse, const std::vector<double>& delta,
                                   Verification& checks) {
  const size_t heads = workload_.sinks.size();
  if (heads == 0) return;
  std::vector<double> squares = sink_term_squares(lse);
  HostStream stream;
  world_
      .all_reduce(squares.data(), std::ssize(squares), DType::f64, ReduceOp::sum, stream,
                  "sizes of the gradients of sinks")
      ->wait();
  Check& check = check_of("d_sinks", run_.tolerances(world_).d_sinks, checks);
  const std::span<const double> all = answers(&AttentionReference::d_sinks);
  // All ranks have all gradients: each shows some.
  const auto ranks = static_cast<size_t>(world_.size());
  for (auto h = static_cast<size_t>(world_.rank()); h < heads; h += ranks) {
    double sum = 0;
    for (size_t at = h; at < lse.size(); at += heads)
      sum -= std::exp(static_cast<double>(workload_.sinks[h]) - lse[at]) * delta[at];
    const double want = all.empty() ? sum : all[h];
    check.add(
        run_.executor().d_sinks().at(h), want,
        [&] { return fmt::format("{}d_sinks[{}]", all.empty() ? "" : "/reference/", h); },
        error_scale(std::span(&want, 1), std::sqrt(squares[h])));
  }
}

void look_at_results(Pass pass, AttentionRun& run, const TensorRows& inputs,
                     const AttentionReference* reference, int64_t pairs, Communicator& world,
                     Verification& checks) {
  Verification look(checks.tolerance_scale());
  AttentionChecker(run, inputs, reference, pairs, world).check(pass, look);
  checks.merge_repeat(look);
}

void run_verified(Pass pass, AttentionRun& run, const TensorRows& inputs,
                  const AttentionReference* reference, int64_t pairs, Communicator& world,
                  Verification& checks) {
  run.repeat_checked(pass, checks);
  look_at_results(pass, run, inputs, reference, pairs, world, checks);
  checks.merge_over(world);
}

}  // namespace gyre

#pragma once
// Attentions on real ranks, and the comparison of their results with the unsharded attention in
// double precision.

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention_reference.hpp"
#include "attention/execute.hpp"
#include "attention/schedules/registry.hpp"
#include "attention/tolerance.hpp"
#include "core/token_random.hpp"
#include "core/tolerance.hpp"
#include "mpi_test.hpp"
#include "sharding/layouts.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre::test {

/// One attention, identical on all ranks. Rows are tokens, without padding.
struct Problem {
  HeadShape heads;
  MaskRule mask;
  std::vector<int64_t> offsets = {0};
  std::vector<int64_t> query_offsets = {};  ///< empty: all tokens have queries
  std::vector<float> q, k, v, d_out, sinks;
  AttentionResults expected;

  AttentionInputs<float> inputs() const { return {heads, mask, offsets, q, k, v, d_out, sinks}; }
  int64_t longest() const {
    int64_t most = 0;
    for (size_t d = 1; d < offsets.size(); ++d) most = std::max(most, offsets[d] - offsets[d - 1]);
    return most;
  }
};

struct ProblemSpec {
  std::vector<int64_t> lengths;
  HeadShape heads;
  MaskRule mask;
  bool sinks = false;
  DType type = DType::f32;
  uint64_t seed = 11;
  std::vector<int64_t> queries = {};  ///< of each document, which its last tokens have; empty: all
};

inline Problem make_problem(const ProblemSpec& spec) {
  Problem p;
  p.heads = spec.heads;
  p.heads.scale = 1 / std::sqrt(static_cast<float>(spec.heads.head_dim));
  p.mask = spec.mask;
  for (const int64_t n : spec.lengths) p.offsets.push_back(p.offsets.back() + n);
  if (!spec.queries.empty()) {
    p.query_offsets = {0};
    for (const int64_t n : spec.queries) p.query_offsets.push_back(p.query_offsets.back() + n);
    p.mask = of_last_queries(spec.mask, p.offsets, p.query_offsets);
  }
  const auto fill = [&](TokenTensor tensor, int64_t width, std::vector<float>& values) {
    values.resize(p.offsets.back() * width);
    for (int64_t t = 0; t < p.offsets.back(); ++t)
      fill_token_row({spec.seed, tensor, spec.type == DType::bf16}, t,
                     std::span(values).subspan(t * width, static_cast<size_t>(width)));
  };
  fill(TokenTensor::q, p.heads.heads * p.heads.head_dim, p.q);
  fill(TokenTensor::k, p.heads.kv_heads * p.heads.head_dim, p.k);
  const int64_t row = p.heads.kv_heads * p.heads.head_dim;
  for (int64_t t = 0; t < p.offsets.back(); ++t)
    share_keys(p.heads, std::span(p.k).subspan(t * row, static_cast<size_t>(row)));
  fill(TokenTensor::v, p.heads.kv_heads * p.heads.value_dim(), p.v);
  fill(TokenTensor::d_out, p.heads.heads * p.heads.value_dim(), p.d_out);
  if (spec.sinks) {
    p.sinks.resize(p.heads.heads);
    fill_token_row({spec.seed, TokenTensor::sinks, false}, 0, p.sinks);
  }
  p.expected = attention_reference(p.inputs());
  return p;
}

struct Configuration {
  const Schedule& schedule;
  const LayoutKind& layout;
  ElementTypes types = {};
  ScheduleOptions options = {};
};

/// The options under which a schedule is to be right: the usual ones, and each other word of the
/// options with words that it reads.
inline std::vector<ScheduleOptions> options_of(const Schedule& schedule) {
  std::vector<ScheduleOptions> all(1);
  for (const auto& field : schedule_option_fields())
    if (std::ranges::find(schedule.reads, field.value) != schedule.reads.end())
      for (int64_t word = 1; word < std::ssize(field.words); ++word)
        all.emplace_back().*field.value = word;
  return all;
}

/// The device that an attention runs on: the stream of kernel and group, and a host communicator of
/// the group's ranks, which agree about tolerances.
struct OnDevice {
  Stream& stream;
  Communicator& host_group;
};

/// A problem planned and filled in for this rank of a group.
class Attention {
 public:
  /// `shared`: a workspace that other attentions use as well; null: a workspace of its own.
  Attention(const Problem& p, const Configuration& c, Communicator& group, BlockKernel& kernel,
            AttentionWorkspace* shared = nullptr, const OnDevice* device = nullptr)
      : p_(p),
        group_(group),
        kernel_(kernel),
        host_group_(device == nullptr ? group : device->host_group),
        types_(c.types),
        stream_(device == nullptr ? host_stream_ : device->stream),
        workspace_(shared == nullptr ? own_workspace_ : *shared) {
    LayoutOptions options;
    options.cp = group.size();
    options.chunk = 4;
    placed_.emplace(p.offsets, p.query_offsets, c.layout, options);
    problem_ = {&placed_->layout, p.heads, p.mask, c.options, PlanPasses::both, placed_->queries()};
    refusal_ = c.schedule.why_not(problem_);
    if (!refusal_.empty()) return;
    plan_ = plan_rank(c.schedule, problem_, group.rank());
    executor_ = std::make_unique<AttentionExecutor>(plan_, p.heads, c.types, group, kernel, stream_,
                                                    workspace_, true);
    executor_->set_sinks(p.sinks);
    put({&p.q}, ArrayKind::q);
    put({&p.k, &p.v}, ArrayKind::kv);
    put({&p.d_out}, ArrayKind::d_out);
  }

  bool refused() const { return !refusal_.empty(); }
  AttentionExecutor& executor() { return *executor_; }
  const RankPlan& plan() const { return plan_; }
  const AttentionProblem& problem() const { return problem_; }
  AttentionWorkspace& workspace() { return workspace_; }
  Stream& stream() { return stream_; }
  HostCopy on_host(const ConstMatrixRef& m) { return {m, stream_}; }
  HostCopy lse_on_host() { return {executor_->lse(), stream_}; }
  /// Collective.
  AttentionTolerances tolerances() const {
    return attention_tolerances(attention_reductions(plan_, problem_, host_group_), types_,
                                kernel_.precision(types_.activations));
  }

  /// `after`: called behind each direction.
  void run(const std::function<void()>& after = [] {}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Traffic before = group_.traffic();
      executor_->run(pass);
      after();
      const PlanCount planned = count(plan_, pass, p_.heads, types_);
      if (!p_.sinks.empty()) continue;  // their sum over ranks is not part of the plan
      EXPECT_EQ(group_.traffic().bytes_sent - before.bytes_sent, planned.bytes_sent);
      EXPECT_EQ(group_.traffic().messages - before.messages, planned.messages);
    }
  }

  /// Calls f(token, row) for the tokens of an array.
  template <class F>
  void for_each_token(const PlanArray& array, F f) const {
    for (const Fragment& fragment : shard_of(problem_.layout_of(array.kind), array.rows).fragments)
      for (int64_t i = 0; i < fragment.length; ++i)
        f(p_.offsets[fragment.segment] + fragment.start.value() + i * fragment.stride,
          fragment.local_begin.value() + i);
  }
  /// The same for the rank's own array of this kind.
  template <class F>
  void for_each_own_token(ArrayKind kind, F f) const {
    for_each_token(plan_.arrays[own(kind)], f);
  }

 private:
  /// Fills the planes of an array. Padding is NaN, which must never be read.
  void put(const std::vector<const std::vector<float>*>& planes, ArrayKind kind) {
    HostFill array(executor_->matrix(kind), stream_);
    const MatrixRef& to = array.matrix();
    const auto set = [&](int64_t row, int64_t column, float x) {
      if (to.type == DType::f32)
        to.as<float>()(row, column) = x;
      else
        to.as<bf16>()(row, column) = to_bf16(x);
    };
    for (int64_t r = 0; r < to.rows; ++r)
      for (int64_t c = 0; c < to.cols; ++c) set(r, c, NAN);
    for_each_own_token(kind, [&](int64_t token, int64_t row) {
      int64_t column = 0;
      for (const std::vector<float>* plane : planes) {
        const int64_t width = std::ssize(*plane) / p_.offsets.back();
        for (int64_t c = 0; c < width; ++c) set(row, column++, (*plane)[token * width + c]);
      }
    });
    array.upload();
  }

  const Problem& p_;
  Communicator& group_;
  BlockKernel& kernel_;
  Communicator& host_group_;
  ElementTypes types_;
  HostStream host_stream_;
  Stream& stream_;
  std::optional<QueryLayouts> placed_;
  AttentionProblem problem_;
  std::string refusal_;
  RankPlan plan_;
  AttentionWorkspace own_workspace_;
  AttentionWorkspace& workspace_;
  std::unique_ptr<AttentionExecutor> executor_;
};

/// The worst error of one result, as a share of its tolerance.
class Worst {
 public:
  void add(double got, double want, double scale) {
    if (got == want) return;
    const double share = std::abs(got - want) / (tolerance_ * scale);
    worst_ = std::isnan(share) ? INFINITY : std::max(worst_, share);
  }
  explicit Worst(double tolerance) : tolerance_(tolerance) {}
  double share() const { return worst_; }

 private:
  double tolerance_, worst_ = 0;
};

inline void expect_rows(ArrayKind kind, const char* name, MatrixRef result,
                        const std::vector<double>& want, const std::vector<double>& size,
                        int64_t dim, double tolerance, Attention& attention, int64_t shared = 0) {
  const HostCopy copy = attention.on_host(result);
  const ConstMatrixRef& got = copy.matrix();
  Worst worst(tolerance);
  attention.for_each_own_token(kind, [&](int64_t token, int64_t row) {
    for (int64_t h = 0; h < got.cols / dim; ++h) {
      const auto at = static_cast<size_t>(token * got.cols / dim + h);
      const double* expected = want.data() + static_cast<int64_t>(at) * dim;
      const double scale = error_scale({expected, static_cast<size_t>(dim - shared)}, size[at]);
      for (int64_t i = 0; i < dim - shared; ++i)
        worst.add(static_cast<double>(got.at(row, h * dim + i)), expected[i], scale);
    }
  });
  EXPECT_LE(worst.share(), 1) << name;
}

/// The sums of gradients that KV heads share, which the first head has; all others must have 0.
inline void expect_shared_keys(const Problem& p, Attention& attention, double tolerance) {
  const HostCopy got = attention.on_host(attention.executor().d_keys());
  const int64_t dim = p.heads.head_dim, own = p.heads.own_key_dim();
  const size_t shared = p.heads.shared_key_dim;
  Worst worst(tolerance);
  attention.for_each_own_token(ArrayKind::d_kv, [&](int64_t token, int64_t row) {
    const double* expected = p.expected.d_k.data() + token * p.heads.kv_heads * dim + own;
    const double scale = error_scale({expected, shared}, p.expected.d_k_shared_size[token]);
    for (int64_t i = own; i < dim; ++i)
      worst.add(static_cast<double>(got.at(row, i)), expected[i - own], scale);
    for (int64_t h = 1; h < p.heads.kv_heads; ++h)
      for (int64_t i = own; i < dim; ++i) EXPECT_EQ(got.at(row, h * dim + i), 0) << "head " << h;
  });
  EXPECT_LE(worst.share(), 1) << "d_k_shared";
}

inline void expect_results(const Problem& p, Attention& attention,
                           const AttentionTolerances& tolerance) {
  AttentionExecutor& run = attention.executor();
  const AttentionResults& want = p.expected;
  const int64_t dim = p.heads.head_dim, value_dim = p.heads.value_dim();
  expect_rows(ArrayKind::out, "out", run.matrix(ArrayKind::out), want.out, want.out_size, value_dim,
              tolerance.out, attention);
  expect_rows(ArrayKind::d_q, "d_q", run.matrix(ArrayKind::d_q), want.d_q, want.d_q_size, dim,
              tolerance.d_q, attention);
  expect_rows(ArrayKind::d_kv, "d_k", run.d_keys(), want.d_k, want.d_k_size, dim, tolerance.d_k,
              attention, p.heads.shared_key_dim);
  if (p.heads.shared_key_dim > 0) expect_shared_keys(p, attention, tolerance.d_k_shared);
  expect_rows(ArrayKind::d_kv, "d_v", run.d_values(), want.d_v, want.d_v_size, value_dim,
              tolerance.d_v, attention);

  const PlanArray& stats = attention.plan().arrays[attention.plan().stats];
  const HostCopy lse = attention.lse_on_host();
  Worst worst(tolerance.lse);
  attention.for_each_token(stats, [&](int64_t token, int64_t row) {
    for (int64_t h = 0; h < lse.matrix().cols; ++h)
      worst.add(static_cast<double>(lse.at(row, h)),
                want.lse[token * p.heads.heads + stats.heads.begin + h], 1);
  });
  EXPECT_LE(worst.share(), 1) << "lse";

  Worst sinks(tolerance.d_sinks);
  for (size_t h = 0; h < p.sinks.size(); ++h)
    sinks.add(run.d_sinks().at(h), want.d_sinks[h],
              error_scale({&want.d_sinks[h], 1}, want.d_sinks_size[h]));
  EXPECT_LE(sinks.share(), 1) << "d_sinks";
}

/// Expects padding without results: no output, no gradient, and a log-sum-exp of -inf.
inline void expect_empty_padding(Attention& attention) {
  AttentionExecutor& run = attention.executor();
  const auto real_rows = [&](const PlanArray& array) {
    std::vector<bool> real(array.tokens(), false);
    attention.for_each_token(array, [&](int64_t, int64_t row) { real[row] = true; });
    return real;
  };
  for (const ArrayKind kind : {ArrayKind::out, ArrayKind::d_q, ArrayKind::d_kv}) {
    const std::vector<bool> real = real_rows(attention.plan().arrays[own(kind)]);
    const HostCopy got = attention.on_host(run.matrix(kind));
    for (int64_t r = 0; r < got.matrix().rows; ++r)
      for (int64_t c = 0; c < got.matrix().cols && !real[r]; ++c)
        EXPECT_EQ(got.at(r, c), 0.0F) << name_of(kind) << ", row " << r;
  }
  const HostCopy copy = attention.lse_on_host();
  const auto lse = copy.matrix().as<float>();
  const auto stats = static_cast<size_t>(attention.plan().stats);
  const std::vector<bool> final_rows = real_rows(attention.plan().arrays[stats]);
  for (int64_t r = 0; r < lse.rows; ++r)
    for (int64_t h = 0; h < lse.cols && !final_rows[r]; ++h)
      EXPECT_EQ(lse(r, h), -std::numeric_limits<float>::infinity()) << "row " << r;
}

inline std::string name_of(const Configuration& c, const ProblemSpec& spec) {
  return c.schedule.name + ", " + c.layout.name + ", heads " + std::to_string(spec.heads.heads) +
         "/" + std::to_string(spec.heads.kv_heads) + ", " + gyre::name_of(spec.mask) + ", " +
         std::to_string(spec.lengths.size()) + " documents" +
         (spec.queries.empty() ? "" : ", queries of the last tokens") +
         (c.options.collectives == 1 ? ", by the library" : "") +
         (c.options.merge == 1 ? ", merged at the end" : "");
}

/// Bits of all results of a rank's own tokens, and of its final log-sum-exps, by token.
inline std::map<int64_t, std::vector<float>> bits_of(Attention& attention) {
  std::map<int64_t, std::vector<float>> bits;
  AttentionExecutor& run = attention.executor();
  for (const ArrayKind kind : {ArrayKind::out, ArrayKind::d_q, ArrayKind::d_kv}) {
    const HostCopy got = attention.on_host(run.matrix(kind));
    attention.for_each_own_token(kind, [&](int64_t token, int64_t row) {
      for (int64_t c = 0; c < got.matrix().cols; ++c) bits[token].push_back(got.at(row, c));
    });
  }
  const HostCopy copy = attention.lse_on_host();
  const auto lse = copy.matrix().as<float>();
  const auto stats = static_cast<size_t>(attention.plan().stats);
  attention.for_each_token(attention.plan().arrays[stats], [&](int64_t token, int64_t row) {
    for (int64_t h = 0; h < lse.cols; ++h) bits[token].push_back(lse(row, h));
  });
  return bits;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace gyre::test

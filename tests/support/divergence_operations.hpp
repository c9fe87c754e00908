#pragma once
// Divergences of a student's largest logits with a sampled tail, of a teacher's rows and of given
// log-probabilities; see operation_contract.hpp.

#include <algorithm>

#include "logprobs/top_k_divergence.hpp"
#include "selection_operations.hpp"

namespace gyre::test {

/// TopKDivergence. `given`: ids and a teacher's log-probabilities are given, the ids in ascending
/// order.
template <bool given>
struct Divergences {
  static constexpr const char* agreement = "top-k divergences";
  LogitRows rows, teacher;
  DType type;
  int64_t k;
  TailGradient tail = TailGradient::unbiased;
  Ints targets = {};
  Floats g = alternating_gradients(rows.tokens);
  std::string title = "random";

  Divergences(const LogitRows& student, const LogitRows& teacher_, DType type_, int64_t k_,
              TailGradient tail_ = TailGradient::unbiased)
      : rows(student), teacher(teacher_), type(type_), k(k_), tail(tail_) {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const uint64_t bits = token_bits({5, TokenTensor::ids}, t, 0);
      const auto random = static_cast<int32_t>(bits % static_cast<uint64_t>(rows.vocab_size));
      const Ints nobodys = {-1, static_cast<int32_t>(rows.vocab_size)};
      targets.push_back(t % 4 == 0   ? ids_of(t)[bits % ids_of(t).size()]
                        : t % 8 == 1 ? nobodys[bits % 2]
                                     : random);
    }
  }
  static Divergences random(int64_t tokens, int64_t vocab_size, int64_t k, DType type,
                            TailGradient tail = TailGradient::unbiased) {
    return {random_logits(tokens, vocab_size, type, 3),
            random_logits(tokens, vocab_size, type, 3, 1, TokenTensor::teacher), type, k, tail};
  }
  /// Equal logits; logits of -inf among the ids, as a target, of the teacher, in all of a shard;
  /// NaN.
  static Divergences special(DType type) {
    constexpr int64_t vocab_size = 24;
    Divergences o = random(14, vocab_size, 5, type);
    for (int64_t v = 0; v < vocab_size; ++v) {
      o.rows.at(0, v) = 0.5;
      o.rows.at(1, v) = std::round(o.rows.at(1, v) / 4);
      if (v != 7 && v != 20) o.rows.at(2, v) = -infinity;  // fewer are finite than are wanted
      if (v < 12) o.rows.at(3, v) = -infinity;
      if (v >= 12) o.rows.at(4, v) = o.teacher.at(4, v) = -infinity;
      o.rows.at(8, v) = v == 3 ? 100 : 0;                                    // nearly certain
      for (const int64_t t : {12, 13}) o.rows.at(t, v) = v == 3 ? 1000 : 0;  // beyond exp
      o.teacher.at(11, v) = 1e4 + static_cast<double>(v % 5) * 128;
    }
    o.targets = {23, 20, 7, 20, 20, 9, 11, 1, 4, 2, 1, 22, 9, 3};
    for (const int64_t t : {12, 13}) o.teacher.at(t, 0) = -infinity;       // +inf by an id of q = 0
    o.teacher.at(5, top_k_reference(o.rows.row(5), 2)[1].id) = -infinity;  // +inf
    o.rows.at(6, 11) = -infinity;                                          // sampled: -inf
    o.rows.at(9, vocab_size - 1) = not_a_number;
    o.teacher.at(10, 0) = not_a_number;
    o.title = "special rows";
    return o;
  }
  static std::vector<Divergences> cases() {
    std::vector<Divergences> all;
    for (const DType type : both_types)
      for (const TailGradient tail : {TailGradient::unbiased, TailGradient::advantage}) {
        all.push_back(random(16, 256, 5, type, tail));
        all.push_back(random(9, 40, 30, type, tail));  // more than a rank of several has
        all.push_back(random(9, 12, 64, type, tail));  // more than there are: no tail
      }
    for (const DType type : both_types) all.push_back(special(type));
    return all;
  }
  static Divergences threaded() { return random(300, 70, 9, DType::bf16); }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    TopKDivergence(tokens, vocab, {.k = 2, .ids_are_given = given}, world());
  }
  std::string name() const {
    return fmt::format("{}: {} of {} ids, {}", title, k, rows.vocab_size,
                       tail == TailGradient::unbiased ? "unbiased" : "advantage");
  }
  int64_t length() const { return std::min(k, rows.vocab_size); }
  int64_t forward_bytes(int64_t ranks) const {
    const int64_t most = (rows.vocab_size + ranks - 1) / ranks;
    return (ranks - 1) * rows.tokens * (given ? 4 * (3 + length()) : 24 + 12 * std::min(k, most));
  }
  void remove_gradient() { std::fill(g.begin(), g.end(), 0.0F); }
  Ints ids_of(int64_t t) const {
    Ints ids;
    for (const TopEntry& entry : top_k_reference(rows.row(t), k)) ids.push_back(entry.id);
    if (given) std::ranges::sort(ids);
    return ids;
  }
  /// [length + 1] log p of the ids and the target in f32, in which they are given.
  Floats given_of(int64_t t) const {
    const Doubles log_p = log_softmax_reference(teacher.row(t));
    const bool owned = targets[t] >= 0 && targets[t] < rows.vocab_size;
    Floats some;
    for (const int32_t id : ids_of(t)) some.push_back(static_cast<float>(log_p[id]));
    some.push_back(owned ? static_cast<float>(log_p[targets[t]]) : 0);
    return some;
  }
  OperationResult run(const Part& part) const {
    const auto logits = part.put(rows, type);
    TopKDivergence scores(rows.tokens, part.vocab,
                          {k, tail, given, part.threads, part.place.kernels(), part.place.arrays()},
                          part.tp());
    OperationResult r{{Floats(targets.size(), NAN)}, {}};
    if constexpr (given) {
      Ints ids;
      Floats of_ids, of_targets;
      for (int64_t t = 0; t < rows.tokens; ++t) {
        const Ints own = ids_of(t);
        const Floats some = given_of(t);
        ids.insert(ids.end(), own.begin(), own.end());
        of_ids.insert(of_ids.end(), some.begin(), some.end() - 1);
        of_targets.push_back(some.back());
      }
      part.forward(r, [&] {
        scores.forward(logits->ref(), TeacherLogprobs{ids, of_ids, of_targets}, targets,
                       part.stream(), r.values[0]);
      });
    } else {
      const auto theirs = part.put(teacher, type);
      part.forward(r, [&] {
        scores.forward(logits->ref(), theirs->ref(), targets, part.stream(), r.values[0]);
      });
    }
    part.backward(r, *logits, type, [&](MatrixRef d) { scores.backward(logits->ref(), g, d); });
    return r;
  }
  TopKDivergenceReference wanted(int64_t t) const {
    const bool unbiased = tail == TailGradient::unbiased;
    if constexpr (given)
      return top_k_divergence_reference(rows.row(t), ids_of(t), doubles(given_of(t)), targets[t],
                                        unbiased);
    return top_k_divergence_reference(rows.row(t), k, teacher.row(t), targets[t], unbiased);
  }
  void expect_reference(const OperationResult& got, const Part& part) const {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const auto row = rows.row(t);
      const TopKDivergenceReference want = wanted(t);
      double size = 0;
      Doubles weights(row.size(), 0), scales;
      for (size_t i = 0; i < want.ids.size(); ++i) {
        const double own =
            divergence_scale(want.log_q[i], want.log_p[i], std::cmp_equal(i, length()));
        size += own;
        weights[want.ids[i]] += std::abs(double{g[t]}) * own;
      }
      expect_near(got.values[0][t], want.value, logprob_tolerance() * size,
                  fmt::format("divergence of token {}", t));
      if (g[t] != 0 && !std::isfinite(want.value)) {
        expect_no_gradient(got.d_logits, t, part.vocab, part.rank(), row);
        continue;
      }
      const Doubles log_q = log_softmax_reference(row);
      for (size_t v = 0; v < row.size(); ++v)
        scales.push_back(
            logit_gradient_scale(log_q[v], std::abs(double{g[t]}) * size, 0, weights[v]));
      expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(),
                          top_k_divergence_gradient_reference(row, want, double{g[t]}), scales);
    }
  }
};
using DivergencesOfRows = Divergences<false>;
using DivergencesOfGivenIds = Divergences<true>;

}  // namespace gyre::test

#pragma once
// Verification of an attention of any size: rows of the results against the definition in double
// precision (attention/attention_reference.hpp).

#include "apps/attention/run.hpp"
#include "io/attention_file.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Log-sum-exps (plane 0) or deltas (plane 1) of all tokens, [tokens, heads], on every rank.
/// Collective.
std::vector<double> gather_statistics(AttentionRun& run, int64_t plane, Communicator& world);

struct ComparedArray;

/// Verifies the results in the arrays of a run. Every rank recomputes a sample of its own tokens,
/// all of them if the budget suffices: as queries (out, lse, d_q) and as keys (d_k, d_v). Keys need
/// the log-sum-exps and deltas of all queries, which are gathered; lse is itself verified for the
/// recomputed queries. Gradients of sinks are recomputed from the gathered values.
class AttentionChecker {
 public:
  /// `pairs`: number of (query head, key) pairs that all ranks together recompute in one direction.
  /// The arrays that `reference` has (null: none) are compared in full; the recomputation then only
  /// gives the scale of errors. A row outside the sample takes the largest size of the sampled rows
  /// of its head.
  AttentionChecker(AttentionRun& run, const TensorRows& inputs, const AttentionReference* reference,
                   int64_t pairs, Communicator& world);

  /// Call it after a forward pass, or after a backward pass (then forward results are checked too).
  /// Copies the results from a device once. Collective; every rank adds its own comparisons.
  void check(Pass pass, Verification& checks);

 private:
  /// The check of one tensor in this run and direction.
  Check& check_of(const char* tensor, double tolerance, Verification& checks) const;
  /// Visible pairs of a token, as a key or as a query.
  int64_t pairs_of(const TokenRow& own, bool as_key) const;
  /// A sample of the rank's tokens: the first, the last, and one of every `step` at a varying
  /// place.
  std::vector<TokenRow> sample(bool keys) const;
  /// The answers to an array; empty: there are none.
  std::span<const double> answers(std::vector<double> AttentionReference::*array) const;
  std::string place(const TokenRow& own) const;
  /// add(row) for the rank's tokens that are not in `sampled`.
  template <class Add>
  void for_each_other(const std::vector<TokenRow>& sampled, Add add) const;
  /// Compares the tokens outside the sample with their answers; or notes that there are none.
  void check_others(const std::vector<TokenRow>& sampled,
                    std::span<ComparedArray* const> arrays) const;
  /// Compares log-sum-exps of `rows` with their answers, or with `computed` [rows, heads].
  void check_lse(const std::vector<TokenRow>& rows, std::span<const double> computed,
                 std::span<const double> lse, Check& check) const;
  /// Sum over this rank's tokens of the squares of the terms of a sink's gradient (a size as in
  /// attention/attention_reference.hpp), [heads].
  std::vector<double> sink_term_squares(const std::vector<double>& lse) const;
  void check_queries(Pass pass, const std::vector<double>& lse, Verification& checks);
  void check_keys(const std::vector<double>& lse, const std::vector<double>& delta,
                  Verification& checks);
  void check_sinks(const std::vector<double>& lse, const std::vector<double>& delta,
                   Verification& checks);

  AttentionRun& run_;
  HostCopy out_, d_q_, d_k_, d_v_;  // results of the checked direction
  const AttentionWorkload& workload_;
  const TensorRows& inputs_;
  const AttentionReference* reference_;
  int64_t pairs_;
  Pass pass_ = Pass::forward;
  Communicator& world_;
  std::vector<TokenRow> own_;  // sorted by token
};

/// Verifies what the last run of `pass` left in the arrays; of several looks at the same pass
/// `checks` keep the worst. Collective; every rank adds its own comparisons.
void look_at_results(Pass pass, AttentionRun& run, const TensorRows& inputs,
                     const AttentionReference* reference, int64_t pairs, Communicator& world,
                     Verification& checks);

/// Runs `pass` once more with checked messages (AttentionRun::repeat_checked), verifies what it
/// left in the arrays, and merges `checks` over all ranks. Collective.
void run_verified(Pass pass, AttentionRun& run, const TensorRows& inputs,
                  const AttentionReference* reference, int64_t pairs, Communicator& world,
                  Verification& checks);

}  // namespace gyre

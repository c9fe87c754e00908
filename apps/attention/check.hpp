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

/// Verifies the results in the arrays of a run. Every rank recomputes a sample of its own tokens,
/// all of them if the budget suffices: as queries (out, lse, d_q) and as keys (d_k, d_v). Keys need
/// the log-sum-exps and deltas of all queries, which are gathered; lse is itself verified for the
/// recomputed queries. Gradients of sinks are recomputed from the gathered values.
class AttentionChecker {
 public:
  /// `pairs`: number of (query head, key) pairs that all ranks together recompute in one direction.
  /// `reference` (of all tokens, or null) replaces the recomputed values; the recomputation then
  /// only gives the scale of errors.
  AttentionChecker(AttentionRun& run, const TensorRows& inputs, const AttentionReference* reference,
                   int64_t pairs, Communicator& world);

  /// Call it after a forward pass, or after a backward pass (then forward results are checked too).
  /// Copies the results from a device once. Collective; every rank adds its own comparisons.
  void check(Pass pass, Verification& checks);

 private:
  /// The check of one tensor in this run and direction.
  Check& check_of(const char* tensor, double tolerance, Verification& checks) const;
  /// A sample of the rank's tokens: the first, the last, and one of every `step` at a varying
  /// place.
  std::vector<TokenRow> sample(bool keys) const;
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

/// Runs `pass` once more with checked messages (AttentionRun::repeat_checked), verifies what it
/// left in the arrays, and merges `checks` over all ranks. Collective.
void run_verified(Pass pass, AttentionRun& run, const TensorRows& inputs,
                  const AttentionReference* reference, int64_t pairs, Communicator& world,
                  Verification& checks);

}  // namespace gyre

#pragma once
// Verifying an attention of any size: rows of the results against the definition in double
// precision (attention/attention_reference.hpp).

#include "apps/attention/run.hpp"
#include "io/attention_file.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Log-sum-exps (plane 0) or deltas (plane 1) of all tokens, [tokens, heads], on every rank.
/// Collective.
std::vector<double> gather_statistics(AttentionRun& run, int64_t plane, Communicator& world);

/// Compares what a run left in its arrays. Every rank computes some of its own tokens again, all of
/// them if the budget suffices: as queries (out, lse, d_q), and as keys (d_k, d_v, from the
/// log-sum-exps and deltas of all queries, which are gathered and are themselves compared where
/// they belong to a query that is computed again). Gradients of sinks are summed again from those.
class AttentionChecker {
 public:
  /// `pairs`: how many (query head, key) pairs all ranks together compute again in one direction.
  /// `reference`, of all tokens, takes the place of what is computed again, if there is one; then
  /// the definition only says how large errors may be.
  AttentionChecker(AttentionRun& run, const TensorRows& inputs, const AttentionReference* reference,
                   int64_t pairs, Communicator& world);

  /// After a forward pass, or a backward one (which checks the forward results too). Results are
  /// fetched from a device once for the call. Collective;
  /// every rank adds its own comparisons.
  void check(Pass pass, Verification& checks);

 private:
  /// The check of one tensor in this run and direction.
  Check& check_of(const char* tensor, double tolerance, Verification& checks) const;
  /// Some of the rank's tokens, one of every `step` at a place that varies, the first and the last.
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
  HostCopy out_, d_q_, d_k_, d_v_;  // results of the direction that is checked
  const AttentionWorkload& problem_;
  const TensorRows& inputs_;
  const AttentionReference* reference_;
  int64_t pairs_;
  Pass pass_ = Pass::forward;
  Communicator& world_;
  std::vector<TokenRow> own_;  // ascending in token
};

}  // namespace gyre

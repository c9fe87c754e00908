#pragma once
// Builds the plan of a schedule for one rank, step by step.

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/plan.hpp"

namespace gyre {

/// Indices of the arrays of one attention computation: the rank's own shard, or the result of a
/// head exchange. -1: absent.
struct ArraySet {
  int q = own(ArrayKind::q), kv = own(ArrayKind::kv), out = own(ArrayKind::out),
      stats = own(ArrayKind::stats), d_out = own(ArrayKind::d_out), d_q = own(ArrayKind::d_q),
      d_kv = own(ArrayKind::d_kv);
};

/// Rows [begin, begin + length) of an array.
struct RowRange {
  int64_t begin = 0, length = 0;
};

/// Appends a run of rows, or extends the last run if `next` continues it.
void append(std::vector<RankRows>& rows, const RankRows& next);

class PlanBuilder {
 public:
  PlanBuilder(const AttentionProblem& problem, int rank);

  int rank() const { return plan_.rank; }
  int cp() const { return problem_.cp(); }
  /// The rank that many places further round the ring of all ranks; any integer.
  int wrap(int rank) const { return (rank % cp() + cp()) % cp(); }
  const AttentionProblem& problem() const { return problem_; }
  const PlanArray& array(int index) const { return plan_.arrays[index]; }

  /// All rows of a rank's own array of this kind.
  std::vector<RankRows> rows_of(int rank, ArrayKind kind) const;
  /// All rows of the own arrays of `ranks` in the order of the packed stream. A document that these
  /// ranks hold as a whole is then contiguous: its pairs are few large rectangles. Strided runs of
  /// slots stay as they are. Example, dual-chunk-swap on 2 ranks, slots 0 to 7:
  ///     rank 0 has 0 1 6 7, rank 1 has 2 3 4 5;  rows: rank 0 [0, 2), rank 1 [0, 4), rank 0 [2, 4)
  std::vector<RankRows> rows_in_order(const std::vector<int>& ranks, ArrayKind kind) const;
  HeadRange all_heads(ArrayKind kind) const;

  int new_storage() { return storages_++; }
  /// Adds an array; storage = -1: in a new storage.
  int add_array(ArrayKind kind, std::vector<RankRows> rows, HeadRange heads, int storage = -1);

  /// Later steps go to the list of `pass` (initially forward). If problem().passes excludes it,
  /// they are dropped and their rectangles are not computed.
  void begin(Pass pass) { pass_ = pass; }
  /// Adds an exchange; returns the id to wait for. Drops empty slices and messages without slices;
  /// if no message is left, adds no exchange and returns -1, which wait() ignores. A transport
  /// other than messages makes one library collective over `group`.
  int exchange(std::string what, std::vector<Message> sends, std::vector<Message> recvs,
               Transport transport = Transport::messages, std::vector<int> group = {});
  /// An exchange of one message each way.
  int exchange_pair(std::string what, Message send, Message recv);
  void wait(int id);
  void clear(int array);
  /// Adds a step that attends all rows of set.q to all rows of `kv`, for the KV heads in `kv`.
  /// Forward writes set.out; backward writes set.d_q and `d_kv`, either of which may be -1. Adds
  /// nothing if no pair is visible.
  void compute(const ArraySet& set, int kv, int d_kv = -1);
  /// Adds such a step for the rows `keys` of `kv` only; they are in ascending order.
  void compute(const ArraySet& set, int kv, int d_kv, const std::vector<RowRange>& keys);
  /// Computes the rectangles of `step`, whose other members are set, and adds it if there are any.
  void compute(step::Compute step, Trim trim = Trim::both);
  void finish(const ArraySet& set);
  void delta(const ArraySet& set);
  void sink_gradient(int stats, bool complete = false);
  template <class AnyStep>
  void add(AnyStep step) {
    if (wanted()) list().emplace_back(std::move(step));
  }

  /// All rows and heads of an array; `add`: see Slice.
  Slice whole(int index, bool add = false) const;
  /// Slices of the rank's own array of this kind, one for each of these runs of its rows.
  std::vector<Slice> slices_of(ArrayKind kind, const std::vector<RankRows>& runs,
                               bool add = false) const;
  /// One slice per run of rows of an array.
  std::vector<Slice> slices_of(int index) const;

  /// Returns the plan. `stats`: the array of the final log-sum-exps.
  RankPlan take(int stats = own(ArrayKind::stats));

 private:
  step::Compute step_of(const ArraySet& set, int kv, int d_kv) const;
  void compute(step::Compute step, Trim trim, std::span<const RowRange> keys);
  std::vector<Step>& list() { return pass_ == Pass::forward ? plan_.forward : plan_.backward; }
  bool wanted() const { return pass_ == Pass::forward || problem_.passes == PlanPasses::both; }

  const AttentionProblem& problem_;
  RankPlan plan_;
  Pass pass_ = Pass::forward;
  int storages_ = array_kinds;
  int exchanges_ = 0;
  int queries_of_ = -1;  ///< the array of `queries_`: a cache, since most steps share it
  Shard queries_;
};

/// The plan of a schedule that is a class: made from a builder, with forward() and backward().
template <class Passes>
RankPlan plan_both_passes(const AttentionProblem& problem, int rank) {
  PlanBuilder plan(problem, rank);
  Passes passes(plan);
  passes.forward();
  plan.begin(Pass::backward);
  passes.backward();
  return plan.take();
}

/// The rows of `owner` whose keys the queries of `reader` see, as runs in the owner's order. For
/// each fragment of queries and each of keys, includes all rows from the first to the last key
/// seen.
std::vector<RankRows> needed_rows(const AttentionProblem& problem, int reader, int owner);

}  // namespace gyre

#pragma once
// The ranks of a case that this process runs: its own rank, or with --replay all ranks of the plan,
// which take turns (comm/in_process.hpp). The suite measures them as one case.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "apps/attention/case.hpp"
#include "comm/in_process.hpp"

namespace gyre {

class AttentionRanks final : public Case {
 public:
  /// `replay`: the group of `ranks`, which are all of the plan; null: `ranks` has only the rank of
  /// this process. Allocates and fills their arrays. Collective.
  AttentionRanks(std::vector<std::unique_ptr<AttentionCase>> ranks, RanksInProcess* replay);
  /// Calls f(rank) for every rank. f is collective over the ranks of the plan.
  void each(const std::function<void(AttentionCase&)>& f);
  AttentionCase& rank(int64_t place) { return *ranks_.at(place); }
  int64_t place_of(const AttentionCase& rank) const { return replay_ ? rank.plan().rank : 0; }
  int64_t size() const { return std::ssize(ranks_); }

  /// See AttentionCase. Collective.
  void check_counts(Verification& checks);
  void complete(AttentionResult& row);

  std::string label(Pass pass) const override { return ranks_.front()->label(pass); }
  void begin(Pass pass) override;
  void prepare(Pass pass, bool poisoned) override;
  void run(Pass pass) override;
  void start_timing(Pass pass) override;
  /// Does nothing in a replay, where messages are copies and ranks wait for each other's work.
  void run_parts(Pass pass, bool ahead) override;
  /// In a replay, threads of the ranks compute, not the caller's.
  bool computes() const override { return replay_ == nullptr && ranks_.front()->computes(); }
  /// Traffic of all ranks that this process runs.
  SentTraffic sent() const override;
  std::optional<uint64_t> checksum(Pass pass) override;
  void verify(Pass pass, Verification& checks) override;

 private:
  /// Calls f(rank, its result) for every rank with copies of `start`, and returns the results.
  template <class T, class F>
  std::vector<T> collect(const T& start, F f);

  std::vector<std::unique_ptr<AttentionCase>> ranks_;
  RanksInProcess* replay_;
};

}  // namespace gyre

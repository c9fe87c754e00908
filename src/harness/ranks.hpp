#pragma once
// The ranks of a case that this process runs: its own rank, or with --replay all ranks of the plan,
// which take turns (comm/in_process.hpp). The suite measures them as one case.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/in_process.hpp"
#include "core/checksum.hpp"
#include "harness/case.hpp"

namespace gyre {

/// RankCase is the case of one rank, Row its row. It also has world(), the ranks of the plan in
/// host memory, check_counts(Verification&) and complete(Row&), which are collective over them.
template <class RankCase, class Row>
class CaseOfRanks final : public Case {
 public:
  /// `replay`: the group of `ranks`, which are all of the plan; null: `ranks` has only the rank of
  /// this process.
  CaseOfRanks(std::vector<std::unique_ptr<RankCase>> ranks, RanksInProcess* replay)
      : ranks_(std::move(ranks)), replay_(replay) {}
  /// Calls f(rank) for every rank. f is collective over the ranks of the plan.
  void each(const std::function<void(RankCase&)>& f) {
    if (replay_ == nullptr) return f(rank(0));
    replay_->run([&](int place) { f(rank(place)); });
  }
  RankCase& rank(int64_t place) { return *ranks_.at(place); }
  int64_t place_of(RankCase& rank) const { return replay_ ? rank.world().rank() : 0; }
  int64_t size() const { return std::ssize(ranks_); }

  /// Collective.
  void check_counts(Verification& checks) {
    checks.merge_repeat(collect(Verification(), [](RankCase& rank, Verification& counts) {
                          rank.check_counts(counts);
                        }).front());
  }
  void complete(Row& row) {
    row = collect(row, [](RankCase& rank, Row& mine) { rank.complete(mine); }).front();
  }

  std::string label(Pass pass) const override { return ranks_.front()->label(pass); }
  void begin(Pass pass) override {
    each([&](RankCase& rank) { rank.begin(pass); });
  }
  void prepare(Pass pass, bool poisoned) override {
    each([&](RankCase& rank) { rank.prepare(pass, poisoned); });
  }
  void run(Pass pass) override {
    each([&](RankCase& rank) { rank.run(pass); });
  }
  void start_timing(Pass pass) override {
    each([&](RankCase& rank) { rank.start_timing(pass); });
  }
  /// Does nothing in a replay, where messages are copies and ranks wait for each other's work.
  void run_parts(Pass pass, bool ahead) override {
    if (replay_ == nullptr) rank(0).run_parts(pass, ahead);
  }
  /// In a replay, threads of the ranks compute, not the caller's.
  bool computes() const override { return replay_ == nullptr && ranks_.front()->computes(); }
  /// Traffic of all ranks that this process runs.
  SentTraffic sent() const override {
    SentTraffic all;
    for (const auto& rank : ranks_) all += rank->sent();
    return all;
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    SentTraffic all;
    for (const auto& rank : ranks_) {
      const std::optional<SentTraffic> one = rank->expected(pass);
      if (!one) return {};
      all += *one;
    }
    return all;
  }
  std::optional<uint64_t> checksum(Pass pass) override {
    const auto sums =
        collect(std::optional<uint64_t>(),
                [&](RankCase& rank, std::optional<uint64_t>& sum) { sum = rank.checksum(pass); });
    if (replay_ == nullptr) return sums.front();
    Checksum all;
    for (const std::optional<uint64_t>& sum : sums)
      all.add(bytes_of(std::span<const uint64_t>(&sum.value(), 1)));
    return all.value();
  }
  void verify(Pass pass, Verification& checks) override {
    if (replay_ == nullptr) return rank(0).verify(pass, checks);
    checks = collect(checks, [&](RankCase& rank, Verification& mine) {
               rank.verify(pass, mine);
               mine.merge_over(rank.world());
             }).front();
  }

 private:
  /// Calls f(rank, its result) for every rank with copies of `start`, and returns the results.
  template <class T, class F>
  std::vector<T> collect(const T& start, F f) {
    std::vector<T> results(ranks_.size(), start);
    each([&](RankCase& rank) { f(rank, results[place_of(rank)]); });
    return results;
  }

  std::vector<std::unique_ptr<RankCase>> ranks_;
  RanksInProcess* replay_;
};

}  // namespace gyre

#include "apps/attention/ranks.hpp"

#include "core/checksum.hpp"

namespace gyre {

AttentionRanks::AttentionRanks(std::vector<std::unique_ptr<AttentionCase>> ranks,
                               RanksInProcess* replay)
    : ranks_(std::move(ranks)), replay_(replay) {
  each([](AttentionCase& rank) { rank.allocate(); });
}

void AttentionRanks::each(const std::function<void(AttentionCase&)>& f) {
  if (replay_ == nullptr) return f(rank(0));
  replay_->run([&](int place) { f(rank(place)); });
}

template <class T, class F>
std::vector<T> AttentionRanks::collect(const T& start, F f) {
  std::vector<T> results(ranks_.size(), start);
  each([&](AttentionCase& rank) { f(rank, results[place_of(rank)]); });
  return results;
}

void AttentionRanks::check_counts(Verification& checks) {
  checks.merge_repeat(collect(Verification(), [](const AttentionCase& rank, Verification& counts) {
                        rank.check_counts(counts);
                      }).front());
}

void AttentionRanks::complete(AttentionResult& row) {
  row = collect(row, [](const AttentionCase& rank, AttentionResult& mine) {
          rank.complete(mine);
        }).front();
}

void AttentionRanks::begin(Pass pass) {
  each([&](AttentionCase& rank) { rank.begin(pass); });
}

void AttentionRanks::prepare(Pass pass, bool poisoned) {
  each([&](AttentionCase& rank) { rank.prepare(pass, poisoned); });
}

void AttentionRanks::run(Pass pass) {
  each([&](AttentionCase& rank) { rank.run(pass); });
}

void AttentionRanks::start_timing(Pass pass) {
  each([&](AttentionCase& rank) { rank.start_timing(pass); });
}

void AttentionRanks::run_parts(Pass pass, bool ahead) {
  if (replay_ == nullptr) rank(0).run_parts(pass, ahead);
}

SentTraffic AttentionRanks::sent() const {
  SentTraffic all;
  for (const auto& rank : ranks_) all += rank->sent();
  return all;
}

std::optional<uint64_t> AttentionRanks::checksum(Pass pass) {
  const auto sums = collect(
      std::optional<uint64_t>(),
      [&](AttentionCase& rank, std::optional<uint64_t>& sum) { sum = rank.checksum(pass); });
  if (replay_ == nullptr) return sums.front();
  Checksum all;
  for (const std::optional<uint64_t>& sum : sums)
    all.add(bytes_of(std::span<const uint64_t>(&sum.value(), 1)));
  return all.value();
}

void AttentionRanks::verify(Pass pass, Verification& checks) {
  if (replay_ == nullptr) return rank(0).verify(pass, checks);
  checks = collect(checks, [&](AttentionCase& rank, Verification& mine) {
             rank.verify(pass, mine);
             mine.merge_over(rank.world());
           }).front();
}

}  // namespace gyre

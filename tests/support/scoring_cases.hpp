#pragma once
// Documents, grids and plans that tests of scoring share.

#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "model/scoring.hpp"
#include "mpi_test.hpp"

namespace gyre::test {

struct Documents {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets = {0};
  DocumentView view() const { return {tokens, offsets}; }
};

/// Empty, of one and two tokens, shorter than 2·cp, longer than the bin (48).
inline Documents ragged_documents(const ModelConfig& config) {
  Documents documents;
  std::mt19937 generator(5);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(config.vocab_size) - 1);
  for (int64_t length : {0, 1, 2, 3, 7, 16, 31, 48, 49, 0, 100, 1, 5}) {
    for (int64_t i = 0; i < length; ++i) documents.tokens.push_back(token(generator));
    documents.offsets.push_back(std::ssize(documents.tokens));
  }
  return documents;
}

/// Two prompts with answers, of which some are equal, one goes on in two ways and one is empty; and
/// a document of its own.
inline Documents rollouts(const ModelConfig& config) {
  Documents documents;
  std::mt19937 generator(6);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(config.vocab_size) - 1);
  const auto text = [&](int64_t length) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < length; ++i) tokens.push_back(token(generator));
    return tokens;
  };
  const auto add = [&](std::initializer_list<std::vector<int32_t>> parts) {
    for (const auto& part : parts)
      documents.tokens.insert(documents.tokens.end(), part.begin(), part.end());
    documents.offsets.push_back(std::ssize(documents.tokens));
  };
  const auto a = text(9), b = text(21), c = text(6), d = text(5), e = text(13), alone = text(17);
  add({a, c});
  add({b, d});
  add({a, e, c});
  add({alone});
  add({a, e, d});
  add({a});
  add({b, c, b});
  add({b, d});
  add({});
  for (const int64_t length : {1, 2, 7, 11, 3}) add({b, text(length)});
  return documents;
}

inline std::vector<GridShape> all_grids(const ModelConfig& config) {
  return nearest_grids({1, 1, 1}, world().size(), allowed_tensor_parallel(config, 8));
}

inline ScoringSetup setup_of(const GridShape& grid, const std::string& layout = "dual-chunk-swap",
                             const std::string& schedule = "ring") {
  return {grid, &find_layout(layout), {}, &find_schedule(schedule), {}};
}

inline std::string name_of(const ScoringSetup& setup) {
  return to_string(setup.grid) + " " + setup.layout->name + " " + setup.schedule->name;
}

/// Documents that begin alike are stored once if they share `min_prefix` tokens; 0: never.
inline ScoringPlan plan_of(const Documents& documents, const ModelConfig& config,
                           const ScoringSetup& setup, int64_t min_prefix) {
  return plan_scoring(documents.offsets,
                      min_prefix > 0 ? share_prefixes(documents.view(), {min_prefix, 48})
                                     : separate_documents(documents.offsets),
                      config, setup, 48);
}

}  // namespace gyre::test

// The keys that an indexer selects for each query (top-k sparse attention: "lightning indexer" and
// DSA of DeepSeek-V3.2): of the keys up to its own position, those with the `keys` best scores; of
// equal scores, that of the earlier position is better. Scores are drawn here:
//
//     query p, key s, mix of SplitMix64 (core/token_random.hpp):
//     row(p)      = mix(mix(mix(seed) + document) + p)
//     score(p, s) = mix(row(p) + s) >> 58                        64 levels, so that many are equal
//
//     keys = 2       score 0 1 2 3 4     best first     a region for each run
//     query 0              7                0           [0, 1)
//     query 1              3 9              1 0         [0, 2)
//     query 2              5 5 1            0 1         [0, 2)
//     query 3              2 8 8 4          1 2         [1, 3)
//     query 4              6 1 6 0 6        0 2         [0, 1) [2, 3)

#include <array>

#include "attention/masks/list.hpp"
#include "core/error.hpp"
#include "core/token_random.hpp"

namespace gyre {
namespace {

constexpr int score_bits = 6;
using Levels = std::array<int64_t, 1 << score_bits>;
/// Largest tables, of about a gigabyte, and most scores, of a second or two.
constexpr int64_t most_selected = int64_t{1} << 24, most_scores = int64_t{1} << 30;

/// The least score of the best `count` ones, and how many keys with it are among these.
std::pair<uint8_t, int64_t> threshold(const std::vector<uint8_t>& scores, int64_t count) {
  Levels keys{};
  for (const uint8_t score : scores) ++keys[score];
  uint8_t level = keys.size() - 1;
  for (; keys[level] < count; --level) count -= keys[level];
  return {level, count};
}

std::vector<Region> regions_of(int64_t length, uint64_t document_key, int64_t keys) {
  std::vector<Region> regions;
  std::vector<uint8_t> scores;  // of the keys up to the query
  std::vector<int64_t> selected;
  for (int64_t p = 0; p < length; ++p) {
    const uint64_t row = splitmix64_mix(document_key + p);
    scores.resize(p + 1);
    for (int64_t s = 0; s <= p; ++s) scores[s] = splitmix64_mix(row + s) >> (64 - score_bits);
    auto [least, equal] = threshold(scores, std::min(keys, p + 1));
    selected.clear();
    for (int64_t s = 0; s <= p; ++s)
      if (scores[s] > least || (scores[s] == least && equal-- > 0)) selected.push_back(s);
    append_selected(p, selected, regions);
  }
  return regions;
}

MaskRule make_top_k(std::span<const int64_t> lengths, std::span<const int64_t> values) {
  const int64_t keys = values[0];
  double selected = 0, scores = 0;  // too large for integers if the lengths are
  for (const int64_t length : lengths) {
    const double first = std::min(length, keys), all = length;  // `first` queries see fewer keys
    selected += 0.5 * first * (first + 1) + (all - first) * static_cast<double>(keys);
    scores += 0.5 * all * (all + 1);
  }
  if (selected > most_selected)
    throw_usage("--mask top-k,keys={} selects {:.0f} keys; at most {}: take fewer tokens or keys",
                keys, selected, most_selected);
  if (scores > most_scores)
    throw_usage("--mask top-k draws {:.0f} scores; at most {}: take fewer tokens", scores,
                most_scores);
  uint64_t document = splitmix64_mix(values[1]);
  return mask_of_regions(lengths, [&](int64_t length) {
    return regions_of(length, splitmix64_mix(document++), keys);
  });
}

}  // namespace

NamedMask top_k_mask() {
  return {"top-k",
          "a query sees the keys that an indexer selects: the best ones up to its own position, by "
          "drawn scores",
          {{"keys", "how many keys a query selects", 1, true}, {"seed", "seed of the scores"}},
          make_top_k,
          /*joins=*/false,
          /*selects=*/true};
}

}  // namespace gyre

#pragma once
// Masks for tests, and what they show, pair by pair.

#include <rapidcheck.h>

#include <algorithm>
#include <vector>

#include "attention/mask.hpp"

namespace gyre::test {

/// Whether a region shows query q key k, both positions of its document: by its picture, a diagonal
/// through the last corner and one through the first.
inline bool shows(const Region& r, int64_t q, int64_t k) {
  if (q < r.q_begin || q >= r.q_end || k < r.k_begin || k >= r.k_end) return false;
  const int64_t before_last = (r.k_end - 1 - k) - (r.q_end - 1 - q);
  const int64_t after_first = (k - r.k_begin) - (q - r.q_begin);
  const bool causal = r.kind == RegionKind::causal || r.kind == RegionKind::both;
  const bool inverse = r.kind == RegionKind::inverse || r.kind == RegionKind::both;
  return (!causal || (before_last >= 0 && (r.window == 0 || before_last < r.window))) &&
         (!inverse || after_first >= 0);
}

/// Whether a mask shows query q of a document its key k.
inline bool shows(const MaskRule& mask, int64_t document, int64_t q, int64_t k) {
  if (mask.kind == MaskKind::full) return true;
  if (mask.kind == MaskKind::causal) return k <= q && (mask.window == 0 || q - k < mask.window);
  const auto regions = mask.table->of(document).all;
  return std::any_of(regions.begin(), regions.end(),
                     [&](const Region& r) { return shows(r, q, k); });
}

/// Up to three edges within (0, length), and both ends.
inline std::vector<int64_t> arbitrary_edges(int64_t length) {
  std::vector<int64_t> edges = {0, length};
  const int more = *rc::gen::inRange(0, 4);
  for (int i = 0; i < more; ++i) edges.push_back(*rc::gen::inRange<int64_t>(0, length + 1));
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  return edges;
}

/// Cells of a random grid over a document, most of them regions of any kind; some share a cell, on
/// both sides of a diagonal.
inline std::vector<Region> arbitrary_regions(int64_t length) {
  std::vector<Region> regions;
  const std::vector<int64_t> q = arbitrary_edges(length), k = arbitrary_edges(length);
  for (size_t i = 0; i + 1 < q.size(); ++i)
    for (size_t j = 0; j + 1 < k.size(); ++j) {
      Region r{q[i], q[i + 1], k[j], k[j + 1], RegionKind::full, 0};
      switch (*rc::gen::inRange(0, 7)) {
        case 0:
          continue;
        case 1:
          r.kind = RegionKind::causal;
          break;
        case 2:
          r.kind = RegionKind::causal;
          r.window = *rc::gen::inRange<int64_t>(1, length + 2);
          break;
        case 3:
          r.kind = RegionKind::inverse;
          break;
        case 4:
          r.kind = RegionKind::both;
          r.window = *rc::gen::inRange<int64_t>(0, length + 2);
          break;
        case 5:  // below a diagonal that begins one key further right, and above it
          if (r.q_end - r.q_begin == r.k_end - r.k_begin && r.q_end - r.q_begin > 1) {
            regions.push_back({r.q_begin + 1, r.q_end, r.k_begin, r.k_end - 1, RegionKind::causal});
            r.kind = RegionKind::inverse;
          }
          break;
        default:
          break;
      }
      regions.push_back(r);
    }
  return regions;
}

/// A table for documents of these lengths.
inline MaskRule arbitrary_table(const std::vector<int64_t>& lengths) {
  std::vector<std::vector<Region>> documents;
  for (const int64_t length : lengths)
    documents.push_back(length == 0 ? std::vector<Region>() : arbitrary_regions(length));
  return MaskRule(MaskTable(std::move(documents), lengths));
}

/// A table with a region of every kind: a prompt that two answers see, one of them through a
/// window, and which sees the end of the document before its diagonal. The first of two or three
/// tokens sees nothing.
inline MaskRule mixed_mask(const std::vector<int64_t>& lengths) {
  std::vector<std::vector<Region>> documents;
  for (const int64_t n : lengths) {
    std::vector<Region>& regions = documents.emplace_back();
    const int64_t prompt = n / 4, half = (prompt + n) / 2;
    const int64_t blind = n == 2 || n == 3 ? 1 : 0;  // queries that see nothing
    if (n > 0) regions.push_back({blind, n, blind, n, RegionKind::causal});
    if (n < 4) continue;
    regions = {{0, prompt, 0, prompt, RegionKind::causal},
               {0, prompt, half, n, RegionKind::inverse},
               {prompt, n, 0, prompt, RegionKind::full},
               {prompt, half, prompt, half, RegionKind::causal, (half - prompt + 1) / 2},
               {half, n, prompt, half, RegionKind::both},
               {half, n, half, n, RegionKind::causal}};
  }
  return MaskRule(MaskTable(std::move(documents), lengths));
}

/// Any mask for documents of these lengths.
inline MaskRule arbitrary_mask(const std::vector<int64_t>& lengths) {
  if (*rc::gen::inRange(0, 2) == 0) return arbitrary_table(lengths);
  const int64_t window = *rc::gen::inRange<int64_t>(1, 20);
  return *rc::gen::element(MaskRule{MaskKind::causal}, MaskRule{MaskKind::full},
                           MaskRule{MaskKind::causal, window});
}

}  // namespace gyre::test

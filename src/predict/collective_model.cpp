#include "predict/collective_model.hpp"

#include <algorithm>

namespace gyre {

const char* name_of(CollectiveAlgorithm algorithm) {
  return algorithm == CollectiveAlgorithm::ring ? "by ring" : "by tree";
}

CollectiveTime collective_time(const LinkTier& link, int ranks, int64_t block) {
  const auto round = [&](int64_t blocks) { return link.latency_s + link.seconds(blocks * block); };
  if (ranks * block >= ring_from_bytes) return {CollectiveAlgorithm::ring, (ranks - 1) * round(1)};
  CollectiveTime tree{CollectiveAlgorithm::tree, 0};
  for (int64_t have = 1; have < ranks; have *= 2)
    tree.seconds += round(std::min(have, ranks - have));
  return tree;
}

}  // namespace gyre

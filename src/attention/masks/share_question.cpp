#include "attention/masks/list.hpp"

namespace gyre {
namespace {

/// Queries x keys: each part x itself, answers x the question, which is the first part.
MaskRule make_share_question(std::span<const int64_t> parts, std::span<const int64_t>) {
  return mask_of_joined(parts, [](std::span<const int64_t> offsets) {
    std::vector<Region> regions;
    for (size_t i = 0; i + 1 < offsets.size(); ++i)
      regions.push_back(
          {offsets[i], offsets[i + 1], offsets[i], offsets[i + 1], RegionKind::causal});
    if (offsets.size() > 1)
      regions.push_back({offsets[1], offsets.back(), 0, offsets[1], RegionKind::full});
    return regions;
  });
}

}  // namespace

NamedMask share_question_mask() {
  return {"share-question",
          "documents are one: the first is a question, the others are answers, each of which sees "
          "the question and itself",
          {},
          make_share_question,
          true};
}

}  // namespace gyre

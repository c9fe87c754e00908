#include "recurrence/parts.hpp"

#include <algorithm>

namespace gyre {
namespace {

/// Whether the tokens of `next` follow those of `part`, in the document and on the rank.
bool follows(const StatePart& part, const Fragment& next) {
  return part.document == next.segment && part.start + part.tokens == next.start.value() &&
         part.row + part.tokens == next.local_begin.value() &&
         (next.stride == 1 || next.length == 1);
}

std::vector<StatePart> parts_of(const Shard& shard) {
  std::vector<StatePart> parts;
  for (const Fragment& f : shard.fragments)
    if (!parts.empty() && follows(parts.back(), f))
      parts.back().tokens += f.length;
    else
      parts.push_back({f.segment, f.start.value(), f.length, f.local_begin.value()});
  return parts;
}

}  // namespace

StateParts::StateParts(const Layout& layout) {
  for (const Shard& shard : layout.shards) of_rank.push_back(parts_of(shard));
  for (int rank = 0; rank < layout.cp(); ++rank)
    for (int part = 0; part < std::ssize(of_rank[rank]); ++part)
      of_document[of_rank[rank][part].document].push_back({rank, part});
  for (auto& [document, chain] : of_document) {
    std::ranges::sort(chain, {},
                      [&](const PartOfRank& at) { return of_rank[at.rank][at.part].start; });
    for (int place = 0; place < std::ssize(chain); ++place) {
      StatePart& part = of_rank[chain[place].rank][chain[place].part];
      part.place = place;
      part.places = static_cast<int>(chain.size());
    }
  }
}

int64_t StateParts::longest_chain() const {
  int64_t longest = 0;
  for (const auto& [document, chain] : of_document) longest = std::max(longest, std::ssize(chain));
  return longest;
}

std::vector<StatePart> whole_documents(const Layout& layout) {
  std::map<int64_t, int64_t> lengths;
  for (const Shard& shard : layout.shards)
    for (const Fragment& f : shard.fragments) lengths[f.segment] += f.length;
  std::vector<StatePart> parts;
  int64_t row = 0;
  for (const auto& [document, length] : lengths) {
    parts.push_back({document, 0, length, row});
    row += length;
  }
  return parts;
}

}  // namespace gyre

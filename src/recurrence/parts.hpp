#pragma once
// Parts of documents on ranks, and where a document continues.
//
// A part is a run of tokens of one document in consecutive rows of a rank: a fragment of the layout,
// or several that follow one another in the document and on the rank.
//
//     one document of 12 tokens, cp = 3    rank 0        rank 1        rank 2
//     contiguous                           0-3           4-7           8-11
//     dual-chunk-swap                      0-1, 10-11    2-3, 8-9      4-7
//
// A part is continued if its document begins on another rank, and continues if it ends on another
// one. The parts of a document are its chain, in the order of tokens.

#include <cstdint>
#include <map>
#include <vector>

#include "sharding/layout.hpp"

namespace gyre {

struct StatePart {
  int64_t document = 0, start = 0, tokens = 0;  ///< the part begins at position `start`
  int64_t row = 0;                              ///< of the rank, where the part begins
  int place = 0, places = 1;                    ///< in the chain; parts of the chain
  bool continued() const { return place > 0; }
  bool continues() const { return place + 1 < places; }
  bool passes_through() const { return continued() && continues(); }
};

/// The part `part` of rank `rank`.
struct PartOfRank {
  int rank = 0, part = 0;
};

struct StateParts {
  std::vector<std::vector<StatePart>> of_rank;             ///< in the order of rows
  std::map<int64_t, std::vector<PartOfRank>> of_document;  ///< chains

  explicit StateParts(const Layout& layout);
  const StatePart& at(const PartOfRank& part) const { return of_rank[part.rank][part.part]; }
  const std::vector<PartOfRank>& chain(const StatePart& part) const {
    return of_document.at(part.document);
  }
  /// Parts of the longest chain; 0 without tokens.
  int64_t longest_chain() const;
  /// Whether a document has several parts.
  bool crosses() const { return longest_chain() > 1; }
};

/// Every document as one part: rows are those of all documents, concatenated.
std::vector<StatePart> whole_documents(const Layout& layout);

}  // namespace gyre

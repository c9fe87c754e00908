#pragma once
// The attention mask as data: per document a list of regions. A region is a rectangle of query
// positions x key positions whose pairs are visible, optionally cut off along diagonals. Documents
// never see each other.
//
//     region of queries [2, 6) and keys [1, 5); x: visible
//
//     full         causal       inverse      both         causal, window 2
//     k 1 2 3 4    k 1 2 3 4    k 1 2 3 4    k 1 2 3 4    k 1 2 3 4
//     2 x x x x    2 x . . .    2 x x x x    2 x . . .    2 x . . .
//     3 x x x x    3 x x . .    3 . x x x    3 . x . .    3 x x . .
//     4 x x x x    4 x x x .    4 . . x x    4 . . x .    4 . x x .
//     5 x x x x    5 x x x x    5 . . . x    5 . . . x    5 . . x x
//
// A causal diagonal ends at the last query and key of the region; an inverse diagonal begins at the
// first ones. These are the slices of FlexFlashAttention (SandAI-org/MagiAttention), plus windows.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/index.hpp"

namespace gyre {

/// Bits: 1 is a causal diagonal, 2 an inverse one. Files use the same codes.
enum class RegionKind { full = 0, causal = 1, inverse = 2, both = 3 };

/// Visible pairs of queries [q_begin, q_end) and keys [k_begin, k_end) of a document. The query at
/// position p sees the keys
///     with a causal diagonal:    up to p + k_end - q_end; with a window w the last w of them
///     with an inverse diagonal:  from p + k_begin - q_begin on
struct Region {
  int64_t q_begin = 0, q_end = 0;
  int64_t k_begin = 0, k_end = 0;
  RegionKind kind = RegionKind::full;
  int64_t window = 0;  ///< 0: none; requires a causal diagonal

  /// Keys [first, last] that the query at p, in [q_begin, q_end), sees; none if first > last.
  struct Keys {
    int64_t first, last;
    int64_t count() const { return last < first ? 0 : last - first + 1; }
  };
  Keys keys_of(int64_t p) const;
  /// Visible pairs of the queries below position `end`.
  int64_t pairs(int64_t end = std::numeric_limits<int64_t>::max()) const;
  friend bool operator==(const Region&, const Region&) = default;
};

/// "queries [0, 4), keys [0, 4), causal".
std::string to_string(const Region& region);

/// Appends the regions of a query that sees these keys, one for each run of consecutive keys. The
/// keys must ascend.
void append_selected(int64_t query, std::span<const int64_t> keys, std::vector<Region>& regions);

/// Sum over i in [0, n) of clamp(i + first, 0, cap), cap >= 0: counts keys up to a diagonal.
int64_t clamped_ramp(int64_t n, int64_t first, int64_t cap);

/// Regions of a document, sorted by first query, then first key.
struct SortedRegions {
  std::span<const Region> all;
  int64_t longest = 0;  ///< the most queries of a region
  bool runs = false;    ///< whether each region is a run of keys that one query sees

  /// The regions that can have queries in [begin, end), found by binary search. All regions with
  /// such queries are among them. If `runs` is set, there are no others.
  std::span<const Region> of_queries(int64_t begin, int64_t end) const;
};

/// The regions of every document. There may be millions of regions of one query each, since an
/// indexer selects other keys for each query.
class MaskTable {
 public:
  /// documents[d]: the regions of document d, which has lengths[d] tokens. Throws a usage error
  /// that names document and region if a region is outside its document or without queries or keys,
  /// if a window is negative or without a causal diagonal, or if two regions share a pair. A window
  /// longer than its document is cut to the document length.
  MaskTable(std::vector<std::vector<Region>> documents, std::span<const int64_t> lengths);
  SortedRegions of(int64_t document) const;
  int64_t documents() const { return std::ssize(documents_); }
  int64_t regions() const;

 private:
  std::vector<std::vector<Region>> documents_;
  std::vector<SortedRegions> sorted_;  ///< [documents]; `all` is empty here, and of() sets it
};

enum class MaskKind { causal, full, regions };

/// A mask: one rule for documents of any length, or a table. Causal with a window w > 0: the query
/// at position p sees positions p - w + 1 .. p, itself and the w - 1 before it. Windows are cut to
/// max_positions.
struct MaskRule {
  MaskKind kind = MaskKind::causal;
  int64_t window = 0;                      ///< 0: no window; causal masks only
  std::shared_ptr<const MaskTable> table;  ///< for MaskKind::regions

  MaskRule() = default;
  MaskRule(MaskKind kind_, int64_t window_ = 0)
      : kind(kind_), window(std::min(window_, max_positions)) {}
  explicit MaskRule(MaskTable table_);

  /// Whether the mask is causal without a window, for every document.
  bool plain_causal() const { return kind == MaskKind::causal && window == 0; }
  friend bool operator==(const MaskRule&, const MaskRule&) = default;
};

/// The mask of documents whose last tokens alone have queries; it shows nothing to the others.
/// offsets, query_offsets [documents + 1]: prefix sums of tokens and of queries.
MaskRule of_last_queries(const MaskRule& mask, std::span<const int64_t> offsets,
                         std::span<const int64_t> query_offsets);

/// Throws a usage error for a window that is negative, or without a causal mask.
void check_mask(const MaskRule& mask);

/// "causal", "causal window of 4", "full mask", "mask of 12 regions".
std::string name_of(const MaskRule& mask);

/// The regions of one document of a mask; they are valid as long as the mask and this object.
class DocumentMask {
 public:
  DocumentMask(const MaskRule& mask, int64_t document, int64_t length);
  DocumentMask(const DocumentMask&) = delete;
  DocumentMask& operator=(const DocumentMask&) = delete;

  const SortedRegions& regions() const& { return regions_; }
  SortedRegions regions() && = delete;  // would outlive this object
  /// The regions that can have this query.
  std::span<const Region> regions_of(int64_t query) const&;
  std::span<const Region> regions_of(int64_t query) && = delete;
  bool sees(int64_t query, int64_t key) const;
  /// Number of keys that a query sees.
  int64_t keys_of(int64_t query) const;
  /// Number of keys that each query sees, [length].
  std::vector<int64_t> keys_of_queries() const;
  /// Number of queries that see each key, [length].
  std::vector<int64_t> queries_of_keys() const;
  /// Largest number of keys that a query sees, and of queries that see a key.
  int64_t max_keys() const;
  int64_t max_queries() const;
  /// Visible pairs of the first `queries` queries, O(regions).
  int64_t pairs(int64_t queries) const;

 private:
  /// For masks without a table: the value of both max_keys() and max_queries().
  int64_t reach() const;

  int64_t length_;
  Region whole_;
  SortedRegions regions_;
};

/// Visible pairs of a document. Without a table: length² if full; n(n+1)/2 + (length - n) n if
/// causal, where n = min(window, length), or n = length without a window.
int64_t visible_pairs(int64_t length, const MaskRule& mask, int64_t document = 0);

/// Sum of `pairs` [documents], times `heads`. If it does not fit into 64 bits, throws a usage error
/// that names `tokens`, the number of tokens of these documents, and the most heads that work.
int64_t pairs_of_heads(std::span<const int64_t> pairs, int64_t tokens, int64_t heads);
/// The same sum, for the visible pairs of documents that begin at `offsets` [documents + 1].
int64_t pairs_of_heads(std::span<const int64_t> offsets, const MaskRule& mask, int64_t heads);

}  // namespace gyre

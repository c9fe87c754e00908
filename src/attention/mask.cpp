#include "attention/mask.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "core/error.hpp"

namespace gyre {
namespace {

bool has(RegionKind kind, RegionKind diagonal) {
  return (static_cast<int>(kind) & static_cast<int>(diagonal)) != 0;
}

/// The order of regions: by first query, then by first key.
bool before(const Region& a, const Region& b) {
  return std::tie(a.q_begin, a.k_begin) < std::tie(b.q_begin, b.k_begin);
}

int64_t most(const std::vector<int64_t>& counts) {
  return counts.empty() ? 0 : *std::ranges::max_element(counts);
}

/// Whether two regions of a document share a visible pair. O(common queries).
bool overlap(const Region& a, const Region& b) {
  const int64_t begin = std::max(a.q_begin, b.q_begin), end = std::min(a.q_end, b.q_end);
  if (begin >= end || std::max(a.k_begin, b.k_begin) >= std::min(a.k_end, b.k_end)) return false;
  for (int64_t p = begin; p < end; ++p) {
    const Region::Keys x = a.keys_of(p), y = b.keys_of(p);
    if (x.count() > 0 && y.count() > 0 && std::max(x.first, y.first) <= std::min(x.last, y.last))
      return true;
  }
  return false;
}

void check_region(const Region& r, int64_t document, size_t index, int64_t length) {
  const auto refuse = [&](const char* what) {
    throw_usage("region {} of document {}, {}: {}", index, document, to_string(r), what);
  };
  if (r.q_begin < 0 || r.k_begin < 0 || r.q_end > length || r.k_end > length)
    throw_usage("region {} of document {}, {}, is not inside of its {} tokens", index, document,
                to_string(r), length);
  if (r.q_begin >= r.q_end || r.k_begin >= r.k_end) refuse("no queries or no keys");
  if (r.window < 0) refuse("the window must be 0, none, or the number of keys");
  if (r.window > 0 && !has(r.kind, RegionKind::causal))
    refuse("a window needs a causal diagonal; it must be 0");
}

/// Throws if two regions share a visible pair. Sorts the regions, and compares two of them only
/// where both queries and keys may overlap. If each region has one query, it compares neighbours.
void check_overlap(const std::vector<Region>& regions, int64_t document) {
  std::vector<size_t> order(regions.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return before(regions[a], regions[b]); });
  for (auto a = order.begin(); a != order.end(); ++a)
    for (auto b = a + 1; b != order.end() && regions[*b].q_begin < regions[*a].q_end;) {
      if (regions[*b].k_begin >= regions[*a].k_end) {
        // Regions after b with the same first query begin behind the keys of a, too: skip them.
        b = std::upper_bound(b, order.end(), *b, [&](size_t x, size_t y) {
          return regions[x].q_begin < regions[y].q_begin;
        });
        continue;
      }
      if (overlap(regions[*a], regions[*b]))
        throw_usage("regions {} and {} of document {} share a pair: {}; {}", std::min(*a, *b),
                    std::max(*a, *b), document, to_string(regions[std::min(*a, *b)]),
                    to_string(regions[std::max(*a, *b)]));
      ++b;
    }
}

}  // namespace

int64_t clamped_ramp(int64_t n, int64_t first, int64_t cap) {
  const int64_t rising_begin = std::clamp<int64_t>(-first, 0, n);
  const int64_t rising_end = std::clamp<int64_t>(cap - first, rising_begin, n);
  const int64_t count = rising_end - rising_begin;
  return count * (rising_begin + first) + count * (count - 1) / 2 + (n - rising_end) * cap;
}

Region::Keys Region::keys_of(int64_t p) const {
  Keys keys{k_begin, k_end - 1};
  if (has(kind, RegionKind::inverse)) keys.first = std::max(keys.first, p + k_begin - q_begin);
  if (has(kind, RegionKind::causal)) {
    const int64_t last = p + k_end - q_end;
    keys.last = std::min(keys.last, last);
    if (window > 0) keys.first = std::max(keys.first, last - window + 1);
  }
  return keys;
}

int64_t Region::pairs(int64_t end) const {
  const int64_t queries = std::clamp(end, q_begin, q_end) - q_begin, keys = k_end - k_begin;
  // A query sees the keys up to the causal diagonal, less those before its first visible key; both
  // counts grow with the query. If the inverse diagonal lies after the causal one, no pair is left.
  const int64_t diagonal = q_begin + k_end - q_end - k_begin;
  int64_t first = std::numeric_limits<int64_t>::min();  // of query q_begin, from k_begin
  if (has(kind, RegionKind::inverse)) first = 0;
  if (window > 0) first = std::max(first, diagonal - window + 1);
  const bool causal = has(kind, RegionKind::causal);
  if (causal && first > diagonal) return 0;
  const int64_t ends = causal ? clamped_ramp(queries, diagonal + 1, keys) : queries * keys;
  return first == std::numeric_limits<int64_t>::min() ? ends
                                                      : ends - clamped_ramp(queries, first, keys);
}

std::string to_string(const Region& r) {
  constexpr const char* names[] = {"full", "causal", "inverse causal", "causal and inverse causal"};
  return fmt::format("queries [{}, {}), keys [{}, {}), {}{}", r.q_begin, r.q_end, r.k_begin,
                     r.k_end, names[static_cast<int>(r.kind)],
                     r.window != 0 ? fmt::format(", window {}", r.window) : "");
}

void append_selected(int64_t query, std::span<const int64_t> keys, std::vector<Region>& regions) {
  for (size_t i = 0; i < keys.size(); ++i)
    if (i > 0 && keys[i] == keys[i - 1] + 1)
      ++regions.back().k_end;
    else
      regions.push_back({query, query + 1, keys[i], keys[i] + 1, RegionKind::full});
}

MaskTable::MaskTable(std::vector<std::vector<Region>> documents, std::span<const int64_t> lengths)
    : documents_(std::move(documents)) {
  if (documents_.size() != lengths.size())
    throw_usage("a mask of {} documents for {}", documents_.size(), lengths.size());
  for (size_t d = 0; d < documents_.size(); ++d) {
    std::vector<Region>& regions = documents_[d];
    const int64_t document = d;
    for (size_t i = 0; i < regions.size(); ++i) {
      check_region(regions[i], document, i, lengths[d]);
      regions[i].window = std::min(regions[i].window, lengths[d]);
    }
    check_overlap(regions, document);
    if (!std::is_sorted(regions.begin(), regions.end(), before))
      std::stable_sort(regions.begin(), regions.end(), before);
    SortedRegions& sorted = sorted_.emplace_back(std::span<const Region>(), 0, true);
    for (const Region& r : regions) {
      sorted.longest = std::max(sorted.longest, r.q_end - r.q_begin);
      sorted.runs = sorted.runs && r.q_end - r.q_begin == 1 && r.kind == RegionKind::full;
    }
  }
}

SortedRegions MaskTable::of(int64_t document) const {
  GYRE_CHECK(document >= 0 && document < documents(), "document {} of a mask of {}", document,
             documents());
  SortedRegions regions = sorted_[document];
  regions.all = documents_[document];
  return regions;
}

std::span<const Region> SortedRegions::of_queries(int64_t begin, int64_t end) const {
  const auto first = std::ranges::upper_bound(all, begin - longest, {}, &Region::q_begin);
  return {first, std::ranges::lower_bound(first, all.end(), end, {}, &Region::q_begin)};
}

int64_t MaskTable::regions() const {
  int64_t sum = 0;
  for (const std::vector<Region>& regions : documents_) sum += std::ssize(regions);
  return sum;
}

MaskRule::MaskRule(MaskTable table_)
    : kind(MaskKind::regions), table(std::make_shared<const MaskTable>(std::move(table_))) {}

void check_mask(const MaskRule& mask) {
  if (mask.window < 0 || (mask.window > 0 && mask.kind != MaskKind::causal))
    throw_usage("a window of {} with a {}; wanted: 0, or a causal mask", mask.window,
                name_of({mask.kind}));
}

std::string name_of(const MaskRule& mask) {
  if (mask.kind == MaskKind::full) return "full mask";
  if (mask.kind == MaskKind::regions)
    return fmt::format("mask of {} regions", mask.table == nullptr ? 0 : mask.table->regions());
  return mask.window > 0 ? fmt::format("causal window of {}", mask.window) : "causal";
}

MaskRule of_last_queries(const MaskRule& mask, std::span<const int64_t> offsets,
                         std::span<const int64_t> query_offsets) {
  std::vector<std::vector<Region>> documents(offsets.size() - 1);
  std::vector<int64_t> lengths;
  for (size_t d = 0; d < documents.size(); ++d) {
    lengths.push_back(offsets[d + 1] - offsets[d]);
    const int64_t first = lengths[d] - (query_offsets[d + 1] - query_offsets[d]);
    const DocumentMask document(mask, static_cast<int64_t>(d), lengths[d]);
    for (Region region : document.regions().all) {
      const int64_t skipped = std::max<int64_t>(0, first - region.q_begin);
      region.q_begin += skipped;
      if (has(region.kind, RegionKind::inverse)) region.k_begin += skipped;
      if (region.q_begin < region.q_end && region.k_begin < region.k_end)
        documents[d].push_back(region);
    }
  }
  return MaskRule(MaskTable(std::move(documents), lengths));
}

DocumentMask::DocumentMask(const MaskRule& mask, int64_t document, int64_t length)
    : length_(length),
      whole_{0,
             length,
             0,
             length,
             mask.kind == MaskKind::full ? RegionKind::full : RegionKind::causal,
             mask.window},
      regions_{{&whole_, 1}, length, false} {
  if (mask.kind == MaskKind::regions) regions_ = mask.table->of(document);
}

std::span<const Region> DocumentMask::regions_of(int64_t query) const& {
  return regions_.of_queries(query, query + 1);
}

bool DocumentMask::sees(int64_t query, int64_t key) const {
  const auto some = regions_of(query);
  return std::any_of(some.begin(), some.end(), [&](const Region& r) {
    if (query >= r.q_end) return false;
    const Region::Keys keys = r.keys_of(query);
    return keys.first <= key && key <= keys.last;
  });
}

int64_t DocumentMask::keys_of(int64_t query) const {
  int64_t sum = 0;
  for (const Region& r : regions_of(query))
    if (query < r.q_end) sum += r.keys_of(query).count();
  return sum;
}

std::vector<int64_t> DocumentMask::keys_of_queries() const {
  std::vector<int64_t> keys(length_, 0);
  for (const Region& r : regions_.all)
    for (int64_t q = r.q_begin; q < r.q_end; ++q) keys[q] += r.keys_of(q).count();
  return keys;
}

std::vector<int64_t> DocumentMask::queries_of_keys() const {
  std::vector<int64_t> queries(length_, 0);
  for (const Region& r : regions_.all)
    for (int64_t key = r.k_begin; key < r.k_end; ++key) {
      // Queries q see the key under a causal diagonal if q >= causal (and q < causal + window),
      // under an inverse one if q <= inverse.
      const int64_t causal = key + r.q_end - r.k_end, inverse = key + r.q_begin - r.k_begin;
      int64_t first = r.q_begin, end = r.q_end;
      if (has(r.kind, RegionKind::causal)) {
        first = std::max(first, causal);
        if (r.window > 0) end = std::min(end, causal + r.window);
      }
      if (has(r.kind, RegionKind::inverse)) end = std::min(end, inverse + 1);
      queries[key] += std::max<int64_t>(0, end - first);
    }
  return queries;
}

int64_t DocumentMask::reach() const {
  return whole_.window > 0 ? std::min(whole_.window, length_) : length_;
}

int64_t DocumentMask::max_keys() const {
  return regions_.all.data() == &whole_ ? reach() : most(keys_of_queries());
}

int64_t DocumentMask::max_queries() const {
  return regions_.all.data() == &whole_ ? reach() : most(queries_of_keys());
}

int64_t DocumentMask::pairs(int64_t queries) const {
  int64_t sum = 0;
  for (const Region& r : regions_.all) {
    if (r.q_begin >= queries) break;
    sum += r.pairs(queries);
  }
  return sum;
}

int64_t visible_pairs(int64_t length, const MaskRule& mask, int64_t document) {
  return DocumentMask(mask, document, length).pairs(length);
}

int64_t pairs_of_heads(std::span<const int64_t> pairs, int64_t tokens, int64_t heads) {
  int64_t sum = 0, product = 0;
  double about = 0;
  bool fits = true;
  for (const int64_t of_document : pairs) {
    fits = fits && !__builtin_add_overflow(sum, of_document, &sum);
    about += of_document;
  }
  if (fits && !__builtin_mul_overflow(sum, heads, &product)) return product;
  const int64_t most = fits ? std::numeric_limits<int64_t>::max() / sum : 0;
  throw_usage(
      "{} tokens under {} heads have {:.3g} visible pairs of a query and a key; at most 2^63 - 1 "
      "can be counted: {}",
      tokens, heads, about * heads,
      most > 0 ? fmt::format("{} heads work", most) : "take shorter documents");
}

int64_t pairs_of_heads(std::span<const int64_t> offsets, const MaskRule& mask, int64_t heads) {
  std::vector<int64_t> pairs;
  for (size_t d = 0; d + 1 < offsets.size(); ++d)
    pairs.push_back(visible_pairs(offsets[d + 1] - offsets[d], mask, d));
  return pairs_of_heads(pairs, offsets.back(), heads);
}

}  // namespace gyre

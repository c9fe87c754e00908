#pragma once
// Assignment of chunks of a row to ranks: the greedy assignment of balanced.hpp, and
// the state of its joint search (joint_search.cpp), which swaps two chunks per move.

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "sharding/layouts.hpp"

namespace gyre {

/// Chunks by descending cost; ties: lower index first.
std::vector<int32_t> by_descending_cost(const std::vector<int64_t>& costs);

/// The rank of each of costs.size() = m·cp chunks, m per rank, by the greedy rule of balanced.hpp
/// (ties: lower chunk first, lower rank first).
std::vector<int32_t> assign_equal_counts(const std::vector<int64_t>& costs, int cp);
/// O(n · cp) reference that compares all ranks for each chunk.
std::vector<int32_t> assign_equal_counts_reference(const std::vector<int64_t>& costs, int cp);

/// Chunks as input of the joint search. Only a document that spans several chunks can make a rank
/// need keys of other ranks; a chunk holds parts of at most two such documents, at its ends.
struct Chunks {
  struct Document {
    int64_t begin, length;
    int32_t first_chunk;
  };
  static constexpr int32_t none = -1;

  int64_t chunk;
  std::vector<Document> documents;               ///< those that span several chunks
  std::vector<int64_t> pairs;                    ///< [n]
  std::vector<int64_t> tokens;                   ///< [n] tokens of such documents in each chunk
  std::vector<std::array<int32_t, 2>> parts_of;  ///< [n] such documents in each chunk, or none

  int32_t count() const { return static_cast<int32_t>(pairs.size()); }
  const std::array<int32_t, 2>& parts(int32_t c) const { return parts_of[c]; }
  /// Keys of `document` up to the end of chunk `c`; 0 for no chunk.
  int64_t keys_up_to(int32_t document, int32_t c) const {
    const Document& d = documents[document];
    return c == none ? 0 : std::min(d.length, (c + 1) * chunk - d.begin);
  }
};

/// Cuts the row of `bounds` into chunks of `chunk` slots. pairs [n]: cost of each chunk.
Chunks chunks_of(const SegmentBounds& bounds, int64_t chunk, std::vector<int64_t> pairs);

/// Which rank holds which chunk. Keeps the costs of every rank up to date.
class Assignment {
 public:
  Assignment(const Chunks& chunks, int cp, const TimeModel& time)
      : chunks_(&chunks),
        time_(time),
        rank_of_(chunks.pairs.size(), -1),
        place_of_(chunks.pairs.size(), 0),
        held_(cp),
        pairs_(cp, 0),
        needed_(cp, 0),
        last_(cp * chunks.documents.size(), Chunks::none) {}
  Assignment(const Chunks& chunks, int cp, const TimeModel& time,
             const std::vector<int32_t>& rank_of)
      : Assignment(chunks, cp, time) {
    for (int32_t c = 0; c < chunks.count(); ++c) add(c, rank_of[c]);
  }

  int cp() const { return static_cast<int>(held_.size()); }
  const std::vector<int32_t>& rank_of_chunk() const { return rank_of_; }
  int32_t rank_of(int32_t c) const { return rank_of_[c]; }
  const std::vector<int32_t>& held(int32_t r) const { return held_[r]; }
  int64_t pairs(int32_t r) const { return pairs_[r]; }
  int64_t needed(int32_t r) const { return needed_[r]; }
  double seconds(int64_t pairs, int64_t needed) const {
    return std::max(pairs * time_.seconds_per_pair, needed * time_.seconds_per_kv_token);
  }
  double slowest_seconds() const {
    double slowest = 0;
    for (int32_t r = 0; r < cp(); ++r) slowest = std::max(slowest, seconds(pairs(r), needed(r)));
    return slowest;
  }
  int64_t all_needed() const { return std::accumulate(needed_.begin(), needed_.end(), int64_t{0}); }

  /// Change of the number of keys that `rank` needs when it gives up chunk `out` and receives `in`
  /// (either may be none).
  int64_t needed_change(int32_t rank, int32_t out, int32_t in) const {
    int64_t change = tokens(out) - tokens(in);
    for_each_document(out, in, [&](int32_t document) {
      change += chunks_->keys_up_to(document, last_after(rank, document, out, in)) -
                chunks_->keys_up_to(document, last(rank, document));
    });
    return change;
  }

  void add(int32_t c, int32_t rank) {
    exchange(rank, Chunks::none, c);
    place_of_[c] = std::ssize(held(rank));
    held_[rank].push_back(c);
    rank_of_[c] = rank;
  }

  void swap(int32_t x, int32_t y) {
    exchange(rank_of(x), x, y);
    exchange(rank_of(y), y, x);
    std::swap(held_place(x), held_place(y));
    std::swap(place_of_[x], place_of_[y]);
    std::swap(rank_of_[x], rank_of_[y]);
  }

 private:
  int64_t tokens(int32_t c) const { return c == Chunks::none ? 0 : chunks_->tokens[c]; }
  int64_t chunk_pairs_of(int32_t c) const { return c == Chunks::none ? 0 : chunks_->pairs[c]; }
  int32_t& held_place(int32_t c) { return held_[rank_of(c)][place_of_[c]]; }
  size_t last_index(int32_t rank, int32_t document) const {
    return rank * chunks_->documents.size() + document;
  }
  /// The last chunk of a document that a rank holds, or none.
  int32_t last(int32_t rank, int32_t document) const { return last_[last_index(rank, document)]; }

  bool holds_part(int32_t c, int32_t document) const {
    return c != Chunks::none &&
           (chunks_->parts(c)[0] == document || chunks_->parts(c)[1] == document);
  }

  int32_t last_after(int32_t rank, int32_t document, int32_t out, int32_t in) const {
    int32_t result = last(rank, document);
    if (result == out && out != Chunks::none) {
      const int32_t first = chunks_->documents[document].first_chunk;
      do --result;
      while (result >= first && rank_of(result) != rank);
      if (result < first) result = Chunks::none;
    }
    return holds_part(in, document) ? std::max(result, in) : result;
  }

  /// Visits once each document that has a part in chunk `a` or `b`.
  template <class Visit>
  void for_each_document(int32_t a, int32_t b, Visit visit) const {
    if (a != Chunks::none)
      for (const int32_t document : chunks_->parts(a))
        if (document != Chunks::none) visit(document);
    if (b != Chunks::none)
      for (const int32_t document : chunks_->parts(b))
        if (document != Chunks::none && !holds_part(a, document)) visit(document);
  }

  /// Updates the costs of `rank`, which gives up `out` and receives `in`.
  void exchange(int32_t rank, int32_t out, int32_t in) {
    needed_[rank] += needed_change(rank, out, in);
    pairs_[rank] += chunk_pairs_of(in) - chunk_pairs_of(out);
    for_each_document(out, in, [&](int32_t document) {
      last_[last_index(rank, document)] = last_after(rank, document, out, in);
    });
  }

  const Chunks* chunks_;
  TimeModel time_;
  std::vector<int32_t> rank_of_;            // [n]
  std::vector<int64_t> place_of_;           // [n] index of the chunk in held_[its rank]
  std::vector<std::vector<int32_t>> held_;  // [cp][chunks of the rank]
  std::vector<int64_t> pairs_, needed_;     // [cp]
  std::vector<int32_t> last_;               // [cp, documents]
};

}  // namespace gyre

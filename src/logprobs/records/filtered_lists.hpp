#pragma once
// Records of rows that the ranks of a sampling filter exchange (lists of the largest logits), and
// the walk down the lists of all ranks. For filtered_*.cpp only.
//
//     record of a rank    scalars [tokens], then values [tokens, length], f32 or bf16, descending
//     walk of a row       of lists 5 5 1 and 4 3 2: (5, twice), (4, once), (3, once), (2, as often
//                         as the second rank says). It ends there: the second rank may have further
//                         values above 1 that its list has no room for

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "core/bf16.hpp"
#include "core/dtype.hpp"
#include "core/index.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Per-row data of a rank besides its list.
struct ListScalars {
  float sum;     ///< SoftmaxPartial::sum, relative to the first value of the list; 0 if not needed
  int32_t last;  ///< number of occurrences of the list's last value
  float target;  ///< logit of the target on the rank that owns it, else -inf
  int32_t behind;  ///< number of columns of that rank that equal the target and come after it
};

/// Records of one or more ranks: for each rank scalars [tokens], then lists [tokens, length].
class ListRecords {
 public:
  ListRecords(int64_t tokens, int64_t length, DType type, int ranks)
      : tokens_(tokens),
        length_(length),
        type_(type),
        bytes_(ranks * block_bytes(tokens, length, type)) {}

  static int64_t block_bytes(int64_t tokens, int64_t length, DType type) {
    const int64_t value = size_of(type);
    return round_up(tokens * (sizeof(ListScalars) + length * value), 4);
  }
  std::span<std::byte> bytes() { return bytes_.span(); }
  std::span<const std::byte> bytes() const { return bytes_.span(); }
  const ListScalars& scalars(int64_t rank, int64_t token) const {
    return reinterpret_cast<const ListScalars*>(block(rank))[token];
  }
  ListScalars& scalars(int64_t token) {
    return reinterpret_cast<ListScalars*>(bytes_.data())[token];
  }
  float value(int64_t rank, int64_t token, int64_t entry) const {
    const std::byte* values = block(rank) + tokens_ * sizeof(ListScalars);
    const int64_t at = token * length_ + entry;
    return type_ == DType::f32 ? reinterpret_cast<const float*>(values)[at]
                               : to_float(reinterpret_cast<const bf16*>(values)[at]);
  }
  /// Sets the lists of the first rank.
  void set_values(std::span<const float> values) {
    std::byte* const to = bytes_.data() + tokens_ * sizeof(ListScalars);
    if (type_ == DType::f32)
      std::copy(values.begin(), values.end(), reinterpret_cast<float*>(to));
    else
      std::transform(values.begin(), values.end(), reinterpret_cast<bf16*>(to), to_bf16);
  }
  int64_t length() const { return length_; }

 private:
  const std::byte* block(int64_t rank) const {
    return bytes_.data() + rank * block_bytes(tokens_, length_, type_);
  }
  int64_t tokens_, length_;
  DType type_;
  Buffer<std::byte> bytes_;
};

/// A value and its number of occurrences in a row, over all ranks.
struct ValueGroup {
  float value;
  int64_t count;
};

/// Walks down the values of one row, over the lists of all ranks.
class ListWalk {
 public:
  /// `columns` [ranks]: valid columns per rank; `heads` [ranks] is scratch.
  ListWalk(const ListRecords& lists, int64_t token, std::span<const int64_t> columns,
           std::span<int64_t> heads)
      : lists_(lists), token_(token), heads_(heads) {
    std::fill(heads.begin(), heads.end(), 0);
    for (int64_t r = 0; r < ranks(); ++r)
      if (columns[r] > lists.length()) bound_ = std::max(bound_, last(r));
  }

  /// Maximum of the row; NaN if it contains NaN.
  float max() const {
    float max = none;
    for (int64_t r = 0; r < ranks(); ++r) {
      const float first = lists_.value(r, token_, 0);
      if (std::isnan(first)) return first;
      max = std::max(max, first);
    }
    return max;
  }
  /// Advances to the next smaller value except -inf; false if there is none, or too_short().
  bool next(ValueGroup& group) {
    float value = none;
    for (int64_t r = 0; r < ranks(); ++r)
      if (const int64_t head = heads_[r]; head < lists_.length())
        value = std::max(value, lists_.value(r, token_, head));
    too_short_ = value < bound_;
    if (too_short_ || value == none) return false;
    group = {value, 0};
    for (int64_t r = 0; r < ranks(); ++r) group.count += take(r, value);
    return true;
  }
  /// Whether smaller values may be missing from the lists.
  bool too_short() const { return too_short_; }
  /// Values below this may be missing.
  float bound() const { return bound_; }

 private:
  static constexpr float none = -std::numeric_limits<float>::infinity();
  int64_t ranks() const { return std::ssize(heads_); }
  float last(int64_t rank) const { return lists_.value(rank, token_, lists_.length() - 1); }
  /// Number of occurrences on a rank; advances the rank's head.
  int64_t take(int64_t rank, float value) {
    int64_t& head = heads_[rank];
    const int64_t before = head;
    while (head < lists_.length() && lists_.value(rank, token_, head) == value) ++head;
    return last(rank) == value ? lists_.scalars(rank, token_).last : head - before;
  }

  const ListRecords& lists_;
  int64_t token_;
  std::span<int64_t> heads_;
  float bound_ = none;
  bool too_short_ = false;
};

}  // namespace gyre

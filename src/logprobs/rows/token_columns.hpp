#pragma once
// Columns of a row's token ids while a pass writes its gradient. Private to this folder.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "core/bf16.hpp"
#include "logprobs/rows/token_ids.hpp"

namespace gyre {

/// Throws unless each of `rows` rows has per_row ids and weights, at most 65536.
void check_token_ids(const RowTokenIds& token_ids, int64_t rows);

/// Columns of one row's token ids. Their gradients are kept in f32 until the weights are added, so
/// that the sum is rounded once.
class TokenColumns {
 public:
  TokenColumns(const RowTokenIds& token_ids, int64_t columns)
      : token_ids_(token_ids), columns_(columns) {}

  /// Starts row r. Returns true if any weight is not 0, including those of ids on other shards.
  bool start(int64_t r) {
    const size_t first = r * token_ids_.per_row;
    const size_t count = token_ids_.per_row;
    r_ = r;
    ids_ = token_ids_.ids.subspan(first, count);
    weights_ = token_ids_.weights.subspan(first, count);
    at_.clear();
    values_.clear();
    return std::any_of(weights_.begin(), weights_.end(), [](float w) { return w != 0; });
  }
  /// Keeps the ids of this shard for which keep(column) is true, with the value base(column).
  template <class Keep, class Base>
  void keep(Keep keep, Base base) {
    kept_weights_.clear();
    for (size_t k = 0; k < ids_.size(); ++k) {
      const int64_t column = ids_[k] - token_ids_.first_column;
      if (ids_[k] < 0 || column < 0 || column >= columns_ || !keep(column)) continue;
      at_.push_back(column);
      values_.push_back(base(column));
      kept_weights_.push_back(weights_[k]);
    }
  }
  /// Keeps all ids of this shard with the value 0, so that put() writes the sums of weights.
  void keep_weights() {
    keep([](int64_t) { return true; }, [](int64_t) { return 0.0F; });
  }
  /// [kept] values: logits, which the caller replaces by gradients.
  std::span<float> values() { return values_; }

  /// Overwrites the kept columns of the output with the sums of value and weights.
  void put(const MatrixRef& to) {
    if (to.type == DType::f32)
      put(to.as<float>().row(r_));
    else
      put(to.as<bf16>().row(r_));
  }

 private:
  static void set(float& to, float x) { to = x; }
  static void set(bf16& to, float x) { to = to_bf16(x); }
  static void mark(float& to, uint32_t x) { to = std::bit_cast<float>(x); }
  static void mark(bf16& to, uint32_t x) { to.bits = static_cast<uint16_t>(x); }
  static uint32_t marked(float at) { return std::bit_cast<uint32_t>(at); }
  static uint32_t marked(bf16 at) { return at.bits; }

  /// The last id of a column owns it and collects the weights of all ids of the column. Each id
  /// first writes its index to the column of the output, where the owner's index remains.
  template <class T>
  void put(T* row) {
    if (at_.size() == 1) return set(row[at_[0]], values_[0] + kept_weights_[0]);
    for (size_t k = 0; k < at_.size(); ++k) mark(row[at_[k]], static_cast<uint32_t>(k));
    owners_.clear();
    for (const int64_t column : at_) owners_.push_back(marked(row[column]));
    for (size_t k = 0; k < at_.size(); ++k) values_[owners_[k]] += kept_weights_[k];
    for (size_t k = 0; k < at_.size(); ++k)
      if (owners_[k] == k) set(row[at_[k]], values_[k]);
  }

  const RowTokenIds& token_ids_;
  int64_t columns_, r_ = 0;
  std::span<const int32_t> ids_;
  std::span<const float> weights_;
  std::vector<int64_t> at_;
  std::vector<float> values_, kept_weights_;
  std::vector<uint32_t> owners_;
};

}  // namespace gyre

#pragma once
// Rows of equal width (BSHD) sharded by dual-chunk-swap, with their key mask.
//
//     n' = n rounded up to a multiple of 2 · cp · max(1, tp)
//     for each row: pad on the right; rank r gets chunks r and 2·cp-1-r of n' / (2·cp) slots
//
// 10 slots, two of them padding on the left (.), cp = 2: n' = 12, chunks of 3; + is new padding
//
//     . . a b c d e f g h + +        rank 0   . . a | h + +      mask 0 0 1 | 1 0 0
//                                    rank 1   b c d | e f g      mask 1 1 1 | 1 1 1
//
// Rows come padded on the left. Padding on the right is invisible under a causal mask, since it
// comes after every real query; padding on the left comes before them and is visible. The causal
// mask alone is therefore wrong: attention must receive `key_mask` with the keys, and pass it on
// wherever the keys go. The shard is one struct, so that the mask cannot be left out. (NeMo
// Automodel, the source of this sharding, dropped the mask and later removed the sharding.)

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout.hpp"

namespace gyre {

/// One rank's part of every row; `slots` = n' / cp. T is float (embeddings) or int64_t (token ids).
template <class T>
struct BshdShard {
  std::vector<T> inputs;          ///< [batch, slots, hidden]; new padding is 0
  std::vector<uint8_t> key_mask;  ///< [batch, slots]; 1: a key that may be attended, 0: padding
  std::vector<int64_t> targets;   ///< [batch, slots]; new padding is ignored_label (-100)
  Layout layout;                  ///< of each row; fragments count left padding as real tokens
  int64_t slots() const { return layout.slots_of_rank(); }
};

/// The padded width of rows of n slots: the next multiple of 2·cp·max(1, tp), so that tp ranks can
/// divide a shard. Throws a usage error unless n >= 0, cp >= 1 and tp >= 0.
int64_t bshd_padded_width(int64_t n, int cp, int tp);

/// The shard of `rank` of inputs [batch, n, hidden] (ids: hidden = 1), mask [batch, n] (nonzero is
/// real) and targets [batch, n] (shifted already). tp is the size of the tensor-parallel group that
/// shares the sequence, 0 or 1 for none. No communication: every rank of the group holds the same
/// rows. Throws a usage error that names the sizes when they do not match.
template <class T>
BshdShard<T> shard_bshd(std::span<const T> inputs, std::span<const int64_t> mask,
                        std::span<const int64_t> targets, int64_t batch, int64_t hidden, int cp,
                        int rank, int tp);

}  // namespace gyre

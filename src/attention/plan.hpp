#pragma once
// A context-parallel schedule as data.
//
// A schedule is a function that returns, for every rank, a list of steps. The executor walks the
// list with a Communicator and a BlockKernel; count() reads the same list for FLOPs, bytes and
// messages. What runs, what is counted and what is checked can therefore not be different
// algorithms.
//
// A rank's keys and values travel as one block [2, slots, kv_heads, head_dim] (K, then V). Blocks
// live in numbered slots: slot 0 is the rank's own block, the others are receive buffers whose
// sizes the plan states.
//
// Example, ring over cp = 3 with one segment in DualChunkSwap, rank 1 (chunks 1 and 4 of 0..5):
//
//     Exchange #0   send slot 0 to rank 2, receive rank 0's block into slot 1
//     Compute       slot 0 (own): chunks {1,4} x {1,4}, causal
//     Wait #0
//     Exchange #1   send slot 1 to rank 2, receive rank 2's block into slot 2
//     Compute       slot 1 (rank 0's, chunks {0,5}): {1,4} x {0}      first half of the keys, no
//     mask Wait #1 Compute       slot 2 (rank 2's, chunks {2,3}): {4} x {2,3}      second half of
//     the queries, no mask

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "core/index.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// Which pairs of a rectangle are visible: all, or key j for query i iff j <= i + diagonal (both
/// counted from the rectangle's corner).
struct Mask {
  bool causal = false;
  int64_t diagonal = 0;
  friend bool operator==(const Mask&, const Mask&) = default;
};

/// Queries [q_begin, q_begin + q_length) of this rank meet keys [k_begin, k_begin + k_length) of a
/// KV block.
struct Rectangle {
  LocalToken q_begin;
  int64_t q_length = 0;
  LocalToken k_begin;  ///< slot inside the KV block, which is a shard of its owner
  int64_t k_length = 0;
  Mask mask;
  /// Number of visible (query, key) pairs.
  int64_t pairs() const;
  friend bool operator==(const Rectangle&, const Rectangle&) = default;
};

namespace step {

/// Sends the KV block in `send_slot` to `to`, receives the next one from `from` into `recv_slot`.
struct Exchange {
  int id = 0;
  int to = 0, from = 0;  ///< ranks in the context-parallel group
  int send_slot = 0, recv_slot = 0;
  int64_t send_tokens = 0, recv_tokens = 0;  ///< block sizes in slots
};
/// Waits for the exchange `id`: its receive slot may be read and its send slot overwritten.
struct Wait {
  int id = 0;
};
/// Attends the rectangles against the block in `slot` and merges the result into the rank's (O,
/// LSE).
struct Compute {
  int slot = 0;
  int kv_owner = 0;                   ///< whose block it is (for drawings and checks)
  std::vector<Rectangle> rectangles;  ///< sorted by q_begin
};

}  // namespace step

using Step = std::variant<step::Exchange, step::Wait, step::Compute>;

struct RankPlan {
  std::vector<Step> steps;
  std::vector<int64_t>
      slot_tokens;  ///< size of each KV slot in tokens; [0] is the rank's own block
};

struct Plan {
  std::string schedule;
  std::vector<RankPlan> ranks;  ///< [cp]
};

enum class MaskKind { causal, full };

/// The visible pairs between the queries of one shard and the keys of another, as rectangles of
/// local indices sorted by q_begin. Documents never see each other. Fragments of one document must
/// have equal strides. Pads are in no fragment, hence in no rectangle.
std::vector<Rectangle> intersect(const Shard& queries, const Shard& keys, MaskKind mask);

/// What a rank's plan does, counted from the plan.
struct PlanCount {
  int64_t pairs = 0;           ///< visible (query, key) pairs, per head
  int64_t messages = 0;        ///< sent
  int64_t tokens_sent = 0;     ///< KV tokens (one token: 2 · kv_heads · head_dim elements)
  int64_t peak_kv_tokens = 0;  ///< receive slots, in tokens
};
PlanCount count(const RankPlan& plan);

/// Forward FLOPs of `pairs` pairs: 4 · heads · head_dim each (two products).
constexpr double forward_flops(int64_t pairs, int64_t heads, int64_t head_dim) {
  return 4.0 * static_cast<double>(pairs) * static_cast<double>(heads * head_dim);
}

}  // namespace gyre

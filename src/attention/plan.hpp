#pragma once
// A context-parallel schedule as data.
//
// A schedule is a function that returns, for one rank, its arrays and two lists of steps, for the
// forward and the backward pass. The executor walks a list with a Communicator and a BlockKernel;
// count() reads the same list for pairs, bytes, messages and memory; simulate() and explain read it
// too. Execution, counts, predictions and drawings can therefore never be different algorithms.
//
// Every array states which tokens of which ranks, and which heads, it holds. The rectangles of
// visible pairs are computed from this alone, and a check can follow each element through every
// message.
//
// Example: ring over cp = 3, one segment, layout dual-chunk-swap, forward on rank 1, which holds
// chunks 1 and 4 of 0..5. {a} x {b}: queries of chunks a and keys of chunks b.
//
//     Clear         out, stats
//     Exchange #0   send own kv to rank 2, receive rank 0's kv into A
//     Compute       own kv: chunks {1,4} x {1,4}, causal
//     Wait #0
//     Exchange #1   send A to rank 2, receive rank 2's kv into B
//     Compute       A (rank 0's, chunks {0,5}): {1,4} x {0}   first half of the keys, no mask
//     Wait #1
//     Compute       B (rank 2's, chunks {2,3}): {4} x {2,3}   second half of the queries, no mask
//     Finish        sinks, if there are any

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/rectangle.hpp"
#include "core/dtype.hpp"
#include "core/pass.hpp"
#include "sharding/heads.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// Contents of an array, row-major [tokens, planes, heads, dim].
enum class ArrayKind {
  q,      ///< queries                                      1 plane, query heads, head_dim
  kv,     ///< keys (plane 0) and values (plane 1)          2 planes, KV heads, head_dim; value_dim
  out,    ///< attention output, the running partial        1 plane, query heads, value_dim
  stats,  ///< log-sum-exp (plane 0) and delta (plane 1)    2 planes, query heads, 1
  d_out,  ///< gradient of out                              as out
  d_q,    ///< gradient of q                                as q
  d_kv,   ///< gradients of keys and values                 as kv
};
inline constexpr int array_kinds = 7;
const char* name_of(ArrayKind kind);
/// Whether the rows of such an array are keys; else they are queries.
constexpr bool has_keys(ArrayKind kind) {
  return kind == ArrayKind::kv || kind == ArrayKind::d_kv;
}
constexpr int64_t planes_of(ArrayKind kind) {
  return has_keys(kind) || kind == ArrayKind::stats ? 2 : 1;
}

/// Slots [begin, begin + length) of the shard of `rank`.
struct RankRows {
  int rank = 0;
  LocalToken begin;
  int64_t length = 0;
  friend bool operator==(const RankRows&, const RankRows&) = default;
};

/// An array of a plan is live from its first write to its last read. Arrays with disjoint lifetimes
/// may share memory: a storage, which has a number.
struct PlanArray {
  ArrayKind kind = ArrayKind::q;
  std::vector<RankRows> rows;
  HeadRange heads;
  int storage = 0;
  int64_t tokens() const;
};

/// Rows [row, row + rows) and heads `heads` of an array.
struct Slice {
  int array = 0;
  int64_t row = 0, rows = 0;
  HeadRange heads;
  bool add = false;  ///< of a received slice: is added to the rows at the Wait, not copied to them
};
/// All slices to or from one peer; they travel as one message, in this order. If the peer is the
/// rank itself, the message is a local copy.
struct Message {
  int peer = 0;  ///< rank in the context-parallel group
  std::vector<Slice> slices;
};

/// Transport of the messages of an exchange: point-to-point, or one collective of the
/// communicator's library. A collective also moves a rank's own block, which nothing reads.
///     all_gather      Input: one slice, sent to every member. Output: one array with one block per
///                     member (itself too), in group order, all with the same number of rows
///     reduce_scatter  Input: an array with one block per member. Member r gets the sum of block r,
///                     added to one slice. A member's own block must be 0
///     all_to_all      any messages
enum class Transport { messages, all_gather, reduce_scatter, all_to_all };
const char* name_of(Transport transport);

namespace step {

/// Posts messages. Until the Wait, sent slices may not change and received slices may not be used
/// (with `add`, other steps may still add to them).
struct Exchange {
  int id = 0;        ///< unique within a list
  std::string what;  ///< "KV", "dKV", "all-gather KV": for traces and errors
  std::vector<Message> sends, recvs;
  Transport transport = Transport::messages;
  std::vector<int> group = {};  ///< ranks of a collective, ascending
};
struct Wait {
  int id = 0;
};
/// Sets an array to what adding and merging start from: 0, and -inf for log-sum-exps.
struct Clear {
  int array = 0;
};
/// Computes attention over the rectangles, whose rows are rows of the arrays q and kv, for the KV
/// heads `kv_heads` and the query heads of q that read them. Forward: merges into out and stats.
/// Backward: adds to d_q and d_kv (-1: not wanted); reads stats and d_out.
struct Compute {
  int q = -1, kv = -1, stats = -1;
  int out = -1;                         ///< forward
  int d_out = -1, d_q = -1, d_kv = -1;  ///< backward
  HeadRange kv_heads;
  std::vector<Rectangle> rectangles;
  bool fixed_tiles = false;  ///< see BlockInput
};
/// Merges partial results over other keys into out and stats; all have the same rows and heads.
/// First the log-sum-exps, one after the other, then the outputs, each sum rounded to the type of
/// out. Uses the delta plane of `stats` for L_0.
///     L_0 = L;  for each partial: L = max(L, L_i) + log(1 + exp(min(L, L_i) - max(L, L_i)))
///     O = O exp(L_0 - L);  for each partial: O = O + O_i exp(L_i - L)
struct Merge {
  struct Partial {
    int out = -1, stats = -1;
  };
  int out = -1, stats = -1;
  std::vector<Partial> partials;
};
/// Includes learnable sinks z_h, if any, in the softmax; forward, once, after the last merge:
///     L' = log(exp L + exp z),  O' = O · exp(L - L')
struct Finish {
  int out = -1, stats = -1;
};
/// Computes delta_i = <O_i, dO_i>; backward, once, at the start. `out` stays unchanged until the
/// end, for kernels that read O itself.
struct Delta {
  int out = -1, stats = -1, d_out = -1;
};
/// Computes the gradient of the sinks: dz_h = - sum over rows of exp(z_h - L_i) delta_i. Each (row,
/// head) of the problem is in one rank's `stats`, so a sum over ranks must follow; with `complete`,
/// all rows are local and there is no such sum.
struct SinkGradient {
  int stats = -1;
  bool complete = false;
};

}  // namespace step

using Step = std::variant<step::Exchange, step::Wait, step::Clear, step::Compute, step::Merge,
                          step::Finish, step::Delta, step::SinkGradient>;

struct RankPlan {
  int rank = 0;
  /// [0, array_kinds): the rank's own shard of every kind with all heads, in the order of
  /// ArrayKind: inputs q, kv, d_out; results out, d_q, d_kv. The schedule's further arrays follow.
  std::vector<PlanArray> arrays;
  int stats = 0;  ///< array with the final log-sum-exps: its own, or one of other rows and heads
  std::vector<Step> forward, backward;
  const std::vector<Step>& steps(Pass pass) const {
    return pass == Pass::forward ? forward : backward;
  }
};
/// Index of the rank's own array of this kind.
constexpr int own(ArrayKind kind) {
  return static_cast<int>(kind);
}

struct Plan {
  std::string schedule;
  std::vector<RankPlan> ranks;  ///< [cp]
};

/// Options of schedules; schedule_option_fields() lists the members.
struct ScheduleOptions {
  int64_t inner = 0;          ///< ranks per inner group; 0: the schedule chooses
  int64_t heads_at_once = 1;  ///< KV heads per stage of a strided all-gather
  int64_t collectives = 0;    ///< 0: point-to-point messages; 1: library collectives
  int64_t merge = 0;          ///< of a ring's partial outputs; 0: into each other; 1: at the end
};

/// Which lists of steps a plan gets; an unwanted list stays empty.
enum class PlanPasses { both, forward };

/// Input of a schedule. The layouts must outlive it.
struct AttentionProblem {
  const Layout* layout = nullptr;  ///< of keys, and of queries unless they have their own
  HeadShape heads;
  MaskRule mask;
  ScheduleOptions options;
  PlanPasses passes = PlanPasses::both;
  /// Layout of the queries, if only some tokens have one, as in chunked prefill and decoding. The
  /// mask shows nothing to the other tokens.
  const Layout* query_layout = nullptr;
  int cp() const { return layout->cp(); }
  /// The layout of the rows of such an array.
  const Layout& layout_of(ArrayKind kind) const {
    return query_layout == nullptr || has_keys(kind) ? *layout : *query_layout;
  }
};

/// The fragments of an array with these rows, as a shard whose local slots are the array's rows.
Shard shard_of(const Layout& layout, const std::vector<RankRows>& rows);

/// Element types of the arrays in memory and in messages. Sums inside a kernel call are always f32.
struct ElementTypes {
  DType activations = DType::f32;  ///< q, kv, d_out; out and d_q in messages
  DType partial_out = DType::f32;  ///< out between merges
  DType d_q = DType::f32;          ///< d_q between additions
  DType wire_d_kv = DType::f32;    ///< d_kv in messages; its sums in memory are f32
  DType stored(ArrayKind kind) const;
  DType on_wire(ArrayKind kind) const;
};

/// "64", or "192 (values: 128)".
std::string name_of_dims(const HeadShape& shape);
/// Elements of a head in this plane of a row.
int64_t plane_dim(ArrayKind kind, int64_t plane, const HeadShape& shape);
/// Elements of one row with `heads` heads in memory, all planes.
int64_t row_elements(ArrayKind kind, int64_t heads, const HeadShape& shape);
/// Whether a message with `heads` heads of this kind has the shared elements of their keys once.
bool sends_shared_keys_once(ArrayKind kind, int64_t heads, const HeadShape& shape);
/// Elements of one row with `heads` heads in a message: those in memory, or
///     own elements of the keys [heads, own_key_dim], values [heads, value_dim],
///     shared elements of the keys [shared_key_dim]; of d_kv, their sum over the heads
int64_t message_elements(ArrayKind kind, int64_t heads, const HeadShape& shape);
/// Bytes of an array in memory.
int64_t stored_bytes(const PlanArray& array, const HeadShape& heads, const ElementTypes& types);
/// Bytes of the plan itself; large where chunks are small, since rectangles then cover few tokens.
int64_t plan_bytes(const RankPlan& plan);
/// Bytes of a slice of an array of `kind` in a message.
int64_t wire_bytes(ArrayKind kind, const Slice& slice, const HeadShape& heads,
                   const ElementTypes& types);
/// Whether a slice is sent without a copy: it has all heads of its array, in the type and the order
/// of messages.
bool travels_as_it_lies(const PlanArray& array, const Slice& slice, const HeadShape& heads,
                        const ElementTypes& types);
/// Bytes that an exchange copies on a rank, without messages to itself: of sent slices that cannot
/// be sent in place, and of received slices that are unpacked or added.
struct MessageCopies {
  int64_t sent = 0, received = 0;
};
MessageCopies copies_of(const step::Exchange& exchange, const RankPlan& plan,
                        const HeadShape& heads, const ElementTypes& types);
/// The query heads in `q` that read a KV head in `kv`.
HeadRange query_heads_of(HeadRange q, HeadRange kv, const HeadShape& heads);

/// Counts of one pass of a rank's plan.
struct PlanCount {
  int64_t pairs = 0;       ///< visible (query, key) pairs, counted once per query head
  int64_t messages = 0;    ///< sent to other ranks; a collective counts as one
  int64_t bytes_sent = 0;  ///< to other ranks
  int64_t bytes_received = 0;
  int64_t transient_bytes = 0;  ///< peak of this pass's arrays, except the rank's own, and of
                                ///< copies made for messages
};
/// Label of a Compute step in timelines, by the owner of its keys: "keys of rank 2", "keys of
/// several ranks".
std::string name_of_keys(const RankPlan& plan, const step::Compute& compute);

PlanCount count(const RankPlan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types);

/// FLOPs of a kernel call per visible pair and query head: two for each element of each product.
/// Products of head_dim elements are the scores, and backward dQ and dK; products of value_dim
/// elements are out forward, dP and dV backward.
constexpr double flops_of_pair(Pass pass, bool d_q, bool d_kv, int64_t head_dim,
                               int64_t value_dim) {
  const int of_keys = pass == Pass::forward ? 1 : 1 + (d_q ? 1 : 0) + (d_kv ? 1 : 0);
  const int of_values = pass == Pass::forward ? 1 : 1 + (d_kv ? 1 : 0);
  return 2.0 * (of_keys * head_dim + of_values * value_dim);
}

/// FLOPs of one pass over `pair_heads` pairs, counted once per query head. With values as wide as
/// keys: per pair 4 · head_dim forward (two products), 10 · head_dim backward (five).
constexpr double attention_flops(Pass pass, int64_t pair_heads, const HeadShape& heads) {
  return pair_heads * flops_of_pair(pass, true, true, heads.head_dim, heads.value_dim());
}

}  // namespace gyre

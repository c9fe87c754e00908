#pragma once
// A context-parallel schedule as data.
//
// A schedule is a function that returns, for a rank, the arrays that it uses and two lists of
// steps, one for each direction. The executor walks a list with a Communicator and a BlockKernel;
// count() reads the same list for pairs, bytes, messages and memory; simulate() and explain read it
// too. What runs, what is counted, what is predicted and what is drawn can therefore not be
// different algorithms.
//
// Every array says which tokens of which ranks and which heads it holds. That is all that the
// geometry needs: rectangles follow from it, and a check can follow each element through every
// message.
//
// Example, ring over cp = 3 with one segment in DualChunkSwap, forward on rank 1 (chunks 1 and 4 of
// 0..5):
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
#include "sharding/heads.hpp"
#include "sharding/layout.hpp"

namespace gyre {

enum class Pass { forward, backward };
constexpr const char* name_of(Pass pass) {
  return pass == Pass::forward ? "fwd" : "bwd";
}

/// What an array holds, row-major [tokens, planes, heads, dim], head fastest but for dim.
enum class ArrayKind {
  q,      ///< queries                                      1 plane, query heads, head_dim
  kv,     ///< keys (plane 0) and values (plane 1)          2 planes, KV heads, head_dim
  out,    ///< attention output, the running partial        1 plane, query heads, head_dim
  stats,  ///< log-sum-exp (plane 0) and delta (plane 1)    2 planes, query heads, 1
  d_out,  ///< gradient of out                              as out
  d_q,    ///< gradient of q                                as q
  d_kv,   ///< gradients of keys and values                 as kv
};
inline constexpr int array_kinds = 7;
const char* name_of(ArrayKind kind);
constexpr int64_t planes_of(ArrayKind kind) {
  return kind == ArrayKind::kv || kind == ArrayKind::d_kv || kind == ArrayKind::stats ? 2 : 1;
}

/// Slots [begin, begin + length) of the shard of `rank`.
struct RankRows {
  int rank = 0;
  LocalToken begin;
  int64_t length = 0;
  friend bool operator==(const RankRows&, const RankRows&) = default;
};

/// An array of a plan lives from its first write to its last read. Arrays whose lifetimes do not
/// overlap may share a storage.
struct PlanArray {
  ArrayKind kind = ArrayKind::q;
  std::vector<RankRows> rows;
  HeadRange heads;
  int storage = 0;
  int64_t tokens() const;
};

/// Rows [row, row + rows) and `heads` (a part of the array's) of an array.
struct Slice {
  int array = 0;
  int64_t row = 0, rows = 0;
  HeadRange heads;
  bool add = false;  ///< received: added to what is there, when waited for
};
/// All slices that go to one peer, or come from one; they travel as one message, in this order.
/// A peer that is the rank itself is a local copy.
struct Message {
  int peer = 0;  ///< rank in the context-parallel group
  std::vector<Slice> slices;
};

/// What carries the messages of an exchange: messages between two ranks, or one operation of the
/// communicator's library. Such an operation moves a rank's own part as well; nothing reads it.
///     all_gather      to each other member the same slice; what comes is one array, of the rows of
///                     all members in the order of the group, own rows too, as many of each
///     reduce_scatter  from such an array each other member's rows; what comes is added to one
///                     slice. Own rows of the array are 0
///     all_to_all      any
enum class Carrier { messages, all_gather, reduce_scatter, all_to_all };
const char* name_of(Carrier carrier);

namespace step {

/// Posts messages. Slices sent may not change, slices received may not be used (or, with `add`, may
/// still be added to) until the Wait.
struct Exchange {
  int id = 0;        ///< distinct within a list
  std::string what;  ///< "KV", "dKV", "all-gather KV": for traces and errors
  std::vector<Message> sends, recvs;
  Carrier carrier = Carrier::messages;
  std::vector<int> group = {};  ///< of an operation of the library: its ranks, ascending
};
struct Wait {
  int id = 0;
};
/// Sets an array to its identity: 0, and -inf for log-sum-exps.
struct Clear {
  int array = 0;
};
/// Attends the rectangles, whose rows are rows of the arrays q and kv, for the KV heads kv_heads
/// and the query heads of q that read them. Forward: merges into out and stats. Backward: adds to
/// d_q and d_kv (either may be -1: not wanted), reading stats and d_out.
struct Compute {
  int q = -1, kv = -1, stats = -1;
  int out = -1;                         ///< forward
  int d_out = -1, d_q = -1, d_kv = -1;  ///< backward
  HeadRange kv_heads;
  std::vector<Rectangle> rectangles;
  bool fixed_tiles = false;  ///< see BlockInput
};
/// Forward, once after the last merge: takes learnable sinks z_h, if the attention has any, into
/// the softmax:  L' = log(exp L + exp z),  O' = O · exp(L - L').
struct Finish {
  int out = -1, stats = -1;
};
/// Backward, once at the start: delta_i = <O_i, dO_i>. `out` stays as it is until the end, for
/// kernels that want O itself.
struct Delta {
  int out = -1, stats = -1, d_out = -1;
};
/// Gradient of the sinks: dz_h = - sum over rows of exp(z_h - L_i) delta_i. Each (row, head) of the
/// problem is in one rank's `stats`, and the sum over ranks is still to come; with `complete`, all
/// rows are here and it is not.
struct SinkGradient {
  int stats = -1;
  bool complete = false;
};

}  // namespace step

using Step = std::variant<step::Exchange, step::Wait, step::Clear, step::Compute, step::Finish,
                          step::Delta, step::SinkGradient>;

struct RankPlan {
  int rank = 0;
  /// [0, array_kinds) are the rank's own shard of every kind with all heads, in the order of
  /// ArrayKind: inputs q, kv, d_out; results out, d_q, d_kv. Then those the schedule needs.
  std::vector<PlanArray> arrays;
  int stats = 0;  ///< the array whose log-sum-exps are final, own or of other rows and heads
  std::vector<Step> forward, backward;
  const std::vector<Step>& steps(Pass pass) const {
    return pass == Pass::forward ? forward : backward;
  }
};
/// Index of the rank's own array of a kind.
constexpr int own(ArrayKind kind) {
  return static_cast<int>(kind);
}

struct Plan {
  std::string schedule;
  std::vector<RankPlan> ranks;  ///< [cp]
};

/// What schedules may be told; schedule_option_fields() lists the members.
struct ScheduleOptions {
  int64_t inner = 0;          ///< ranks of an inner group; 0: the schedule chooses
  int64_t heads_at_once = 1;  ///< KV heads of one stage of a strided all-gather
  int64_t collectives = 0;    ///< 0: made of messages; 1: the library's
};

/// Which lists of steps a plan gets; a list that is not wanted stays empty.
enum class PlanPasses { both, forward };

/// What a schedule plans. The layout must outlive it.
struct AttentionProblem {
  const Layout* layout = nullptr;
  HeadShape heads;
  MaskRule mask;
  ScheduleOptions options;
  PlanPasses passes = PlanPasses::both;
  int cp() const { return layout->cp(); }
};

/// The fragments of the rows of an array, as a shard whose local slots are the array's rows.
Shard shard_of(const Layout& layout, const std::vector<RankRows>& rows);

/// Element types of the arrays, and of what travels. Sums inside a kernel call are f32 always.
struct ElementTypes {
  DType activations = DType::f32;  ///< q, kv, d_out; out and d_q when they travel
  DType partial_out = DType::f32;  ///< out between merges
  DType d_q = DType::f32;          ///< d_q between additions
  DType wire_d_kv = DType::f32;    ///< d_kv when it travels; where it is summed it is f32
  DType stored(ArrayKind kind) const;
  DType on_wire(ArrayKind kind) const;
};

/// Elements of one row of `heads` heads.
int64_t row_elements(ArrayKind kind, int64_t heads, int64_t head_dim);
/// Bytes of an array where it lies.
int64_t stored_bytes(const PlanArray& array, const HeadShape& heads, const ElementTypes& types);
/// Bytes of the plan itself: many where chunks are small, and rectangles of a few tokens with them.
int64_t plan_bytes(const RankPlan& plan);
/// Bytes of a slice of an array of `kind` in a message.
int64_t wire_bytes(ArrayKind kind, const Slice& slice, const HeadShape& heads,
                   const ElementTypes& types);
/// Whether a slice needs no copy to be sent: all heads of its rows, in the type that travels.
bool travels_as_it_lies(const PlanArray& array, const Slice& slice, const ElementTypes& types);
/// Bytes of the copies that an exchange makes on a rank, without those inside of it: of what is
/// sent and does not lie as it travels, and of what is received and has to be unpacked or added.
struct MessageCopies {
  int64_t sent = 0, received = 0;
};
MessageCopies copies_of(const step::Exchange& exchange, const RankPlan& plan,
                        const HeadShape& heads, const ElementTypes& types);
/// The query heads among `q` that read one of the KV heads `kv`.
HeadRange query_heads_of(HeadRange q, HeadRange kv, const HeadShape& heads);

/// What one direction of a rank's plan does, counted from its steps.
struct PlanCount {
  int64_t pairs = 0;       ///< visible (query, key) pairs, each times its query heads
  int64_t messages = 0;    ///< sent to other ranks; an operation of the library counts as one
  int64_t bytes_sent = 0;  ///< to other ranks
  int64_t bytes_received = 0;
  int64_t transient_bytes = 0;  ///< arrays of this direction other than the rank's own, and copies
                                ///< made for messages, at their peak
};
/// What a Compute step is called in timelines, by whose keys it reads: "keys of rank 2", "keys of
/// several ranks".
std::string name_of_keys(const RankPlan& plan, const step::Compute& compute);

PlanCount count(const RankPlan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types);

/// Matrix products of a kernel call: forward scores and out; backward scores and dP, one more for
/// dQ and two more for dK and dV.
constexpr int products_of(Pass pass, bool d_q, bool d_kv) {
  return pass == Pass::forward ? 2 : 2 + (d_q ? 1 : 0) + (d_kv ? 2 : 0);
}

/// FLOPs of one direction: 4 · head_dim for each pair and head forward (two products), 10 backward
/// (five).
constexpr double attention_flops(Pass pass, int64_t pair_heads, int64_t head_dim) {
  return (pass == Pass::forward ? 4.0 : 10.0) * static_cast<double>(pair_heads) *
         static_cast<double>(head_dim);
}

}  // namespace gyre

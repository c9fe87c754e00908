#pragma once
// A schedule of a recurrence's states as data.
//
// A rank computes the documents, or parts of them, that it holds. Where a part continues on the
// next rank, its state is needed there; a part from `a` to `b` is an affine map of states:
//
//     S_b = M S_a + B                   forward
//     dS_a = Mᵀ dS_b + C                backward; C is the gradient for dS_b = 0
//     (M2, B2) after (M1, B1)           = (M2 M1, M2 B1 + B2)
//
// A schedule is a function that returns, for one rank, its buffers (states and maps, f32) and two
// lists of steps. The executor walks a list with a Communicator and a RecurrenceKernel; count() and
// predictions (predict/recurrence_program.hpp) read the same list.
//
// A part is a run of consecutive tokens of one document on a rank (parts.hpp). A rank may have
// several parts of a document, with parts of other ranks between them.
//
// Example: state-gather, cp = 3, documents of 5, 4 and 3 tokens, forward on rank 1, which holds the
// last token of document 0 and the first 3 of document 1.
//
//     tokens        0 0 0 0 | 0 1 1 1 | 1 2 2 2
//     Summarize     M, B of the part of document 1
//     Exchange      all-gather M, B
//     Run           document 1, from state 0
//     Wait
//     Compose       the state behind rank 0's part of document 0: B of rank 0
//     Run           the last token of document 0, from this state

#include <algorithm>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "core/dtype.hpp"
#include "core/pass.hpp"
#include "recurrence/kind.hpp"
#include "recurrence/parts.hpp"

namespace gyre {

/// A buffer holds states, or linear parts of maps, of all value heads.
enum class StateKind { state, map };

/// All buffers to or from one peer, or rows of histories; they travel as one message, in this order.
/// A message to the rank itself is a local copy.
struct StateMessage {
  int peer = 0;
  std::vector<int> buffers;
  std::vector<int> pieces = {};  ///< of the plan's history; their rows are `row_bytes` in all
  int64_t row_bytes = 0;
};

/// Consecutive tokens of a part that the convolution of a later part of the document reads.
struct HistoryPiece {
  int from = 0, from_part = 0;  ///< rank and part that have the tokens
  int to = 0, to_part = 0;      ///< rank and part that read them
  int64_t row = 0;              ///< the first of them, as a row of the part that has them
  int64_t at = 0;               ///< and as a row of the history of the part that reads them
  int64_t rows = 0;
};

namespace state_step {

/// map, state <- M, B of a part; without a part, the identity, M = 1 and B = 0.
struct Summarize {
  int part = -1;  ///< of the rank; -1: none
  int map = -1, state = -1;
  bool begins = false;  ///< the document begins here: M = 0, as no state before it matters
};
/// state <- C of a part; 0 without one.
struct SummarizeBack {
  int part = -1, state = -1;
};
/// Posts messages. Until the Wait, sent buffers may not change and received ones may not be used.
struct Exchange {
  int id = 0;        ///< unique within a list
  std::string what;  ///< "states": for traces and errors
  std::vector<StateMessage> sends, recvs;
  /// One all-gather of the library instead: sends has one message, which goes to every rank, and
  /// recvs one of each rank, its own included.
  bool all_gather = false;
  /// One all-reduce of the gradient of the convolution's weights instead: sends is one message,
  /// whose bytes are those that the best algorithm sends, and recvs one of each rank.
  bool all_reduce = false;
};
struct Wait {
  int id = 0;
};
/// into <- M_n (... (M_1 start + B_1) ...) + B_n, with Mᵀ and C backward. Without a start it begins
/// with 0, and M_1 is not read.
struct Compose {
  struct Term {
    int map = -1, state = -1;
  };
  int into = -1, start = -1;
  std::vector<Term> terms;
};
/// into <- the map of two runs as one, (M2 M1, M2 B1 + B2): first that of `first`, then that of
/// `second`. Backward, gradients pass first that of `first`: (M1 M2, M2ᵀ C1 + C2). `into` may be
/// one of them.
struct Join {
  Compose::Term into, first, second;
};
/// Posts an all-to-all of tokens for heads. Each rank gets the rows of all ranks in its heads; with
/// `home` it returns the rows that others hold, and gets its own in all heads.
struct HeadExchange {
  int id = 0;
  std::vector<RecurrenceArray> arrays;
  bool home = false;
};
/// Computes a part: its rows of out, or of the gradients. Buffers of states: -1: zero, or not
/// wanted.
struct Run {
  int part = -1;
  int before = -1;                   ///< state before the part
  int behind = -1;                   ///< forward: gets the state behind it
  int d_behind = -1, d_before = -1;  ///< backward: gradient behind it; gets the gradient before it
};

/// Convolves parts: makes what Run steps read as q, k and v. Their histories are there.
struct Convolve {
  std::vector<int> parts;
};
/// Backward, first half: from the gradients of all parts' q, k and v as Run steps leave them, those
/// of the sums before SiLU; from these, the gradients of weights and of histories.
struct ConvolveSlopes {};
/// Second half: the gradients of the rows of q, k and v that were convolved. What later parts add
/// to them is there.
struct ConvolveBack {
  std::vector<int> parts;
};

}  // namespace state_step

using StateStep =
    std::variant<state_step::Summarize, state_step::SummarizeBack, state_step::Exchange,
                 state_step::Wait, state_step::Compose, state_step::Join, state_step::HeadExchange,
                 state_step::Run, state_step::Convolve, state_step::ConvolveSlopes,
                 state_step::ConvolveBack>;

struct StatePlan {
  int rank = 0;
  DType type = DType::f32;           ///< of activations
  std::vector<StatePart> parts;      ///< of the rank; whole documents if ranks exchange heads
  std::vector<int64_t> rank_tokens;  ///< [cp] if ranks exchange tokens for heads; else empty
  std::vector<StateKind> buffers;    ///< they live from the forward to the end of the backward pass
  std::vector<HistoryPiece> history = {};  ///< pieces that this rank has or reads
  std::vector<StateStep> forward, backward;
  const std::vector<StateStep>& steps(Pass pass) const {
    return pass == Pass::forward ? forward : backward;
  }
  /// Ranks among which heads are divided while parts are computed.
  int head_ranks() const { return std::max(1, static_cast<int>(rank_tokens.size())); }
  /// The heads that a rank computes of a layer of this shape.
  RecurrenceShape computed(RecurrenceShape shape) const {
    shape.key_heads /= head_ranks();
    shape.value_heads /= head_ranks();
    return shape;
  }
};

/// Input of a schedule. The layout must outlive it.
struct RecurrenceProblem {
  RecurrenceProblem(const Layout* layout_, const RecurrenceShape& shape_, DType type_ = DType::f32)
      : layout(layout_), shape(shape_), type(type_), parts(*layout_) {}
  const Layout* layout;
  RecurrenceShape shape;
  DType type;  ///< of activations
  StateParts parts;
  int cp() const { return layout->cp(); }
};

/// Elements of a buffer.
int64_t elements_of(StateKind kind, const RecurrenceShape& shape);

/// Counts of one pass of a rank's plan.
struct StateCount {
  int64_t tokens = 0;    ///< times heads of values, of Run steps
  int64_t messages = 0;  ///< sent to other ranks; a collective counts as one
  int64_t bytes_sent = 0, bytes_received = 0;
  double flops = 0;       ///< of Run steps, as recurrence_flops(), and of the convolution
  double more_flops = 0;  ///< of summaries and compositions, and of what is computed again
};
StateCount count(const StatePlan& plan, Pass pass, const RecurrenceShape& shape);
/// FLOPs of a step: {of the recurrence itself, further ones}.
std::pair<double, double> flops_of(const StateStep& step, const StatePlan& plan, Pass pass,
                                   const RecurrenceShape& shape);
/// Work of a step in a kernel that computes chunks of `recurrence_chunk` tokens.
struct ChunkedWork {
  double flops = 0;     ///< of products of matrices; not of the inverses inside chunks
  int64_t scanned = 0;  ///< tokens of scans, in which a chunk waits for the state before it
};
/// Returns the work of a step; convolutions and messages have none. K: key_dim, V: value_dim, C:
/// chunk. FLOPs of a token and head:
///
///                            with the delta rule          without it
///     forward                6 K V + 2 C (3 K + 2 V)      4 K V + 2 C (K + V)
///     backward, two scans    16 K V + 2 C (8 K + 5 V)     10 K V + 2 C (3 K + 2 V)
///     summary                4 K V + 4 K K                2 K V
///     summary, backward      6 K V                        2 K V
ChunkedWork chunked_work(const StateStep& step, const StatePlan& plan, Pass pass,
                         const RecurrenceShape& shape);
/// Tokens of all ranks, if they exchange tokens for heads; else 0.
int64_t tokens_of_all(const StatePlan& plan);
/// Bytes of a rank's buffers, and of its arrays of heads.
int64_t buffer_bytes(const StatePlan& plan, const RecurrenceShape& shape);
/// Bytes of a message.
int64_t bytes_of_message(const StateMessage& message, const StatePlan& plan,
                         const RecurrenceShape& shape);
/// Bytes of a token in the heads that a rank computes, of all arrays of the step.
int64_t bytes_of_token(const state_step::HeadExchange& step, const StatePlan& plan,
                       const RecurrenceShape& shape);
/// Bytes that a step sends to other ranks, and receives from them.
struct HeadBytes {
  int64_t sent = 0, received = 0;
};
HeadBytes bytes_of_heads(const state_step::HeadExchange& step, const StatePlan& plan,
                         const RecurrenceShape& shape);

/// FLOPs of a pass over `tokens`: two for each element of each product with a state in the
/// recurrence, token by token. Forward Sᵀq and k uᵀ, and Sᵀk with the delta rule; backward q dOᵀ,
/// S dO, dS u and dSᵀk, and S' du and k duᵀ. What chunks and summaries compute more is not counted.
double recurrence_flops(Pass pass, int64_t tokens, const RecurrenceShape& shape);

}  // namespace gyre

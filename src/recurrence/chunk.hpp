#pragma once
// One value head over a chunk of tokens of one document: the arithmetic of the kernel.
//
// Within a chunk of n <= 64 tokens, let A_t = D_1 ... D_t (products of decays, never quotients, so
// that nothing overflows), and for i <= t
//
//     P_ti = q_tᵀ (A_t / A_i) k_i                   R_ti = k_tᵀ (A_t / A_i) k_i,  i < t
//     Qa_t = A_t q_t      Ka_t = A_t k_t            Kb_t = (A_n / A_t) k_t
//
// With the state S before the chunk, the delta rule is a triangular system for the updates U:
//
//     U_t = beta_t (V_t - Ka_tᵀ S - sum_{i<t} R_ti U_i)             without it U = V
//     O   = scale (Qa S + P U)
//     S'  = A_n S + Kbᵀ U                           the state behind the chunk
//
// S' is an affine function M S + B. Carrying [B | M] instead of S, with values [V | 0] and from
// [0 | I], gives both.
//
// Backward, from the gradient dS' and dO (times scale):
//
//     dU  = Pᵀ dO + Kb dS'                          dW = -beta Y,  dV = beta Y, where
//     Y_t = dU_t - sum_{j>t} beta_j R_jt Y_j        (delta rule; else dV = dU)
//     dS  = A_n dS' + Qaᵀ dO + Kaᵀ dW               no state is needed: M' applied to dS', plus C

#include <cstdint>
#include <span>
#include <vector>

#include "recurrence/kernel.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Scratch of a thread. States are [key_dim, width] with width = value_dim, or wider (see above).
class RecurrenceChunk {
 public:
  RecurrenceChunk(const RecurrenceShape& shape, int64_t state_width);

  /// Loads `tokens` rows of a value head from row `begin` on.
  void load(const RecurrenceData& data, int64_t head, int64_t begin, int64_t tokens);
  void load_d_out(const RecurrenceData& data, int64_t head, int64_t begin);

  /// Computes U from the state before the chunk.
  void solve(MatrixView<const float> state);
  /// state <- that behind the chunk. After solve().
  void advance(MatrixView<float> state);
  /// Writes the chunk's rows of out. After solve().
  void output(MatrixView<const float> state, const RecurrenceData& data, int64_t head,
              int64_t begin);
  /// map <- A_n map, for maps without the delta rule, which are diagonals [decay_dim].
  void decay(std::span<float> map);

  /// Computes Y. After load_d_out().
  void solve_back(MatrixView<const float> d_state);
  /// d_state <- the gradient of the state before the chunk. After solve_back().
  void retreat(MatrixView<float> d_state);
  /// Writes d_v, d_g and d_beta of the chunk's rows, and adds to d_q and d_k [tokens, key_dim].
  /// `state` is that before the chunk, `d_state` the gradient behind it. After solve() and
  /// solve_back().
  void gradients(MatrixView<const float> state, MatrixView<const float> d_state,
                 const RecurrenceData& data, int64_t head, int64_t begin, MatrixView<float> d_q,
                 MatrixView<float> d_k);

 private:
  MatrixView<float> view(Buffer<float>& buffer, int64_t cols) {
    return {buffer.data(), tokens_, cols};
  }
  MatrixView<float> keys(Buffer<float>& buffer) { return view(buffer, shape_.key_dim); }
  MatrixView<float> values(Buffer<float>& buffer) { return view(buffer, shape_.value_dim); }
  MatrixView<float> pairs(Buffer<float>& buffer) { return view(buffer, tokens_); }
  /// The columns of U or of the residual that are of values.
  MatrixView<float> value_columns(Buffer<float>& buffer) {
    return view(buffer, width_).columns_from(0, shape_.value_dim);
  }
  void load_decays(const RecurrenceData& data, int64_t head, int64_t begin);
  void make_pairs();
  void make_channel_pairs();
  /// Adds the gradients of pairs i < t to d_q_, row_ and source_.
  void pair_gradients();
  void channel_pair_gradients();
  /// Gradients of q and k through states, and those of pairs without decays.
  void state_gradients(MatrixView<const float> state, MatrixView<const float> d_state);
  void write_value_gradients(const RecurrenceData& data, int64_t head, int64_t begin);
  void write_decay_gradients(MatrixView<const float> state, MatrixView<const float> d_state,
                             MatrixView<float> d_g);

  const RecurrenceShape shape_;
  int64_t width_, tokens_ = 0;
  Buffer<float> q_, k_, qa_, ka_, kb_;       // [tokens, key_dim]
  Buffer<float> decays_, until_, behind_;    // [tokens, key_dim] D_t, A_t, A_n / A_t
  Buffer<float> between_;                    // [tokens, tokens] A_t / A_i, one decay a head
  Buffer<float> v_, d_out_, y_, d_w_;        // [tokens, value_dim]
  Buffer<float> residual_, u_;               // [tokens, width] U is beta times the residual
  Buffer<float> p_, r_, d_p_, d_r_;          // [tokens, tokens]
  Buffer<float> d_q_, row_, source_, d_kb_;  // [tokens, key_dim] gradients of q, and of k in Ka and
                                             // as k_t in R; as k_i in P and R; in Kb
  std::vector<float> beta_, diagonal_;       // [tokens]
};

}  // namespace gyre

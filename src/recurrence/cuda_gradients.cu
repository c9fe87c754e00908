// Gradients of the inputs of a chunk (cuda_kernel.hpp), from the state before it and the gradient of
// the state behind it, in the names of chunk.cpp:
//
//     dP = dO Uᵀ,  dR = dW Uᵀ                          dW = -beta Y
//     d_q = A (dO Sᵀ),  row = A (dW Sᵀ)                by channels, 32 at once
//     d_kb = (A_n / A) (U dS'ᵀ)
//     d_q_t += sum_{i<t} dP_ti (A_t / A_i) k_i         row with dR
//     source_i = sum_{t>i} (A_t / A_i) (dP_ti q_t + dR_ti k_t)
//     d_k = row + source + d_kb + dP_tt q,  d_q += dP_tt k

#include "recurrence/cuda_chunk.cuh"

namespace gyre {
namespace {

using Array = RecurrenceArray;

/// Shared memory of a block: gradient_bytes.
struct GradientMemory {
  float *d_p, *d_r;                   ///< [C, C]
  float *d_q, *row, *d_kb;            ///< [C, 32] of the channels
  float* tiles[4];                    ///< [C, 32]
  float *beta, *d_beta, *d_g, *dots;  ///< [C]; dots [32]: S · dS' of a channel
  __device__ GradientMemory()
      : d_p(reinterpret_cast<float*>(dynamic_shared())),
        d_r(d_p + square_elements),
        d_q(d_r + square_elements),
        row(d_q + tile_elements),
        d_kb(row + tile_elements) {
    for (int i = 0; i < 4; ++i) tiles[i] = d_kb + (i + 1) * tile_elements;
    beta = tiles[3] + tile_elements;
    d_beta = beta + chunk_tokens;
    d_g = d_beta + chunk_tokens;
    dots = d_g + chunk_tokens;
  }
};

class ChunkGradients {
 public:
  __device__ explicit ChunkGradients(const HeadChunk& chunk)
      : chunk_(chunk), args_(chunk.args), n_(chunk.tokens) {}

  __device__ void compute() {
    const int thread = thread_index();
    if (thread < n_) {
      s_.beta[thread] = chunk_.beta(thread);
      s_.d_beta[thread] = s_.d_g[thread] = 0;
    }
    pairs();
    for (int first = 0; first < args_.keys; first += tile_columns) {
      through_states(first);
      load_channels(first);
      scale();
      through_pairs();
      write_channels(first);
      __syncthreads();
    }
    if (thread >= n_) return;
    if (args_.delta) store(Array::d_beta, thread, chunk_.head, s_.d_beta[thread]);
    if (!args_.channel_decay) store(Array::d_g, thread, chunk_.head, s_.d_g[thread]);
  }

 private:
  __device__ void store(Array array, int t, int64_t column, float x) const {
    gyre::store(chunk_.rows(array), chunk_.begin + t, column, x);
  }
  /// tiles 0, 1, 2 <- columns of dO, of the residual (without the delta rule: of V) and of Y.
  __device__ void load_values(int first) {
    const float* const residual = chunk_.of_values(args_.scratch.residual);
    const float* const y = chunk_.of_values(args_.scratch.y);
    for_tile(n_, [&](int t, int j) {
      const int at = t * tile_stride + j, e = first + j;
      s_.tiles[0][at] = args_.scale * chunk_.value(Array::d_out, t, e);
      if (!args_.delta) {
        s_.tiles[1][at] = chunk_.value(Array::v, t, e);
      } else {
        s_.tiles[1][at] = e < args_.values ? residual[t * args_.values + e] : 0;
        s_.tiles[2][at] = e < args_.values ? y[t * args_.values + e] : 0;
      }
    });
  }
  /// Elements of dW and of U, of the columns that are loaded.
  __device__ float d_w(int t, int j) const {
    return -s_.beta[t] * s_.tiles[2][t * tile_stride + j];
  }
  __device__ float u(int t, int j) const { return s_.beta[t] * s_.tiles[1][t * tile_stride + j]; }

  /// dP, dR and d_beta.
  __device__ void pairs() {
    const Shared d_o{s_.tiles[0], tile_stride};
    for (int first = 0; first < args_.values; first += tile_columns) {
      load_values(first);
      __syncthreads();
      for (int column = 0; column < n_; column += tile_columns) {
        const auto u_of = [&](int j, int i) { return u(min(column + i, n_ - 1), j); };
        const auto add_to = [&](float* sums) {
          return [=, this](int t, int i, float sum) {
            if (column + i >= n_) return;
            float& to = sums[t * square_stride + column + i];
            to = first == 0 ? sum : to + sum;
          };
        };
        product(n_, tile_columns, d_o, u_of, add_to(s_.d_p));
        if (args_.delta)
          product(
              n_, tile_columns, [&](int t, int j) { return d_w(t, j); }, u_of, add_to(s_.d_r));
      }
      const int lane = thread_index() % warp_lanes;
      for (int t = thread_index() / warp_lanes; args_.delta && t < n_; t += chunk_warps) {
        const int at = t * tile_stride + lane;
        const float sum = warp_sum(s_.tiles[1][at] * s_.tiles[2][at]);
        if (lane == 0) s_.d_beta[t] += sum;
      }
      __syncthreads();
    }
  }
  /// d_q, row, d_kb and dots of channels, without decays.
  __device__ void through_states(int channel) {
    float *const s = s_.tiles[3], *const d_s = s + tile_columns * tile_stride;
    const float* const states = chunk_.state(args_.scratch.states);
    const float* const d_states = chunk_.state(args_.scratch.d_states);
    for (int first = 0; first < args_.values; first += tile_columns) {
      load_values(first);
      for_tile(tile_columns, [&](int c, int j) {
        const bool any = channel + c < args_.keys && first + j < args_.values;
        const int64_t at = static_cast<int64_t>(channel + c) * args_.values + first + j;
        s[c * tile_stride + j] = any ? states[at] : 0;
        d_s[c * tile_stride + j] = any ? d_states[at] : 0;
      });
      __syncthreads();
      const auto add_to = [&](float* sums) {
        return [=](int t, int c, float sum) {
          float& to = sums[t * tile_stride + c];
          to = first == 0 ? sum : to + sum;
        };
      };
      const SharedTransposed state{s, tile_stride}, d_state{d_s, tile_stride};
      product(n_, tile_columns, Shared{s_.tiles[0], tile_stride}, state, add_to(s_.d_q));
      if (args_.delta)
        product(
            n_, tile_columns, [&](int t, int j) { return d_w(t, j); }, state, add_to(s_.row));
      product(
          n_, tile_columns, [&](int t, int j) { return u(t, j); }, d_state, add_to(s_.d_kb));
      if (const int c = thread_index(); c < tile_columns) {
        float sum = first == 0 ? 0 : s_.dots[c];
        for (int j = 0; j < tile_columns; ++j)
          sum += s[c * tile_stride + j] * d_s[c * tile_stride + j];
        s_.dots[c] = sum;
      }
      __syncthreads();
    }
  }
  /// tiles 0, 1, 2 <- q, k and decays of channels.
  __device__ void load_channels(int channel) {
    for_tile(n_, [&](int t, int c) {
      const int at = t * tile_stride + c;
      s_.tiles[0][at] = chunk_.key(Array::q, t, channel + c);
      s_.tiles[1][at] = chunk_.key(Array::k, t, channel + c);
      s_.tiles[2][at] = chunk_.decay(t, channel + c);
      if (!args_.delta) s_.row[at] = 0;
    });
    __syncthreads();
  }
  /// d_q and row times A_t, dots times A_n, d_kb times A_n / A_t. A lane has a channel.
  __device__ void scale() {
    const int warp = thread_index() / warp_lanes, c = thread_index() % warp_lanes;
    const float* const decays = s_.tiles[2];
    float decay = 1;
    if (warp == 0) {
      for (int at = c; at < n_ * tile_stride; at += tile_stride) {
        decay *= decays[at];
        s_.d_q[at] *= decay;
        s_.row[at] *= decay;
      }
      s_.dots[c] *= decay;
    } else if (warp == 1) {
      for (int at = (n_ - 1) * tile_stride + c; at >= 0; at -= tile_stride) {
        s_.d_kb[at] *= decay;
        decay *= decays[at];
      }
    }
    __syncthreads();
  }
  /// Adds what goes through pairs of tokens to d_q and row; tile 3 <- source.
  __device__ void through_pairs() {
    const float *const q = s_.tiles[0], *const k = s_.tiles[1], *const decays = s_.tiles[2];
    for_tile(n_, [&](int t, int c) {
      float d_q = 0, row = 0, source = 0, decay = 1;
      for (int i = t - 1; i >= 0; --i) {
        decay *= decays[(i + 1) * tile_stride + c];
        const float decayed = decay * k[i * tile_stride + c];
        d_q += s_.d_p[t * square_stride + i] * decayed;
        if (args_.delta) row += s_.d_r[t * square_stride + i] * decayed;
      }
      decay = 1;
      for (int j = t + 1; j < n_; ++j) {
        decay *= decays[j * tile_stride + c];
        float term = s_.d_p[j * square_stride + t] * q[j * tile_stride + c];
        if (args_.delta) term += s_.d_r[j * square_stride + t] * k[j * tile_stride + c];
        source += decay * term;
      }
      const int at = t * tile_stride + c;
      s_.d_q[at] += d_q;
      s_.row[at] += row;
      s_.tiles[3][at] = source;
    });
    __syncthreads();
  }
  __device__ void write_channels(int channel) {
    const float *const q = s_.tiles[0], *const k = s_.tiles[1], *const source = s_.tiles[3];
    for_tile(n_, [&](int t, int c) {
      if (channel + c >= args_.keys) return;
      const int at = t * tile_stride + c, to = t * args_.keys + channel + c;
      const float diagonal = s_.d_p[t * square_stride + t];
      chunk_.of_keys(args_.scratch.d_q)[to] = s_.d_q[at] + diagonal * k[at];
      chunk_.of_keys(args_.scratch.d_k)[to] =
          s_.row[at] + source[at] + s_.d_kb[at] + diagonal * q[at];
    });
    if (thread_index() < warp_lanes) write_decays(channel);
  }
  /// d_g; a lane has a channel.
  __device__ void write_decays(int channel) {
    const int c = thread_index();
    const float *const q = s_.tiles[0], *const k = s_.tiles[1], *const source = s_.tiles[3];
    float* const before = s_.tiles[2];
    float sum = s_.dots[c];
    for (int at = c; at < n_ * tile_stride; at += tile_stride) {
      before[at] = sum;  // g_t decays the state before the chunk, and the terms of tokens before t
      sum += k[at] * s_.d_kb[at];
    }
    float behind = 0;  // it is in A_t of tokens from t on
    for (int t = n_ - 1; t >= 0; --t) {
      const int at = t * tile_stride + c;
      behind += q[at] * s_.d_q[at] + k[at] * (s_.row[at] - source[at]);
      const float d_g = before[at] + behind;
      if (args_.channel_decay) {
        if (channel + c < args_.keys)
          store(Array::d_g, t, int64_t{chunk_.head} * args_.keys + channel + c, d_g);
      } else if (const float all = warp_sum(d_g); c == 0) {
        s_.d_g[t] += all;
      }
    }
  }

  const HeadChunk& chunk_;
  const ChunkArgs& args_;
  const int n_;
  GradientMemory s_;
};

__global__ void __launch_bounds__(chunk_threads)
    gradients_of_chunks(const __grid_constant__ ChunkArgs args) {
  const HeadChunk chunk(args, static_cast<int>(blockIdx.y), blockIdx.x);
  ChunkGradients(chunk).compute();
}

/// d_q and d_k of the heads of keys: sums over their heads of values.
__global__ void __launch_bounds__(chunk_threads)
    sum_over_groups(const __grid_constant__ ChunkArgs args) {
  const int64_t i = int64_t{blockIdx.x} * chunk_threads + threadIdx.x;
  const int64_t columns = int64_t{args.heads} / args.group * args.keys;
  if (i >= args.tokens * columns) return;
  const int64_t token = i / columns, head = i % columns / args.keys, c = i % args.keys;
  const int64_t first = args.first_head / args.group * args.keys;
  float d_q = 0, d_k = 0;
  for (int64_t h = head * args.group; h < (head + 1) * args.group; ++h) {
    const int64_t at = (h * args.chunks * chunk_tokens + token) * args.keys + c;
    d_q += args.scratch.d_q[at];
    d_k += args.scratch.d_k[at];
  }
  store(args.arrays[static_cast<int>(Array::d_q)], token, first + i % columns, d_q);
  store(args.arrays[static_cast<int>(Array::d_k)], token, first + i % columns, d_k);
}

}  // namespace

void launch_gradients(const ChunkArgs& args, Stream& stream) {
  launch({grid_of(args.chunks, args), chunk_threads, cuda_handle(stream), gradient_bytes},
         gradients_of_chunks, args);
  const int64_t elements = args.tokens * args.heads / args.group * args.keys;
  launch({static_cast<unsigned>(ceil_div(elements, int64_t{chunk_threads})), chunk_threads,
          cuda_handle(stream)},
         sum_over_groups, args);
}

}  // namespace gyre

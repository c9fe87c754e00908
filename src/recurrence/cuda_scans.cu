// Pairs of a chunk, and the scans of states and of their gradients (cuda_kernel.hpp).

#include "recurrence/cuda_chunk.cuh"

namespace gyre {
namespace {

using Array = RecurrenceArray;

/// Sum over 4 adjacent lanes.
__device__ float sum_of_four(float x) {
  x += __shfl_xor_sync(all_lanes, x, 1);
  return x + __shfl_xor_sync(all_lanes, x, 2);
}

int64_t pairs_bytes(int64_t keys) {
  return (chunk_tokens * keys + 2 * square_elements + chunk_tokens) * sizeof(float);
}

/// P_ti and R_ti: four lanes have token i, and multiply its key by the decays of t = i + 1, ...
__device__ void make_pairs(const HeadChunk& chunk, const float* decays, float* pairs,
                           float* key_pairs) {
  constexpr int parts = 4, most = cuda_recurrence_largest_key_dim / parts;
  const ChunkArgs& args = chunk.args;
  const int i = thread_index() / parts, part = thread_index() % parts, n = chunk.tokens;
  float decayed[most];
  GYRE_UNROLL for (int m = 0; m < most; ++m) decayed[m] =
      i < n ? chunk.key(Array::k, i, m * parts + part) : 0;
  for (int t = 0; t < n; ++t) {
    float with_query = 0, with_key = 0;
    GYRE_UNROLL for (int m = 0; m < most; ++m) {
      const int c = m * parts + part;
      if (t < i || i >= n || c >= args.keys) continue;
      if (t > i) decayed[m] *= decays[t * args.keys + c];
      with_query += chunk.key(Array::q, t, c) * decayed[m];
      if (args.delta && t > i) with_key += chunk.key(Array::k, t, c) * decayed[m];
    }
    with_query = sum_of_four(with_query);
    with_key = sum_of_four(with_key);
    if (part != 0 || i >= n) continue;
    pairs[t * square_stride + i] = with_query;  // 0 above the diagonal
    key_pairs[t * square_stride + i] = with_key;
  }
}

/// X = (1 + R beta)^-1; four lanes have a column.
__device__ void invert(int tokens, const float* key_pairs, const float* beta, float* inverse) {
  constexpr int parts = 4;
  const int j = thread_index() / parts, part = thread_index() % parts;
  for (int t = 0; t < tokens; ++t) {
    float sum = 0;
    for (int i = j + part; i < t; i += parts)
      sum += key_pairs[t * square_stride + i] * beta[i] * inverse[i * square_stride + j];
    sum = sum_of_four(sum);
    if (part == 0) inverse[t * square_stride + j] = t < j ? 0 : t == j ? 1 : -sum;
    __syncwarp();
  }
}

__global__ void __launch_bounds__(chunk_threads)
    pairs_of_chunks(const __grid_constant__ ChunkArgs args) {
  auto* const decays = reinterpret_cast<float*>(dynamic_shared());  // [C, K]
  float* const pairs = decays + chunk_tokens * args.keys;           // [C, C], then X
  float* const key_pairs = pairs + square_elements;
  float* const beta = key_pairs + square_elements;
  const HeadChunk chunk(args, static_cast<int>(blockIdx.y), blockIdx.x);
  const int n = chunk.tokens, thread = thread_index();
  for (int i = thread; i < n * args.keys; i += chunk_threads)
    decays[i] = chunk.decay(i / args.keys, i % args.keys);
  if (thread < n) beta[thread] = chunk.beta(thread);
  __syncthreads();
  make_pairs(chunk, decays, pairs, key_pairs);
  __syncthreads();
  const auto write = [&](float* scratch, const float* from) {
    for (int i = thread; i < n * chunk_tokens; i += chunk_threads)
      if (i % chunk_tokens < n)
        chunk.square(scratch)[i] = from[i / chunk_tokens * square_stride + i % chunk_tokens];
  };
  write(args.scratch.pairs, pairs);
  if (!args.delta) return;
  write(args.scratch.key_pairs, key_pairs);
  __syncthreads();
  invert(n, key_pairs, beta, pairs);
  __syncthreads();
  write(args.scratch.inverse, pairs);
}

enum class Decays { until, behind };

/// to [C, K] <- rows of q or k, times A_t, or times A_n / A_t; all [K] <- A_n.
__device__ void load_decayed(const HeadChunk& chunk, Array array, Decays decays, float* to,
                             float* all) {
  const int stride = chunk.args.keys + 1, n = chunk.tokens;
  for (int c = thread_index(); c < chunk.args.keys; c += chunk_threads) {
    float decay = 1;
    if (decays == Decays::until)
      for (int t = 0; t < n; ++t) {
        decay *= chunk.decay(t, c);
        to[t * stride + c] = chunk.key(array, t, c) * decay;
      }
    else
      for (int t = n - 1; t >= 0; --t) {
        to[t * stride + c] = chunk.key(array, t, c) * decay;
        decay *= chunk.decay(t, c);
      }
    all[c] = decay;
  }
}

/// Shared memory of a scan.
struct ScanMemory {
  float* state;     ///< [K, 32]
  float* decayed;   ///< [C, K]
  float* all;       ///< [K]
  float* square;    ///< [C, C]
  float* beta;      ///< [C]
  float* tiles[3];  ///< [C, 32]
  __device__ explicit ScanMemory(int keys)
      : state(reinterpret_cast<float*>(dynamic_shared())),
        decayed(state + keys * tile_stride),
        all(decayed + chunk_tokens * (keys + 1)),
        square(all + keys),
        beta(square + square_elements) {
    for (int i = 0; i < 3; ++i) tiles[i] = beta + chunk_tokens + i * tile_elements;
  }
  static int64_t bytes(int64_t keys) {
    return (keys * (tile_stride + chunk_tokens + 1) + chunk_tokens + square_elements +
            chunk_tokens + 3 * tile_elements) *
           sizeof(float);
  }
};

/// The block's columns of a head's states in global memory, [K, values].
struct StateColumns {
  int keys, values, first;
  __device__ float* at(float* states, int c, int j) const {
    return states + static_cast<int64_t>(c) * values + first + j;
  }
  __device__ void load(float* to, const float* states) const {
    for_tile(keys, [&](int c, int j) {
      const bool any = states != nullptr && first + j < values;
      to[c * tile_stride + j] = any ? states[static_cast<int64_t>(c) * values + first + j] : 0;
    });
  }
  __device__ void store(const float* from, float* states) const {
    for_tile(keys, [&](int c, int j) {
      if (first + j < values) *at(states, c, j) = from[c * tile_stride + j];
    });
  }
};

template <class T>
__device__ T* of_head(T* states, int head, int64_t elements) {
  return states == nullptr ? nullptr : states + head * elements;
}

/// U of a chunk, after beta and the state are there.
__device__ void update(const HeadChunk& chunk, const ScanMemory& shared, int first, bool keeps) {
  const ChunkArgs& args = chunk.args;
  const int n = chunk.tokens, keys = args.keys;
  float *const right = shared.tiles[0], *const u = shared.tiles[1];
  if (!args.delta) {
    for_tile(n,
             [&](int t, int j) { u[t * tile_stride + j] = chunk.value(Array::v, t, first + j); });
    return __syncthreads();
  }
  load_decayed(chunk, Array::k, Decays::until, shared.decayed, shared.all);
  load_square(shared.square, chunk.square(args.scratch.inverse), n);
  __syncthreads();
  product(n, keys, Shared{shared.decayed, keys + 1}, Shared{shared.state, tile_stride},
          [&](int t, int j, float sum) {
            right[t * tile_stride + j] = chunk.value(Array::v, t, first + j) - sum;
          });
  __syncthreads();
  product(n, n, Shared{shared.square, square_stride}, Shared{right, tile_stride},
          [&](int t, int j, float sum) {
            if (keeps && first + j < args.values)
              chunk.of_values(args.scratch.residual)[t * args.values + first + j] = sum;
            u[t * tile_stride + j] = shared.beta[t] * sum;
          });
  __syncthreads();
}

__device__ void write_output(const HeadChunk& chunk, const ScanMemory& shared, int first) {
  const ChunkArgs& args = chunk.args;
  const int n = chunk.tokens;
  float *const out = shared.tiles[0], *const u = shared.tiles[1];
  load_decayed(chunk, Array::q, Decays::until, shared.decayed, shared.all);
  load_square(shared.square, chunk.square(args.scratch.pairs), n);
  __syncthreads();
  product(n, args.keys, Shared{shared.decayed, args.keys + 1}, Shared{shared.state, tile_stride},
          [&](int t, int j, float sum) { out[t * tile_stride + j] = sum; });
  product(n, n, Shared{shared.square, square_stride}, Shared{u, tile_stride},
          [&](int t, int j, float sum) {
            chunk.store_value(Array::out, t, first + j,
                              args.scale * (out[t * tile_stride + j] + sum));
          });
  __syncthreads();
}

/// Columns from `values` on are those of the map.
__global__ void __launch_bounds__(chunk_threads)
    scan_chunks(const __grid_constant__ ChunkArgs args, const ScanStates states) {
  const ScanMemory shared(args.keys);
  const auto place = static_cast<int>(blockIdx.y), head = args.first_head + place;
  const int first = static_cast<int>(blockIdx.x) * tile_columns, keys = args.keys;
  const StateColumns columns{keys, args.values, first}, of_map{keys, keys, first - args.values};
  columns.load(shared.state, of_head(states.before, head, int64_t{keys} * args.values));
  __syncthreads();
  for_tile(keys, [&](int c, int j) {
    if (first + j == args.values + c) shared.state[c * tile_stride + j] = 1;
  });
  __syncthreads();
  for (int64_t index = 0; index < args.chunks; ++index) {
    const HeadChunk chunk(args, place, index);
    if (states.keeps) columns.store(shared.state, chunk.state(args.scratch.states));
    if (thread_index() < chunk.tokens) shared.beta[thread_index()] = chunk.beta(thread_index());
    update(chunk, shared, first, states.keeps);
    if (states.writes_out) write_output(chunk, shared, first);
    load_decayed(chunk, Array::k, Decays::behind, shared.decayed, shared.all);
    __syncthreads();
    product(keys, chunk.tokens, SharedTransposed{shared.decayed, keys + 1},
            Shared{shared.tiles[1], tile_stride}, [&](int c, int j, float sum) {
              float& state = shared.state[c * tile_stride + j];
              state = shared.all[c] * state + sum;
            });
    __syncthreads();
  }
  if (states.behind != nullptr)
    columns.store(shared.state, of_head(states.behind, head, int64_t{keys} * args.values));
  if (states.map == nullptr) return;
  float* const map = of_head(states.map, head, int64_t{keys} * keys);
  for_tile(keys, [&](int c, int j) {
    const int column = of_map.first + j;
    if (column >= 0 && column < keys) map[c * keys + column] = shared.state[c * tile_stride + j];
  });
}

/// dV of a chunk, after dU is in the second tile. Returns the tile that it is in.
__device__ float* update_back(const HeadChunk& chunk, const ScanMemory& shared, int first,
                              bool keeps) {
  const ChunkArgs& args = chunk.args;
  const int n = chunk.tokens;
  float *const d_u = shared.tiles[1], *const d_v = shared.tiles[2];
  if (!args.delta) return d_u;
  load_square(shared.square, chunk.square(args.scratch.inverse), n);
  __syncthreads();
  product(
      n, n, SharedTransposed{shared.square, square_stride},
      [&](int t, int j) { return shared.beta[t] * d_u[t * tile_stride + j]; },
      [&](int t, int j, float sum) { d_v[t * tile_stride + j] = sum; });
  __syncthreads();
  if (!keeps) return d_v;
  load_square(shared.square, chunk.square(args.scratch.key_pairs), n);
  __syncthreads();
  product(n, n, SharedTransposed{shared.square, square_stride}, Shared{d_v, tile_stride},
          [&](int t, int j, float sum) {
            if (first + j < args.values)
              chunk.of_values(args.scratch.y)[t * args.values + first + j] =
                  d_u[t * tile_stride + j] - sum;
          });
  return d_v;
}

__global__ void __launch_bounds__(chunk_threads)
    scan_chunks_back(const __grid_constant__ ChunkArgs args, const ScanBackStates states) {
  const ScanMemory shared(args.keys);
  const auto place = static_cast<int>(blockIdx.y), head = args.first_head + place;
  const int first = static_cast<int>(blockIdx.x) * tile_columns, keys = args.keys;
  const StateColumns columns{keys, args.values, first};
  float *const d_state = shared.state, *const d_o = shared.tiles[0], *const d_u = shared.tiles[1];
  const Shared outputs{d_o, tile_stride};
  columns.load(d_state, of_head(states.d_behind, head, int64_t{keys} * args.values));
  __syncthreads();
  for (int64_t index = args.chunks - 1; index >= 0; --index) {
    const HeadChunk chunk(args, place, index);
    const int n = chunk.tokens;
    if (states.keeps) columns.store(d_state, chunk.state(args.scratch.d_states));
    if (thread_index() < n) shared.beta[thread_index()] = chunk.beta(thread_index());
    for_tile(n, [&](int t, int j) {
      d_o[t * tile_stride + j] = args.scale * chunk.value(Array::d_out, t, first + j);
    });
    load_decayed(chunk, Array::k, Decays::behind, shared.decayed, shared.all);
    load_square(shared.square, chunk.square(args.scratch.pairs), n);
    __syncthreads();
    product(n, n, SharedTransposed{shared.square, square_stride}, outputs,
            [&](int t, int j, float sum) { d_u[t * tile_stride + j] = sum; });
    product(n, keys, Shared{shared.decayed, keys + 1}, Shared{d_state, tile_stride},
            [&](int t, int j, float sum) { d_u[t * tile_stride + j] += sum; });
    __syncthreads();
    const float* const d_v = update_back(chunk, shared, first, states.keeps);
    if (states.keeps)
      for_tile(n, [&](int t, int j) {
        chunk.store_value(Array::d_v, t, first + j, d_v[t * tile_stride + j]);
      });
    load_decayed(chunk, Array::q, Decays::until, shared.decayed, shared.all);
    __syncthreads();
    product(keys, n, SharedTransposed{shared.decayed, keys + 1}, outputs,
            [&](int c, int j, float sum) {
              d_state[c * tile_stride + j] = shared.all[c] * d_state[c * tile_stride + j] + sum;
            });
    __syncthreads();
    if (!args.delta) continue;
    load_decayed(chunk, Array::k, Decays::until, shared.decayed, shared.all);
    __syncthreads();
    product(keys, n, SharedTransposed{shared.decayed, keys + 1}, Shared{d_v, tile_stride},
            [&](int c, int j, float sum) { d_state[c * tile_stride + j] -= sum; });
    __syncthreads();
  }
  if (states.d_before != nullptr)
    columns.store(d_state, of_head(states.d_before, head, int64_t{keys} * args.values));
}

}  // namespace

int64_t chunk_shared_bytes(int64_t keys) {
  return std::max({pairs_bytes(keys), ScanMemory::bytes(keys), gradient_bytes});
}

void launch_pairs(const ChunkArgs& args, Stream& stream) {
  launch({grid_of(args.chunks, args), chunk_threads, cuda_handle(stream),
          static_cast<size_t>(pairs_bytes(args.keys))},
         pairs_of_chunks, args);
}

void launch_scan(const ChunkArgs& args, const ScanStates& states, Stream& stream) {
  const int64_t columns = args.values + (states.map != nullptr ? args.keys : 0);
  launch({grid_of(ceil_div(columns, int64_t{tile_columns}), args), chunk_threads,
          cuda_handle(stream), static_cast<size_t>(ScanMemory::bytes(args.keys))},
         scan_chunks, args, states);
}

void launch_scan_back(const ChunkArgs& args, const ScanBackStates& states, Stream& stream) {
  launch({grid_of(ceil_div(int64_t{args.values}, int64_t{tile_columns}), args), chunk_threads,
          cuda_handle(stream), static_cast<size_t>(ScanMemory::bytes(args.keys))},
         scan_chunks_back, args, states);
}

}  // namespace gyre

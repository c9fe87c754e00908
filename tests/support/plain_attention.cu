#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/bf16.hpp"
#include "core/error.hpp"
#include "plain_attention.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

namespace gyre::test {
namespace {

template <class T>
__device__ T not_a_number() {
  if constexpr (std::is_same_v<T, float>)
    return __uint_as_float(0x7fffffff);
  else
    return T{0x7fff};
}

constexpr int max_head_dim = 256;
constexpr int threads = 32;

/// Rows of the entries of a batch: by a table of offsets, or at equal distances.
template <class T>
struct EntryRows {
  T* data = nullptr;
  const int64_t* offsets = nullptr;
  int64_t stride = 0;
  int64_t entries = 0;
  int64_t rows = 0;      ///< with offsets: that can be reached
  int64_t distance = 0;  ///< without: rows from entry to entry
  int dim = 0;           ///< elements of a head

  /// nullptr beyond what can be reached.
  __device__ T* row(int64_t entry, int64_t i) const {
    if (offsets == nullptr) return data + (entry * distance + i) * stride;
    const int64_t at = offsets[entry] + i * stride;
    return at / stride < rows && at < offsets[entries] ? data + at : nullptr;
  }
  /// The first element of a head.
  __device__ T* head(int64_t entry, int64_t i, int head) const {
    T* at = row(entry, i);
    return at == nullptr ? nullptr : at + head * dim;
  }
};

struct Arguments {
  EntryRows<const bf16> q, k, v, d_out;
  EntryRows<bf16> out, d_q, d_k, d_v;
  EntryRows<float> lse;
  bool lse_by_head = false;                        // [batch, heads, longest_q]
  EntryRows<float> delta, q_sums, k_sums, v_sums;  // workspace of the backward pass
  float* maxima = nullptr;                         // [batch, heads, longest_q], of the forward
  const int32_t *q_lengths = nullptr, *k_lengths = nullptr;  // none: all are the longest
  RaggedMask mask = RaggedMask::full;
  int64_t window = 0;
  int heads = 0, group = 1, head_dim = 0, value_dim = 0;
  int64_t longest_q = 0, longest_k = 0;
  float scale = 0;
  int32_t* dropped = nullptr;
  bool multiplies_masked_rows = false;

  /// As many of the rows behind an entry of a ragged batch take part with weights of 0 as are in
  /// its last tile.
  __device__ int64_t masked_end(int64_t length) const {
    constexpr int64_t tile = 64;
    return multiplies_masked_rows && q_lengths != nullptr ? (length + tile - 1) / tile * tile
                                                          : length;
  }
  /// nullptr beyond what can be reached.
  __device__ float* lse_of(int64_t entry, int64_t i, int head) const {
    if (lse_by_head) return lse.data + (entry * heads + head) * longest_q + i;
    float* row = lse.row(entry, i);
    return row == nullptr ? nullptr : row + head;
  }
};

/// What a thread works on: query head `head`, and rows threadIdx.x, threadIdx.x + threads, ...
struct Place {
  int64_t entry, rows, keys;
  int head, kv_head;
  RaggedMask mask;
  int64_t window;
  int32_t* dropped;

  __device__ explicit Place(const Arguments& a)
      : entry(blockIdx.x),
        rows(a.q_lengths == nullptr ? a.longest_q : a.q_lengths[blockIdx.x]),
        keys(a.k_lengths == nullptr ? a.longest_k : a.k_lengths[blockIdx.x]),
        head(static_cast<int>(blockIdx.y)),
        kv_head(static_cast<int>(blockIdx.y) / a.group),
        mask(a.mask),
        window(a.window),
        dropped(a.dropped) {
    if (rows > a.longest_q || keys > a.longest_k) *dropped = 1;
    rows = min(rows, a.longest_q);
    keys = min(keys, a.longest_k);
  }
  /// Query i sees the keys before this one.
  __device__ int64_t end_key(int64_t i) const {
    if (mask == RaggedMask::full) return keys;
    const int64_t end = i + 1 + (mask == RaggedMask::causal ? 0 : keys - rows);
    return max(int64_t{0}, min(end, keys));
  }
  /// And from this one on.
  __device__ int64_t begin_key(int64_t i) const {
    if (window == 0) return 0;
    const int64_t end = i + 1 + (mask == RaggedMask::causal ? 0 : keys - rows);
    return max(int64_t{0}, min(end - window, keys));
  }
  __device__ bool sees(int64_t i, int64_t j) const { return begin_key(i) <= j && j < end_key(i); }
  template <class... Rows>
  __device__ bool reached(Rows... row) const {
    const bool all = (... && (row != nullptr));
    if (!all) *dropped = 1;
    return all;
  }
};

/// <a, b>, of the heads that begin there.
template <class T>
__device__ float dot(const bf16* a, const T* b, int head_dim) {
  float sum = 0;
  for (int d = 0; d < head_dim; ++d) sum += to_float(a[d]) * to_float(b[d]);
  return sum;
}

/// NaN in rows behind the entries that an array has.
template <class T>
__global__ void spoil(EntryRows<T> array, const int32_t* lengths, int64_t columns) {
  constexpr int64_t tile = 64;
  const auto row_of = [&](int64_t entry) { return array.offsets[entry] / array.stride; };
  if (lengths[blockIdx.x] == 0) return;
  const int64_t begin = row_of(blockIdx.x) + lengths[blockIdx.x];
  int64_t end = min(begin + tile, row_of(array.entries));
  for (int64_t entry = 0; entry < array.entries; ++entry)
    if (lengths[entry] > 0 && row_of(entry) >= begin) end = min(end, row_of(entry));
  for (int64_t i = threadIdx.x; i < (end - begin) * columns; i += threads)
    array.data[(begin + i / columns) * array.stride + i % columns] = not_a_number<T>();
}

/// sums [dim] += 0 · the rows behind the `length` of an entry.
template <class T>
__device__ void add_masked(const Arguments& a, const EntryRows<T>& array, const Place& p,
                           int64_t length, int head, float* sums, int dim) {
  for (int64_t j = length; j < a.masked_end(length); ++j)
    if (const T* row = array.head(p.entry, j, head); row != nullptr)
      for (int d = 0; d < dim; ++d) sums[d] += 0.0F * to_float(row[min(d, array.dim - 1)]);
}

/// The largest score of each row.
__global__ void find_maxima(Arguments a) {
  const Place p(a);
  for (int64_t i = threadIdx.x; i < p.rows; i += threads) {
    const bf16* q = a.q.head(p.entry, i, p.head);
    if (!p.reached(q)) continue;
    if (p.end_key(i) <= p.begin_key(i)) *p.dropped = 1;
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t j = p.begin_key(i); j < p.end_key(i); ++j)
      if (const bf16* k = a.k.head(p.entry, j, p.kv_head); p.reached(k))
        largest = fmaxf(largest, a.scale * dot(q, k, a.head_dim));
    a.maxima[(p.entry * a.heads + p.head) * a.longest_q + i] = largest;
  }
}

__global__ void add_values(Arguments a) {
  const Place p(a);
  float sums[max_head_dim];
  for (int64_t i = threadIdx.x; i < p.rows; i += threads) {
    const bf16* q = a.q.head(p.entry, i, p.head);
    bf16* out = a.out.head(p.entry, i, p.head);
    float* lse = a.lse_of(p.entry, i, p.head);
    if (!p.reached(q, out, lse)) continue;
    const float largest = a.maxima[(p.entry * a.heads + p.head) * a.longest_q + i];
    float weights = 0;
    for (int d = 0; d < a.value_dim; ++d) sums[d] = 0;
    for (int64_t j = p.begin_key(i); j < p.end_key(i); ++j) {
      const bf16* k = a.k.head(p.entry, j, p.kv_head);
      const bf16* v = a.v.head(p.entry, j, p.kv_head);
      if (!p.reached(k, v)) continue;
      const float weight = expf(a.scale * dot(q, k, a.head_dim) - largest);
      weights += weight;
      for (int d = 0; d < a.value_dim; ++d) sums[d] += weight * to_float(v[d]);
    }
    add_masked(a, a.v, p, p.keys, p.kv_head, sums, a.value_dim);
    for (int d = 0; d < a.value_dim; ++d) out[d] = to_bf16(sums[d] / weights);
    *lse = largest + logf(weights);
  }
}

__global__ void find_delta(Arguments a) {
  const Place p(a);
  for (int64_t i = threadIdx.x; i < p.rows; i += threads) {
    const bf16* out = a.out.head(p.entry, i, p.head);
    const bf16* d_out = a.d_out.head(p.entry, i, p.head);
    float* delta = a.delta.row(p.entry, i);
    if (p.reached(out, d_out, delta)) delta[p.head] = dot(out, d_out, a.value_dim);
  }
}

/// p and its gradient for one query and key; false: nothing can be said.
struct Weight {
  const bf16 *q, *k, *d_out;
  float p, d_s;
};
__device__ bool weigh(const Arguments& a, const Place& at, int64_t i, int64_t j, Weight& w) {
  w.q = a.q.head(at.entry, i, at.head);
  w.k = a.k.head(at.entry, j, at.kv_head);
  w.d_out = a.d_out.head(at.entry, i, at.head);
  const bf16* v = a.v.head(at.entry, j, at.kv_head);
  const float* lse = a.lse_of(at.entry, i, at.head);
  const float* delta = a.delta.row(at.entry, i);
  if (!at.reached(w.q, w.k, w.d_out, v, lse, delta)) return false;
  w.p = expf(a.scale * dot(w.q, w.k, a.head_dim) - *lse);
  w.d_s = w.p * (dot(w.d_out, v, a.value_dim) - delta[at.head]);
  return true;
}

__global__ void query_gradients(Arguments a) {
  const Place p(a);
  Weight w{};
  for (int64_t i = threadIdx.x; i < p.rows; i += threads) {
    bf16* d_q = a.d_q.head(p.entry, i, p.head);
    float* sums = a.q_sums.head(p.entry, i, p.head);
    if (!p.reached(d_q, sums)) continue;
    for (int d = 0; d < a.head_dim; ++d) sums[d] = 0;
    for (int64_t j = p.begin_key(i); j < p.end_key(i); ++j)
      if (weigh(a, p, i, j, w))
        for (int d = 0; d < a.head_dim; ++d) sums[d] += a.scale * w.d_s * to_float(w.k[d]);
    add_masked(a, a.k, p, p.keys, p.kv_head, sums, a.head_dim);
    for (int d = 0; d < a.head_dim; ++d) d_q[d] = to_bf16(sums[d]);
  }
}

/// What each query head adds to the gradients of keys and values.
__global__ void key_sums(Arguments a) {
  const Place p(a);
  Weight w{};
  for (int64_t j = threadIdx.x; j < p.keys; j += threads) {
    float* d_k = a.k_sums.head(p.entry, j, p.head);
    float* d_v = a.v_sums.head(p.entry, j, p.head);
    if (!p.reached(d_k, d_v)) continue;
    for (int d = 0; d < a.head_dim; ++d) d_k[d] = 0;
    for (int d = 0; d < a.value_dim; ++d) d_v[d] = 0;
    for (int64_t i = 0; i < p.rows; ++i) {
      if (!p.sees(i, j) || !weigh(a, p, i, j, w)) continue;
      for (int d = 0; d < a.head_dim; ++d) d_k[d] += a.scale * w.d_s * to_float(w.q[d]);
      for (int d = 0; d < a.value_dim; ++d) d_v[d] += w.p * to_float(w.d_out[d]);
    }
    add_masked(a, a.q, p, p.rows, p.head, d_k, a.head_dim);
    add_masked(a, a.out, p, p.rows, p.head, d_k, a.head_dim);  // by way of delta
    add_masked(a, a.d_out, p, p.rows, p.head, d_v, a.value_dim);
  }
}

/// Sums over the heads of a group, by the threads of its first head.
__global__ void key_gradients(Arguments a) {
  const Place p(a);
  if (p.head % a.group != 0) return;
  for (int64_t j = threadIdx.x; j < p.keys; j += threads) {
    bf16* d_k = a.d_k.head(p.entry, j, p.kv_head);
    bf16* d_v = a.d_v.head(p.entry, j, p.kv_head);
    const float* k_sums = a.k_sums.head(p.entry, j, p.head);
    const float* v_sums = a.v_sums.head(p.entry, j, p.head);
    if (!p.reached(d_k, d_v, k_sums, v_sums)) continue;
    const auto sum_of = [&a](const float* sums, int dim, int d) {
      float sum = 0;
      for (int h = 0; h < a.group; ++h) sum += sums[h * dim + d];
      return to_bf16(sum);
    };
    for (int d = 0; d < a.head_dim; ++d) d_k[d] = sum_of(k_sums, a.head_dim, d);
    for (int d = 0; d < a.value_dim; ++d) d_v[d] = sum_of(v_sums, a.value_dim, d);
  }
}

class Graph final : public AttentionGraph {
 public:
  Graph(const AttentionGraphShape& shape, PlainAttention& asked, CUstream_st* stream)
      : shape_(shape), asked_(asked), stream_(stream) {}

  int64_t workspace_bytes() const override {
    const bool ordered = shape_.backward && shape_.deterministic;
    return used_bytes() + (shape_.backward ? asked_.extra_bytes : 0) +
           (ordered ? asked_.ordered_extra_bytes : 0);
  }

  void execute(const AttentionAddresses& addresses, std::byte* workspace) override {
    GYRE_CHECK(workspace != nullptr, "no workspace");
    PlainAttention::Calls& calls = shape_.backward ? asked_.backward : asked_.forward;
    ++calls.executed;
    calls.ordered += shape_.deterministic ? 1 : 0;
    calls.even += shape_.even ? 1 : 0;
    asked_.last = addresses;
    if (!shape_.even) count_empty(addresses);
    GYRE_CHECK_CUDA(
        cudaMemsetAsync(workspace, 0xff, static_cast<size_t>(workspace_bytes()), stream_));
    Arguments a = common(addresses);
    auto* floats = reinterpret_cast<float*>(workspace);
    if (shape_.backward)
      backward(a, addresses, floats);
    else
      forward(a, floats);
  }

 private:
  using Id = AttentionTensor;
  static constexpr int64_t float_bytes = sizeof(float);

  void count_empty(const AttentionAddresses& addresses) {
    std::vector<int32_t> lengths(shape_.batch);
    for (const AttentionTensor id : {Id::q_lengths, Id::k_lengths}) {
      GYRE_CHECK_CUDA(cudaMemcpyAsync(lengths.data(), addresses.at(id),
                                      lengths.size() * sizeof(int32_t), cudaMemcpyDeviceToHost,
                                      stream_));
      GYRE_CHECK_CUDA(cudaStreamSynchronize(stream_));
      asked_.empty += std::count(lengths.begin(), lengths.end(), 0);
    }
  }
  int64_t group() const { return shape_.heads / shape_.kv_heads; }
  int64_t k_columns() const { return shape_.kv_heads * shape_.head_dim; }
  int64_t v_columns() const { return shape_.kv_heads * shape_.value_dim; }
  int64_t reached_q() const { return shape_.batch * shape_.longest_q; }
  int64_t reached_k() const { return shape_.batch * shape_.longest_k; }
  int64_t q_columns() const { return shape_.heads * shape_.head_dim; }
  int64_t out_columns() const { return shape_.heads * shape_.value_dim; }
  int64_t delta_size() const { return reached_q() * shape_.heads; }
  int64_t q_sums_size() const { return reached_q() * q_columns(); }
  int64_t k_sums_size() const { return reached_k() * q_columns(); }
  int64_t v_sums_size() const { return reached_k() * out_columns(); }
  int64_t used_bytes() const {
    if (!shape_.backward) return reached_q() * shape_.heads * float_bytes;
    return (delta_size() + q_sums_size() + k_sums_size() + v_sums_size()) * float_bytes;
  }

  template <class T>
  static T* address(const AttentionAddresses& addresses, AttentionTensor id) {
    const auto found = addresses.find(id);
    const auto number = static_cast<int64_t>(id);
    GYRE_CHECK(found != addresses.end() && found->second != nullptr, "no tensor {}", number);
    GYRE_CHECK(reinterpret_cast<uintptr_t>(found->second) % 16 == 0, "tensor {} is not aligned",
               number);
    return static_cast<T*>(found->second);
  }
  template <class T>
  EntryRows<T> array(const AttentionAddresses& addresses, AttentionTensor id,
                     AttentionTensor offsets, int64_t stride, int64_t rows, int64_t distance,
                     int64_t dim) const {
    const int elements = static_cast<int>(dim);
    if (shape_.even)
      return {address<T>(addresses, id), nullptr, stride, shape_.batch, 0, distance, elements};
    return {address<T>(addresses, id),
            address<const int64_t>(addresses, offsets),
            stride,
            shape_.batch,
            rows,
            0,
            elements};
  }
  EntryRows<float> sums(float* data, int64_t dim, int64_t longest) const {
    return {data, nullptr, shape_.heads * dim, shape_.batch, 0, longest, static_cast<int>(dim)};
  }

  Arguments common(const AttentionAddresses& addresses) const {
    const AttentionGraphShape& s = shape_;
    Arguments a;
    const auto of_queries = [&]<class T>(EntryRows<T>& to, Id id, Id offsets, int64_t stride,
                                         int64_t distance, int64_t dim) {
      to = array<T>(addresses, id, offsets, stride, reached_q(), distance, dim);
    };
    const auto of_keys = [&]<class T>(EntryRows<T>& to, Id id, Id offsets, int64_t stride,
                                      int64_t dim) {
      to = array<T>(addresses, id, offsets, stride, reached_k(), s.k_distance, dim);
    };
    of_queries(a.q, Id::q, Id::q_offsets, s.q_stride, s.q_distance, s.head_dim);
    of_keys(a.k, Id::k, Id::k_offsets, s.k_stride, s.head_dim);
    of_keys(a.v, Id::v, Id::v_offsets, s.v_stride, s.value_dim);
    of_queries(a.out, Id::out, Id::out_offsets, s.out_stride, s.out_distance, s.value_dim);
    of_queries(a.lse, Id::lse, Id::lse_offsets, s.lse_stride, s.out_distance, 1);
    a.lse_by_head = s.even && s.backward;
    if (!s.even) {
      a.q_lengths = address<const int32_t>(addresses, Id::q_lengths);
      a.k_lengths = address<const int32_t>(addresses, Id::k_lengths);
    }
    a.mask = s.mask;
    a.window = s.window;
    a.heads = static_cast<int>(s.heads);
    a.group = static_cast<int>(group());
    a.head_dim = static_cast<int>(s.head_dim);
    a.value_dim = static_cast<int>(s.value_dim);
    a.longest_q = s.longest_q;
    a.longest_k = s.longest_k;
    a.scale = s.scale;
    a.dropped = asked_.dropped.data();
    a.multiplies_masked_rows = asked_.multiplies_masked_rows;
    return a;
  }

  void run(void (*kernel)(Arguments), const Arguments& a) const {
    launch({{static_cast<unsigned>(shape_.batch), static_cast<unsigned>(shape_.heads)},
            threads,
            stream_},
           kernel, a);
  }

  template <class T>
  void spoil_behind(const EntryRows<T>& array, const int32_t* lengths, int64_t columns) const {
    if (shape_.even) return;
    launch({static_cast<unsigned>(shape_.batch), threads, stream_}, spoil<T>, array, lengths,
           columns);
  }

  void forward(Arguments& a, float* workspace) const {
    a.maxima = workspace;
    spoil_behind(a.out, a.q_lengths, out_columns());
    spoil_behind(a.lse, a.q_lengths, shape_.heads);
    run(find_maxima, a);
    run(add_values, a);
  }

  void backward(Arguments& a, const AttentionAddresses& addresses, float* workspace) const {
    const AttentionGraphShape& s = shape_;
    a.d_out = array<const bf16>(addresses, Id::d_out, Id::d_out_offsets, s.d_out_stride,
                                reached_q(), s.q_distance, s.value_dim);
    a.d_q = array<bf16>(addresses, Id::d_q, Id::d_q_offsets, s.d_q_stride, reached_q(),
                        s.d_q_distance, s.head_dim);
    const bool as_keys = !s.even && group() == 1;
    const auto gradient = [&](Id id, Id own, Id of, int64_t stride, int64_t dim) {
      return array<bf16>(addresses, id, as_keys ? of : own, as_keys ? stride : s.kv_heads * dim,
                         reached_k(), s.longest_k, dim);
    };
    a.d_k = gradient(Id::d_k, Id::d_k_offsets, Id::k_offsets, s.k_stride, s.head_dim);
    a.d_v = gradient(Id::d_v, Id::d_v_offsets, Id::v_offsets, s.v_stride, s.value_dim);
    a.delta = sums(workspace, 1, s.longest_q);
    a.q_sums = sums(a.delta.data + delta_size(), s.head_dim, s.longest_q);
    a.k_sums = sums(a.q_sums.data + q_sums_size(), s.head_dim, s.longest_k);
    a.v_sums = sums(a.k_sums.data + k_sums_size(), s.value_dim, s.longest_k);
    spoil_behind(a.d_q, a.q_lengths, q_columns());
    spoil_behind(a.d_k, a.k_lengths, k_columns());
    spoil_behind(a.d_v, a.k_lengths, v_columns());
    run(find_delta, a);
    run(query_gradients, a);
    run(key_sums, a);
    run(key_gradients, a);
  }

  AttentionGraphShape shape_;
  PlainAttention& asked_;
  CUstream_st* stream_;
};

class Library final : public AttentionLibrary {
 public:
  Library(Stream& stream, PlainAttention& asked) : asked_(asked), stream_(cuda_handle(stream)) {
    asked_.dropped = Buffer<int32_t>(1, MemorySpace::device);
    stream.fill(asked_.dropped.data(), std::byte{0}, sizeof(int32_t));
  }
  std::string name() const override { return "plain"; }
  bool multiplies_masked_rows(const AttentionGraphShape&) override { return asked_.says_so; }
  int64_t least_even_queries() const override { return asked_.least_even_queries; }

  std::unique_ptr<AttentionGraph> build(const AttentionGraphShape& shape,
                                        std::string& problem) override {
    PlainAttention::Calls& calls = shape.backward ? asked_.backward : asked_.forward;
    ++calls.asked;
    problem = problem_of(shape);
    if (problem.empty() && asked_.refuses) problem = asked_.refuses(shape);
    if (!problem.empty()) return nullptr;
    ++calls.built;
    asked_.largest_batch = std::max(asked_.largest_batch, shape.batch);
    return std::make_unique<Graph>(shape, asked_, stream_);
  }

 private:
  std::string problem_of(const AttentionGraphShape& s) const {
    GYRE_CHECK(s.heads > 0 && s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.batch > 0 &&
                   s.longest_q > 0 && s.longest_k > 0,
               "{} heads over {}, {} entries of up to {} and {} rows", s.heads, s.kv_heads, s.batch,
               s.longest_q, s.longest_k);
    const int64_t q_columns = s.heads * s.head_dim, out_columns = s.heads * s.value_dim;
    const auto wrong = [](int64_t stride, int64_t columns) {
      return stride < columns || stride % 8 != 0;  // 16 bytes
    };
    GYRE_CHECK(s.lse_stride >= s.heads || (s.even && s.backward), "a stride of {} for {} heads",
               s.lse_stride, s.heads);
    for (const int64_t dim : {s.head_dim, s.value_dim})
      if (dim <= 0 || dim > max_head_dim) return "head_dim";
    if (wrong(s.q_stride, q_columns) || wrong(s.out_stride, out_columns))
      return "stride of queries";
    if (wrong(s.k_stride, s.kv_heads * s.head_dim) || wrong(s.v_stride, s.kv_heads * s.value_dim))
      return "stride of keys";
    if (!s.backward) return "";
    if (wrong(s.d_out_stride, out_columns) || wrong(s.d_q_stride, q_columns))
      return "stride of gradients";
    return s.deterministic && !asked_.ordered_gradients ? "no fixed order" : "";
  }

  PlainAttention& asked_;
  CUstream_st* stream_;
};

}  // namespace

std::unique_ptr<AttentionLibrary> make_plain_attention(Stream& stream, PlainAttention& asked) {
  return std::make_unique<Library>(stream, asked);
}

}  // namespace gyre::test

#include "attention/kernels/cuda_finite_rows.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "core/bf16.hpp"
#include "core/special_values.hpp"
#include "runtime/buffer.hpp"

namespace gyre {
namespace {

/// Probe of two entries, [0, 100) and [120, 128), with NaN in the rows between them.
constexpr int64_t probe_rows = 128, gap_begin = 100, gap_end = 120;

template <class T>
T element_of(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return to_bf16(x);
}

/// Rows of one head: all ones, with NaN in the gap.
template <class T>
class ProbeArray {
 public:
  ProbeArray(int64_t columns, Stream& stream) : stream_(stream), host_(probe_rows * columns) {
    for (int64_t i = 0; i < host_.size(); ++i)
      host_[i] = element_of<T>(in_gap(i / columns) ? nan_of<float> : 1);
    device_ = Buffer<T>(host_.size(), MemorySpace::device);
    stream.copy(device_.data(), host_.data(), bytes());
  }
  T* data() { return device_.data(); }
  /// Submits the copy to the host.
  void fetch() { stream_.copy(host_.data(), device_.data(), bytes()); }
  /// Whether the fetched rows of entries are finite.
  bool is_finite() const {
    for (int64_t i = 0; i < host_.size(); ++i)
      if (!in_gap(i / (host_.size() / probe_rows)) && !std::isfinite(to_float(host_[i])))
        return false;
    return true;
  }

 private:
  static bool in_gap(int64_t row) { return gap_begin <= row && row < gap_end; }
  size_t bytes() const { return host_.size() * sizeof(T); }
  Stream& stream_;
  Buffer<T> host_, device_;
};

template <class T>
Buffer<T> on_device(const std::vector<T>& values, Stream& stream) {
  Buffer<T> copy(std::ssize(values), MemorySpace::device);
  stream.copy(copy.data(), values.data(), values.size() * sizeof(T));
  return copy;
}

/// Shape of the probe, with one head.
AttentionGraphShape probed(const AttentionGraphShape& shape) {
  AttentionGraphShape one;
  one.backward = shape.backward;
  one.mask = shape.mask;
  one.window = shape.window;
  one.deterministic = shape.deterministic;
  one.heads = one.kv_heads = one.lse_stride = 1;
  one.batch = 2;
  one.head_dim = shape.head_dim;
  one.value_dim = shape.value_dim;
  one.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  one.longest_q = one.longest_k = probe_rows;
  one.q_stride = one.k_stride = one.d_q_stride = shape.head_dim;
  one.v_stride = one.out_stride = one.d_out_stride = shape.value_dim;
  return one;
}

}  // namespace

bool find_masked_products(AttentionLibrary& library, const AttentionGraphShape& shape,
                          Stream& stream) {
  using enum AttentionTensor;
  std::string problem;
  const auto graph = library.build(probed(shape), problem);
  if (graph == nullptr) return false;
  const auto offsets = [&](int64_t stride) {
    return on_device(std::vector<int64_t>{0, gap_end * stride, probe_rows * stride}, stream);
  };
  const Buffer<int32_t> lengths =
      on_device(std::vector<int32_t>{gap_begin, probe_rows - gap_end}, stream);
  const Buffer<int64_t> of_keys = offsets(shape.head_dim), of_values = offsets(shape.value_dim),
                        of_sums = offsets(1);
  AttentionAddresses addresses;
  for (const AttentionTensor id : {q_lengths, k_lengths})
    addresses[id] = const_cast<int32_t*>(lengths.data());
  for (const AttentionTensor id : {q_offsets, k_offsets, d_q_offsets, d_k_offsets})
    addresses[id] = const_cast<int64_t*>(of_keys.data());
  for (const AttentionTensor id : {v_offsets, out_offsets, d_out_offsets, d_v_offsets})
    addresses[id] = const_cast<int64_t*>(of_values.data());
  addresses[lse_offsets] = const_cast<int64_t*>(of_sums.data());
  std::map<AttentionTensor, ProbeArray<bf16>> arrays;
  for (const AttentionTensor id : {q, k, d_q, d_k})
    addresses[id] = arrays.try_emplace(id, shape.head_dim, stream).first->second.data();
  for (const AttentionTensor id : {v, out, d_out, d_v})
    addresses[id] = arrays.try_emplace(id, shape.value_dim, stream).first->second.data();
  ProbeArray<float> sums(1, stream);
  addresses[lse] = sums.data();
  Buffer<std::byte> workspace(std::max<int64_t>(1, graph->workspace_bytes()), MemorySpace::device);
  graph->execute(addresses, workspace.data());
  for (auto& [id, array] : arrays) array.fetch();
  sums.fetch();
  stream.synchronize();
  const bool finite =
      std::ranges::all_of(arrays, [](const auto& array) { return array.second.is_finite(); });
  return !finite || !sums.is_finite();
}

ConstMatrixRef FiniteCopies::of(AttentionTensor id, ConstMatrixRef m, const DeviceRound& outside) {
  if (m.empty()) return m;
  const int64_t element = size_of(m.type);
  const int64_t bytes = ((m.rows - 1) * m.stride + m.cols) * element;
  std::byte* const copy = memory_[id].at_least(bytes);
  stream_.copy(copy, m.data, bytes);
  cuda_fill_rows(outside, {copy, m.type, m.rows, m.cols, m.stride}, 0, stream_);
  bytes_ += 2 * bytes;
  return {copy, m.type, m.rows, m.cols, m.stride};
}

}  // namespace gyre

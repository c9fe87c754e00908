#pragma once
// Access of the tiled kernels to their results: a lane has adjacent columns of a row in pairs,
// which are accessed at once if the row is aligned.

#include "attention/kernels/cuda_tile_code.cuh"

namespace gyre {

/// Two adjacent elements of a row, accessed at once.
template <class T>
struct alignas(2 * sizeof(T)) Neighbours {
  T x[2];
};
__device__ inline void store(float& to, float x) {
  to = x;
}
__device__ inline void store(bf16& to, float x) {
  to = to_bf16(x);
}

/// Columns from `begin` on of one head of an output.
struct OutputHead {
  DeviceOutput to;
  int head, dim, begin;  ///< heads of `dim` elements

  /// Calls f(n, e, element) for the element of each of the lane's sums in row lane.row[which].
  template <int columns, class F>
  __device__ __forceinline__ void read(const LaneRows& lane, int which, F f) const {
    access<true, false, columns>(lane, which, f);
  }
  /// Stores f(n, e) for each of the lane's sums in row lane.row[which].
  template <int columns, class F>
  __device__ __forceinline__ void write(const LaneRows& lane, int which, F f) const {
    access<false, true, columns>(lane, which, [&](int n, int e, float& x) { x = f(n, e); });
  }
  /// Adds factor · sums to row lane.row[which].
  template <int columns>
  __device__ __forceinline__ void add(const LaneRows& lane, int which, const Sums<columns>& sums,
                                      float factor) const {
    access<true, true, columns>(lane, which,
                                [&](int n, int e, float& x) { x = fmaf(factor, sums[n][e], x); });
  }

 private:
  /// f(n, e, x): x holds the element if `reads`, and its new value is stored if `writes`.
  template <bool reads, bool writes, int columns, class F>
  __device__ __forceinline__ void access(const LaneRows& lane, int which, F f) const {
    const int64_t at = lane.row[which] * to.stride + int64_t{head} * dim + begin;
    if (to.narrow)
      access_row<reads, writes, columns>(static_cast<bf16*>(to.data) + at, which, f);
    else
      access_row<reads, writes, columns>(static_cast<float*>(to.data) + at, which, f);
  }
  template <bool reads, bool writes, int columns, class T, class F>
  __device__ __forceinline__ void access_row(T* row, int which, F f) const {
    const LanePlace place;
    T* const own = row + 2 * place.t;
    const int left = dim - begin - 2 * place.t;  // columns from `own` on
    if (left % 2 == 0 && reinterpret_cast<uintptr_t>(own) % sizeof(Neighbours<T>) == 0) {
      GYRE_UNROLL
      for (int n = 0; n < columns / 8; ++n)
        if (8 * n < left)
          access_all<reads, writes>(*reinterpret_cast<Neighbours<T>*>(own + 8 * n), n, 2 * which,
                                    f);
    } else {
      for_row_sums<columns>(which, [&](int n, int e) {
        if (8 * n + e % 2 < left) access_all<reads, writes>(own[8 * n + e % 2], n, e, f);
      });
    }
  }
  template <bool reads, bool writes, class T, class F>
  __device__ __forceinline__ static void access_all(Neighbours<T>& both, int n, int e, F f) {
    Neighbours<T> mine;
    if constexpr (reads) mine = both;
    access_all<reads, writes>(mine.x[0], n, e, f);
    access_all<reads, writes>(mine.x[1], n, e + 1, f);
    if constexpr (writes) both = mine;
  }
  template <bool reads, bool writes, class T, class F>
  __device__ __forceinline__ static void access_all(T& element, int n, int e, F f) {
    float x = 0;
    if constexpr (reads) x = to_float(element);
    f(n, e, x);
    if constexpr (writes) store(element, x);
  }
};

}  // namespace gyre

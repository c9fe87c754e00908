#include "baselines/upstream_passes.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "baselines/upstream_passes.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "runtime/exp-inl.hpp"
#include "runtime/parallel.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::upstream::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
using U = hn::RebindToUnsigned<F>;
using Half = hn::Rebind<uint16_t, F>;
constexpr int64_t max_lanes = HWY_MAX_BYTES / sizeof(float);

int64_t lanes() {
  return hn::Lanes(F());
}

/// Loads min(count, lanes) elements and pads with `fill`. Whole vectors need no copy.
HWY_INLINE V load(const float* from, int64_t count, float fill = 0) {
  const F f;
  if (count >= lanes()) return hn::LoadU(f, from);
  HWY_ALIGN float padded[max_lanes];
  std::fill_n(padded, max_lanes, fill);
  std::memcpy(padded, from, count * sizeof(float));
  return hn::Load(f, padded);
}

HWY_INLINE void store(V v, float* to, int64_t count) {
  const F f;
  if (count >= lanes()) return hn::StoreU(v, f, to);
  HWY_ALIGN float padded[max_lanes];
  hn::Store(v, f, padded);
  std::memcpy(to, padded, count * sizeof(float));
}

template <class Op>
HWY_INLINE void transform(const float* a, float* out, int64_t count, Op op) {
  for (int64_t i = 0; i < count; i += lanes())
    store(op(load(a + i, count - i)), out + i, count - i);
}

template <class Op>
HWY_INLINE void transform(const float* a, const float* b, float* out, int64_t count, Op op) {
  for (int64_t i = 0; i < count; i += lanes())
    store(op(load(a + i, count - i), load(b + i, count - i)), out + i, count - i);
}

void exp_row(const float* a, float* out, int64_t count) {
  transform(a, out, count, [](V x) HWY_ATTR { return gyre::HWY_NAMESPACE::exp_f32(F(), x); });
}

void negate_row(const float* a, float* out, int64_t count) {
  transform(a, out, count, [](V x) HWY_ATTR { return hn::Neg(x); });
}

void map_row(RowMap op, const float* a, float s_, float* out, int64_t count) {
  const V s = hn::Set(F(), s_);
  if (op == RowMap::subtract)
    transform(a, out, count, [s](V x) HWY_ATTR { return hn::Sub(x, s); });
  else if (op == RowMap::multiply)
    transform(a, out, count, [s](V x) HWY_ATTR { return hn::Mul(x, s); });
  else
    transform(a, out, count, [s](V x) HWY_ATTR { return hn::Div(x, s); });
}

/// The product x y, but 0 where x is 0, whatever y is.
HWY_INLINE V selected_product(V x, V y) {
  const V zero = hn::Zero(F());
  return hn::IfThenElse(hn::Eq(x, zero), zero, hn::Mul(x, y));
}

void zip_row(Zip op, const float* a, const float* b, float* out, int64_t count) {
  if (op == Zip::subtract)
    transform(a, b, out, count, [](V x, V y) HWY_ATTR { return hn::Sub(x, y); });
  else
    transform(a, b, out, count, [](V x, V y) HWY_ATTR { return selected_product(x, y); });
}

float max_row(const float* a, int64_t count) {
  const F f;
  constexpr float least = -std::numeric_limits<float>::infinity();
  V first = hn::Set(f, least), second = first;
  const int64_t n = lanes();
  int64_t i = 0;
  for (; i + 2 * n <= count; i += 2 * n) {
    first = hn::Max(hn::LoadU(f, a + i), first);
    second = hn::Max(hn::LoadU(f, a + i + n), second);
  }
  for (; i < count; i += n) first = hn::Max(load(a + i, count - i, least), first);
  return hn::GetLane(hn::MaxOfLanes(f, hn::Max(first, second)));
}

/// Σ term(i, number of elements left from i on), in f32 within a run and in f64 over the runs.
template <class Term>
HWY_INLINE double sum_of(int64_t count, Term term) {
  const F f;
  const int64_t n = lanes(), run = 256 * max_lanes;
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += run) {
    const int64_t end = std::min(begin + run, count);
    V a = hn::Zero(f), b = a, c = a, d = a;
    int64_t i = begin;
    for (; i + 4 * n <= end; i += 4 * n) {
      a = hn::Add(a, term(i, n));
      b = hn::Add(b, term(i + n, n));
      c = hn::Add(c, term(i + 2 * n, n));
      d = hn::Add(d, term(i + 3 * n, n));
    }
    for (; i < end; i += n) a = hn::Add(a, term(i, end - i));
    total += hn::GetLane(hn::SumOfLanes(f, hn::Add(hn::Add(a, b), hn::Add(c, d))));
  }
  return total;
}

double sum_row(const float* a, int64_t count) {
  return sum_of(count, [a](int64_t i, int64_t left) HWY_ATTR { return load(a + i, left); });
}

double dot_row(const float* a, const float* b, int64_t count) {
  return sum_of(count, [a, b](int64_t i, int64_t left) HWY_ATTR {
    return selected_product(load(a + i, left), load(b + i, left));
  });
}

void widen_row(const bf16* a, float* out, int64_t count) {
  const auto* bits = reinterpret_cast<const uint16_t*>(a);
  const int64_t n = lanes();
  int64_t i = 0;
  for (; i + n <= count; i += n)
    hn::StoreU(hn::BitCast(F(), hn::ShiftLeft<16>(hn::PromoteTo(U(), hn::LoadU(Half(), bits + i)))),
               F(), out + i);
  for (; i < count; ++i) out[i] = gyre::to_float(a[i]);
}

/// Vectorised to_bf16 of core/bf16.hpp.
void narrow_row(const float* a, bf16* out, int64_t count) {
  const U u;
  const hn::RebindToSigned<U> s;
  auto* bits = reinterpret_cast<uint16_t*>(out);
  const int64_t n = lanes();
  int64_t i = 0;
  for (; i + n <= count; i += n) {
    const auto v = hn::LoadU(F(), a + i);
    const auto x = hn::BitCast(u, v);
    const auto upper = hn::ShiftRight<16>(x);
    const auto odd = hn::And(upper, hn::Set(u, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(x, hn::Add(odd, hn::Set(u, 0x7fff))));
    const auto quiet = hn::Or(upper, hn::Set(u, 0x40));
    const auto result = hn::IfThenElse(hn::RebindMask(u, hn::IsNaN(v)), quiet, rounded);
    hn::StoreU(hn::DemoteTo(Half(), hn::BitCast(s, result)), Half(), bits + i);
  }
  for (; i < count; ++i) out[i] = to_bf16(a[i]);
}

}  // namespace
}  // namespace gyre::upstream::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::upstream {
namespace {

HWY_EXPORT(exp_row);
HWY_EXPORT(negate_row);
HWY_EXPORT(map_row);
HWY_EXPORT(zip_row);
HWY_EXPORT(max_row);
HWY_EXPORT(sum_row);
HWY_EXPORT(dot_row);
HWY_EXPORT(widen_row);
HWY_EXPORT(narrow_row);

/// Calls work(row) for each row of `out`, distributed over threads; a column takes about 0.2 ns.
template <class Matrix, class Work>
void for_each_row(const Matrix& out, int threads, Work work) {
  const double nanoseconds = 0.2 * out.cols + 10;
  for_each_part(threads, out.rows, nanoseconds, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) work(r);
  });
}

size_t at(int64_t i) {
  return i;
}

}  // namespace

void apply(Map f, MatrixView<const float> a, MatrixView<float> out, int threads) {
  const auto exp = HWY_DYNAMIC_DISPATCH(exp_row);
  const auto negate = HWY_DYNAMIC_DISPATCH(negate_row);
  for_each_row(out, threads, [&](int64_t r) {
    if (f == Map::copy)
      std::copy_n(a.row(r), a.cols, out.row(r));
    else
      (f == Map::exp ? exp : negate)(a.row(r), out.row(r), a.cols);
  });
}

void apply(RowMap op, MatrixView<const float> a, std::span<const float> s, MatrixView<float> out,
           int threads) {
  const auto work = HWY_DYNAMIC_DISPATCH(map_row);
  for_each_row(out, threads, [&](int64_t r) { work(op, a.row(r), s[at(r)], out.row(r), a.cols); });
}

void apply(Zip op, MatrixView<const float> a, MatrixView<const float> b, MatrixView<float> out,
           int threads) {
  const auto work = HWY_DYNAMIC_DISPATCH(zip_row);
  for_each_row(out, threads, [&](int64_t r) { work(op, a.row(r), b.row(r), out.row(r), a.cols); });
}

void reduce(Reduction f, MatrixView<const float> a, std::span<float> out, int threads) {
  const auto max = HWY_DYNAMIC_DISPATCH(max_row);
  const auto sum = HWY_DYNAMIC_DISPATCH(sum_row);
  for_each_row(a, threads, [&](int64_t r) {
    out[at(r)] =
        f == Reduction::max ? max(a.row(r), a.cols) : static_cast<float>(sum(a.row(r), a.cols));
  });
}

void dot(MatrixView<const float> a, MatrixView<const float> b, std::span<float> out, int threads) {
  const auto work = HWY_DYNAMIC_DISPATCH(dot_row);
  for_each_row(a, threads, [&](int64_t r) {
    out[at(r)] = static_cast<float>(work(a.row(r), b.row(r), a.cols));
  });
}

void widen(MatrixView<const bf16> a, MatrixView<float> out, int threads) {
  const auto work = HWY_DYNAMIC_DISPATCH(widen_row);
  for_each_row(out, threads, [&](int64_t r) { work(a.row(r), out.row(r), a.cols); });
}

void narrow(MatrixView<const float> a, MatrixView<bf16> out, int threads) {
  const auto work = HWY_DYNAMIC_DISPATCH(narrow_row);
  for_each_row(out, threads, [&](int64_t r) { work(a.row(r), out.row(r), a.cols); });
}

void one_hot(std::span<const int64_t> ids, MatrixView<int64_t> out, int threads) {
  for_each_row(out, threads, [&](int64_t r) {
    std::fill_n(out.row(r), out.cols, 0);
    if (out.cols > 0) out(r, ids[at(r)]) = 1;
  });
}

void multiply_rows(MatrixView<const int64_t> a, std::span<const int64_t> s, MatrixView<int64_t> out,
                   int threads) {
  for_each_row(out, threads, [&](int64_t r) {
    const int64_t factor = s[at(r)];
    const int64_t* from = a.row(r);
    int64_t* to = out.row(r);
    for (int64_t c = 0; c < a.cols; ++c) to[c] = from[c] * factor;
  });
}

void to_float(MatrixView<const int64_t> a, MatrixView<float> out, int threads) {
  for_each_row(out, threads, [&](int64_t r) {
    const int64_t* from = a.row(r);
    float* to = out.row(r);
    // By way of int32, which holds 0 and 1: every instruction set converts int32 vectors to f32.
    for (int64_t c = 0; c < a.cols; ++c) to[c] = static_cast<float>(static_cast<int32_t>(from[c]));
  });
}

void clear(MatrixRef out, int threads) {
  for_each_row(out, threads, [&](int64_t r) {
    const int64_t size = size_of(out.type);
    std::fill_n(out.data + r * out.stride * size, out.cols * size, std::byte{0});
  });
}

}  // namespace gyre::upstream
#endif

#pragma once
// Test problems for an attention kernel, their results by the double-precision
// reference, and the comparison of a kernel's results with them. Rows that no
// rectangle covers, and gaps between rows, are NaN and must stay unchanged.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "attention/tolerance.hpp"
#include "core/bf16.hpp"
#include "core/tolerance.hpp"
#include "gpu_test.hpp"

namespace gyre::test::attention_kernel {

inline constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
inline constexpr float infinity = std::numeric_limits<float>::infinity();

inline Rectangle full(int64_t q, int64_t rows, int64_t k, int64_t keys) {
  return {q, rows, k, keys, {}};
}
inline Rectangle causal(int64_t q, int64_t rows, int64_t k, int64_t keys, int64_t offset,
                        int64_t window = 0, int64_t q_stride = 1, int64_t k_stride = 1) {
  return {q, rows, k, keys, {true, offset, q_stride, k_stride, window}};
}
inline BlockHeads heads_of(int64_t heads, int64_t kv_heads, int64_t dim, int64_t v_dim = 0) {
  return {heads, kv_heads, dim, heads / kv_heads, 0, 1 / std::sqrt(static_cast<float>(dim)), v_dim};
}

/// A matrix of f32 or bf16 on the host with gaps between rows; starts as NaN.
class Matrix {
 public:
  Matrix() = default;
  Matrix(DType type, int64_t rows, int64_t cols, int64_t gap)
      : type_(type),
        rows_(rows),
        cols_(cols),
        stride_(cols + gap),
        bytes_(static_cast<size_t>(rows * stride_) * size_of(type)) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < stride_; ++c) set(r, c, nan_value);
  }
  void set(int64_t r, int64_t c, float x) {
    const int64_t at = r * stride_ + c;
    if (type_ == DType::f32)
      reinterpret_cast<float*>(bytes_.data())[at] = x;
    else
      reinterpret_cast<bf16*>(bytes_.data())[at] = to_bf16(x);
  }
  void fill_row(int64_t r, float x) {
    for (int64_t c = 0; c < cols_; ++c) set(r, c, x);
  }
  /// Standard normal numbers in rows that are still NaN.
  void fill(int64_t begin, int64_t count, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t r = begin; r < begin + count; ++r)
      if (std::isnan((*this)(r, 0)))
        for (int64_t c = 0; c < cols_; ++c) set(r, c, normal(random));
  }
  MatrixRef ref() { return {bytes_.data(), type_, rows_, cols_, stride_}; }
  ConstMatrixRef ref() const { return {bytes_.data(), type_, rows_, cols_, stride_}; }
  MatrixView<float> view() { return ref().as<float>(); }
  float operator()(int64_t r, int64_t c) const { return ref().at(r, c); }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t stride() const { return stride_; }
  DType type() const { return type_; }
  std::vector<std::byte>& bytes() { return bytes_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  friend bool operator==(const Matrix& a, const Matrix& b) { return a.bytes_ == b.bytes_; }

 private:
  DType type_ = DType::f32;
  int64_t rows_ = 0, cols_ = 0, stride_ = 0;
  std::vector<std::byte> bytes_;
};

struct Types {
  DType inputs = DType::f32, out = DType::f32, d_q = DType::f32;
};
struct Forward {
  Matrix out, lse;
  friend bool operator==(const Forward&, const Forward&) = default;
};
struct Backward {
  Matrix d_q, d_kv;
  friend bool operator==(const Backward&, const Backward&) = default;
};
struct Wanted {
  bool queries = true, keys = true;
  bool overwrite = false;
  bool with_out = false;  ///< the output of the forward pass is at hand
};

/// Random queries, keys, values and output gradients in the rows that
/// rectangles cover; NaN elsewhere. Keys and values are interleaved by token.
struct Problem {
  Problem(BlockHeads heads_, int64_t rows_, int64_t keys_, std::vector<Rectangle> rectangles_,
          Types types_ = {}, int64_t gap = 8)
      : heads(heads_),
        rows(rows_),
        keys(keys_),
        types(types_),
        rectangles(std::move(rectangles_)),
        q(types.inputs, rows, heads.heads * heads.head_dim, gap),
        kv(types.inputs, keys, k_width() + v_width(), 0),
        d_out(types.inputs, rows, heads.heads * heads.value_dim(), gap) {
    std::mt19937 random(31);
    for (const Rectangle& r : rectangles) {
      q.fill(r.q_begin, r.q_length, random);
      d_out.fill(r.q_begin, r.q_length, random);
      kv.fill(r.k_begin, r.k_length, random);
    }
  }
  int64_t k_width() const { return heads.kv_heads * heads.head_dim; }
  int64_t v_width() const { return heads.kv_heads * heads.value_dim(); }

  /// Empty partial results in rows that rectangles cover; NaN elsewhere.
  Forward cleared(DType out_type) const {
    Forward result{{out_type, rows, d_out.cols(), 3}, {DType::f32, rows, heads.heads, 1}};
    for (const Rectangle& r : rectangles)
      for (int64_t i = 0; i < r.q_length; ++i) {
        result.out.fill_row(r.q_begin + i, 0);
        result.lse.fill_row(r.q_begin + i, -infinity);
      }
    return result;
  }
  Forward cleared() const { return cleared(types.out); }
  /// Zero in rows that rectangles cover; NaN elsewhere.
  Backward no_gradients(DType d_q_type) const {
    Backward result{{d_q_type, rows, q.cols(), 2}, {DType::f32, keys, kv.cols(), 1}};
    for (const Rectangle& r : rectangles) {
      for (int64_t i = 0; i < r.q_length; ++i) result.d_q.fill_row(r.q_begin + i, 0);
      for (int64_t j = 0; j < r.k_length; ++j) result.d_kv.fill_row(r.k_begin + j, 0);
    }
    return result;
  }
  Backward no_gradients() const { return no_gradients(types.d_q); }

  template <class Block>
  void fill(Block& block, MatrixRef q_ref, MatrixRef kv_ref,
            std::span<const Rectangle> some) const {
    block.heads = heads;
    block.q = q_ref;
    block.k = kv_ref.columns_from(0, k_width());
    block.v = kv_ref.columns_from(k_width(), v_width());
    block.rectangles = some;
    block.fixed_tiles = fixed_tiles;
    block.progress = progress;
  }
  Matrix delta_of(const Forward& of) const {
    Matrix delta(DType::f32, rows, heads.heads, 0);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < heads.heads; ++h) {
        double sum = 0;
        for (int64_t d = h * heads.value_dim(); d < (h + 1) * heads.value_dim(); ++d)
          sum += static_cast<double>(of.out(r, d)) * static_cast<double>(d_out(r, d));
        delta.set(r, h, static_cast<float>(sum));
      }
    return delta;
  }

  BlockHeads heads;
  int64_t rows, keys;
  Types types;
  std::vector<Rectangle> rectangles;
  Matrix q, kv, d_out;
  bool fixed_tiles = false;
  std::function<void()> progress = {};
  double magnified = 1;      ///< size of scores, where it is large
  double gradient_term = 1;  ///< size of a term of a gradient
  /// Whether the kernel under test rounds the term that a rectangle adds to a result to bf16.
  bool narrow_partials = false;
  /// Whether the kernel under test rounds only what it stores. The reference then does the same.
  bool wide_inside = false;
};

inline Forward reference_forward(const Problem& p) {
  Forward result = p.cleared(p.wide_inside ? p.types.out : DType::f32);
  Matrix q = p.q, kv = p.kv;
  ForwardBlock block;
  p.fill(block, q.ref(), kv.ref(), p.rectangles);
  block.progress = {};
  block.out = result.out.ref();
  block.lse = result.lse.view();
  make_reference_kernel()->forward(block);
  return result;
}

inline Backward reference_backward(const Problem& p, const Forward& of) {
  Backward result = p.no_gradients(p.wide_inside ? p.types.d_q : DType::f32);
  Matrix q = p.q, kv = p.kv, d_out = p.d_out, lse = of.lse, delta = p.delta_of(of);
  BackwardBlock block;
  p.fill(block, q.ref(), kv.ref(), p.rectangles);
  block.progress = {};
  block.d_out = d_out.ref();
  block.lse = lse.view();
  block.delta = delta.view();
  block.d_q = result.d_q.ref();
  block.d_k = result.d_kv.view().columns_from(0, p.k_width());
  block.d_v = result.d_kv.view().columns_from(p.k_width(), p.v_width());
  make_reference_kernel()->backward(block);
  return result;
}

/// Largest error as a share of the tolerance, which is `tolerance` times the
/// rms of the reference's row, at least `least_rms`, plus the rounding of a
/// reference in bf16. Infinite if only one of result and reference is NaN, and
/// if a gap was written.
inline double worst_error(const Matrix& got, const Matrix& want, double tolerance,
                          double least_rms) {
  double worst = 0;
  for (int64_t r = 0; r < want.rows(); ++r) {
    double squares = 0;
    for (int64_t c = 0; c < want.cols(); ++c) squares += std::pow(want(r, c), 2);
    const double rms = std::max(std::sqrt(squares / static_cast<double>(want.cols())), least_rms);
    for (int64_t c = 0; c < want.stride(); ++c) {
      const auto x = static_cast<double>(got(r, c)), y = static_cast<double>(want(r, c));
      if (x == y || (std::isnan(x) && std::isnan(y))) continue;
      const double allowed =
          tolerance * (std::isnan(rms) ? 1 : rms) +
          (want.type() == DType::bf16 ? epsilon_of(DType::bf16) * std::abs(y) : 0);
      const double share = std::abs(x - y) / allowed;
      if (!(share <= worst)) worst = std::isnan(share) ? HUGE_VAL : share;
    }
  }
  return worst;
}

/// Tolerance that bf16 adds to that of f32: one rounding for each of
/// `roundings` whose type is bf16.
inline double with_narrow(double wide, int64_t roundings) {
  return std::hypot(wide, tolerance_for(DType::bf16, roundings));
}
inline int64_t narrow(const Problem& p, DType type) {
  return type == DType::bf16 && !p.wide_inside ? 1 : 0;
}

/// Number of a row's partial results in bf16. A kernel may split a rectangle into two parts that
/// share keys, but no query.
inline int64_t narrow_partials(const Problem& p, int64_t calls, int64_t parts) {
  return p.narrow_partials ? calls * std::ssize(p.rectangles) * parts : 0;
}

/// Largest error over tolerance of the result of `calls` calls. Weights are rounded to bf16 if
/// inputs are bf16; out and partial results if they are bf16 themselves.
inline double worst_error(const Problem& p, const Forward& got, const Forward& want,
                          int64_t calls = 1) {
  const auto merges = std::ssize(p.rectangles) + calls;
  const double wide = p.magnified * attention_tolerance(p.heads.head_dim, p.keys, merges);
  const int64_t stores = calls * (p.fixed_tiles ? merges : 1);
  const double out = with_narrow(wide, narrow(p, p.types.inputs) + stores * narrow(p, p.types.out) +
                                           narrow_partials(p, calls, 1));
  return std::max(worst_error(got.out, want.out, out, 0), worst_error(got.lse, want.lse, wide, 1));
}

/// The same for gradients. They are sums of terms of either sign, which may
/// cancel: errors are relative to the rms of the row, at least the size of a
/// term, 1 for standard normal inputs. Weights and their gradients are rounded
/// to bf16 if inputs are bf16; partial results as in the forward pass, and the
/// value that replaces out, once.
inline double worst_error(const Problem& p, const Backward& got, const Backward& want,
                          int64_t calls = 1) {
  const auto tolerance = [&](int64_t terms, int64_t partials) {
    const double wide =
        p.magnified * tolerance_for(DType::f32, p.heads.head_dim + p.heads.value_dim() + terms +
                                                    roundings_per_merge);
    return with_narrow(wide, narrow(p, p.types.inputs) + (partials > 0 ? partials + 1 : 0));
  };
  const int64_t stores = calls * (p.fixed_tiles ? std::ssize(p.rectangles) : 1);
  const double d_q =
      with_narrow(tolerance(p.keys, narrow_partials(p, calls, 1)), stores * narrow(p, p.types.d_q));
  const double d_kv = tolerance(p.rows * p.heads.group, narrow_partials(p, calls, 2));
  return std::max(worst_error(got.d_q, want.d_q, d_q, p.gradient_term),
                  worst_error(got.d_kv, want.d_kv, d_kv, p.gradient_term));
}

/// A kernel under test, and its calls with copies of a problem's arrays in the
/// stream's memory.
class KernelTest : public StreamTest {
 protected:
  MemorySpace space() const override { return MemorySpace::device; }
  void SetUp() override {
    StreamTest::SetUp();
    if (!IsSkipped()) kernel_ = make_kernel(stream());
  }
  virtual std::unique_ptr<BlockKernel> make_kernel(Stream& stream) = 0;
  BlockKernel& kernel() { return *kernel_; }
  /// The arguments of the last calls, whose arrays are gone.
  const ForwardBlock& last_forward() const { return last_forward_; }
  const BackwardBlock& last_backward() const { return last_backward_; }
  /// Whether the last backward call asked for delta.
  bool asked_for_delta() const { return asked_for_delta_; }
  void use(std::unique_ptr<BlockKernel> other) { kernel_ = std::move(other); }

  /// Device copy of a matrix, with the view of it.
  struct There {
    Buffer<std::byte> buffer;
    MatrixRef ref;
  };
  There send(const Matrix& m) {
    There there{to_device<std::byte>(m.bytes()), {}};
    there.ref = {there.buffer.data(), m.type(), m.rows(), m.cols(), m.stride()};
    return there;
  }
  void fetch(const There& there, Matrix& m) { m.bytes() = to_host(there.buffer); }

  void add(const Problem& p, std::span<const Rectangle> some, Forward& to, bool overwrite = false) {
    const There q = send(p.q), kv = send(p.kv), out = send(to.out), lse = send(to.lse);
    ForwardBlock& block = last_forward_ = {};
    p.fill(block, q.ref, kv.ref, some);
    block.overwrite = overwrite;
    block.out = out.ref;
    block.lse = lse.ref.as<float>();
    kernel().forward(block);
    fetch(out, to.out);
    fetch(lse, to.lse);
  }
  Forward forward(const Problem& p) {
    Forward result = p.cleared();
    add(p, p.rectangles, result);
    return result;
  }
  void add(const Problem& p, std::span<const Rectangle> some, const Forward& of, Backward& to,
           Wanted wanted = {}) {
    const There q = send(p.q), kv = send(p.kv), d_out = send(p.d_out), lse = send(of.lse),
                d_q = send(to.d_q), d_kv = send(to.d_kv), out = send(of.out);
    const Matrix delta_of_rows = p.delta_of(of);
    // NaN until a kernel asks for it, if it does.
    const There delta = send(kernel().asks_for_delta()
                                 ? Matrix(DType::f32, delta_of_rows.rows(), delta_of_rows.cols(), 0)
                                 : delta_of_rows);
    BackwardBlock& block = last_backward_ = {};
    p.fill(block, q.ref, kv.ref, some);
    block.d_out = d_out.ref;
    block.lse = lse.ref.as<float>();
    block.delta = delta.ref.as<float>();
    asked_for_delta_ = false;
    if (kernel().asks_for_delta())
      block.make_delta = [&] {
        const auto& bytes = delta_of_rows.bytes();
        stream().copy(delta.ref.data, bytes.data(), bytes.size());
        asked_for_delta_ = true;
      };
    block.overwrite_d_q = block.overwrite_d_kv = wanted.overwrite;
    if (wanted.with_out) block.out = out.ref;
    if (wanted.queries) block.d_q = d_q.ref;
    if (wanted.keys) {
      block.d_k = d_kv.ref.as<float>().columns_from(0, p.k_width());
      block.d_v = d_kv.ref.as<float>().columns_from(p.k_width(), p.v_width());
    }
    kernel().backward(block);
    fetch(d_q, to.d_q);
    fetch(d_kv, to.d_kv);
  }
  Backward backward(const Problem& p, const Forward& of, Wanted wanted = {}) {
    Backward result = p.no_gradients();
    add(p, p.rectangles, of, result, wanted);
    return result;
  }

  /// The kernel against the reference, forward and backward.
  void check(const Problem& p) {
    const Forward want = reference_forward(p);
    EXPECT_LE(worst_error(p, forward(p), want), 1) << "forward, share of the tolerance";
    EXPECT_LE(worst_error(p, backward(p, want), reference_backward(p, want)), 1)
        << "backward, share of the tolerance";
  }
  /// The same for a problem with one rectangle of all rows and keys, in three
  /// calls with a part of the keys each.
  void check_in_parts(const Problem& p) {
    const Forward want = reference_forward(p);
    Forward parts = p.cleared();
    Backward gradients = p.no_gradients();
    const int64_t last = p.keys - p.keys / 3;
    for (const auto& [begin, end] :
         {std::pair{last, p.keys}, {int64_t{0}, int64_t{1}}, {int64_t{1}, last}}) {
      const Rectangle part = full(0, p.rows, begin, end - begin);
      add(p, {&part, 1}, parts);
      add(p, {&part, 1}, want, gradients);
    }
    EXPECT_LE(worst_error(p, parts, want, 3), 1);
    EXPECT_LE(worst_error(p, gradients, reference_backward(p, want), 3), 1);
  }

 private:
  std::unique_ptr<BlockKernel> kernel_;
  ForwardBlock last_forward_;
  BackwardBlock last_backward_;
  bool asked_for_delta_ = false;
};

inline constexpr Types all_f32{}, all_bf16{DType::bf16, DType::bf16, DType::bf16},
    bf16_in{DType::bf16, DType::f32, DType::f32};

}  // namespace gyre::test::attention_kernel

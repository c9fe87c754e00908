#pragma once
// A block kernel for arrays of device memory that computes on the host, in double precision: what
// is wrong with it in the place of a device's kernel is not the kernel's fault.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "attention/array_ops.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "core/tolerance.hpp"
#include "runtime/host_copy.hpp"

namespace gyre::test {

/// With `can_overwrite`, calls may be fresh. The counters say how many were, and how many of the
/// backward calls had `out` at hand, whose product with d_out must be delta.
class DeviceReferenceKernel final : public BlockKernel {
 public:
  explicit DeviceReferenceKernel(Stream& stream, bool can_overwrite = false)
      : stream_(stream), can_overwrite_(can_overwrite) {}
  bool can_overwrite() const override { return can_overwrite_; }
  bool asks_for_delta() const override { return can_overwrite_; }
  int overwriting_forward = 0, overwrite_d_q = 0, overwrite_d_kv = 0, with_out = 0;

  void forward(const ForwardBlock& block) override {
    std::set<int64_t> queries =
        rows_of(block.rectangles, &Rectangle::q_begin, &Rectangle::q_length);
    EXPECT_TRUE(can_overwrite_ || !block.overwrite);
    ForwardBlock here = block;
    read_inputs(here);
    Result out(block.out, stream_), lse(MatrixRef(block.lse), stream_);
    here.out = out.matrix();
    here.lse = lse.matrix().as<float>();
    if (block.overwrite) {
      ++overwriting_forward;
      out.fill(0, queries);
      lse.fill(-std::numeric_limits<float>::infinity(), queries);
      here.overwrite = false;
    }
    kernel_->forward(here);
    out.write_back(queries);
    lse.write_back(queries);
    inputs_.clear();
  }

  void backward(const BackwardBlock& block) override {
    std::set<int64_t> queries =
        rows_of(block.rectangles, &Rectangle::q_begin, &Rectangle::q_length);
    std::set<int64_t> keys = rows_of(block.rectangles, &Rectangle::k_begin, &Rectangle::k_length);
    EXPECT_TRUE(can_overwrite_ || !(block.overwrite_d_q || block.overwrite_d_kv));
    EXPECT_TRUE(can_overwrite_ || !block.make_delta);
    if (block.make_delta) block.make_delta();
    BackwardBlock here = block;
    read_inputs(here);
    here.d_out = read(block.d_out);
    here.lse = read(block.lse).as<float>();
    here.delta = read(block.delta).as<float>();
    Result d_q(block.d_q, stream_), d_k(MatrixRef(block.d_k), stream_),
        d_v(MatrixRef(block.d_v), stream_);
    if (!block.d_q.empty()) here.d_q = d_q.matrix();
    if (block.d_k.data != nullptr) {
      here.d_k = d_k.matrix().as<float>();
      here.d_v = d_v.matrix().as<float>();
    }
    if (!block.out.empty()) {
      ++with_out;
      expect_delta(read(block.out), here, queries);
    }
    if (block.overwrite_d_q) {
      ++overwrite_d_q;
      d_q.fill(0, queries);
    }
    if (block.overwrite_d_kv) {
      ++overwrite_d_kv;
      d_k.fill(0, keys);
      d_v.fill(0, keys);
    }
    here.overwrite_d_q = here.overwrite_d_kv = false;
    here.out = {};
    kernel_->backward(here);
    d_q.write_back(queries);
    d_k.write_back(keys);
    d_v.write_back(keys);
    inputs_.clear();
  }

 private:
  /// A matrix that is read, changed and written back: its own columns of the rows that the call may
  /// change, because messages may be under way to others.
  class Result {
   public:
    Result(const MatrixRef& there, Stream& stream) : there_(there), stream_(stream) {
      if (!there.empty()) here_ = HostCopy(there, stream);
    }
    MatrixRef matrix() const {
      const ConstMatrixRef& m = here_.matrix();
      return {const_cast<std::byte*>(m.data), m.type, m.rows, m.cols, m.stride};
    }
    /// All rows, which are then to be written back.
    void fill(float value, std::set<int64_t>& rows) {
      const MatrixRef m = matrix();
      for (int64_t r = 0; r < m.rows; ++r) {
        rows.insert(r);
        for (int64_t c = 0; c < m.cols; ++c)
          if (m.type == DType::f32)
            m.as<float>()(r, c) = value;
          else
            m.as<bf16>()(r, c) = to_bf16(value);
      }
    }
    void write_back(const std::set<int64_t>& rows) {
      if (there_.empty()) return;
      const auto size = size_of(there_.type);
      for (const int64_t row : rows)
        stream_.copy(there_.data + row * there_.stride * size,
                     here_.matrix().data + row * there_.stride * size,
                     static_cast<size_t>(there_.cols * size));
      stream_.synchronize();
    }

   private:
    MatrixRef there_;
    Stream& stream_;
    HostCopy here_;
  };

  static void expect_delta(const ConstMatrixRef& out, const BackwardBlock& block,
                           const std::set<int64_t>& rows) {
    for (const int64_t r : rows)
      for (int64_t h = 0; h < block.heads.heads; ++h) {
        double sum = 0, size = 0;
        const int64_t dim = block.heads.value_dim();
        for (int64_t c = h * dim; c < (h + 1) * dim; ++c) {
          const double term = static_cast<double>(out.at(r, c)) * block.d_out.at(r, c);
          sum += term;
          size += std::abs(term);
        }
        if (std::isnan(sum) && std::isnan(block.delta(r, h))) continue;  // a part of a plan, alone
        EXPECT_NEAR(block.delta(r, h), sum, tolerance_for(DType::f32, dim) * size)
            << "delta of row " << r << ", head " << h;
      }
  }

  static std::set<int64_t> rows_of(std::span<const Rectangle> rectangles, int64_t Rectangle::*begin,
                                   int64_t Rectangle::*length) {
    std::set<int64_t> rows;
    for (const Rectangle& r : rectangles)
      for (int64_t i = 0; i < r.*length; ++i) rows.insert(r.*begin + i);
    return rows;
  }
  ConstMatrixRef read(const ConstMatrixRef& there) {
    return inputs_.emplace_back(there, stream_).matrix();
  }
  void read_inputs(BlockInput& block) {
    block.q = read(block.q);
    block.k = read(block.k);
    block.v = read(block.v);
  }

  Stream& stream_;
  bool can_overwrite_;
  std::unique_ptr<BlockKernel> kernel_ = make_reference_kernel();
  std::vector<HostCopy> inputs_;
};

}  // namespace gyre::test

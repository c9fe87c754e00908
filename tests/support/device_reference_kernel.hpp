#pragma once
// A block kernel for arrays of device memory that computes on the host, in double precision: what
// is wrong with it in the place of a device's kernel is not the kernel's fault.

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "attention/array_ops.hpp"
#include "attention/kernels/block_kernel.hpp"

namespace gyre::test {

class DeviceReferenceKernel final : public BlockKernel {
 public:
  explicit DeviceReferenceKernel(Stream& stream) : stream_(stream) {}

  void forward(const ForwardBlock& block) override {
    const std::set<int64_t> queries =
        rows_of(block.rectangles, &Rectangle::q_begin, &Rectangle::q_length);
    ForwardBlock here = block;
    read_inputs(here);
    Result out(block.out, stream_), lse(MatrixRef(block.lse), stream_);
    here.out = out.matrix();
    here.lse = lse.matrix().as<float>();
    kernel_->forward(here);
    out.write_back(queries);
    lse.write_back(queries);
    inputs_.clear();
  }

  void backward(const BackwardBlock& block) override {
    const std::set<int64_t> queries = rows_of(block.rectangles, &Rectangle::q_begin,
                                              &Rectangle::q_length),
                            keys = rows_of(block.rectangles, &Rectangle::k_begin,
                                           &Rectangle::k_length);
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
    void write_back(const std::set<int64_t>& rows) {
      if (there_.empty()) return;
      const auto size = static_cast<int64_t>(size_of(there_.type));
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

  static std::set<int64_t> rows_of(std::span<const Rectangle> rectangles,
                                   LocalToken Rectangle::*begin, int64_t Rectangle::*length) {
    std::set<int64_t> rows;
    for (const Rectangle& r : rectangles)
      for (int64_t i = 0; i < r.*length; ++i) rows.insert((r.*begin).value() + i);
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
  std::unique_ptr<BlockKernel> kernel_ = make_reference_kernel();
  std::vector<HostCopy> inputs_;
};

}  // namespace gyre::test

#pragma once
// Random problems for attention kernels, and the fixture of the tests of every kernel
// (attention_kernel_suite.hpp).

#include <algorithm>
#include <array>

#include "attention/kernels/cuda_kernel.hpp"
#include "attention_kernel_cases.hpp"
#include "backend_test.hpp"

namespace gyre::test::attention_kernel {

using Draw = std::function<int64_t(int64_t low, int64_t high)>;

/// Documents one after the other with gaps. Each has some rectangles, whose keys are theirs alone.
inline Problem random_problem(const Draw& draw, bool small) {
  const auto type = [&] { return draw(0, 1) == 0 ? DType::f32 : DType::bf16; };
  BlockHeads heads;
  heads.group = draw(1, 4);
  heads.kv_heads = draw(1, small ? 2 : 3);
  heads.skew = draw(0, heads.group - 1);
  heads.heads = draw(std::max<int64_t>(1, (heads.kv_heads - 1) * heads.group - heads.skew + 1),
                     heads.kv_heads * heads.group - heads.skew);
  const auto dim = [&] {
    return std::array<int64_t, 8>{5, 8, 16, 24, 32, 64, 80, 128}[draw(0, small ? 7 : 6)];
  };
  heads.head_dim = dim();
  if (draw(0, 2) == 0) heads.v_head_dim = dim();
  heads.scale = 1 / std::sqrt(static_cast<float>(heads.head_dim));
  std::vector<Rectangle> rectangles;
  int64_t row = draw(0, 3), key = draw(0, 3);
  for (int64_t documents = draw(1, small ? 3 : 4); documents > 0; --documents) {
    const bool is_short = !small && draw(0, 1) == 1;
    const int64_t length = draw(1, is_short ? 24 : small ? 90 : 150);
    for (int64_t parts = draw(1, small ? 2 : 3); parts > 0; --parts) {
      const int64_t first = draw(0, length - 1), rows = draw(0, length - first);
      const int64_t keys = draw(0, is_short ? 24 : small ? 200 : 300);
      Rectangle r = full(row + first, rows, key, keys);
      if (draw(0, 3) > 0)
        r.mask = {draw(0, 3) > 0, is_short ? draw(-8, 24) : draw(-50, 300), draw(1, 3), draw(1, 3),
                  draw(0, 1) * draw(1, is_short ? 12 : 200)};
      rectangles.push_back(r);
      key += keys + draw(0, 3);
    }
    row += length + draw(0, 3);
  }
  std::ranges::stable_sort(rectangles, {}, &Rectangle::q_begin);
  const bool fixed = draw(0, 1) == 1;
  // The host's kernel stores fixed tiles in f32.
  const Types types =
      fixed && !small ? Types{type(), DType::f32, DType::f32} : Types{type(), type(), type()};
  Problem problem(heads, row + 1, key + 1, rectangles, types, draw(0, 8));
  problem.fixed_tiles = fixed;
  return problem;
}

/// [0, length) cut at random places.
inline std::vector<int64_t> random_cuts(int64_t length, const Draw& draw) {
  std::vector<int64_t> cuts{0, length};
  for (int64_t n = draw(0, 4); n > 0; --n) cuts.push_back(draw(0, length));
  std::ranges::sort(cuts);
  return cuts;
}

/// Causal documents with gaps between them that stay NaN.
inline Problem several_documents(const BlockHeads& heads, const std::vector<int64_t>& lengths,
                                 Types types = {}) {
  std::vector<Rectangle> documents;
  int64_t at = 3;
  for (const int64_t length : lengths) {
    documents.push_back(causal(at, length, at, length, 0));
    at += length + 3;
  }
  return Problem(heads, at, at, documents, types);
}

class AttentionKernel : public OnBackend<KernelTest> {
 protected:
  std::unique_ptr<BlockKernel> make_kernel(Stream& stream) override {
    return on_host() ? make_cpu_kernel() : make_cuda_kernel(stream);
  }
  void check(Problem p) {
    p.wide_inside = on_host();
    KernelTest::check(p);
  }
  /// Runs `body` with the kernel, and with the reference, which is on the host.
  template <class Body>
  void with_reference(Body body) {
    body();
    if (!on_host()) return;
    use(make_reference_kernel());
    body();
  }
  Draw draw_ = [random = std::make_shared<std::mt19937>(5)](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(*random);
  };
  /// Problems of one rectangle whose rows or keys can be dealt to several
  /// calls.
  std::vector<Problem> fixed_problems() {
    std::vector<Problem> all;
    const auto add = [&](const BlockHeads& heads, const Rectangle& r, Types types) {
      all.emplace_back(heads, r.q_length + 5, r.k_length + 3, std::vector{r}, types).fixed_tiles =
          true;
    };
    for (const Mask& mask : {Mask{}, Mask{true, 20}, Mask{true, 90, 1, 1, 40}, Mask{true, 5, 2, 1},
                             Mask{false, 30, 1, 1, 1}})
      for (const DType type : {DType::f32, DType::bf16}) {
        Rectangle r = full(2, 150, 1, 170);
        r.mask = mask;
        add(heads_of(2, 1, 24), r, {type, type, DType::f32});
      }
    for (int i = 0; i < (on_host() ? 90 : 0); ++i) {
      Rectangle r = full(draw_(0, 2), draw_(1, 300), draw_(0, 2), draw_(1, 400));
      if (draw_(0, 3) > 0)
        r.mask = {draw_(0, 3) > 0, draw_(-50, 300), 1, draw_(1, 2), draw_(0, 1) * draw_(1, 200)};
      const DType type = draw_(0, 1) == 0 ? DType::f32 : DType::bf16;
      const int64_t kv_heads = draw_(1, 2);
      const std::array<int64_t, 7> dims{5, 8, 24, 64, 80, 96, 128};
      const int64_t dim = dims[draw_(0, 6)], v_dim = draw_(0, 2) == 0 ? dims[draw_(0, 6)] : dim;
      add(heads_of(draw_(1, 3) * kv_heads, kv_heads, dim, v_dim), r, {type, type, DType::f32});
    }
    return all;
  }
};

}  // namespace gyre::test::attention_kernel

// The decoder's operations on the host: the suite of every backend, and results
// in place or not.

#include "model/elementwise.hpp"

#include "decoder_ops_cases.hpp"

namespace gyre::test::decoder_ops {

GYRE_RUN_ON(host, DecoderOpsTest);

class HostElementwise : public DecoderOpsTest {};
GYRE_RUN_ON(host, HostElementwise);

TEST_P(HostElementwise, ResultsInPlaceHaveTheSameBits) {
  on_every_target([&] {
    for (const int64_t cols : columns_) {
      Rows x = random(4, cols, 1), out = empty(4, cols);
      const Rows w = random(4, cols, 2);
      const auto expect_same = [&] {
        const std::vector<float> want = to_host(out.memory);
        expect(x, [&](int64_t r, int64_t c) { return want[r * out.stride + c]; });
        expect(out, [&](int64_t r, int64_t c) { return want[r * out.stride + c]; });
      };
      const std::span<const float> weight(w.memory.data(), static_cast<size_t>(cols));
      rms_norm(x.view(), weight, 1e-5F, out.view());
      rms_norm(x.view(), weight, 1e-5F, x.view());
      expect_same();
      for (const GateFunction& function : gate_functions) {
        gate_multiply(function.activation, x.view(), w.view(), out.view());
        gate_multiply(function.activation, x.view(), w.view(), x.view());
        expect_same();
      }
    }
  });
}

}  // namespace gyre::test::decoder_ops

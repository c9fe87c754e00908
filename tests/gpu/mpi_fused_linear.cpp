// The fused linear layer on ranks that share a GPU, against whole logits in double precision and
// against the host's.

#include <array>
#include <cmath>
#include <cstring>

#include "comm/agree.hpp"
#include "comm/cuda_device.hpp"
#include "comm/staged.hpp"
#include "device_matrix.hpp"
#include "gpu_test.hpp"
#include "linear_cases.hpp"
#include "logprobs/cuda_row_kernels.hpp"
#include "logprobs/fused_linear_cuda.hpp"
#include "score_checks.hpp"

#ifdef GYRE_SOFTGPU
#include <softgpu_progress.h>
#endif

namespace gyre {
namespace GYRE_FILE {

using test::DeviceMatrix;
using test::Matrix;
using test::world;
using namespace test::linear;

class FusedLinearGpu : public test::GpuTest {
 protected:
  void SetUp() override {
    if (usable_cuda_devices() > 0) bind_device(world(), true);
    GpuTest::SetUp();
    if (IsSkipped()) return;
    staging_ = world().split(0);
    arrays_ = make_staged_communicator(*staging_);
    kernels_ = make_cuda_row_kernels(stream());
    ops_ = make_cuda_linear_ops(stream(), *kernels_);
  }
  Communicator& arrays() { return *arrays_; }
  LinearOps& ops() { return *ops_; }

  /// A matrix with the problem's values in another type.
  static Matrix as_type(const Matrix& from, DType type) {
    Matrix to(from.rows(), from.cols(), type);
    for (int64_t r = 0; r < from.rows(); ++r)
      for (int64_t c = 0; c < from.cols(); ++c) to.set(r, c, from.at(r, c));
    return to;
  }
  Result run(const Problem& p, LinearOptions options, const VocabPartition& vocab, DType x_type,
             DType weight_type);
  Result run(const Problem& p, const LinearOptions& options, const VocabPartition& vocab) {
    return run(p, options, vocab, p.type, p.type);
  }
  void expect_reference(const Problem& p, const LinearOptions& options, const VocabPartition& vocab,
                        DType x_type, DType weight_type);

 private:
  std::unique_ptr<Communicator> staging_;  // counts for itself what arrays_ has counted
  std::unique_ptr<Communicator> arrays_;
  std::unique_ptr<RowKernels> kernels_;
  std::unique_ptr<LinearOps> ops_;
};

/// Forward and backward of arrays with gaps, which are checked, and which nobody has written to.
Result FusedLinearGpu::run(const Problem& p, LinearOptions options, const VocabPartition& vocab,
                           DType x_type, DType weight_type) {
  options.ops = &ops();
  const int me = world().rank();
  FusedLinear layer(options, vocab, world(), &arrays());
  const Matrix x_values = as_type(rows_of(p, layer.first_row(me), layer.rows()), x_type),
               weights = as_type(weight_of(p, vocab, me), weight_type);
  const DeviceMatrix x(x_values.ref(), stream(), 1), weight(weights.ref(), stream(), 2, 1);
  DeviceMatrix d_x(layer.rows(), p.hidden, DType::f32, stream(), 3),
      d_weight(vocab.columns(me), p.hidden, DType::f32, stream());
  const auto tokens = static_cast<size_t>(p.tokens);
  Floats logprob(tokens, NAN), entropy(options.entropy ? tokens : 0, NAN);
  layer.forward(x.ref(), weight.ref(), p.targets, stream(), logprob, entropy);
  layer.backward(x.ref(), weight.ref(), p.targets, p.d_logprob,
                 options.entropy ? std::span<const float>(p.d_entropy) : std::span<const float>{},
                 stream(), d_x.ref().as<float>(), d_weight.ref().as<float>());
  return {logprob, entropy, d_x.host(), d_weight.host()};
}

void FusedLinearGpu::expect_reference(const Problem& p, const LinearOptions& options,
                                      const VocabPartition& vocab, DType x_type,
                                      DType weight_type) {
  const int me = world().rank();
  SCOPED_TRACE(testing::Message() << p.tokens << " x " << p.hidden << " x " << p.vocab_size << ' '
                                  << name_of(x_type) << ' ' << name_of(weight_type)
                                  << (options.sharded ? " sharded" : "")
                                  << (options.entropy ? " entropy" : "") << " tiles "
                                  << options.tile_rows << " x " << options.tile_columns
                                  << " columns " << vocab.columns(me));
  const bool rounded = x_type == DType::bf16 && weight_type == DType::bf16;
  expect_result(p, make_reference(p, options.entropy), run(p, options, vocab, x_type, weight_type),
                first_row_of(world(), p.tokens, options.sharded), vocab, me,
                rounded ? logit_gradient_tolerance(DType::bf16) : 0);
}

TEST_F(FusedLinearGpu, MatchesReferenceForAllPartitionsTilesAndTypes) {
  // Values that bf16 holds, in any pair of types.
  for (const auto& [x, weight] : {std::pair{DType::f32, DType::f32},
                                  {DType::bf16, DType::bf16},
                                  {DType::f32, DType::bf16},
                                  {DType::bf16, DType::f32}})
    for (const bool sharded : {true, false}) {
      const Problem p = make_problem(13, 12, 29, DType::bf16, sharded ? 1 : 1.7);
      for (const VocabPartition& vocab : test::partitions(p.vocab_size, world().size()))
        for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 0}, {4, 7}}) {
          LinearOptions options = options_of(p, sharded);
          options.entropy = columns != 7;
          options.tile_rows = rows;
          options.tile_columns = columns;
          expect_reference(p, options, vocab, x, weight);
        }
    }
}

TEST_F(FusedLinearGpu, MatchesReferenceForFewTokensAndNoneAndEmptyShards) {
  for (const int64_t tokens : {0, 1, 5})
    for (const bool sharded : {true, false}) {
      const Problem p = make_problem(tokens, 7, 20, DType::f32);
      LinearOptions options = options_of(p, sharded);
      options.entropy = true;
      expect_reference(p, options, balanced_partition(20, world().size()), p.type, p.type);
    }
  const Problem p = make_problem(9, 5, 2, DType::f32);
  expect_reference(p, options_of(p), balanced_partition(2, world().size()), p.type, p.type);
}

TEST_F(FusedLinearGpu, MatchesReferenceForLongDotProducts) {
  const Problem p = make_problem(40, 160, 230, DType::f32);
  LinearOptions options = options_of(p);
  options.entropy = true;
  options.tile_rows = 32;
  options.tile_columns = 70;
  expect_reference(p, options, test::partitions(p.vocab_size, world().size())[0], p.type, p.type);
}

TEST_F(FusedLinearGpu, MatchesReferenceForMoreColumnsThanAGridHasBlocks) {
  const Problem p = make_problem(3, 2, 1100 * world().size(), DType::bf16);
  expect_reference(p, options_of(p), balanced_partition(p.vocab_size, world().size()), DType::f32,
                   DType::bf16);
}

Doubles doubles_of(const Floats& values) {
  return {values.begin(), values.end()};
}

TEST_F(FusedLinearGpu, EqualsTheHosts) {
  const Problem p = make_problem(21, 16, 60, DType::f32);
  const int me = world().rank();
  const VocabPartition vocab = test::partitions(p.vocab_size, world().size())[2];
  LinearOptions options = options_of(p);
  options.entropy = true;
  const Result got = run(p, options, vocab);
  FusedLinear layer(options, vocab, world());
  const Matrix x = rows_of(p, layer.first_row(me), layer.rows()), weight = weight_of(p, vocab, me);
  Result host{Floats(21), Floats(21), Matrix(layer.rows(), 16, DType::f32),
              Matrix(vocab.columns(me), 16, DType::f32)};
  HostStream on_host;
  layer.forward(x.ref(), weight.ref(), p.targets, on_host, host.logprob, host.entropy);
  layer.backward(x.ref(), weight.ref(), p.targets, p.d_logprob, p.d_entropy, on_host,
                 host.d_x.ref().as<float>(), host.d_weight.ref().as<float>());
  const Reference sizes = make_reference(p, true);
  const double tolerance = linear_logprob_tolerance(16, sizes.logit_size);
  expect_scores(got.logprob, doubles_of(host.logprob), tolerance, logprob_scale);
  expect_scores(got.entropy, doubles_of(host.entropy), tolerance,
                [&](double) { return entropy_scale(60); });
  const double gradients = linear_gradient_tolerance(16, 60, sizes.logit_size);
  for (int64_t r = 0; r < layer.rows(); ++r)
    for (int64_t d = 0; d < 16; ++d)
      EXPECT_NEAR(got.d_x.at(r, d), host.d_x.at(r, d),
                  gradients * sizes.d_x_size[static_cast<size_t>(layer.first_row(me) + r)]);
  for (int64_t r = 0; r < vocab.valid(me); ++r)
    for (int64_t d = 0; d < 16; ++d)
      EXPECT_NEAR(got.d_weight.at(r, d), host.d_weight.at(r, d),
                  gradients * sizes.d_weight_size[static_cast<size_t>(vocab.begin(me) + r)]);
}

bool same_bits(const Matrix& a, const Matrix& b) {
  bool same = a.rows() == b.rows() && a.cols() == b.cols();
  for (int64_t r = 0; same && r < a.rows(); ++r)
    same = std::memcmp(a.ref().as<float>().row(r), b.ref().as<float>().row(r),
                       static_cast<size_t>(a.cols()) * sizeof(float)) == 0;
  return same;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_F(FusedLinearGpu, BitsAreTheSameOnAllRanksAndInASecondRun) {
  const Problem p = make_problem(23, 12, 50, DType::bf16);
  const VocabPartition vocab = test::partitions(p.vocab_size, world().size())[2];
  LinearOptions options = options_of(p, false);
  options.entropy = true;
  options.tile_rows = 8;
  options.tile_columns = 20;
  const Result first = run(p, options, vocab), second = run(p, options, vocab);
  EXPECT_TRUE(same_bits(first.logprob, second.logprob));
  EXPECT_TRUE(same_bits(first.entropy, second.entropy));
  EXPECT_TRUE(same_bits(first.d_x, second.d_x));
  EXPECT_TRUE(same_bits(first.d_weight, second.d_weight));
  std::string mine(reinterpret_cast<const char*>(first.logprob.data()), 23 * sizeof(float));
  for (int64_t r = 0; r < 23; ++r)
    mine.append(reinterpret_cast<const char*>(first.d_x.ref().as<float>().row(r)),
                12 * sizeof(float));
  EXPECT_EQ(broadcast_string(world(), mine, 0), mine);
}

TEST_F(FusedLinearGpu, TokensWithoutGradientTakeNoPartWhateverTheyHold) {
  Problem p = make_problem(14, 8, 30, DType::f32);
  const auto has_none = [](int64_t t) { return t % 3 != 1; };
  for (int64_t t = 0; t < 14; ++t)
    if (has_none(t)) {
      p.d_logprob[static_cast<size_t>(t)] = p.d_entropy[static_cast<size_t>(t)] = 0;
      p.targets[static_cast<size_t>(t)] = -1;
    }
  const Reference want = make_reference(p, false);
  for (int64_t t = 0; t < 14; ++t)
    if (has_none(t))
      for (int64_t d = 0; d < 8; ++d) p.x.at(t, d) = quiet_nan;
  for (const int64_t rows : {0, 2}) {
    LinearOptions options = options_of(p);
    options.tile_rows = rows;
    const VocabPartition vocab = test::partitions(30, world().size())[2];
    expect_result(p, want, run(p, options, vocab), first_row_of(world(), 14, true), vocab,
                  world().rank());
  }
}

TEST_F(FusedLinearGpu, AccumulatesIntoTheWeightsGradientAndBadNumbersMakeRowsNan) {
  Problem p = make_problem(11, 6, 40, DType::f32);
  const int me = world().rank();
  const VocabPartition vocab = test::partitions(40, world().size())[0];
  LinearOptions options = options_of(p);
  const Result once = run(p, options, vocab);
  options.ops = &ops();
  FusedLinear layer(options, vocab, world(), &arrays());
  const DeviceMatrix x(rows_of(p, layer.first_row(me), layer.rows()).ref(), stream()),
      weight(weight_of(p, vocab, me).ref(), stream());
  Matrix thousands(vocab.columns(me), 6, DType::f32);
  for (int64_t r = 0; r < thousands.rows(); ++r)
    for (int64_t d = 0; d < 6; ++d) thousands.set(r, d, 1000);
  DeviceMatrix d_x(layer.rows(), 6, DType::f32, stream()),
      d_weight(std::as_const(thousands).ref(), stream());
  Floats logprob(11, NAN);
  layer.forward(x.ref(), weight.ref(), p.targets, stream(), logprob, {});
  layer.backward(x.ref(), weight.ref(), p.targets, p.d_logprob, {}, stream(), d_x.ref().as<float>(),
                 d_weight.ref().as<float>(), true);
  const Matrix summed = d_weight.host();
  for (int64_t r = 0; r < summed.rows(); ++r)
    for (int64_t d = 0; d < 6; ++d)  // rounded at the size of 1000 by every tile
      EXPECT_NEAR(summed.at(r, d), 1000 + once.d_weight.at(r, d),
                  1000 * tolerance_for(DType::f32, 1));
  for (int64_t d = 0; d < 6; ++d) p.x.at(7, d) = quiet_nan;
  const Result bad = run(p, options_of(p), vocab);
  for (size_t t = 0; t < 11; ++t) EXPECT_EQ(std::isnan(bad.logprob[t]), t == 7) << t;
}

TEST_F(FusedLinearGpu, SendsWhatTheHostsSends) {
  const Problem p = make_problem(11, 10, 30, DType::bf16);
  const int64_t n = world().size(), me = world().rank();
  const int64_t own = p.tokens / n + (me < p.tokens % n ? 1 : 0);
  for (const bool sharded : {true, false}) {
    const VocabPartition vocab = balanced_partition(30, world().size());
    LinearOptions options = options_of(p, sharded);
    options.ops = &ops();
    const test::TrafficSince agreeing(world());
    FusedLinear(options, vocab, world(), &arrays());
    const int64_t agreed = agreeing.bytes();
    const test::TrafficSince arguments(world()), matrices(arrays());
    run(p, options, vocab);
    const int64_t x_bytes = sharded ? (n - 1) * own * 10 * 2 : 0;
    const int64_t share = sharded ? 0 : (n - 1) * own * 10 * 4, records = (n - 1) * 11 * 12;
    EXPECT_EQ(matrices.bytes(), n == 1 ? 0 : x_bytes + records + (11 - own) * 10 * 4 + share);
    EXPECT_EQ(matrices.messages(), n == 1 ? 0 : 1 + n - 1 + (sharded ? n - 1 : 1));
    EXPECT_EQ(arguments.bytes(), agreed);  // no more than that passes the host
  }
}

#ifdef GYRE_SOFTGPU
TEST_F(FusedLinearGpu, TheHostWaitsOnceForAForwardPassOfAnyTiles) {
  const Problem p = make_problem(24, 8, 40, DType::bf16);
  const VocabPartition vocab = balanced_partition(40, world().size());
  LinearOptions options = options_of(p);
  options.ops = &ops();
  options.tile_rows = 5;
  options.tile_columns = 3;
  FusedLinear layer(options, vocab, world(), &arrays());
  const DeviceMatrix x(rows_of(p, layer.first_row(world().rank()), layer.rows()).ref(), stream()),
      weight(weight_of(p, vocab, world().rank()).ref(), stream());
  Floats logprob(24), entropy(options.entropy ? 24 : 0);
  stream().mark();  // the first of a stream waits
  for (int call = 0; call < 2; ++call) {
    const int64_t before = softgpu::host_waits();
    layer.forward(x.ref(), weight.ref(), p.targets, stream(), logprob, entropy);
    EXPECT_EQ(softgpu::host_waits() - before, 1);
  }
}
#endif

TEST_F(FusedLinearGpu, ExtraMemoryDoesNotGrowWithColumns) {
  const int64_t n = world().size(), tokens = 24 * n;
  const auto extra = [&](int64_t vocab_size) {
    const Problem p = make_problem(tokens, 8, vocab_size, DType::bf16);
    const VocabPartition vocab = even_partition(vocab_size, vocab_size, world().size());
    const int me = world().rank();
    LinearOptions options = options_of(p);
    options.ops = &ops();
    options.tile_rows = 16;
    options.tile_columns = 8;
    const DeviceMatrix x(rows_of(p, me * 24, 24).ref(), stream()),
        weight(weight_of(p, vocab, me).ref(), stream());
    DeviceMatrix d_x(24, 8, DType::f32, stream()),
        d_weight(vocab.columns(me), 8, DType::f32, stream());
    Floats logprob(static_cast<size_t>(tokens));
    const int64_t before = memory_use().current_bytes;
    reset_memory_peak();
    FusedLinear layer(options, vocab, world(), &arrays());
    layer.forward(x.ref(), weight.ref(), p.targets, stream(), logprob, {});
    layer.backward(x.ref(), weight.ref(), p.targets, p.d_logprob, {}, stream(),
                   d_x.ref().as<float>(), d_weight.ref().as<float>());
    stream().synchronize();
    return memory_use().peak_bytes - before;
  };
  extra(16 * n);  // what kernels and products keep
  const int64_t few = extra(16 * n);
  EXPECT_GT(few, 0);
  EXPECT_EQ(extra(64 * n), few);
}

TEST_F(FusedLinearGpu, ProductsOfBf16WithBf16AreOfBf16) {
  const DType f32 = DType::f32, half = DType::bf16;
  for (const auto& [x_type, weight_type, product] :
       {std::array{f32, f32, f32}, {half, half, half}, {f32, half, f32}, {half, f32, f32}}) {
    const DeviceMatrix x(2, 4, x_type, stream()), weight(3, 4, weight_type, stream());
    const auto tile = ops().make_tile({2, 3}, 4, x_type, weight_type, 1);
    tile->load(x.ref(), 0, 2);
    tile->logits(weight.ref());
    EXPECT_EQ(tile->gradient().type, product) << name_of(x_type) << ' ' << name_of(weight_type);
  }
  stream().synchronize();
}

TEST_F(FusedLinearGpu, TheCommunicatorOfMatricesIsOfTheirMemory) {
  const Problem p = make_problem(4, 3, 10, DType::f32);
  LinearOptions options = options_of(p);
  options.ops = &ops();
  const auto make = [&] { FusedLinear(options, balanced_partition(10, world().size()), world()); };
  if (world().size() == 1)
    EXPECT_NO_THROW(make());  // nothing is sent
  else
    EXPECT_THROW(make(), Error);
}

}  // namespace GYRE_FILE
}  // namespace gyre

// The fused linear layer on ranks that share a GPU, against whole logits in double precision and
// against the host's.

#include <array>

#include "comm/cuda_device.hpp"
#include "comm/staged.hpp"
#include "device_matrix.hpp"
#include "gpu_test.hpp"
#include "linear_cases.hpp"
#include "logprobs/fused_linear/fused_linear_cuda.hpp"
#include "logprobs/rows/cuda_row_kernels.hpp"

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
  Layer layer() {
    return {[this](const Problem& p, const LinearOptions& o, const VocabPartition& vocab, DType x,
                   DType weight) { return run(p, o, vocab, x, weight); },
            true};
  }

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
  FusedLinear fused(options, vocab, world(), &arrays());
  const Matrix x_values = as_type(rows_of(p, fused.first_row(me), fused.rows()), x_type),
               weights = as_type(weight_of(p, vocab, me), weight_type);
  const DeviceMatrix x(x_values.ref(), stream(), 1), weight(weights.ref(), stream(), 2, 1);
  DeviceMatrix d_x(fused.rows(), p.hidden, DType::f32, stream(), 3),
      d_weight(vocab.columns(me), p.hidden, DType::f32, stream());
  const int64_t tokens = p.tokens;
  Floats logprob(tokens, NAN), entropy(options.entropy ? tokens : 0, NAN);
  fused.forward(x.ref(), weight.ref(), p.targets, stream(), logprob, entropy);
  fused.backward(x.ref(), weight.ref(), p.targets,
                 {p.d_logprob,
                  options.entropy ? std::span<const float>(p.d_entropy) : std::span<const float>{},
                  d_x.ref().as<float>(), d_weight.ref().as<float>()},
                 stream());
  return {logprob, entropy, d_x.host(), d_weight.host()};
}

TEST_F(FusedLinearGpu, MatchesReferenceForAllPartitionsTilesAndTypes) {
  // Values that bf16 holds, in any pair of types.
  for (const auto& [x, weight] : {std::pair{DType::f32, DType::f32},
                                  {DType::bf16, DType::bf16},
                                  {DType::f32, DType::bf16},
                                  {DType::bf16, DType::f32}})
    for (const bool sharded : {true, false}) {
      Problem p = make_problem(13, 12, 29, DType::bf16, sharded ? 1 : 1.7);
      if (sharded) p.temperatures = test::own_temperatures(p.tokens);
      for (const VocabPartition& vocab : test::partitions(p.vocab_size, world().size()))
        for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 0}, {4, 7}}) {
          LinearOptions options = options_of(p, sharded);
          options.entropy = columns != 7;
          options.tile_rows = rows;
          options.tile_columns = columns;
          layer().expect_reference(p, options, vocab, x, weight);
        }
    }
}

TEST_F(FusedLinearGpu, MatchesReferenceForFewTokensAndNoneAndEmptyShards) {
  layer().expect_few_tokens_and_empty_shards();
}

TEST_F(FusedLinearGpu, BitsAreTheSameOnAllRanksAndInASecondRun) {
  layer().expect_same_bits(make_problem(23, 12, 50, DType::bf16), 8, 20, {1});
}

TEST_F(FusedLinearGpu, TokensWithoutGradientTakeNoPartWhateverTheyHold) {
  layer().expect_no_part_of_tokens_without_gradient(14, 2);
}

TEST_F(FusedLinearGpu, MatchesReferenceForLongDotProducts) {
  const Problem p = make_problem(40, 160, 230, DType::f32);
  LinearOptions options = options_of(p);
  options.entropy = true;
  options.tile_rows = 32;
  options.tile_columns = 70;
  layer().expect_reference(p, options, test::partitions(p.vocab_size, world().size())[0], p.type,
                           p.type);
}

TEST_F(FusedLinearGpu, MatchesReferenceForMoreColumnsThanAGridHasBlocks) {
  const Problem p = make_problem(3, 2, 1100 * world().size(), DType::bf16);
  layer().expect_reference(p, options_of(p), balanced_partition(p.vocab_size, world().size()),
                           DType::f32, DType::bf16);
}

TEST_F(FusedLinearGpu, AccumulatesIntoTheWeightsGradientAndBadNumbersMakeRowsNan) {
  Problem p = make_problem(11, 6, 40, DType::f32);
  const int me = world().rank();
  const VocabPartition vocab = test::partitions(40, world().size())[0];
  LinearOptions options = options_of(p);
  const Result once = run(p, options, vocab);
  options.ops = &ops();
  FusedLinear fused(options, vocab, world(), &arrays());
  const DeviceMatrix x(rows_of(p, fused.first_row(me), fused.rows()).ref(), stream()),
      weight(weight_of(p, vocab, me).ref(), stream());
  Matrix thousands(vocab.columns(me), 6, DType::f32);
  for (int64_t r = 0; r < thousands.rows(); ++r)
    for (int64_t d = 0; d < 6; ++d) thousands.set(r, d, 1000);
  DeviceMatrix d_x(fused.rows(), 6, DType::f32, stream()),
      d_weight(std::as_const(thousands).ref(), stream());
  Floats logprob(11, NAN);
  fused.forward(x.ref(), weight.ref(), p.targets, stream(), logprob, {});
  fused.backward(x.ref(), weight.ref(), p.targets,
                 {p.d_logprob, {}, d_x.ref().as<float>(), d_weight.ref().as<float>(), true},
                 stream());
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
  FusedLinear fused(options, vocab, world(), &arrays());
  const DeviceMatrix x(rows_of(p, fused.first_row(world().rank()), fused.rows()).ref(), stream()),
      weight(weight_of(p, vocab, world().rank()).ref(), stream());
  Floats logprob(24), entropy(options.entropy ? 24 : 0);
  stream().mark();  // the first of a stream waits
  for (int call = 0; call < 2; ++call) {
    const int64_t before = softgpu::host_waits();
    fused.forward(x.ref(), weight.ref(), p.targets, stream(), logprob, entropy);
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
    Floats logprob(tokens);
    const int64_t before = memory_use().current_bytes;
    reset_memory_peak();
    FusedLinear fused(options, vocab, world(), &arrays());
    fused.forward(x.ref(), weight.ref(), p.targets, stream(), logprob, {});
    fused.backward(x.ref(), weight.ref(), p.targets,
                   {p.d_logprob, {}, d_x.ref().as<float>(), d_weight.ref().as<float>()}, stream());
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

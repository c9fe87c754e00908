// The operations on split vocabularies with logits on the device, compared with the references on
// any number of ranks and for any partition.

#include "comm/staged.hpp"
#include "device_matrix.hpp"
#include "divergence_operations.hpp"
#include "gpu_test.hpp"
#include "logprobs/records/gather_records.hpp"
#include "logprobs/rows/cuda_row_kernels.hpp"
#include "projection_operation.hpp"
#include "row_operation_cases.hpp"
#include "selection_operations.hpp"

#ifdef GYRE_SOFTGPU
#include <softgpu_progress.h>
#endif

namespace gyre {
namespace GYRE_FILE {

using namespace test;

/// Ranks that share a device.
class OnDevice final : public Place {
 public:
  explicit OnDevice(Stream& stream)
      : stream_(stream),
        kernels_(make_cuda_row_kernels(stream)),
        staging_(world().split(0)),
        arrays_(make_staged_communicator(*staging_)) {}
  std::unique_ptr<Placed> put(const Matrix& matrix) const override {
    struct OnStream final : Placed {
      OnStream(const Matrix& m, Stream& s) : matrix(m.ref(), s, 1) {}
      MatrixRef ref() override { return matrix.ref(); }
      Matrix host() override { return matrix.host(); }
      DeviceMatrix matrix;
    };
    return std::make_unique<OnStream>(matrix, stream_);
  }
  Stream& stream() const override { return stream_; }
  RowKernels* kernels() const override { return kernels_.get(); }
  Communicator* arrays() const override { return arrays_.get(); }

 private:
  Stream& stream_;
  std::unique_ptr<RowKernels> kernels_;
  std::unique_ptr<Communicator> staging_;  // counts for itself what arrays_ has counted
  std::unique_ptr<Communicator> arrays_;
};

class LogprobsOnDevice : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) place_ = std::make_unique<OnDevice>(stream());
  }
  void TearDown() override {
    GpuTest::TearDown();
    place_.reset();
  }
  const OnDevice& device() { return *place_; }

 private:
  std::unique_ptr<OnDevice> place_;
};

/// Random rows, one of NaN and one with much of -inf.
LogitRows rows_of(int64_t tokens, int64_t vocab_size, DType type) {
  LogitRows rows = random_logits(tokens, vocab_size, type);
  for (int64_t v = 0; v < vocab_size; v += 2) rows.at(1, v) = -infinity;
  rows.at(2, vocab_size / 2) = NAN;
  return rows;
}

TEST_F(LogprobsOnDevice, LogProbabilitiesAndEntropies) {
  std::vector<LogProbabilities> cases;
  for (const DType type : both_types) {
    for (const int64_t vocab_size : {37, 700})
      cases.push_back({"random", rows_of(7, vocab_size, type), type, {3, true, 1.5}});
    cases.push_back({"special rows", special_rows(type), type, {3, true, 1}});
  }
  expect_reference_for_any_partition(cases, device());
  expect_zeros_without_a_gradient(cases, device());
}

TEST_F(LogprobsOnDevice, SoftCrossEntropies) {
  std::vector<CrossEntropies> cases;
  for (const DType type : both_types) {
    cases.push_back(
        {"300 ids", rows_of(6, 300, type), random_logits(6, 300, type, 2, 7), type, type});
    cases.push_back(CrossEntropies::special(type));
  }
  expect_reference_for_any_partition(cases, device());
}

TEST_F(LogprobsOnDevice, OperationsOnRows) {
  std::vector<RowOperations> cases;
  for (const RowOperation& operation : row_operations()) {
    cases.push_back({operation, "random", rows_of(6, 90, DType::bf16), DType::bf16, 5});
    cases.push_back({operation, "special rows", special_rows(DType::f32), DType::f32, 3});
  }
  expect_reference_for_any_partition(cases, device());
  expect_zeros_without_a_gradient(cases, device());
}

TEST_F(LogprobsOnDevice, DivergencesOfTheLargest) {
  std::vector<DivergencesOfRows> of_rows;
  std::vector<DivergencesOfGivenIds> given;
  for (const DType type : both_types) {
    of_rows.push_back(DivergencesOfRows::random(6, 500, 90, type, TailGradient::advantage));
    given.push_back(DivergencesOfGivenIds::random(6, 500, 90, type, TailGradient::advantage));
    of_rows.push_back(DivergencesOfRows::special(type));
    given.push_back(DivergencesOfGivenIds::special(type));
  }
  expect_reference_for_any_partition(of_rows, device());
  expect_reference_for_any_partition(given, device());
  expect_zeros_without_a_gradient(of_rows, device());
}

TEST_F(LogprobsOnDevice, TheLargest) {
  std::vector<LargestLogits> cases;
  for (const DType type : both_types) {
    LogitRows rows = rows_of(5, 500, type);
    for (double& z : rows.values) z = std::round(4 * z) / 4;  // many ties
    for (const int64_t k : {1, 20, 500}) cases.push_back({rows, type, k});
  }
  expect_reference_for_any_partition(cases, device());
}

/// Rows whose threshold is found in the lists or by digits, flat rows, and targets at, above and
/// below the threshold.
TEST_F(LogprobsOnDevice, SamplingFilters) {
  constexpr int64_t tokens = 9, vocab_size = 1200;
  const FilterOptions filters[] = {
      filter_of(0, 1, 64, 1.5),           filter_of(10, 1),      filter_of(0, 0.8503, 8),
      filter_of(0, 0.4007, 64, 0.5),      filter_of(30, 0.7001), filter_of(0, 1, 8, 1, 0.01003),
      filter_of(0, 0.7001, 8, 1, 0.01003)};
  int64_t by_digits = 0;
  for (const DType type : both_types) {
    LogitRows rows = random_logits(tokens, vocab_size, type);
    for (int64_t v = 0; v < vocab_size; ++v) {
      if (v % 2 == 0) rows.at(1, v) = -infinity;
      rows.at(4, v) = 0.25;                           // flat
      rows.at(5, v) = std::round(2 * rows.at(5, v));  // ties
      for (const int64_t t : {6, 7, 8}) rows.at(t, v) = v % 60 == 7 ? 5 : -10;
    }
    Ints targets;
    for (int64_t t = 0; t < tokens; ++t)
      targets.push_back(top_k_reference(rows.row(t), 1 + 3 * t).back().id);
    targets[4] = vocab_size - 3;
    // Targets among 20 ties, of which the last 9 or 18 survive. A list may hold all ties or not.
    targets[6] = 10 * 60 + 7;
    targets[7] = 11 * 60 + 7;
    targets[8] = 1 * 60 + 7;
    for (const VocabPartition& vocab : partitions(vocab_size, world().size()))
      for (const FilterOptions& options : filters) {
        SCOPED_TRACE(fmt::format("{} top_k {} top_p {}", name_of(type), options.filter.top_k,
                                 options.filter.top_p));
        FilteredLogprobs o{rows, type, options, targets};
        const OperationResult got = o.run({vocab, device()}), host = o.run({vocab, Place()});
        EXPECT_EQ(got.values[1], host.values[1]);
        EXPECT_EQ(got.values[2], host.values[2]);
        o.expect_reference(got, {vocab, device()});
        expect_same_on_all_ranks(got.values[0]);
        FilteredLogprobs mixed = o;
        mixed.filters = mixed_filters(tokens);
        mixed.expect_reference(mixed.run({vocab, device()}), {vocab, device()});
        by_digits += got.values[2][0] > 0 ? 1 : 0;
        o.rows.at(2, vocab_size / 2) = NAN;
        const OperationResult poisoned = o.run({vocab, device()});
        EXPECT_TRUE(std::isnan(poisoned.values[0][2]));
        EXPECT_EQ(poisoned.values[1][2], 0);
      }
  }
  EXPECT_GT(by_digits, 0);
}

TEST_F(LogprobsOnDevice, KeptIds) {
  expect_reference_for_any_partition(KeptLogprobs::cases(), device());
}

TEST_F(LogprobsOnDevice, ProjectedProbabilities) {
  std::vector<ProjectedRows> cases = ProjectedRows::cases();
  cases.push_back(ProjectedRows::random(3, 700, DType::bf16, 520, 0.02));
  expect_reference_for_any_partition(cases, device());
  expect_zeros_without_a_gradient(cases, device());
}

TEST_F(LogprobsOnDevice, EveryRunHasTheSameBits) {
  const LogitRows rows = random_logits(5, 900, DType::bf16);
  const Part part{partitions(900, world().size())[2], device()};
  const FilteredLogprobs o{rows, DType::bf16, filter_of(0, 0.9, 16), mixed_ids(5, 1, 900)};
  const OperationResult first = o.run(part);
  for (int run = 0; run < 2; ++run) EXPECT_TRUE(o.run(part).same_bits(first));
}

TEST_F(LogprobsOnDevice, ShardsInTilesHaveTheScoresOfWholeOnes) {
  constexpr int64_t tokens = 9, ids_per_token = 2, vocab_size = 61;
  const LogitRows rows = random_logits(tokens, vocab_size, DType::f32);
  const Ints ids = mixed_ids(tokens, ids_per_token, vocab_size);
  for (const VocabPartition& vocab : partitions(vocab_size, world().size())) {
    const RecordShape shape{vocab, world().rank(), ids_per_token, {.weighted = true}, 0.5F};
    const int64_t columns = vocab.valid(world().rank());
    const auto records = std::make_unique<ScoreRecords>(*device().kernels(), shape);
    // In pinned memory, the kernels read ids and write results themselves.
    const auto scores_by = [&](const Matrix& logits, int64_t tile_rows, int64_t tile_columns,
                               MemorySpace space = MemorySpace::host) {
      Buffer<int32_t> ids_there(std::ssize(ids), space);
      std::ranges::copy(ids, ids_there.data());
      Buffer<RowNormalizer> normalizers(tokens, space);
      Buffer<float> scores(tokens * (ids_per_token + 1), space);
      std::ranges::fill(scores.span(), NAN);
      const std::span<float> logprob = scores.span().first(tokens * ids_per_token);
      const std::span<float> entropy = scores.span().last(tokens);
      records->start(tokens, ids_there.span(), {normalizers.span(), logprob, entropy});
      std::vector<std::unique_ptr<DeviceMatrix>> tiles;  // they stay until all is done
      for (int64_t row = 0; row < tokens; row += tile_rows)
        for (int64_t column = 0; column < columns; column += tile_columns) {
          Matrix tile(std::min(tile_rows, tokens - row), std::min(tile_columns, columns - column),
                      DType::f32);
          for (int64_t r = 0; r < tile.rows(); ++r)
            for (int64_t c = 0; c < tile.cols(); ++c)
              tile.set(r, c, logits.at(row + r, column + c));
          // Aligns the rows of all tiles alike: what a thread reads depends on it.
          const int64_t gap = 4 - tile.cols() % 4;
          tiles.push_back(
              std::make_unique<DeviceMatrix>(std::as_const(tile).ref(), stream(), 1, gap));
          records->add(std::as_const(*tiles.back()).ref(), row, column, tile.cols());
        }
      records->merge(*device().arrays(), stream(), "a test");
      Floats found(scores.span().begin(), scores.span().end());
      for (const RowNormalizer& row : normalizers.span()) found.push_back(row.max + row.log_sum);
      return found;
    };
    const Matrix logits = rows.shard(vocab, world().rank(), DType::f32);
    const Floats whole = scores_by(logits, tokens, std::max<int64_t>(1, columns));
    EXPECT_EQ(scores_by(logits, 2, std::max<int64_t>(1, columns)), whole);
    EXPECT_EQ(scores_by(logits, tokens, std::max<int64_t>(1, columns), MemorySpace::pinned), whole);
    const Floats tiled = scores_by(logits, 4, 7);
    for (size_t i = 0; i < whole.size(); ++i)  // both have their errors
      expect_near(tiled[i], double{whole[i]}, 2 * logprob_tolerance() * logprob_scale(whole[i]),
                  "in tiles");
  }
}

#ifdef GYRE_SOFTGPU
/// Submissions of an all-gather of `floats` per rank, timed by two marks.
int64_t submissions_of_a_gather(Communicator& arrays, Stream& stream, int64_t floats) {
  Buffer<float> own(floats, MemorySpace::device), all(floats * arrays.size(), MemorySpace::device);
  const int64_t before = softgpu::host_submissions();
  (void)merge_gathered<float>(arrays.size(), own.span(), all.span(), arrays, stream, "a test",
                              [&](std::span<const float>) { stream.synchronize(); });
  return softgpu::host_submissions() - before;
}

TEST_F(LogprobsOnDevice, TheHostWaitsOnceForACallForwardAndNotBackward) {
  constexpr int64_t tokens = 5, vocab_size = 64;
  const VocabPartition vocab = balanced_partition(vocab_size, world().size());
  const LogitRows rows = random_logits(tokens, vocab_size, DType::f32);
  const Part part{vocab, device()};
  const auto shard = part.put(rows, DType::f32), teacher = part.put(rows, DType::f32),
             gradients = part.put(rows, DType::f32);
  VocabScores scores(tokens, vocab,
                     {.entropy = true, .kernels = device().kernels(), .arrays = device().arrays()},
                     world());
  const Ints ids(tokens, 3);
  const Floats g(tokens, 1);
  Floats logprob(tokens), entropy(tokens);
  stream().mark();  // the first of a stream waits
  for (int call = 0; call < 2; ++call) {
    const int64_t before = softgpu::host_waits();
    const int64_t submitted = softgpu::host_submissions();
    scores.forward(shard->ref(), ids, stream(), logprob, entropy);
    EXPECT_EQ(softgpu::host_waits() - before, 1);
    const int64_t forward = softgpu::host_submissions() - submitted;
    // Two kernels; with several ranks, the exchange between two marks and another kernel.
    const int64_t gather = submissions_of_a_gather(*device().arrays(), stream(), 4 * tokens);
    EXPECT_EQ(forward, world().size() == 1 ? 2 : 3 + gather);
    const int64_t waited = softgpu::host_waits();
    scores.backward(shard->ref(), ids, {g, g}, gradients->ref());
    EXPECT_EQ(softgpu::host_waits(), waited);
  }
  SoftCrossEntropy crosses(tokens, vocab, 1, world(), device().kernels(), device().arrays());
  const int64_t before = softgpu::host_waits();
  crosses.forward(shard->ref(), teacher->ref(), stream(), logprob);
  EXPECT_EQ(softgpu::host_waits() - before, 1);
}
#endif

}  // namespace GYRE_FILE
}  // namespace gyre

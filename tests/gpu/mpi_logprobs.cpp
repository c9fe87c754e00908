// The routines on split vocabularies with logits on the device: the same values as from the host's
// passes, on any number of ranks and for any partition.

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <string>

#include "comm/staged.hpp"
#include "device_matrix.hpp"
#include "gpu_test.hpp"
#include "logprobs/cuda_row_kernels.hpp"
#include "logprobs/distillation.hpp"
#include "logprobs/filtered_scores.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "logprobs/vocab_top_k.hpp"
#include "score_checks.hpp"

#ifdef GYRE_SOFTGPU
#include <softgpu_progress.h>
#endif

namespace gyre {
namespace GYRE_FILE {

using test::DeviceMatrix;
using test::LogitRows;
using test::Matrix;
using test::partitions;
using test::random_logits;
using test::world;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

/// What a routine is run with, on the host or on the device.
struct Side {
  RowKernels* kernels = nullptr;
  Stream* stream = nullptr;        // of the device
  Communicator* arrays = nullptr;  // of its memory
};

/// This rank's columns on a side, and gradients for them in the same memory: NaN at first.
class Shard {
 public:
  Shard(const LogitRows& rows, const VocabPartition& vocab, DType type, const Side& side)
      : logits_(rows.shard(vocab, world().rank(), type)),
        gradients_(rows.tokens, logits_.cols(), type) {
    if (side.kernels == nullptr) return;
    device_logits_ = std::make_unique<DeviceMatrix>(logits_.ref(), *side.stream, 1);
    device_gradients_ =
        std::make_unique<DeviceMatrix>(std::as_const(gradients_).ref(), *side.stream);
  }
  ConstMatrixRef logits() const {
    return device_logits_ ? std::as_const(*device_logits_).ref() : logits_.ref();
  }
  MatrixRef gradients() { return device_gradients_ ? device_gradients_->ref() : gradients_.ref(); }
  /// The elements of the gradients.
  Floats result() {
    if (device_gradients_) gradients_ = device_gradients_->host();
    return test::elements(gradients_.ref());
  }

 private:
  Matrix logits_, gradients_;
  std::unique_ptr<DeviceMatrix> device_logits_, device_gradients_;
};

class LogprobsOnDevice : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    kernels_ = make_cuda_row_kernels(stream());
    staging_ = world().split(0);
    arrays_ = make_staged_communicator(*staging_);
  }
  Side device() { return {kernels_.get(), &stream(), arrays_.get()}; }
  Stream& stream_of(const Side& side) { return side.stream == nullptr ? host_ : *side.stream; }

 private:
  HostStream host_;
  std::unique_ptr<RowKernels> kernels_;
  std::unique_ptr<Communicator> staging_;  // counts for itself what arrays_ has counted
  std::unique_ptr<Communicator> arrays_;
};

void expect_equal(const Floats& got, const Floats& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    test::expect_near(static_cast<double>(got[i]), static_cast<double>(want[i]), 0,
                      fmt::format("{}, element {}", what, i));
}
/// Values like log-probabilities, whose errors are twice what one side's may be.
void expect_scores(const Floats& got, const Floats& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const auto value = static_cast<double>(want[i]);
    test::expect_near(static_cast<double>(got[i]), value,
                      2 * logprob_tolerance() * logprob_scale(value),
                      fmt::format("{}, element {}", what, i));
  }
}
/// Gradients p (a + b log p) + weights, all of size 1 at most a term, twice as for expect_scores.
/// `terms`: how many of them.
void expect_gradients(const Floats& got, const Floats& want, const LogitRows& rows,
                      const VocabPartition& vocab, DType type, double temperature, double terms) {
  ASSERT_EQ(got.size(), want.size());
  const int rank = world().rank();
  size_t i = 0;
  for (int64_t t = 0; t < rows.tokens; ++t) {
    const auto log_p = log_softmax_reference(rows.row(t), temperature);
    for (int64_t c = 0; c < vocab.columns(rank); ++c, ++i) {
      // Without the weights' share, which only widens it: what ids add is exact to one rounding.
      const double p =
          c < vocab.valid(rank) ? log_p[static_cast<size_t>(vocab.begin(rank) + c)] : -HUGE_VAL;
      const double scale = logit_gradient_scale(p, terms / temperature, terms / temperature,
                                                std::abs(static_cast<double>(want[i])));
      test::expect_near(static_cast<double>(got[i]), static_cast<double>(want[i]),
                        c < vocab.valid(rank) ? 2 * logit_gradient_tolerance(type) * scale : 0,
                        fmt::format("gradient of token {}, column {}", t, c));
    }
  }
}

const DType both_types[] = {DType::f32, DType::bf16};

/// body(rows, vocab, type) for some shapes, with a row of NaN and one with much of -inf.
void for_each_split(
    int64_t tokens, int64_t vocab_size,
    const std::function<void(const LogitRows&, const VocabPartition&, DType)>& body) {
  for (const DType type : both_types) {
    LogitRows rows = random_logits(tokens, vocab_size, type);
    for (int64_t v = 0; v < vocab_size; v += 2) rows.at(1, v) = -HUGE_VAL;
    rows.at(2, vocab_size / 2) = NAN;
    for (const VocabPartition& vocab : partitions(vocab_size, world().size())) {
      SCOPED_TRACE(fmt::format("{} ids of {}, offsets {}", vocab_size, name_of(type),
                               fmt::join(vocab.offsets, " ")));
      body(rows, vocab, type);
    }
  }
}

TEST_F(LogprobsOnDevice, LogProbabilitiesAndEntropies) {
  constexpr int64_t tokens = 7, token_ids = 3;
  const Side gpu = device();
  for (const int64_t vocab_size : {37, 700})
    for_each_split(
        tokens, vocab_size, [&](const LogitRows& rows, const VocabPartition& vocab, DType type) {
          const Ints ids = test::mixed_ids(tokens, token_ids, vocab_size);
          const Floats g = test::gradients(tokens, token_ids), h = test::gradients(tokens, 1, 2);
          struct Result {
            Floats logprob, entropy, d_logits, probabilities;
          };
          const auto run = [&](const Side& side) {
            Shard shard(rows, vocab, type, side), whole(rows, vocab, type, side);
            VocabScores scores(tokens, vocab,
                               {.token_ids = token_ids,
                                .entropy = true,
                                .temperature = 1.5,
                                .kernels = side.kernels,
                                .arrays = side.arrays},
                               world());
            Result out{Floats(tokens * token_ids, NAN), Floats(tokens, NAN), {}, {}};
            scores.forward(shard.logits(), ids, stream_of(side), out.logprob, out.entropy);
            scores.backward(shard.logits(), ids, g, h, shard.gradients());
            scores.write_log_softmax(shard.logits(), true, whole.gradients());
            out.d_logits = shard.result();
            out.probabilities = whole.result();
            return out;
          };
          const Result got = run(gpu), want = run({});
          expect_scores(got.logprob, want.logprob, "log p");
          for (int64_t t = 0; t < tokens; ++t)
            for (int64_t k = 0; k < token_ids; ++k) {
              const auto at = static_cast<size_t>(t * token_ids + k);
              test::expect_logprob(got.logprob[at],
                                   score_row_reference(rows.row(t), ids[at], 1.5).logprob,
                                   fmt::format("log p of token {}, id {}", t, ids[at]));
            }
          for (int64_t t = 0; t < tokens; ++t)
            test::expect_entropy(got.entropy[static_cast<size_t>(t)],
                                 score_row_reference(rows.row(t), -1, 1.5).entropy, vocab_size,
                                 fmt::format("entropy of token {}", t));
          double most = 0;  // of a row's gradients, entropy included
          for (const float x : g) most = std::max(most, std::abs(static_cast<double>(x)));
          for (const float x : h) most = std::max(most, std::abs(static_cast<double>(x)));
          most *= static_cast<double>(token_ids) + std::log(static_cast<double>(vocab_size));
          expect_gradients(got.d_logits, want.d_logits, rows, vocab, type, 1.5, most);
          expect_gradients(got.probabilities, want.probabilities, rows, vocab, type, 1.5, 1);
          test::expect_same_on_all_ranks(got.logprob);
        });
}

TEST_F(LogprobsOnDevice, ShardsInTilesHaveTheScoresOfWholeOnes) {
  constexpr int64_t tokens = 9, token_ids = 2, vocab_size = 61;
  const LogitRows rows = random_logits(tokens, vocab_size, DType::f32);
  const Ints ids = test::mixed_ids(tokens, token_ids, vocab_size);
  const Side gpu = device();
  for (const VocabPartition& vocab : partitions(vocab_size, world().size())) {
    const RecordShape shape{vocab, world().rank(), token_ids, true, 0.5F};
    const int64_t columns = vocab.valid(world().rank());
    const auto records = gpu.kernels->make_records(shape);
    const auto scores_by = [&](const Matrix& logits, int64_t tile_rows, int64_t tile_columns) {
      records->start(tokens, ids);
      std::vector<std::unique_ptr<DeviceMatrix>> tiles;  // they stay until all is done
      for (int64_t row = 0; row < tokens; row += tile_rows)
        for (int64_t column = 0; column < columns; column += tile_columns) {
          Matrix tile(std::min(tile_rows, tokens - row), std::min(tile_columns, columns - column),
                      DType::f32);
          for (int64_t r = 0; r < tile.rows(); ++r)
            for (int64_t c = 0; c < tile.cols(); ++c)
              tile.set(r, c, logits.at(row + r, column + c));
          // Rows that are aligned alike, whatever the tile: what a thread reads depends on that.
          const int64_t gap = 4 - tile.cols() % 4;
          tiles.push_back(
              std::make_unique<DeviceMatrix>(std::as_const(tile).ref(), *gpu.stream, 1, gap));
          records->add(std::as_const(*tiles.back()).ref(), row, column, tile.cols());
        }
      std::vector<RowNormalizer> normalizers(tokens);
      Floats logprob(tokens * token_ids, NAN), entropy(tokens, NAN);
      records->merge(*gpu.arrays, *gpu.stream, "a test", {normalizers, logprob, entropy});
      logprob.insert(logprob.end(), entropy.begin(), entropy.end());
      for (const RowNormalizer& row : normalizers) logprob.push_back(row.max + row.log_sum);
      return logprob;
    };
    const Matrix logits = rows.shard(vocab, world().rank(), DType::f32);
    const Floats whole = scores_by(logits, tokens, std::max<int64_t>(1, columns));
    expect_scores(scores_by(logits, 4, 7), whole, "in tiles");
    expect_equal(scores_by(logits, 2, std::max<int64_t>(1, columns)), whole, "in rows");
  }
}

#ifdef GYRE_SOFTGPU
TEST_F(LogprobsOnDevice, TheHostWaitsOnceForACallForwardAndNotBackward) {
  constexpr int64_t tokens = 5, vocab_size = 64;
  const Side gpu = device();
  const VocabPartition vocab = balanced_partition(vocab_size, world().size());
  const LogitRows rows = random_logits(tokens, vocab_size, DType::f32);
  Shard shard(rows, vocab, DType::f32, gpu);
  VocabScores scores(tokens, vocab, {.entropy = true, .kernels = gpu.kernels, .arrays = gpu.arrays},
                     world());
  const Ints ids(tokens, 3);
  const Floats g(tokens, 1);
  Floats logprob(tokens), entropy(tokens);
  stream().mark();  // the first of a stream waits
  for (int call = 0; call < 2; ++call) {
    const int64_t before = softgpu::host_waits();
    scores.forward(shard.logits(), ids, *gpu.stream, logprob, entropy);
    EXPECT_EQ(softgpu::host_waits() - before, 1);
    scores.backward(shard.logits(), ids, g, g, shard.gradients());
    EXPECT_EQ(softgpu::host_waits() - before, 1);
  }
  SoftCrossEntropy crosses(tokens, vocab, 1, world(), gpu.kernels, gpu.arrays);
  Shard teacher(rows, vocab, DType::f32, gpu);
  const int64_t before = softgpu::host_waits();
  crosses.forward(shard.logits(), teacher.logits(), *gpu.stream, logprob);
  EXPECT_EQ(softgpu::host_waits() - before, 1);
}
#endif

TEST_F(LogprobsOnDevice, SoftCrossEntropies) {
  constexpr int64_t tokens = 6;
  const Side gpu = device();
  for_each_split(tokens, 300, [&](const LogitRows& rows, const VocabPartition& vocab, DType type) {
    const LogitRows teacher = random_logits(tokens, 300, type, 2, 7);
    const Floats g = test::gradients(tokens, 1);
    const auto run = [&](const Side& side) {
      Shard students(rows, vocab, type, side), teachers(teacher, vocab, type, side);
      SoftCrossEntropy scores(tokens, vocab, 1, world(), side.kernels, side.arrays);
      Floats value(tokens, NAN);
      scores.forward(students.logits(), teachers.logits(), stream_of(side), value);
      scores.backward(students.logits(), teachers.logits(), g, students.gradients());
      return std::pair{value, students.result()};
    };
    const auto [value, gradient] = run(gpu);
    const auto [want, want_gradient] = run({});
    expect_scores(value, want, "cross entropy");
    // Where the student is certain that the teacher errs, the value is infinite.
    EXPECT_EQ(value[1], HUGE_VALF);
    ASSERT_EQ(gradient.size(), want_gradient.size());
    size_t i = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const auto log_q = log_softmax_reference(rows.row(t));
      const auto log_p = log_softmax_reference(teacher.row(t));
      const auto factor = static_cast<double>(g[static_cast<size_t>(t)]);
      for (int64_t c = 0; c < vocab.columns(world().rank()); ++c, ++i) {
        const auto id = static_cast<size_t>(vocab.begin(world().rank()) + c);
        const double scale = c < vocab.valid(world().rank())
                                 ? logit_gradient_scale(log_q[id], factor, 0, 0) +
                                       logit_gradient_scale(log_p[id], factor, 0, 0)
                                 : 0;
        test::expect_near(static_cast<double>(gradient[i]), static_cast<double>(want_gradient[i]),
                          2 * logit_gradient_tolerance(type) * scale,
                          fmt::format("gradient of token {}, id {}", t, id));
      }
    }
  });
}

TEST_F(LogprobsOnDevice, LogitsOfIdsAndDistillation) {
  constexpr int64_t tokens = 6, token_ids = 5, vocab_size = 90;
  const Side gpu = device();
  for_each_split(tokens, vocab_size,
                 [&](const LogitRows& rows, const VocabPartition& vocab, DType type) {
                   const Ints ids = test::mixed_ids(tokens, token_ids, vocab_size);
                   Ints owned = ids;
                   for (int32_t& id : owned) id = std::clamp<int32_t>(id, 0, vocab_size - 1);
                   const Floats g = test::gradients(tokens, token_ids),
                                teacher = test::gradients(tokens, token_ids, 4);
                   const auto gathered = [&](const Side& side) {
                     Shard shard(rows, vocab, type, side);
                     GatheredLogits scores(tokens, vocab, token_ids, 1, world(), side.kernels);
                     Floats values(tokens * token_ids, NAN);
                     HostStream host;
                     scores.forward(shard.logits(), ids, host, values);
                     scores.backward(ids, g, shard.gradients());
                     return std::pair{values, shard.result()};
                   };
                   const auto [values, gradient] = gathered(gpu);
                   const auto [want_values, want_gradient] = gathered({});
                   expect_equal(values, want_values, "logit");
                   expect_equal(gradient, want_gradient, "gradient");
                   for (const bool renormalised : {false, true}) {
                     const auto distilled = [&](const Side& side) {
                       Shard shard(rows, vocab, type, side);
                       DistillationScores scores(tokens, vocab,
                                                 {.token_ids = token_ids,
                                                  .renormalised = renormalised,
                                                  .kernels = side.kernels,
                                                  .arrays = side.arrays},
                                                 world());
                       Floats student(tokens * token_ids, NAN), of_teacher(tokens * token_ids, NAN);
                       scores.forward(shard.logits(), teacher, owned, stream_of(side), student,
                                      of_teacher, {});
                       scores.backward(shard.logits(), owned, g, {}, shard.gradients());
                       return std::pair{student, shard.result()};
                     };
                     const auto [student, d_logits] = distilled(gpu);
                     const auto [want_student, want_d_logits] = distilled({});
                     expect_scores(student, want_student, "log p");
                     expect_gradients(d_logits, want_d_logits, rows, vocab, type, 1, 4 * token_ids);
                   }
                 });
}

TEST_F(LogprobsOnDevice, TheLargest) {
  constexpr int64_t tokens = 5;
  const Side gpu = device();
  for_each_split(tokens, 500,
                 [&](const LogitRows& random, const VocabPartition& vocab, DType type) {
                   LogitRows rows = random;
                   for (double& z : rows.values) z = std::round(4 * z) / 4;  // many ties
                   for (const int64_t k : {1, 20, 500}) {
                     const auto run = [&](const Side& side) {
                       const Shard shard(rows, vocab, type, side);
                       VocabTopK top(tokens, vocab, k, 1, world(), side.kernels);
                       Floats values(static_cast<size_t>(tokens * k), NAN);
                       Ints ids(values.size(), -7);
                       HostStream host;
                       top.run(shard.logits(), host, values, ids);
                       return std::pair{values, ids};
                     };
                     const auto [values, ids] = run(gpu);
                     const auto [want_values, want_ids] = run({});
                     expect_equal(values, want_values, "value");
                     EXPECT_EQ(ids, want_ids);
                   }
                 });
}

struct Filtered {
  Floats logprob, d_logits;
  Ints kept;
  int64_t by_digits;
};

Filtered filtered(const LogitRows& rows, const VocabPartition& vocab, DType type,
                  const Ints& targets, FilterOptions options, const Side& side) {
  options.kernels = side.kernels;
  Shard shard(rows, vocab, type, side);
  FilteredScores scores(rows.tokens, vocab, type, options, world());
  Filtered out;
  out.logprob.assign(static_cast<size_t>(rows.tokens), NAN);
  HostStream host;
  scores.forward(shard.logits(), targets, host, out.logprob);
  scores.backward(shard.logits(), targets, test::gradients(rows.tokens, 1), shard.gradients());
  out.d_logits = shard.result();
  out.kept.assign(scores.survivors().begin(), scores.survivors().end());
  out.by_digits = scores.rows_by_digits();
  return out;
}

/// The same columns survive, and get the same gradients, of test::gradients.
void expect_filtered_gradients(const Floats& got, const Floats& want, const LogitRows& rows,
                               const VocabPartition& vocab, DType type,
                               const SamplingFilter& filter) {
  const Floats g = test::gradients(rows.tokens, 1);
  const int rank = world().rank();
  ASSERT_EQ(got.size(), want.size());
  size_t i = 0;
  for (int64_t t = 0; t < rows.tokens; ++t) {
    std::vector<double> left(rows.row(t).begin(), rows.row(t).end());
    const bool a_number = std::none_of(left.begin(), left.end(), [](double z) { return z != z; });
    const std::vector<bool> kept =
        a_number ? filter_reference(rows.row(t), filter) : std::vector<bool>(left.size(), true);
    for (size_t v = 0; v < left.size(); ++v)
      if (!kept[v]) left[v] = -HUGE_VAL;
    const auto log_p = log_softmax_reference(left, filter.temperature);
    const double size =
        std::abs(static_cast<double>(g[static_cast<size_t>(t)])) / filter.temperature;
    for (int64_t c = 0; c < vocab.columns(rank); ++c, ++i) {
      const auto id = static_cast<size_t>(vocab.begin(rank) + c);
      const bool survives = c < vocab.valid(rank) && kept[id];
      const double scale = survives ? logit_gradient_scale(log_p[id], size, 0, size) : 0;
      test::expect_near(static_cast<double>(got[i]), static_cast<double>(want[i]),
                        2 * logit_gradient_tolerance(type) * scale,
                        fmt::format("gradient of token {}, id {}", t, id));
    }
  }
}

/// Rows cut by lists and by digits, flat ones, and targets at, above and below the threshold.
TEST_F(LogprobsOnDevice, SamplingFilters) {
  constexpr int64_t tokens = 9, vocab_size = 1200;
  const Side gpu = device();
  const FilterOptions filters[] = {{{0, 1, 1.5}, 64, 1},
                                   {{10, 1, 1}, 64, 1},
                                   {{0, 0.8503, 1}, 8, 1},
                                   {{0, 0.4007, 0.5}, 64, 1},
                                   {{30, 0.7001, 1}, 64, 1}};
  int64_t by_digits = 0;
  for_each_split(
      tokens, vocab_size, [&](const LogitRows& random, const VocabPartition& vocab, DType type) {
        LogitRows rows = random;
        for (int64_t v = 0; v < vocab_size; ++v) {
          rows.at(4, v) = 0.25;                           // flat
          rows.at(5, v) = std::round(2 * rows.at(5, v));  // ties
          for (const int64_t t : {6, 7, 8}) rows.at(t, v) = v % 60 == 7 ? 5 : -10;
        }
        Ints targets;
        for (int64_t t = 0; t < tokens; ++t)
          targets.push_back(top_k_reference(rows.row(t == 2 ? 0 : t), 1 + 3 * t).back().id);
        targets[4] = vocab_size - 3;
        // Of 20 ties, of which the last 9 or 18 survive, and which are more than a list holds, or
        // less.
        targets[6] = 10 * 60 + 7;
        targets[7] = 11 * 60 + 7;
        targets[8] = 1 * 60 + 7;
        for (const FilterOptions& options : filters) {
          const Filtered got = filtered(rows, vocab, type, targets, options, gpu),
                         want = filtered(rows, vocab, type, targets, options, {});
          EXPECT_EQ(got.kept, want.kept);
          EXPECT_EQ(got.by_digits, want.by_digits);
          by_digits += got.by_digits;
          expect_scores(got.logprob, want.logprob, "log p");
          for (int64_t t = 6; t < tokens; ++t) {
            const auto at = static_cast<size_t>(t);
            test::expect_logprob(
                got.logprob[at],
                filtered_logprob_reference(rows.row(t), targets[at], options.filter),
                fmt::format("filtered log p of token {}", t));
          }
          test::expect_same_on_all_ranks(got.logprob);
          expect_filtered_gradients(got.d_logits, want.d_logits, rows, vocab, type, options.filter);
        }
      });
  EXPECT_GT(by_digits, 0);
}

TEST_F(LogprobsOnDevice, EveryRunHasTheSameBits) {
  const Side gpu = device();
  const LogitRows rows = random_logits(5, 900, DType::bf16);
  const VocabPartition vocab = partitions(900, world().size())[2];
  const Ints targets = test::mixed_ids(5, 1, 900);
  const FilterOptions options{{0, 0.9, 1}, 16, 1};
  const Filtered first = filtered(rows, vocab, DType::bf16, targets, options, gpu);
  for (int run = 0; run < 2; ++run) {
    const Filtered again = filtered(rows, vocab, DType::bf16, targets, options, gpu);
    EXPECT_EQ(test::digest<float>(first.logprob), test::digest<float>(again.logprob));
    EXPECT_EQ(test::digest<float>(first.d_logits), test::digest<float>(again.d_logits));
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

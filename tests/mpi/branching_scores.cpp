// Rows that predict several ids, of a vocabulary that is split over all ranks.

#include "logprobs/branching_scores.hpp"

#include "logprobs/reference.hpp"
#include "score_checks.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;
using Doubles = std::vector<double>;

constexpr int64_t rows = 7, vocab_size = 37;

/// What each row is asked for, and the gradients.
struct Asked {
  std::vector<int32_t> ids = {3, 36, -1, 0, 12, -1, -1};
  std::vector<Branch> branches = {{5, {7, 7, 30}}, {2, {1}}};
  std::vector<float> g = {1, -2, 0, 0.5F, 0, 0, 0, 1.5F, -0.5F, 2, -1};

  /// The ids of a row, and where they are among the predictions.
  std::vector<std::pair<int32_t, size_t>> of(int64_t row) const {
    std::vector<std::pair<int32_t, size_t>> all;
    const int64_t r = row;
    if (ids[r] >= 0) all.emplace_back(ids[r], r);
    size_t at = ids.size();
    for (const Branch& branch : branches)
      for (const int32_t id : branch.ids) {
        if (branch.row == row) all.emplace_back(id, at);
        ++at;
      }
    return all;
  }
};

TEST(BranchingScores, AreThoseOfEachIdAndGradientsAddUp) {
  const Asked asked;
  HostStream stream;
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool in_place : {false, true})
      for (const VocabPartition& vocab : test::partitions(vocab_size, world().size())) {
        const test::LogitRows whole = test::random_logits(rows, vocab_size, type);
        test::Matrix logits = whole.shard(vocab, world().rank(), type);
        test::Matrix elsewhere(rows, logits.cols(), type);
        const Doubles temperatures{1.25, 1.25, 0.5, 2, 1, 3, 1.25};
        ScoreOptions options;
        options.temperatures = temperatures;
        BranchingScores scores(rows, asked.branches, vocab, options, world());
        ASSERT_EQ(scores.predictions(), std::ssize(asked.g));
        std::vector<float> logprob(asked.g.size(), NAN);
        const test::TrafficSince forward(world());
        scores.forward(logits.ref(), asked.ids, stream, logprob);
        const int64_t peers = world().size() - 1;
        EXPECT_EQ(forward.bytes(), peers * (12 * rows + 4 * (2 + 3) + 4 * (2 + 1)));
        test::expect_same_on_all_ranks(logprob);
        MatrixRef d_logits = in_place ? logits.ref() : elsewhere.ref();
        const test::TrafficSince backward(world());
        scores.backward(logits.ref(), asked.ids, asked.g, stream, d_logits);
        EXPECT_EQ(backward.messages(), 0);
        const std::vector<float> got = test::elements(d_logits);
        for (int64_t r = 0; r < rows; ++r) {
          std::vector<int32_t> ids;
          Doubles g;
          for (const auto& [id, at] : asked.of(r)) {
            test::expect_logprob(logprob[at],
                                 score_row_reference(whole.row(r), id, temperatures[r]).logprob,
                                 fmt::format("row {} id {}", r, id));
            ids.push_back(id);
            g.push_back(static_cast<double>(asked.g[at]));
          }
          test::expect_gradient_row(
              got, type, r, vocab, world().rank(),
              score_gradient_reference(whole.row(r), ids, g, 0, temperatures[r]),
              Doubles(vocab_size, 4));
        }
      }
}

}  // namespace GYRE_FILE
}  // namespace gyre

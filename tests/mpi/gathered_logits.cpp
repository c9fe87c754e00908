// Raw logits at ids of a vocabulary that is split over all ranks, and their gradients.

#include "errors.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "score_checks.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::differs;
using test::LogitRows;
using test::Matrix;
using test::on_last_rank;
using test::world;
using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

constexpr float inf = std::numeric_limits<float>::infinity();

Floats gather(const Matrix& logits, const VocabPartition& vocab, int64_t picks, const Ints& ids) {
  GatheredLogits gathered(logits.rows(), vocab, picks, 1, world());
  Floats values(ids.size(), NAN);
  HostStream stream;
  gathered.forward(logits.ref(), ids, stream, values);
  return values;
}

TEST(GatheredLogits, AreExactForAnyPartitionTypeAndNumberOfIds) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const int64_t picks : {0, 1, 4, 64})
      for (const int64_t vocab_size : {37, 256}) {
        const LogitRows rows = test::random_logits(32, vocab_size, type);
        const Ints ids = test::mixed_ids(32, picks, vocab_size);
        for (const VocabPartition& vocab : test::partitions(vocab_size, world().size())) {
          const Floats got = gather(rows.shard(vocab, world().rank(), type), vocab, picks, ids);
          for (size_t i = 0; i < ids.size(); ++i) {
            const auto row = rows.row(static_cast<int64_t>(i) / picks);
            const bool owned = ids[i] >= 0 && ids[i] < vocab_size;
            EXPECT_EQ(static_cast<double>(got[i]), owned ? row[static_cast<size_t>(ids[i])] : 0)
                << "id " << ids[i];
          }
          test::expect_same_on_all_ranks(got);
        }
      }
}

TEST(GatheredLogits, NothingElseIsRead) {
  const VocabPartition vocab = test::partitions(50, world().size()).front();
  LogitRows rows(3, 50);
  for (double& z : rows.values) z = NAN;
  rows.at(0, 0) = 1.5, rows.at(1, 49) = -2, rows.at(2, 20) = -INFINITY;
  const Matrix logits = rows.shard(vocab, world().rank(), DType::bf16);
  EXPECT_EQ(gather(logits, vocab, 2, {0, -1, 50, 49, 20, 51}), (Floats{1.5, 0, 0, -2, -inf, 0}));
}

TEST(GatheredLogits, OwnersOfTheIdsGetTheSumsOfTheirGradients) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const VocabPartition& vocab : test::partitions(37, world().size())) {
      const int64_t tokens = 9, picks = 64;
      const Ints ids = test::mixed_ids(tokens, picks, 37);
      const Floats g = test::gradients(tokens, picks);
      GatheredLogits gathered(tokens, vocab, picks, 1, world());
      Matrix d_logits(tokens, vocab.columns(world().rank()), type);
      const test::TrafficSince backward(world());
      gathered.backward(ids, g, d_logits.ref());
      EXPECT_EQ(backward.messages(), 0);
      const Floats got = test::elements(d_logits.ref());
      for (int64_t t = 0; t < tokens; ++t) {
        std::vector<double> want(37, 0), sizes(37, 0);
        for (int64_t k = 0; k < picks; ++k) {
          const auto at = static_cast<size_t>(t * picks + k);
          if (ids[at] < 0 || ids[at] >= 37) continue;
          want[static_cast<size_t>(ids[at])] += static_cast<double>(g[at]);
          sizes[static_cast<size_t>(ids[at])] += std::abs(static_cast<double>(g[at]));
        }
        test::expect_gradient_row(got, type, t, vocab, world().rank(), want, sizes);
      }
    }
}

TEST(GatheredLogits, OneAllReduceOf4BytesAnId) {
  const int n = world().size();
  const VocabPartition vocab = balanced_partition(40, n);
  const LogitRows rows = test::random_logits(12, 40, DType::bf16);
  const Matrix logits = rows.shard(vocab, world().rank(), DType::bf16);
  GatheredLogits gathered(12, vocab, 2, 1, world());
  Floats values(24);
  HostStream stream;
  const test::TrafficSince forward(world());
  gathered.forward(logits.ref(), Ints(24, 3), stream, values);
  EXPECT_EQ(forward.messages(), n > 1 ? 1 : 0);
  EXPECT_EQ(forward.bytes(), 2 * (n - 1) * 24 * 4 / n);
}

TEST(GatheredLogits, WrongArgumentsEndAllRanksAlike) {
  const int n = world().size();
  const auto error = [](int64_t tokens, const VocabPartition& vocab, int64_t picks) {
    return agreed_message([&] { GatheredLogits(tokens, vocab, picks, 1, world()); });
  };
  const VocabPartition vocab = balanced_partition(30, n);
  const int last = on_last_rank() ? 1 : 0;
  const std::string what = "logits of ids";
  EXPECT_EQ(error(4, vocab, 2), "no error");
  EXPECT_EQ(error(4 + last, vocab, 2), differs(what, "the number of tokens", "4", "5"));
  EXPECT_EQ(error(4, vocab, 2 + last), differs(what, "the number of ids a token", "2", "3"));
  EXPECT_EQ(error(-1, vocab, 2), "-1 tokens; the fewest are 0");
  EXPECT_EQ(error(4, vocab, -7 * last), "-7 ids a token; the fewest are 0" + test::found_on(n - 1));
  EXPECT_EQ(error(4, even_partition(8 * n - last, 8 * n, n), 2),
            differs(what, "the number of ids of the vocabulary", std::to_string(8 * n),
                    std::to_string(8 * n - 1)));
  EXPECT_EQ(error(4, balanced_partition(30, n + 1), 2),
            fmt::format("a vocabulary in {} shards for a group of {} ranks; it must be one shard a "
                        "rank",
                        n + 1, n));
}

}  // namespace GYRE_FILE
}  // namespace gyre

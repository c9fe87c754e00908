// The algorithms of NeMo RL over all ranks: results against whole rows in double precision, and
// what they cost: collectives, bytes on the wire, memory.

#include "baselines/upstream.hpp"

#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "baselines/upstream_passes.hpp"
#include "comm/agree.hpp"
#include "logprob_cases.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/tolerance.hpp"
#include "mpi_test.hpp"
#include "runtime/buffer.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::LogitRows;
using test::Matrix;
using test::world;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// The largest error as a share of its tolerance. What should be finite and is not, or the other
/// way round, is infinitely wrong; NaN is right where it is expected.
class Worst {
 public:
  void add(double got, double want, double tolerance) {
    if (got == want || (std::isnan(got) && std::isnan(want))) return;
    const double share = std::abs(got - want) / tolerance;
    share_ = std::isfinite(want) && share <= infinity ? std::max(share_, share) : infinity;
  }
  void expect(bool holds) {
    if (!holds) share_ = infinity;
  }
  double share() const { return share_; }

 private:
  double share_ = 0;
};

struct Case {
  VocabPartition vocab;
  DType type = DType::f32;
  int64_t tokens = 7;
  int64_t chunk = 0;
  int threads = 1;
  uint64_t seed = 1;

  upstream::Shape shape() const { return {tokens, vocab, chunk, threads}; }
  size_t rows() const { return tokens; }
  int64_t ids() const { return vocab.vocab_size; }
  LogitRows logits() const { return test::random_logits(tokens, ids(), type, 2, seed); }
  LogitRows teacher() const {
    return test::random_logits(tokens, ids(), type, 2, seed, TokenTensor::teacher);
  }
  Matrix shard(const LogitRows& rows) const { return rows.shard(vocab, world().rank(), type); }
  Matrix gradient() const { return {tokens, vocab.columns(world().rank()), type}; }
  /// Ids of all kinds: of every shard, repeated, and nobody's.
  Ints some_ids(int64_t picks) const {
    const int64_t nobodys[] = {-1, -100, ids(), vocab.padded() + 5};
    Ints result;
    for (int64_t i = 0; i < tokens * picks; ++i)
      result.push_back(
          static_cast<int32_t>(i % 5 == 3 ? nobodys[i % 4] : (i / 2 * 37 + i / 7) % ids()));
    return result;
  }
  /// Gradients from above; some are 0.
  Floats some_gradients(int64_t picks) const {
    Floats result;
    for (int64_t i = 0; i < tokens * picks; ++i)
      result.push_back(static_cast<float>((i * 11 + 3) % 9 - 4) / 2);
    return result;
  }
};

std::span<const int32_t> row_of(const Ints& x, int64_t row, int64_t picks) {
  return std::span(x).subspan(row * picks, picks);
}
Doubles row_of(const Floats& x, int64_t row, int64_t picks) {
  return {x.begin() + row * picks, x.begin() + (row + 1) * picks};
}
double at(const Floats& x, int64_t i) {
  return static_cast<double>(x[i]);
}

/// Whether all ranks have the same bits.
bool same_on_all_ranks(const Floats& mine) {
  Floats first = mine;
  HostStream stream;
  world().broadcast(writable_bytes_of(std::span(first)), 0, stream, "rank 0's results")->wait();
  return std::ranges::equal(std::as_bytes(std::span(first)), std::as_bytes(std::span(mine)));
}

/// This rank's columns of a row's gradient: want(id), within the tolerance times scale(id); 0 in
/// padding; what lies between rows is as it was.
void compare_gradient(const Case& c, const Matrix& got, int64_t row,
                      const std::function<double(int64_t)>& want,
                      const std::function<double(int64_t)>& scale, Worst& worst) {
  const int me = world().rank();
  for (int64_t col = 0; col < got.cols(); ++col) {
    if (col >= c.vocab.valid(me)) {
      worst.expect(got.at(row, col) == 0);
      continue;
    }
    const int64_t id = c.vocab.begin(me) + col;
    worst.add(got.at(row, col), want(id), logit_gradient_tolerance(c.type) * scale(id));
  }
  worst.expect(std::isnan(got.at(row, got.cols())));
}

/// A row of the gradient of Σ g log p(id) + h · entropy.
void compare_score_gradient(const Case& c, const Matrix& got, int64_t row,
                            std::span<const double> logits, std::span<const int32_t> ids,
                            std::span<const double> g, double h, Worst& worst) {
  const Doubles want = score_gradient_reference(logits, ids, g, h);
  const Doubles logp = log_softmax_reference(logits);
  const double sum = std::accumulate(g.begin(), g.end(), 0.0);
  const double a = sum + std::abs(h) * score_row_reference(logits, -1).entropy;
  const auto scale = [&](int64_t id) {
    double weights = 0;
    for (size_t k = 0; k < ids.size(); ++k) weights += ids[k] == id ? std::abs(g[k]) : 0;
    return logit_gradient_scale(logp[id], a, h, weights);
  };
  compare_gradient(
      c, got, row, [&](int64_t id) { return want[id]; }, scale, worst);
}

/// One id a token, or `picks` of them by the class for several. `in_place`: the gradient goes where
/// the logits were.
double worst_of_logprobs(const Case& c, int64_t picks, bool in_place, const LogitRows& rows) {
  Matrix logits = c.shard(rows), other = c.gradient();
  const Ints ids = c.some_ids(picks);
  const Floats g = c.some_gradients(picks);
  Floats logprob(ids.size(), 1e9F);
  HostStream stream;
  const MatrixRef d_logits = in_place ? logits.ref() : other.ref();
  if (picks == 1) {
    upstream::Logprob peer(c.shape(), world());
    peer.forward(logits.ref(), ids, stream, logprob);
    peer.backward(logits.ref(), ids, g, stream, d_logits);
  } else {
    upstream::GatherLogprob peer(c.shape(), picks, world());
    peer.forward(logits.ref(), ids, stream, logprob);
    peer.backward(logits.ref(), ids, g, stream, d_logits);
  }
  Worst worst;
  worst.expect(same_on_all_ranks(logprob));
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t k = 0; k < picks; ++k) {
      const int64_t i = t * picks + k;
      const double want = score_row_reference(rows.row(t), ids[i]).logprob;
      worst.add(at(logprob, i), want, logprob_tolerance() * logprob_scale(want));
    }
    compare_score_gradient(c, in_place ? logits : other, t, rows.row(t), row_of(ids, t, picks),
                           row_of(g, t, picks), 0, worst);
  }
  return worst.share();
}

double worst_of_entropies(const Case& c, const LogitRows& rows) {
  const Matrix logits = c.shard(rows);
  Matrix d_logits = c.gradient();
  const Floats g = c.some_gradients(1);
  Floats entropy(c.rows(), 1e9F);
  HostStream stream;
  upstream::Entropy peer(c.shape(), world());
  peer.forward(logits.ref(), stream, entropy);
  peer.backward(logits.ref(), g, stream, d_logits.ref());
  Worst worst;
  worst.expect(same_on_all_ranks(entropy));
  for (int64_t t = 0; t < c.tokens; ++t) {
    const double want = score_row_reference(rows.row(t), -1).entropy;
    worst.add(at(entropy, t), want, logprob_tolerance() * entropy_scale(c.ids()));
    compare_score_gradient(c, d_logits, t, rows.row(t), {}, {}, at(g, t), worst);
  }
  return worst.share();
}

double worst_of_cross_entropies(const Case& c, const LogitRows& rows, const LogitRows& teachers) {
  const Matrix student = c.shard(rows), teacher = c.shard(teachers);
  Matrix d_student = c.gradient();
  const Floats g = c.some_gradients(1);
  Floats value(c.rows(), 1e9F);
  HostStream stream;
  upstream::SoftCrossEntropy peer(c.shape(), world());
  peer.forward(student.ref(), teacher.ref(), stream, value);
  peer.backward(g, d_student.ref());
  Worst worst;
  worst.expect(same_on_all_ranks(value));
  for (int64_t t = 0; t < c.tokens; ++t) {
    const double want = soft_cross_entropy_reference(rows.row(t), teachers.row(t));
    worst.add(at(value, t), want, logprob_tolerance() * logprob_scale(want));
    const Doubles gradient =
        soft_cross_entropy_gradient_reference(rows.row(t), teachers.row(t), at(g, t));
    const Doubles log_q = log_softmax_reference(rows.row(t));
    const Doubles log_p = log_softmax_reference(teachers.row(t));
    compare_gradient(
        c, d_student, t, [&](int64_t id) { return gradient[id]; },
        [&](int64_t id) {
          const int64_t v = id;
          return logit_gradient_scale(log_q[v], at(g, t), 0, 0) +
                 logit_gradient_scale(log_p[v], at(g, t), 0, 0);
        },
        worst);
  }
  return worst.share();
}

/// Whether rounding in f32 cannot change who survives: no probability before a logit is top_p to
/// four digits, and no two logits have the same quotient by the temperature.
bool is_clear(std::span<const double> row, const SamplingFilter& filter) {
  if (filter.top_p == 1) return true;
  SamplingFilter largest = filter;
  largest.top_p = 1;
  const std::vector<bool> kept = filter_reference(row, largest);
  Doubles left;
  for (size_t v = 0; v < row.size(); ++v)
    if (kept[v] && row[v] != -infinity) left.push_back(row[v]);
  std::sort(left.begin(), left.end(), std::greater<>());
  double before = 0;
  for (const double logp : log_softmax_reference(left, filter.temperature)) {
    if (std::abs(before - filter.top_p) < 1e-4) return false;
    before += std::exp(logp);
  }
  return true;
}

/// Targets in turn: the largest, one of the middle, and some_ids.
Ints filter_targets(const Case& c, const LogitRows& rows) {
  Ints targets = c.some_ids(1);
  for (int64_t t = 0; t < c.tokens; ++t) {
    const auto top = top_k_reference(rows.row(t), c.ids());
    if (t % 3 == 0) targets[t] = top[0].id;
    if (t % 3 == 1) targets[t] = top[top.size() / 4].id;
  }
  return targets;
}

double worst_of_filtered(const Case& c, const SamplingFilter& filter, const LogitRows& rows) {
  const Matrix logits = c.shard(rows);
  Matrix d_logits = c.gradient();
  const Ints targets = filter_targets(c, rows);
  const Floats g = c.some_gradients(1);
  Floats logprob(c.rows(), 1e9F);
  HostStream stream;
  upstream::FilteredLogprob peer(c.shape(), filter, world());
  peer.forward(logits.ref(), targets, stream, logprob);
  peer.backward(targets, g, stream, d_logits.ref());
  Worst worst;
  worst.expect(same_on_all_ranks(logprob));
  const Ints survivors = peer.survivors(stream);
  for (int64_t t = 0; t < c.tokens; ++t) {
    if (!is_clear(rows.row(t), filter)) continue;
    worst.expect(survivors[t] == SurvivorsReference(rows.row(t), filter).usual());
    const int32_t target = targets[t];
    const double want = filtered_logprob_reference(rows.row(t), target, filter);
    worst.add(at(logprob, t), want, logprob_tolerance() * logprob_scale(want));
    const Doubles gradient = filtered_gradient_reference(rows.row(t), target, filter, at(g, t));
    const std::vector<bool> kept = filter_reference(rows.row(t), filter);
    const Doubles logp = log_softmax_reference(rows.row(t), filter.temperature);
    compare_gradient(
        c, d_logits, t, [&](int64_t id) { return gradient[id]; },
        [&](int64_t id) {
          const int64_t v = id;
          const double weight = id == target ? std::abs(at(g, t)) / filter.temperature : 0;
          // Among survivors probabilities are larger than in the whole row, which serves for size.
          return kept[v] ? logit_gradient_scale(0, gradient[v], 0, weight) +
                               logit_gradient_scale(logp[v], gradient[v], 0, 0)
                         : logit_gradient_scale(-infinity, 0, 0, 0);
        },
        worst);
  }
  return worst.share();
}

double worst_of_top_k(const Case& c, int64_t k, const LogitRows& rows) {
  const int64_t length = std::min(k, c.ids());
  const int64_t count = c.tokens * length;
  Floats values(count, 1e9F);
  Ints ids(count, -7);
  HostStream stream;
  upstream::TopK(c.shape(), k, world()).run(c.shard(rows).ref(), stream, values, ids);
  Worst worst;
  for (int64_t t = 0; t < c.tokens; ++t) {
    const auto want = top_k_reference(rows.row(t), k);
    for (int64_t i = 0; i < length; ++i) {
      const TopEntry entry = want[i];
      worst.expect(at(values, t * length + i) == entry.value);
      worst.expect(ids[t * length + i] == entry.id);
    }
  }
  return worst.share();
}

/// Every way of cutting the vocabulary, both types, numbers of rows that ranks divide or not, and
/// slices.
template <class Body>
void for_each_case(Body body) {
  struct Size {
    int64_t tokens, chunk;
  };
  for (const VocabPartition& vocab : test::partitions(61, world().size()))
    for (const DType type : {DType::f32, DType::bf16})
      for (const auto [tokens, chunk] :
           {Size{0, 0}, {0, 3}, {7, 0}, {8, 0}, {4, 1}, {7, 3}, {8, 4}, {7, 1000}}) {
        SCOPED_TRACE(fmt::format("{} of {} columns, {} tokens of {}, slices of {}",
                                 vocab.columns(world().rank()), vocab.padded(), tokens,
                                 name_of(type), chunk));
        body(Case{vocab, type, tokens, chunk});
      }
}

std::vector<SamplingFilter> filters() {
  return {{}, {10}, {0, 0.9}, {10, 0.9}, {5, 0.5, 0.7}, {0, 0.01}, {1}, {0, 1, 1.5}, {61}};
}

/// Compares every operation on these rows with the twin.
void expect_twin(const Case& c, const LogitRows& rows, const LogitRows& teachers,
                 const std::vector<SamplingFilter>& some_filters) {
  for (const int64_t picks : {1, 3})
    for (const bool in_place : {false, true})
      EXPECT_LE(worst_of_logprobs(c, picks, in_place, rows), 1) << picks << ' ' << in_place;
  EXPECT_LE(worst_of_entropies(c, rows), 1);
  for (const int64_t k : {1, 5, 70}) EXPECT_EQ(worst_of_top_k(c, k, rows), 0) << k;
  if (c.chunk > 0) return;  // the others have no slices
  EXPECT_LE(worst_of_cross_entropies(c, rows, teachers), 1);
  for (const SamplingFilter& filter : some_filters)
    EXPECT_LE(worst_of_filtered(c, filter, rows), 1)
        << "k " << filter.top_k << " p " << filter.top_p << " T " << filter.temperature;
}

TEST(Upstream, ResultsAndTheirGradientsEqualTheTwin) {
  for_each_case([](const Case& c) { expect_twin(c, c.logits(), c.teacher(), filters()); });
}

TEST(Upstream, FiltersOfTheseRowsAreClearCut) {
  const LogitRows rows = test::golden_logits();
  for (const SamplingFilter& filter : filters())
    for (int64_t t = 0; t < rows.tokens; ++t) EXPECT_TRUE(is_clear(rows.row(t), filter));
  for (const VocabPartition& vocab : test::partitions(64, world().size()))
    for (const SamplingFilter& filter : filters())
      EXPECT_LE(worst_of_filtered({vocab, DType::bf16, 16}, filter, rows), 1)
          << "k " << filter.top_k << " p " << filter.top_p;
}

/// Rows of few different values: ties within and between shards.
LogitRows tied_rows(int64_t tokens, int64_t vocab_size) {
  LogitRows rows(tokens, vocab_size);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t v = 0; v < vocab_size; ++v)
      rows.at(t, v) = static_cast<double>((v * v + 3 * t) % 7) / 2 - 1;
  return rows;
}

TEST(Upstream, TheLargestLogitsOfTiesAreThoseOfTheTwin) {
  for_each_case([](const Case& c) {
    for (const int64_t k : {1, 5, 70})
      EXPECT_EQ(worst_of_top_k(c, k, tied_rows(c.tokens, 61)), 0) << k;
  });
}

TEST(Upstream, TheLargestLogitsOfLongRowsAreThoseOfTheTwin) {
  const Case c{balanced_partition(2000, world().size()), DType::bf16, 3};
  for (const int64_t k : {1, 3, 40}) EXPECT_EQ(worst_of_top_k(c, k, c.logits()), 0) << k;
}

TEST(Upstream, LongRowsEqualTheTwinOnEveryInstructionSet) {
  test::on_every_simd_target([] {
    for (const DType type : {DType::f32, DType::bf16}) {
      const Case c{balanced_partition(9001 * world().size(), world().size()), type, 2, 1};
      EXPECT_LE(worst_of_logprobs(c, 1, false, c.logits()), 1);
      EXPECT_LE(worst_of_entropies(c, c.logits()), 1);
      EXPECT_LE(worst_of_cross_entropies(c, c.logits(), c.teacher()), 1);
    }
  });
}

TEST(Upstream, CastsAreThoseOfBf16OnEveryInstructionSet) {
  const int64_t count = 1003;
  Floats from;
  for (const uint32_t bits : {0x7fffffffU, 0xffffffffU, 0x7f800000U, 0x7f800001U, 0x3f808000U,
                              0x3f818000U, 0x3f808001U, 0x7f7fffffU, 0U, 0x80000000U, 0x8000U})
    from.push_back(std::bit_cast<float>(bits));
  std::mt19937 random(1);
  while (std::ssize(from) < count)
    from.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  test::on_every_simd_target([&] {
    std::vector<bf16> narrow(from.size());
    Floats wide(from.size());
    upstream::narrow({from.data(), 1, count}, {narrow.data(), 1, count}, 1);
    upstream::widen({narrow.data(), 1, count}, {wide.data(), 1, count}, 1);
    for (size_t i = 0; i < from.size(); ++i) {
      EXPECT_EQ(narrow[i], to_bf16(from[i])) << i;
      EXPECT_EQ(std::bit_cast<uint32_t>(wide[i]), uint32_t{to_bf16(from[i]).bits} << 16U) << i;
    }
  });
}

TEST(Upstream, TiesAtAFiltersEdgeGoToHigherIds) {
  LogitRows rows(5, 8);
  for (int64_t t = 0; t < 5; ++t)
    for (int64_t v = 0; v < 8; ++v) rows.at(t, v) = t == 4 && v % 2 == 0 ? -0.0 : 0.0;
  for (const VocabPartition& vocab : test::partitions(8, world().size()))
    for (const SamplingFilter filter : {SamplingFilter{0, 0.55}, {3, 1}, {3, 0.3}}) {
      // All eight are equal: 4 before reach 0.5, the fifth is the last kept.
      EXPECT_LE(worst_of_filtered({vocab, DType::f32, 5}, filter, rows), 1) << filter.top_p;
      const std::vector<bool> kept = filter_reference(rows.row(4), filter);
      EXPECT_TRUE(kept[7]);
      EXPECT_EQ(kept[0], filter.top_p == 1);
    }
}

TEST(Upstream, ALogitBehindExactlyTopPIsDropped) {
  const LogitRows rows(8, 8);  // all 0: half of the probability is that of four
  for (const VocabPartition& vocab : test::partitions(8, world().size())) {
    const Case c{vocab, DType::f32, 8};
    const Ints targets = {0, 1, 2, 3, 4, 5, 6, 7};
    Floats got(8);
    HostStream stream;
    upstream::FilteredLogprob(c.shape(), {0, 0.5}, world())
        .forward(c.shard(rows).ref(), targets, stream, got);
    Worst worst;
    for (int64_t t = 0; t < 8; ++t)
      worst.add(at(got, t), t < 4 ? -infinity : -std::log(4.0), logprob_tolerance());
    EXPECT_LE(worst.share(), 1);
  }
}

/// Random rows of which a third, and all of one rank's columns, are -inf.
LogitRows with_holes(const Case& c, LogitRows rows) {
  const int64_t empty = std::min(1, world().size() - 1);
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t v = 0; v < c.ids(); ++v) {
      const bool in_empty = world().size() > 1 && c.vocab.owner(v) == empty;
      if ((v + t) % 3 == 0 || (in_empty && t % 2 == 0)) rows.at(t, v) = -infinity;
    }
  return rows;
}

TEST(Upstream, LogitsOfMinusInfinityHaveNoProbabilityAndNoGradient) {
  for_each_case([](const Case& c) {
    if (c.tokens == 7)
      expect_twin(c, with_holes(c, c.logits()), with_holes(c, c.teacher()),
                  {{}, {10}, {50}, {30, 0.9}});
  });
}

/// Rows under an offset that differs from row to row, and by 200 from shard to shard.
LogitRows far_away(const Case& c, LogitRows rows) {
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t v = 0; v < c.ids(); ++v) {
      const double offset = (t % 3 - 1) * 1e4 - 200.0 * (c.vocab.owner(v) % 2);
      const auto z = static_cast<float>(rows.at(t, v) + offset);
      rows.at(t, v) = static_cast<double>(c.type == DType::bf16 ? to_float(to_bf16(z)) : z);
    }
  return rows;
}

TEST(Upstream, LogitsFarFromZeroAndFromEachOtherLoseNothing) {
  for (const VocabPartition& vocab : test::partitions(61, world().size()))
    for (const DType type : {DType::f32, DType::bf16})
      for (const int64_t chunk : {0, 4}) {
        const Case c{vocab, type, 6, chunk};
        expect_twin(c, far_away(c, c.logits()), far_away(c, c.teacher()), {{20}});
      }
}

/// Expects NaN in the values and gradients of these rows and in no others.
void expect_nan_rows(const Case& c, const Floats& got, const Matrix& d_logits,
                     const std::vector<bool>& rows, const std::string& what) {
  for (int64_t t = 0; t < c.tokens; ++t) {
    const bool poisoned = rows[t];
    EXPECT_EQ(std::isnan(at(got, t)), poisoned) << what << " of row " << t;
    for (int64_t v = 0; v < c.vocab.valid(world().rank()); ++v)
      EXPECT_EQ(std::isnan(d_logits.at(t, v)), poisoned) << what << ": gradient of row " << t;
  }
}

void check_poisoned(const Case& c, double poison) {
  LogitRows rows = c.logits();
  rows.at(1, 0) = rows.at(3, 60) = rows.at(4, 30) = poison;
  const std::vector<bool> poisoned = {false, true, false, true, true, false};
  const Matrix logits = c.shard(rows), other = c.shard(c.teacher());
  const Ints ids = {5, 5, 50, 50, 0, 60};
  Matrix d_logits = c.gradient();
  HostStream stream;
  Floats value(6);
  const Floats ones(6, 1.0F);
  const auto expect = [&](const std::string& what) {
    expect_nan_rows(c, value, d_logits, poisoned, what);
  };
  upstream::Logprob logprob(c.shape(), world());
  logprob.forward(logits.ref(), ids, stream, value);
  logprob.backward(logits.ref(), ids, ones, stream, d_logits.ref());
  expect("log-probability");
  upstream::GatherLogprob gather(c.shape(), 1, world());
  gather.forward(logits.ref(), ids, stream, value);
  gather.backward(logits.ref(), ids, ones, stream, d_logits.ref());
  expect("gathered log-probability");
  upstream::Entropy entropy(c.shape(), world());
  entropy.forward(logits.ref(), stream, value);
  entropy.backward(logits.ref(), ones, stream, d_logits.ref());
  expect("entropy");
  upstream::SoftCrossEntropy cross(c.shape(), world());
  cross.forward(logits.ref(), other.ref(), stream, value);
  cross.backward(ones, d_logits.ref());
  expect("cross entropy");
  cross.forward(other.ref(), logits.ref(), stream, value);
  cross.backward(ones, d_logits.ref());
  expect("cross entropy of a teacher");
  for (const SamplingFilter& filter : {SamplingFilter{}, {0, 0.999}, {30}, {40, 0.999}}) {
    upstream::FilteredLogprob filtered(c.shape(), filter, world());
    filtered.forward(logits.ref(), ids, stream, value);
    filtered.backward(ids, ones, stream, d_logits.ref());
    expect("filtered log-probability");
  }
  Ints top(6);
  upstream::TopK(c.shape(), 1, world()).run(logits.ref(), stream, value, top);
  EXPECT_EQ((Ints{top[1], top[3], top[4]}), (Ints{0, 60, 30}));
  EXPECT_EQ(std::isnan(at(value, 1)), std::isnan(poison));
}

TEST(Upstream, ARowWithNaNOrInfinityIsNaNOnAllRanksAndNoOtherRowIs) {
  test::on_every_simd_target([] {
    for (const double poison : {nan, -nan, infinity})
      for (const DType type : {DType::f32, DType::bf16})
        check_poisoned(
            {test::partitions(61, world().size()).back(), type, 6, std::isnan(poison) ? 0 : 2},
            poison);
  });
}

TEST(Upstream, ResultsOfAnyShapeEqualTheTwin) {
  EXPECT_TRUE(rc::check("for any operation, vocabulary, cut, rows, slices and type", [] {
    const auto vocab_size = *rc::gen::inRange<int64_t>(1, 90);
    const auto cuts = test::partitions(vocab_size, world().size());
    const Case c{cuts[*rc::gen::inRange<size_t>(0, cuts.size())],
                 *rc::gen::element(DType::f32, DType::bf16),
                 *rc::gen::inRange<int64_t>(0, 10),
                 *rc::gen::inRange<int64_t>(0, 12),
                 1,
                 *rc::gen::inRange<uint64_t>(1, 1000)};
    const auto picks = *rc::gen::inRange<int64_t>(1, 5), k = *rc::gen::inRange<int64_t>(1, 100);
    const SamplingFilter filter{*rc::gen::inRange<int64_t>(0, vocab_size + 1),
                                *rc::gen::inRange(1, 21) / 20.0, *rc::gen::inRange(1, 9) / 4.0};
    const bool in_place = *rc::gen::arbitrary<bool>();
    const std::function<double()> worsts[] = {
        [&] { return worst_of_logprobs(c, picks, in_place, c.logits()); },
        [&] { return worst_of_entropies(c, c.logits()); },
        [&] { return worst_of_cross_entropies(c, c.logits(), c.teacher()); },
        [&] { return worst_of_filtered(c, filter, c.logits()); },
        [&] { return worst_of_top_k(c, k, c.logits()); }};
    const double worst = worsts[*rc::gen::inRange(0, 5)]();
    // All ranks go on to the same next case.
    RC_ASSERT(all_reduce_value(world(), worst, ReduceOp::max) <= 1);
  }));
}

/// Results of every operation, one behind the other.
Floats all_results(const Case& c) {
  const Matrix logits = c.shard(c.logits());
  HostStream stream;
  Floats all, value(c.rows()), top(c.rows() * 4);
  Ints ids(c.rows() * 4);
  const auto add = [&](const Floats& more) { all.insert(all.end(), more.begin(), more.end()); };
  upstream::Logprob(c.shape(), world()).forward(logits.ref(), c.some_ids(1), stream, value);
  add(value);
  upstream::Entropy(c.shape(), world()).forward(logits.ref(), stream, value);
  add(value);
  upstream::FilteredLogprob(c.shape(), {20, 0.9}, world())
      .forward(logits.ref(), c.some_ids(1), stream, value);
  add(value);
  upstream::TopK(c.shape(), 4, world()).run(logits.ref(), stream, top, ids);
  add(top);
  return all;
}

TEST(Upstream, SlicesDoNotChangeABit) {
  for (const VocabPartition& vocab : test::partitions(61, world().size())) {
    const Floats once = all_results({vocab, DType::bf16, 9});
    for (const int64_t chunk : {1, 4, 20})
      EXPECT_EQ(all_results({vocab, DType::bf16, 9, chunk}), once) << chunk;
  }
}

TEST(Upstream, ThreadsDoNotChangeABit) {
  const VocabPartition vocab = balanced_partition(61, world().size());
  EXPECT_EQ(all_results({vocab, DType::bf16, 9, 0, 2}), all_results({vocab, DType::bf16, 9, 0, 1}));
}

// ---- costs -------------------------------------------------------------------------------------

/// Collectives and bytes that `work` puts on the wire.
Traffic traffic_of(const std::function<void()>& work) {
  const Traffic before = world().traffic();
  work();
  const Traffic after = world().traffic();
  return {after.bytes_sent - before.bytes_sent, after.messages - before.messages};
}

/// Expects this many all-reduces of `bytes` each. A group of one rank sends nothing.
void expect_all_reduces(const Traffic& got, int64_t count, int64_t bytes) {
  const int64_t n = world().size();
  EXPECT_EQ(got.messages, n > 1 ? count : 0);
  EXPECT_EQ(got.bytes_sent, count * (2 * (n - 1) * bytes / n));
}

/// The collectives of a slice, times the slices.
TEST(Upstream, CollectivesAreThreeASliceForwardAndTwoOrThreeBackward) {
  const int64_t n = world().size(), tokens = 6 * n;
  for (const int64_t slices : {0, 1, 3}) {
    Case c{even_partition(61, 64 * n, static_cast<int>(n)), DType::bf16, tokens};
    c.chunk = slices == 0 ? 0 : tokens / slices;
    const int64_t m = std::max<int64_t>(1, slices), bytes = 4 * tokens / m;
    const Matrix logits = c.shard(c.logits());
    Matrix d_logits = c.gradient();
    HostStream stream;
    Floats value(c.rows()), g = c.some_gradients(1);
    const Ints ids = c.some_ids(1);
    upstream::Logprob logprob(c.shape(), world());
    upstream::Entropy entropy(c.shape(), world());
    upstream::GatherLogprob gather(c.shape(), 1, world());
    expect_all_reduces(traffic_of([&] { logprob.forward(logits.ref(), ids, stream, value); }),
                       3 * m, bytes);
    expect_all_reduces(
        traffic_of([&] { logprob.backward(logits.ref(), ids, g, stream, d_logits.ref()); }),
        slices == 0 ? 0 : 2 * m, bytes);
    expect_all_reduces(traffic_of([&] { entropy.forward(logits.ref(), stream, value); }), 3 * m,
                       bytes);
    expect_all_reduces(
        traffic_of([&] { entropy.backward(logits.ref(), g, stream, d_logits.ref()); }), 3 * m,
        bytes);
    expect_all_reduces(traffic_of([&] { gather.forward(logits.ref(), ids, stream, value); }), 3 * m,
                       bytes);
    expect_all_reduces(
        traffic_of([&] { gather.backward(logits.ref(), ids, g, stream, d_logits.ref()); }), 2 * m,
        bytes);
  }
}

TEST(Upstream, SoftCrossEntropyIsFiveCollectives) {
  const int64_t n = world().size();
  const Case c{even_partition(61, 64 * n, static_cast<int>(n)), DType::bf16, 4 * n};
  const Matrix student = c.shard(c.logits()), teacher = c.shard(c.teacher());
  Matrix d_student = c.gradient();
  HostStream stream;
  Floats value(c.rows());
  upstream::SoftCrossEntropy peer(c.shape(), world());
  expect_all_reduces(traffic_of([&] { peer.forward(student.ref(), teacher.ref(), stream, value); }),
                     5, 4 * c.tokens);
  expect_all_reduces(traffic_of([&] { peer.backward(c.some_gradients(1), d_student.ref()); }), 0,
                     0);
}

TEST(Upstream, AFilterMovesAllColumnsInF32ThereAndBack) {
  const int64_t n = world().size(), rows = 3, columns = 64;
  const Case c{even_partition(61, columns * n, static_cast<int>(n)), DType::bf16, rows * n};
  const Matrix logits = c.shard(c.logits());
  Matrix d_logits = c.gradient();
  HostStream stream;
  Floats value(c.rows());
  upstream::FilteredLogprob peer(c.shape(), {5, 0.9}, world());
  const Ints ids = c.some_ids(1);
  const Traffic forward = traffic_of([&] { peer.forward(logits.ref(), ids, stream, value); });
  const Traffic backward =
      traffic_of([&] { peer.backward(ids, c.some_gradients(1), stream, d_logits.ref()); });
  // The exchange is a message to each other rank; the all-gather is one collective.
  const int64_t exchanged = (n - 1) * rows * columns * 4;
  EXPECT_EQ(forward.bytes_sent, exchanged + (n - 1) * rows * 4);
  EXPECT_EQ(forward.messages, n > 1 ? n - 1 + 1 : 0);
  EXPECT_EQ(backward.bytes_sent, exchanged);
  EXPECT_EQ(backward.messages, n - 1);
}

TEST(Upstream, TheLargestLogitsAreTwoCollectivesASlice) {
  const int64_t n = world().size(), columns = 40;
  const Case c{even_partition(columns * n, columns * n, static_cast<int>(n)), DType::bf16, 6, 2};
  const Matrix logits = c.shard(c.logits());
  HostStream stream;
  for (const int64_t k : {int64_t{5}, columns + 1}) {
    const int64_t count = c.tokens * std::min(k, c.ids());
    Floats values(count);
    Ints ids(count);
    upstream::TopK peer(c.shape(), k, world());
    const Traffic traffic = traffic_of([&] { peer.run(logits.ref(), stream, values, ids); });
    EXPECT_EQ(traffic.messages, n > 1 ? 2 * 3 : 0);
    EXPECT_EQ(traffic.bytes_sent, (n - 1) * c.tokens * std::min(k, columns) * 12);
  }
}

/// Most memory that forward and backward of log-probabilities hold.
int64_t memory_of_logprobs(const Case& c) {
  const Matrix logits = c.shard(c.logits());
  Matrix d_logits = c.gradient();
  HostStream stream;
  Floats value(c.rows());
  reset_memory_peak();
  const int64_t before = memory_use().peak_bytes;
  upstream::Logprob peer(c.shape(), world());
  peer.forward(logits.ref(), c.some_ids(1), stream, value);
  peer.backward(logits.ref(), c.some_ids(1), c.some_gradients(1), stream, d_logits.ref());
  return memory_use().peak_bytes - before;
}

TEST(Upstream, SlicesBoundTheMemory) {
  const int n = world().size();
  const int64_t tokens = 64, columns = 256;
  Case c{even_partition(columns * n, columns * n, n), DType::bf16, tokens};
  const int64_t at_once = memory_of_logprobs(c);
  c.chunk = 4;
  const int64_t in_slices = memory_of_logprobs(c);
  c.chunk = tokens;
  const int64_t in_one_slice = memory_of_logprobs(c);
  // Three f32 tensors at once, and little else.
  EXPECT_GE(at_once, 3 * 4 * tokens * columns);
  EXPECT_LE(at_once, 3 * 4 * tokens * columns + 64 * tokens);
  EXPECT_GT(at_once - in_slices, 4 * tokens * columns);
  // The one-hot of int64 makes a single slice worse than none.
  EXPECT_GT(in_one_slice, 2 * at_once);
}

}  // namespace GYRE_FILE
}  // namespace gyre

#pragma once
// Scores of split vocabularies, each operation with a problem and what the references say of it;
// see operation_contract.hpp.

#include <cmath>
#include <numeric>

#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "operation_contract.hpp"

namespace gyre::test {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr DType both_types[] = {DType::f32, DType::bf16};

/// Rows that break careless softmaxes, whole and in any one shard.
inline LogitRows special_rows(DType type) {
  constexpr int64_t vocab_size = 24;
  LogitRows rows = random_logits(14, vocab_size, type, 3);
  const auto fill = [&](int64_t t, int64_t begin, int64_t end, double z) {
    for (int64_t v = begin; v < end; ++v) rows.at(t, v) = z;
  };
  // A large common offset, in steps that the type still holds.
  const double offset = type == DType::f32 ? 1e4 : 512, step = type == DType::f32 ? 0.25 : 4;
  for (int64_t v = 0; v < vocab_size; ++v) {
    rows.at(0, v) = offset + step * static_cast<double>(v % 5);
    rows.at(1, v) = -rows.at(0, v);
    rows.at(2, v) = 128 * static_cast<double>(v % 7) - 512;  // far apart
  }
  fill(3, 0, vocab_size, 0);  // uniform
  rows.at(4, 0) = rows.at(4, vocab_size - 1) = -infinity;
  fill(5, 0, vocab_size / 2, -infinity);
  fill(6, vocab_size / 2, vocab_size, -infinity);
  fill(7, 0, vocab_size, -infinity);
  rows.at(7, 13) = 2;  // one id only
  fill(8, 0, vocab_size, -infinity);
  rows.at(9, 1) = not_a_number;
  rows.at(10, vocab_size - 1) = not_a_number;
  fill(11, 0, vocab_size - 1, -infinity);
  rows.at(11, vocab_size - 1) = not_a_number;  // nothing but it in its shard
  rows.at(12, 7) = infinity;
  rows.at(13, 0) = rows.at(13, vocab_size - 1) = infinity;
  return rows;
}

/// Error scales of the gradient of Σ g log p(id) + h · entropy of a row, column by column; see
/// logit_gradient_scale.
inline Doubles score_gradient_scales(std::span<const double> row, std::span<const int32_t> ids,
                                     std::span<const double> g, double h, double temperature = 1) {
  const Doubles logprobs = log_softmax_reference(row, temperature);
  const double sum = std::accumulate(g.begin(), g.end(), 0.0);
  const double entropy = h == 0 ? 0 : score_row_reference(row, -1, temperature).entropy;
  Doubles weights(row.size(), 0), scales;
  for (size_t k = 0; k < ids.size(); ++k)
    if (ids[k] >= 0 && ids[k] < std::ssize(row)) weights[ids[k]] += std::abs(g[k]) / temperature;
  for (size_t v = 0; v < row.size(); ++v)
    scales.push_back(logit_gradient_scale(logprobs[v], (sum + h * entropy) / temperature,
                                          h / temperature, weights[v]));
  return scales;
}

/// Expects NaN in the gradient of a row that is no distribution, where a logit is not -inf.
inline void expect_no_gradient(const Floats& got, int64_t token, const VocabPartition& vocab,
                               int rank, std::span<const double> row) {
  const auto mine = row_of(got, token, vocab.columns(rank));
  for (size_t c = 0; c < mine.size(); ++c) {
    const size_t id = vocab.begin(rank) + c;
    if (id < row.size() && row[id] == -infinity) continue;
    const bool expected = id < row.size() ? std::isnan(mine[c]) : mine[c] == 0;
    EXPECT_TRUE(expected) << "token " << token << ", id " << id << ": " << mine[c];
  }
}

/// VocabScores.
struct LogProbabilities {
  static constexpr const char* agreement = "log-probabilities";
  std::string title;
  LogitRows rows;
  DType type;
  ScoreOptions options;
  Ints ids;                   ///< [tokens, ids_per_token]
  Floats g, h;                ///< gradients of log-probabilities and of entropies
  Doubles temperatures = {};  ///< [tokens], or empty: that of the options

  LogProbabilities(const std::string& title_, const LogitRows& rows_, DType type_,
                   const ScoreOptions& options_)
      : title(title_),
        rows(rows_),
        type(type_),
        options(options_),
        ids(mixed_ids(rows.tokens, options.ids_per_token, rows.vocab_size)),
        g(gradients(rows.tokens, options.ids_per_token)),
        h(gradients(options.entropy ? rows.tokens : 0, 1, 2)) {}
  /// The shapes that the same functions are tested with in NeMo RL, and what those leave out.
  static std::vector<LogProbabilities> cases() {
    std::vector<LogProbabilities> all;
    const auto add = [&](const char* name, int64_t tokens, int64_t vocab_size, double size,
                         const ScoreOptions& options) {
      for (const DType type : both_types)
        all.push_back({name, random_logits(tokens, vocab_size, type, size), type, options});
    };
    add("log-probabilities of 1024 ids", 32, 1024, 1, {1, false, 1});
    add("logits times 100", 6, 64, 100, {1, true, 1});
    add("eight ids, temperature 1.5", 8, 8, 1, {1, true, 1.5});
    add("64 of 37 ids, cold", 24, 37, 2, {64, true, 0.3});
    add("entropies alone", 16, 100, 2, {0, true, 1});
    add("long rows", 8, 5000, 2, {2, true, 1});
    for (const DType type : both_types) {
      all.push_back({"golden rows", golden_logits(), type, {1, true, 1}});
      all.back().ids = golden_targets();
      all.push_back({"special rows", special_rows(type), type, {3, true, 1}});
    }
    add("three ids and entropies", 32, 256, 1, {3, true, 1});
    add("a temperature of each row", 12, 300, 2, {2, true, 1});
    for (size_t last = all.size(), i = last - 2; i < last; ++i)
      all[i].temperatures = own_temperatures(12);
    return all;
  }
  static LogProbabilities threaded() {
    return {"300 rows", random_logits(300, 130, DType::bf16, 3), DType::bf16, {2, true, 1}};
  }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    VocabScores(tokens, vocab, {}, world());
  }
  std::string name() const { return title; }
  int64_t forward_bytes(int64_t ranks) const {
    return (ranks - 1) * rows.tokens * 4 * (2 + options.ids_per_token + (options.entropy ? 1 : 0));
  }
  void remove_gradient() {
    for (Floats* x : {&g, &h}) std::fill(x->begin(), x->end(), 0.0F);
  }
  OperationResult run(const Part& part) const {
    const auto logits = part.put(rows, type);
    ScoreOptions o = options;
    o.threads = part.threads;
    o.kernels = part.place.kernels();
    o.arrays = part.place.arrays();
    o.temperatures = temperatures;
    VocabScores scores(rows.tokens, part.vocab, o, part.tp());
    OperationResult r{{Floats(ids.size(), NAN), Floats(h.size(), NAN)}, {}};
    part.forward(
        r, [&] { scores.forward(logits->ref(), ids, part.stream(), r.values[0], r.values[1]); });
    part.backward(r, *logits, type, [&](MatrixRef d) {
      scores.backward(logits->ref(), ids, {g, h}, d);
    });
    return r;
  }
  void expect_reference(const OperationResult& got, const Part& part) const {
    const int64_t k = options.ids_per_token;
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const double temperature = temperatures.empty() ? options.temperature : temperatures[t];
      const auto row = rows.row(t);
      const auto row_ids = row_of(ids, t, k);
      for (int64_t i = t * k; i < (t + 1) * k; ++i)
        expect_logprob(got.values[0][i], score_row_reference(row, ids[i], temperature).logprob,
                       fmt::format("log p of token {}, id {}", t, ids[i]));
      const double entropy = score_row_reference(row, -1, temperature).entropy;
      if (options.entropy)
        expect_entropy(got.values[1][t], entropy, rows.vocab_size,
                       fmt::format("entropy of token {}", t));
      const Doubles g_row = doubles(row_of(g, t, k));
      const double h_row = h.empty() ? 0 : double{h[t]};
      const bool wanted =
          h_row != 0 || std::any_of(g_row.begin(), g_row.end(), [](double x) { return x != 0; });
      if (std::isnan(entropy) && wanted)
        expect_no_gradient(got.d_logits, t, part.vocab, part.rank(), row);
      else if (std::isnan(entropy))
        expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(), Doubles(row.size(), 0),
                            Doubles(row.size(), 0));
      else
        expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(),
                            score_gradient_reference(row, row_ids, g_row, h_row, temperature),
                            score_gradient_scales(row, row_ids, g_row, h_row, temperature));
    }
  }
};

/// SoftCrossEntropy.
struct CrossEntropies {
  static constexpr const char* agreement = "soft cross entropies";
  std::string title;
  LogitRows rows, teacher;
  DType type, teacher_type;
  Floats g;

  CrossEntropies(const std::string& title_, const LogitRows& student, const LogitRows& teacher_,
                 DType type_, DType teacher_type_)
      : title(title_),
        rows(student),
        teacher(teacher_),
        type(type_),
        teacher_type(teacher_type_),
        g(gradients(rows.tokens, 1)) {}
  static CrossEntropies random(int64_t tokens, int64_t vocab_size, DType student, DType teacher,
                               double size) {
    return {fmt::format("{} ids, teacher {}", vocab_size, gyre::name_of(teacher)),
            random_logits(tokens, vocab_size, student, size),
            random_logits(tokens, vocab_size, teacher, size, 1, TokenTensor::teacher), student,
            teacher};
  }
  /// Rows that break careless cross entropies, whole and in any one shard.
  static CrossEntropies special(DType type) {
    CrossEntropies c = random(12, 24, type, type, 3);
    c.title = "special rows";
    c.g.assign(12, 0.5F);
    const double offset = type == DType::f32 ? 1e4 : 512, step = type == DType::f32 ? 0.25 : 4;
    for (int64_t v = 0; v < 24; ++v) {
      c.rows.at(0, v) = offset + step * static_cast<double>(v % 5);
      c.teacher.at(0, v) = -offset - step * static_cast<double>(v % 3);
      c.rows.at(1, v) *= v % 2 == 0 ? 64 : -32;  // far apart
      c.rows.at(2, v) = c.teacher.at(2, v) = 0;
    }
    for (const int64_t v : {0, 9, 23}) {
      c.rows.at(3, v) = c.teacher.at(3, v) = -infinity;  // a column that both mask
      c.teacher.at(4, v) = -infinity;                    // the teacher alone
      c.rows.at(5, v) = -infinity;                       // the student alone: infinite
    }
    for (int64_t v = 0; v < 12; ++v) {
      c.rows.at(6, v) = c.teacher.at(6, v) = -infinity;  // whole shards that both mask
      c.teacher.at(7, v) = -infinity;
      c.rows.at(8, v) = -infinity;
    }
    c.rows.at(9, 4) = not_a_number;
    c.teacher.at(10, 23) = not_a_number;
    c.teacher.at(11, 0) = infinity;
    return c;
  }
  static std::vector<CrossEntropies> cases() {
    std::vector<CrossEntropies> all;
    for (const DType student : both_types) {
      for (const DType teacher : both_types)
        for (const int64_t vocab_size : {37, 515})
          all.push_back(random(12, vocab_size, student, teacher, 3));
      all.push_back(special(student));
      all.push_back({"golden rows", golden_logits(), golden_teacher(), student, student});
    }
    return all;
  }
  static CrossEntropies threaded() { return random(300, 70, DType::bf16, DType::bf16, 3); }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    SoftCrossEntropy(tokens, vocab, 1, world());
  }
  std::string name() const { return title; }
  int64_t forward_bytes(int64_t ranks) const { return (ranks - 1) * rows.tokens * 20; }
  void remove_gradient() { std::fill(g.begin(), g.end(), 0.0F); }
  OperationResult run(const Part& part) const {
    const auto student = part.put(rows, type), teachers = part.put(teacher, teacher_type);
    SoftCrossEntropy loss(rows.tokens, part.vocab, part.threads, part.tp(), part.place.kernels(),
                          part.place.arrays());
    OperationResult r{{Floats(g.size(), NAN)}, {}};
    part.forward(
        r, [&] { loss.forward(student->ref(), teachers->ref(), part.stream(), r.values[0]); });
    part.backward(r, *student, type,
                  [&](MatrixRef d) { loss.backward(student->ref(), teachers->ref(), g, d); });
    return r;
  }
  void expect_reference(const OperationResult& got, const Part& part) const {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const auto student = rows.row(t), teachers = teacher.row(t);
      expect_logprob(got.values[0][t], soft_cross_entropy_reference(student, teachers),
                     fmt::format("cross entropy of token {}", t));
      const Doubles want = soft_cross_entropy_gradient_reference(student, teachers, double{g[t]});
      const auto log_q = log_softmax_reference(student), log_p = log_softmax_reference(teachers);
      Doubles scale;
      for (size_t v = 0; v < want.size(); ++v)
        scale.push_back(logit_gradient_scale(log_q[v], double{g[t]}, 0, 0) +
                        logit_gradient_scale(log_p[v], double{g[t]}, 0, 0));
      expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(), want, scale);
    }
  }
};

/// Appends ids and values of the k largest logits of each row, in descending order; repeated where
/// a row has fewer.
inline void add_largest(const LogitRows& rows, int64_t k, Ints& ids, Floats& values) {
  for (int64_t t = 0; t < rows.tokens; ++t) {
    const std::vector<TopEntry> top = top_k_reference(rows.row(t), k);
    for (int64_t i = 0; i < k; ++i) {
      ids.push_back(top[i % top.size()].id);
      values.push_back(static_cast<float>(top[i % top.size()].value));
    }
  }
}

}  // namespace gyre::test

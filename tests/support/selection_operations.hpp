#pragma once
// Operations that select logits of split vocabularies: those of ids, the largest, those that a
// sampling filter keeps. Each has a problem and what the references say of it; see
// operation_contract.hpp.

#include "logprob_operations.hpp"
#include "logprobs/filtered_scores.hpp"
#include "logprobs/kept_scores.hpp"
#include "logprobs/vocab_top_k.hpp"

namespace gyre::test {

/// GatheredLogits.
struct LogitsOfIds {
  static constexpr const char* agreement = "logits of ids";
  LogitRows rows;
  DType type;
  int64_t ids_per_token;
  Ints ids;
  Floats g;

  LogitsOfIds(const LogitRows& rows_, DType type_, int64_t ids_per_token_)
      : rows(rows_),
        type(type_),
        ids_per_token(ids_per_token_),
        ids(mixed_ids(rows.tokens, ids_per_token, rows.vocab_size)),
        g(gradients(rows.tokens, ids_per_token)) {}
  static std::vector<LogitsOfIds> cases() {
    std::vector<LogitsOfIds> all;
    for (const DType type : both_types)
      for (const int64_t vocab_size : {37, 256})
        for (const int64_t ids_per_token : {0, 1, 4, 64})
          all.push_back({random_logits(32, vocab_size, type), type, ids_per_token});
    return all;
  }
  static LogitsOfIds threaded() { return {random_logits(300, 70, DType::bf16), DType::bf16, 5}; }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    GatheredLogits(tokens, vocab, 2, 1, world());
  }
  std::string name() const { return fmt::format("{} of {} ids", ids_per_token, rows.vocab_size); }
  int64_t forward_bytes(int64_t ranks) const {
    return 2 * (ranks - 1) * std::ssize(ids) * 4 / ranks;
  }
  void remove_gradient() { std::fill(g.begin(), g.end(), 0.0F); }
  OperationResult run(const Part& part) const {
    const auto logits = part.put(rows, type);
    GatheredLogits gathered(rows.tokens, part.vocab, ids_per_token, part.threads, part.tp(),
                            part.place.kernels());
    OperationResult r{{Floats(ids.size(), NAN)}, {}};
    HostStream host;
    part.forward(r, [&] { gathered.forward(logits->ref(), ids, host, r.values[0]); });
    part.backward(r, *logits, type, [&](MatrixRef d) { gathered.backward(ids, g, d); });
    return r;
  }
  void expect_reference(const OperationResult& got, const Part& part) const {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      Doubles want(rows.vocab_size, 0), sizes = want;
      for (int64_t i = t * ids_per_token; i < (t + 1) * ids_per_token; ++i) {
        const bool owned = ids[i] >= 0 && ids[i] < rows.vocab_size;
        EXPECT_EQ(double{got.values[0][i]}, owned ? rows.row(t)[ids[i]] : 0) << "id " << ids[i];
        if (!owned) continue;
        want[ids[i]] += double{g[i]};
        sizes[ids[i]] += std::abs(double{g[i]});
      }
      expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(), want, sizes);
    }
  }
};

/// VocabTopK: values and ids; no gradient.
struct LargestLogits {
  static constexpr const char* agreement = "largest logits";
  LogitRows rows;
  DType type;
  int64_t k;

  static std::vector<LargestLogits> cases() {
    std::vector<LargestLogits> all;
    for (const DType type : both_types) {
      all.push_back({random_logits(2 * 16, 256, type), type, 5});
      all.push_back({golden_logits(), type, 5});
    }
    return all;
  }
  static LargestLogits threaded() {
    return {random_logits(300, 200, DType::bf16), DType::bf16, 17};  // some tie
  }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    VocabTopK(tokens, vocab, 3, 1, world());
  }
  std::string name() const { return fmt::format("{} of {}", k, rows.vocab_size); }
  int64_t forward_bytes(int64_t ranks) const {
    return (ranks - 1) * rows.tokens * k * (type == DType::f32 ? 8 : 6);
  }
  void remove_gradient() {}
  OperationResult run(const Part& part) const {
    const auto logits = part.put(rows, type);
    VocabTopK top(rows.tokens, part.vocab, k, part.threads, part.tp(), part.place.kernels());
    EXPECT_EQ(top.length(), std::min(k, rows.vocab_size));
    OperationResult r{{Floats(rows.tokens * top.length(), NAN)}, {}};
    Ints ids(r.values[0].size(), -7);
    HostStream host;
    part.forward(r, [&] { top.run(logits->ref(), host, r.values[0], ids); });
    r.values.emplace_back(ids.begin(), ids.end());
    return r;
  }
  void expect_reference(const OperationResult& got, const Part&) const {
    const int64_t length = std::min(k, rows.vocab_size);
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const std::vector<TopEntry> want = top_k_reference(rows.row(t), k);
      for (int64_t i = 0; i < length; ++i) {
        expect_near(got.values[0][t * length + i], want[i].value, 0, "value");
        EXPECT_EQ(got.values[1][t * length + i], static_cast<float>(want[i].id));
      }
    }
  }
};

inline FilterOptions filter_of(int64_t top_k, double top_p, int64_t list_length = 64,
                               double temperature = 1, double min_p = 0) {
  return {{top_k, top_p, temperature, min_p}, list_length, 1};
}

/// Whether the same columns survive when top_p is a little larger or smaller: rounding of the sums
/// may cross a boundary that is nearer than that.
inline bool is_clear(std::span<const double> row, SamplingFilter filter) {
  if (filter.top_p == 1) return true;
  constexpr double width = 1e-6;
  SamplingFilter more = filter, less = filter;
  more.top_p = std::min(filter.top_p * (1 + width), std::nextafter(1.0, 0.0));
  less.top_p = filter.top_p * (1 - width);
  return filter_reference(row, more) == filter_reference(row, less);
}

/// Whether lists of `length` are too short for the row: its threshold is below the last in the list
/// of some shard that has more columns; or min_p keeps this last one, and there are smaller
/// columns.
inline bool needs_digits(std::span<const double> row, const VocabPartition& vocab,
                         const SamplingFilter& filter, int64_t length) {
  if ((filter.top_p == 1 && filter.min_p == 0) ||
      (filter.top_k > 0 && filter.top_k < std::ssize(row)))
    return false;
  const std::vector<bool> kept = filter_reference(row, filter);
  double threshold = infinity;
  for (size_t v = 0; v < row.size(); ++v)
    if (kept[v]) threshold = std::min(threshold, row[v]);
  const double max = *std::ranges::max_element(row);
  double bound = -infinity;  // smaller columns may be missing from the lists
  for (int r = 0; r < vocab.ranks(); ++r) {
    if (vocab.valid(r) <= length) continue;
    const auto shard = row.subspan(vocab.begin(r), vocab.valid(r));
    bound = std::max(bound, top_k_reference(shard, length).back().value);
  }
  if (filter.min_p == 0) return threshold < bound;
  return filter.is_likely(bound, max) &&
         std::ranges::any_of(row, [&](double z) { return z < bound; });
}

/// Filters of tokens, all different kinds in turn.
inline std::vector<SamplingFilter> mixed_filters(int64_t tokens) {
  const SamplingFilter kinds[] = {{},
                                  {.top_k = 7, .temperature = 0.5},
                                  {.top_p = 0.7, .temperature = 2},
                                  {.min_p = 0.05},
                                  {.top_k = 20, .top_p = 0.8, .min_p = 0.01},
                                  {.top_p = 0.9, .temperature = 1.5, .min_p = 0.002},
                                  {.min_p = 1},
                                  {.temperature = 0.3, .min_p = 1e-12}};
  std::vector<SamplingFilter> filters;
  for (int64_t t = 0; t < tokens; ++t) filters.push_back(kinds[t % std::ssize(kinds)]);
  return filters;
}

/// Of each row its i-th largest, i = 0, 1, 2, ..., most - 1, 0, ...
inline Ints large_targets(const LogitRows& rows, int64_t most = 10) {
  Ints targets;
  for (int64_t t = 0; t < rows.tokens; ++t)
    targets.push_back(top_k_reference(rows.row(t), t % most + 1).back().id);
  return targets;
}

/// Gradients of 1, -0.5, 1.25, -0.5, ...
inline Floats alternating_gradients(int64_t tokens) {
  Floats g;
  for (int64_t t = 0; t < tokens; ++t)
    g.push_back(t % 2 == 1 ? -0.5F : 1 + 0.125F * static_cast<float>(t));
  return g;
}

/// FilteredScores: log-probabilities, numbers of survivors, and how many rows took digits.
struct FilteredLogprobs {
  static constexpr const char* agreement = "filtered log-probabilities";
  LogitRows rows;
  DType type;
  FilterOptions options;
  Ints targets;
  Floats g = alternating_gradients(rows.tokens);
  std::vector<SamplingFilter> filters = {};  // of tokens; empty: that of the options

  const SamplingFilter& filter(int64_t token) const {
    return filters.empty() ? options.filter : filters[token];
  }
  static std::vector<FilteredLogprobs> cases() {
    std::vector<FilteredLogprobs> all;
    for (const DType type : both_types)
      for (const auto& [top_k, top_p] : {std::pair{10, 1.0}, {0, 0.9}, {0, 1.0}, {10, 0.9}}) {
        const LogitRows rows = random_logits(2 * 16, 300, type, 8);
        all.push_back({rows, type, filter_of(top_k, top_p, 16), large_targets(rows)});
      }
    for (const DType type : both_types) {
      const LogitRows rows = random_logits(2 * 16, 300, type, 8);
      all.push_back({rows, type, filter_of(0, 1, 16, 1.5, 0.02), large_targets(rows)});
      all.push_back({rows, type, filter_of(0, 0.8, 16, 1, 0.02), large_targets(rows)});
      all.push_back({rows, type, filter_of(0, 1, 32), large_targets(rows)});
      all.back().filters = mixed_filters(rows.tokens);
    }
    return all;
  }
  static FilteredLogprobs threaded() {
    const LogitRows rows = random_logits(70, 1000, DType::bf16, 1.5);
    return {rows, DType::bf16, filter_of(0, 0.85, 2), large_targets(rows)};
  }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    FilteredScores(tokens, vocab, DType::f32, filter_of(3, 0.5), world());
  }
  std::string name() const {
    return fmt::format("{} ids, top_k {}, top_p {}, min_p {}, {} filters of tokens, lists of {}",
                       rows.vocab_size, options.filter.top_k, options.filter.top_p,
                       options.filter.min_p, filters.size(), options.list_length);
  }
  int64_t list_length() const {
    int64_t most = 1;
    for (int64_t t = 0; t < std::max<int64_t>(1, std::ssize(filters)); ++t) {
      const SamplingFilter& one = filter(t);
      const bool limited = one.top_k > 0 && one.top_k < rows.vocab_size;
      most = std::max(most, limited                            ? one.top_k
                            : one.top_p == 1 && one.min_p == 0 ? 1
                                                               : options.list_length);
    }
    return most;
  }
  int64_t forward_bytes(int64_t ranks) const {
    return (ranks - 1) * rows.tokens * (list_length() * static_cast<int64_t>(size_of(type)) + 16);
  }
  void remove_gradient() { std::fill(g.begin(), g.end(), 0.0F); }
  OperationResult run(const Part& part) const {
    const auto logits = part.put(rows, type);
    FilterOptions o = options;
    o.threads = part.threads;
    o.kernels = part.place.kernels();
    o.filters = filters;
    FilteredScores scores(rows.tokens, part.vocab, type, o, part.tp());
    OperationResult r{{Floats(targets.size(), NAN)}, {}};
    HostStream host;
    part.forward(r, [&] { scores.forward(logits->ref(), targets, host, r.values[0]); });
    part.backward(r, *logits, type,
                  [&](MatrixRef d) { scores.backward(logits->ref(), targets, g, d); });
    r.values.emplace_back(scores.survivors().begin(), scores.survivors().end());
    r.values.push_back({static_cast<float>(scores.rows_by_digits())});
    return r;
  }
  void expect_reference(const OperationResult& got, const Part& part) const {
    EXPECT_LE(count_unclear(got, part), rows.tokens / 8);
  }
  /// Compares everything with whole rows. Returns how many rows were too near a boundary to be
  /// compared.
  int64_t count_unclear(const OperationResult& got, const Part& part) const {
    int64_t unclear = 0, by_digits = 0;
    for (int64_t t = 0; t < rows.tokens; ++t) {
      if (!is_clear(rows.row(t), filter(t))) {
        ++unclear;
        continue;
      }
      by_digits += needs_digits(rows.row(t), part.vocab, filter(t), list_length()) ? 1 : 0;
      expect_row(got, t, part);
    }
    if (unclear == 0) {
      EXPECT_EQ(got.values[2][0], static_cast<float>(by_digits));
    }
    return unclear;
  }

 private:
  void expect_row(const OperationResult& got, int64_t t, const Part& part) const {
    const auto row = rows.row(t);
    const SamplingFilter& filter = this->filter(t);
    const std::vector<bool> kept = filter_reference(row, filter);
    EXPECT_EQ(got.values[1][t], static_cast<float>(std::count(kept.begin(), kept.end(), true)));
    expect_logprob(got.values[0][t], filtered_logprob_reference(row, targets[t], filter),
                   fmt::format("log p of token {}, target {}", t, targets[t]));
    Doubles left(row.begin(), row.end()), scales(row.size(), 0);
    for (size_t v = 0; v < left.size(); ++v)
      if (!kept[v]) left[v] = -infinity;
    const Doubles logprobs = log_softmax_reference(left, filter.temperature);
    const double size = std::abs(double{g[t]}) / filter.temperature;
    for (size_t v = 0; v < left.size(); ++v)  // columns that are dropped have exactly 0
      if (kept[v])
        scales[v] = logit_gradient_scale(logprobs[v], size, 0,
                                         static_cast<int32_t>(v) == targets[t] ? size : 0);
    expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(),
                        filtered_gradient_reference(row, targets[t], filter, double{g[t]}), scales);
  }
};

/// KeptScores.
struct KeptLogprobs {
  static constexpr const char* agreement = "log-probabilities among kept ids";
  LogitRows rows;
  DType type;
  std::vector<Ints> kept;  ///< [tokens]
  Ints targets;
  Doubles temperatures = {};
  Floats g = alternating_gradients(rows.tokens);

  /// Sets of 0, 1, 2, ... `most` ids; every third target is not in its set, some are nobody's.
  static KeptLogprobs random(int64_t tokens, int64_t vocab_size, DType type, int64_t most) {
    KeptLogprobs o{random_logits(tokens, vocab_size, type, 4), type, {}, {}};
    for (int64_t t = 0; t < tokens; ++t) {
      Ints ids(vocab_size);
      for (int32_t v = 0; v < vocab_size; ++v) ids[v] = v;
      std::ranges::sort(ids, {}, [&](int32_t v) {
        return token_bits({9, TokenTensor::ids}, t, v);
      });
      const int64_t count = std::min(t % (most + 1), vocab_size);
      o.targets.push_back(t % 7 == 6 ? -1 : t % 3 == 2 || count == 0 ? ids.back() : ids[t % count]);
      ids.resize(count);
      o.kept.push_back(ids);
    }
    return o;
  }
  static std::vector<KeptLogprobs> cases() {
    std::vector<KeptLogprobs> all;
    for (const DType type : both_types) {
      all.push_back(random(2 * 16, 300, type, 40));
      all.push_back(random(150, 23, type, 23));
      all.back().temperatures = own_temperatures(150);
      all.push_back(random(9, 40, type, 8));
      for (const int32_t v : all.back().kept[5])
        all.back().rows.at(5, v) = -8192 - 64 * v;  // exact in bf16
      for (const int64_t t : {3, 4}) all.back().rows.at(t, all.back().kept[t][0]) = -infinity;
    }
    return all;
  }
  static KeptLogprobs threaded() { return random(300, 70, DType::bf16, 30); }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    const std::vector<int64_t> offsets(std::max<int64_t>(0, tokens) + 1, 0);
    KeptScores(tokens, vocab, {offsets, {}}, {}, world());
  }
  std::string name() const {
    return fmt::format("{} tokens of {} ids", rows.tokens, rows.vocab_size);
  }
  int64_t forward_bytes(int64_t ranks) const { return (ranks - 1) * rows.tokens * 12; }
  void remove_gradient() { std::fill(g.begin(), g.end(), 0.0F); }
  OperationResult run(const Part& part) const {
    const auto logits = part.put(rows, type);
    std::vector<int64_t> offsets{0};
    Ints ids;
    for (const Ints& some : kept) {
      ids.insert(ids.end(), some.begin(), some.end());
      offsets.push_back(std::ssize(ids));
    }
    KeptScores scores(rows.tokens, part.vocab, {offsets, ids},
                      {1, part.threads, part.place.kernels(), temperatures}, part.tp());
    OperationResult r{{Floats(targets.size(), NAN)}, {}};
    HostStream host;
    part.forward(r, [&] { scores.forward(logits->ref(), targets, host, r.values[0]); });
    part.backward(r, *logits, type, [&](MatrixRef d) { scores.backward(targets, g, d); });
    return r;
  }
  void expect_reference(const OperationResult& got, const Part& part) const {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const auto row = rows.row(t);
      const double heat = temperatures.empty() ? 1 : temperatures[t];
      expect_logprob(got.values[0][t], kept_logprob_reference(row, kept[t], targets[t], heat),
                     fmt::format("log p of token {}, target {}", t, targets[t]));
      const double size = std::abs(double{g[t]}) / heat;
      Doubles scales(row.size(), 0);
      for (const int32_t v : kept[t])
        scales[v] = logit_gradient_scale(kept_logprob_reference(row, kept[t], v, heat), size, 0,
                                         v == targets[t] ? size : 0);
      expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(),
                          kept_gradient_reference(row, kept[t], targets[t], double{g[t]}, heat),
                          scales);
    }
  }
};

}  // namespace gyre::test

#pragma once
// ProjectedProbabilities with a problem and what the references say of it; see
// operation_contract.hpp.

#include "logprob_operations.hpp"
#include "logprobs/projected_probabilities.hpp"

namespace gyre::test {

struct ProjectedRows {
  static constexpr const char* agreement = "projected probabilities";
  static constexpr int64_t collectives = 2;
  LogitRows rows;
  DType type;
  int64_t width = 1;
  std::vector<int64_t> offsets{0};
  Ints columns = {};
  Floats weights = {};
  Doubles temperatures = {};
  Floats g = gradients(rows.tokens, width);

  SparseMatrixRef matrix() const { return {width, offsets, columns, weights}; }
  /// Entries in a share of the places, but none in every fourth row and every fifth column, and
  /// only in rows from `first` to `last` - 1; some weights are 0, and some large.
  void fill_matrix(double share, int64_t first, int64_t last) {
    for (int64_t v = 0; v < rows.vocab_size; ++v) {
      for (int64_t c = 0; c < width; ++c) {
        const uint64_t bits = token_bits({5, TokenTensor::ids}, v, c);
        const bool left_out = v % 4 == 3 || c % 5 == 4 || v < first || v >= last;
        if (left_out || 0x1p-64 * static_cast<double>(bits) >= share) continue;
        columns.push_back(static_cast<int32_t>(c));
        weights.push_back(bits % 11 == 0 ? 0 : bits % 7 == 0 ? 1000 : static_cast<float>(bits % 9));
      }
      offsets.push_back(std::ssize(columns));
    }
  }
  static ProjectedRows random(int64_t tokens, int64_t vocab_size, DType type, int64_t width,
                              double share = 0.1, int64_t first = 0, int64_t last = 1 << 30) {
    ProjectedRows o{random_logits(tokens, vocab_size, type, 3), type, width};
    o.fill_matrix(share, first, last);
    return o;
  }
  static std::vector<ProjectedRows> cases() {
    std::vector<ProjectedRows> all;
    for (const DType type : both_types) {
      all.push_back(random(2 * 16, 300, type, 40));
      all.push_back(random(9, 40, type, 300, 0.5));  // more columns than ids
      all.back().temperatures = own_temperatures(9);
      all.push_back(random(7, 64, type, 1, 1));
      all.push_back(random(7, 64, type, 12, 0.5, 0, 5));    // entries on the first rank alone
      all.push_back(random(7, 64, type, 12, 0.5, 60, 64));  // on the last
      all.push_back(random(7, 64, type, 12, 0));            // none
      all.push_back({special_rows(type), type, 6});
      all.back().fill_matrix(0.6, 0, 24);
    }
    return all;
  }
  static ProjectedRows threaded() { return random(300, 70, DType::bf16, 30, 0.3); }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    const std::vector<int64_t> none(std::max<int64_t>(0, vocab.vocab_size) + 1, 0);
    ProjectedProbabilities(tokens, vocab, {3, none, {}, {}}, {}, world());
  }
  std::string name() const {
    return fmt::format("{} tokens of {} ids, {} entries in {} columns", rows.tokens,
                       rows.vocab_size, columns.size(), width);
  }
  int64_t forward_bytes(int64_t ranks) const {
    return (ranks - 1) * rows.tokens * 8 + 2 * (ranks - 1) * rows.tokens * width * 4 / ranks;
  }
  void remove_gradient() { std::fill(g.begin(), g.end(), 0.0F); }
  OperationResult run(const Part& part) const {
    const auto logits = part.put(rows, type);
    const int64_t bytes = 4 * std::ssize(g);
    RowKernels& kernels = kernels_or_cpu(part.place.kernels());
    Buffer<float> out(std::ssize(g), kernels.space()), d_out(std::ssize(g), kernels.space());
    part.stream().fill(out.data(), std::byte{0xff}, bytes);  // NaN
    part.stream().copy(d_out.data(), g.data(), bytes);
    ProjectedProbabilities projected(
        rows.tokens, part.vocab, matrix(),
        {1, part.threads, part.place.kernels(), part.place.arrays(), temperatures}, part.tp());
    const auto here = out.matrix(rows.tokens, width);
    OperationResult r{{Floats(g.size(), NAN)}, {}};
    part.forward(r, [&] { projected.forward(logits->ref(), part.stream(), here); });
    part.stream().copy(r.values[0].data(), out.data(), bytes);
    part.stream().synchronize();
    part.backward(r, *logits, type, [&](MatrixRef d) {
      projected.backward(logits->ref(), here, d_out.matrix(rows.tokens, width), d);
    });
    return r;
  }
  void expect_reference(const OperationResult& got, const Part& part) const {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const auto row = rows.row(t);
      const double heat = temperatures.empty() ? 1 : temperatures[t];
      const Doubles logprobs = log_softmax_reference(row, heat),
                    g_row = doubles(row_of(g, t, width));
      Doubles scales(width, 0), own(row.size(), 0);
      for (size_t v = 0; v < row.size(); ++v)
        for (int64_t e = offsets[v]; e < offsets[v + 1]; ++e) {
          const double weight = weights[e];
          scales[columns[e]] += weight == 0 ? 0 : logit_gradient_scale(logprobs[v], weight, 0, 0);
          own[v] += std::abs(g_row[columns[e]]) * weight;
        }
      const Doubles want = projected_reference(row, matrix(), heat);
      double centre = 0;
      for (int64_t c = 0; c < width; ++c) {
        expect_near(got.values[0][t * width + c], want[c], logprob_tolerance() * scales[c],
                    fmt::format("token {}, column {}", t, c));
        centre += std::abs(g_row[c]) * scales[c];
      }
      const Doubles d_row = projected_gradient_reference(row, matrix(), g_row, heat);
      Doubles d_scales;
      for (size_t v = 0; v < row.size(); ++v)
        d_scales.push_back(logit_gradient_scale(logprobs[v], (own[v] + centre) / heat, 0, 0));
      if (std::isnan(d_row[0]))
        expect_no_gradient(got.d_logits, t, part.vocab, part.rank(), row);
      else
        expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(), d_row, d_scales);
    }
  }
};

}  // namespace gyre::test

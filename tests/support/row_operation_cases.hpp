#pragma once
// All operations on rows (logprobs/operations/), by their entries; see operation_contract.hpp.

#include "harness/expected_operation.hpp"
#include "logprob_operations.hpp"
#include "logprobs/operations/operation_scores.hpp"

namespace gyre::test {

/// An operation with one problem.
struct RowOperations {
  static constexpr const char* agreement = "log-probabilities";
  const RowOperation& operation;
  std::string title;
  LogitRows rows;
  DType type;
  int64_t ids_per_token;
  Doubles parameters;
  double temperature = 1;
  Doubles temperatures = {};                ///< [tokens], or empty
  Ints ids = {};                            ///< [tokens, ids_per_token]
  std::vector<Floats> inputs = {}, g = {};  ///< of the operation's inputs and results

  RowOperations(const RowOperation& operation_, const std::string& title_, const LogitRows& rows_,
                DType type_, int64_t picks)
      : operation(operation_),
        title(title_),
        rows(rows_),
        type(type_),
        ids_per_token(operation.ids.empty()        ? 0
                      : operation.ids == "targets" ? 1
                                                   : picks) {
    for (const RowParameter& parameter : operation.parameters)
      parameters.push_back(parameter.usual);
    const LogitRows teacher =
        random_logits(rows.tokens, rows.vocab_size, DType::f32, 2, 1, TokenTensor::teacher);
    Floats largest;
    if (operation.ids_are_largest)
      add_largest(teacher, ids_per_token, ids, largest);
    else
      ids = mixed_ids(rows.tokens, ids_per_token, rows.vocab_size);
    for (const std::string& name : operation.inputs) {
      const auto own = std::ranges::find(operation.own_inputs, name, &RowInput::name);
      inputs.push_back(own == operation.own_inputs.end() ? largest : made_up(*own));
    }
    uint64_t seed = 1;
    for (const RowResult& result : operation.results) {
      const int64_t width = operation.width_of(result, ids_per_token);
      g.push_back(result.first_gradient < 0 ? Floats() : gradients(rows.tokens, width, seed++));
    }
  }
  static std::vector<RowOperations> cases() {
    std::vector<RowOperations> all;
    for (const RowOperation& operation : row_operations())
      for (const DType type : both_types) {
        all.push_back({operation, "256 ids", random_logits(9, 256, type), type, 3});
        all.push_back({operation, "long rows", random_logits(5, 5000, type, 3), type, 2});
        all.push_back({operation, "far apart", random_logits(6, 64, type, 100), type, 4});
        all.push_back({operation, "special rows", special_rows(type), type, 3});
        all.push_back({operation, "golden rows", golden_logits(), type, 4});
        if (operation.at_temperature_1) continue;
        all.push_back({operation, "cold", random_logits(8, 37, type, 2), type, 7});
        all.back().temperature = 0.3;
        all.push_back(
            {operation, "a temperature of each row", random_logits(12, 300, type), type, 2});
        all.back().temperatures = own_temperatures(12);
      }
    for (const RowOperation& operation : row_operations())
      for (size_t i = 0; i < operation.parameters.size(); ++i)
        for (const double value : {operation.parameters[i].least, operation.parameters[i].most})
          for (const LogitRows& rows :
               {random_logits(7, 90, DType::f32), special_rows(DType::f32)}) {
            all.push_back({operation, "a limit", rows, DType::f32, 3});
            all.back().parameters[i] = value;
          }
    return all;
  }
  static RowOperations threaded() {
    return {row_operations().front(), "300 rows", random_logits(300, 130, DType::bf16, 3),
            DType::bf16, 2};
  }
  static void construct(int64_t tokens, const VocabPartition& vocab) {
    OperationScores(row_operations().front(), tokens, vocab, {.ids_per_token = 1}, world());
  }
  std::string name() const { return operation.name + ", " + title; }
  int64_t forward_bytes(int64_t ranks) const {
    const int64_t bytes = 4 * rows.tokens * operation.sent_floats(ids_per_token);
    return operation.on_logits ? 2 * (ranks - 1) * bytes / ranks : (ranks - 1) * bytes;
  }
  void remove_gradient() {
    for (Floats& x : g) std::ranges::fill(x, 0.0F);
  }
  OperationResult run(const Part& part) const {
    const auto logits = part.put(rows, type);
    OperationScores scores(operation, rows.tokens, part.vocab,
                           {.ids_per_token = ids_per_token,
                            .parameters = parameters,
                            .temperature = temperature,
                            .threads = part.threads,
                            .kernels = part.place.kernels(),
                            .arrays = part.place.arrays(),
                            .temperatures = temperatures},
                           part.tp());
    OperationInputs in{ids, {inputs.begin(), inputs.end()}};
    OperationResult r;
    for (const RowResult& result : operation.results)
      r.values.emplace_back(rows.tokens * operation.width_of(result, ids_per_token), NAN);
    const std::vector<std::span<float>> values(r.values.begin(), r.values.end());
    const std::vector<std::span<const float>> above(g.begin(), g.end());
    part.forward(r, [&] { scores.forward(logits->ref(), in, part.stream(), values); });
    part.backward(r, *logits, type,
                  [&](MatrixRef d) { scores.backward(logits->ref(), in, above, d); });
    return r;
  }
  void expect_reference(const OperationResult& got, const Part& part) const {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      OperationCase row{.operation = operation,
                        .logits = rows.row(t),
                        .ids = row_of(ids, t, ids_per_token),
                        .parameters = parameters,
                        .temperature = temperatures.empty() ? temperature : temperatures[t]};
      for (const Floats& input : inputs)
        row.inputs.push_back(row_of(input, t, std::ssize(input) / rows.tokens));
      const ExpectedOperation expected(row);
      Doubles above;
      for (size_t i = 0; i < operation.results.size(); ++i) {
        const RowResult& result = operation.results[i];
        const int64_t width = operation.width_of(result, ids_per_token);
        const ExpectedRow want = expected.values(i);
        for (int64_t k = 0; k < width; ++k) {
          const double tolerance =
              result.error == RowError::exact ? 0 : logprob_tolerance() * want.scales[k];
          expect_near(got.values[i][t * width + k], want.values[k], tolerance,
                      fmt::format("{} of token {}, {}", result.name, t, k));
          above.push_back(g[i].empty() ? 0 : double{g[i][t * width + k]});
        }
      }
      const ExpectedRow want = expected.gradient(above);
      if (want.undefined)
        expect_no_gradient(got.d_logits, t, part.vocab, part.rank(), want);
      else
        expect_gradient_row(got.d_logits, type, t, part.vocab, part.rank(), want.values,
                            want.scales);
    }
  }

 private:
  /// Rows of an input of this operation alone.
  Floats made_up(const RowInput& input) const {
    const int64_t width = input.shape == "T" ? 1 : ids_per_token;
    Floats all(rows.tokens * width);
    for (int64_t t = 0; t < rows.tokens; ++t) {
      Doubles random;
      for (int64_t k = 0; k < width; ++k)
        random.push_back(0x1p-64 * (0.5 + double(token_bits({5, TokenTensor::teacher}, t, k))));
      input.make(row_of(ids, t, ids_per_token), random, std::span(all).subspan(t * width, width));
    }
    return all;
  }
  /// Expects NaN where the definition has it, where elements are compared.
  static void expect_no_gradient(const Floats& got, int64_t token, const VocabPartition& vocab,
                                 int rank, const ExpectedRow& want) {
    const auto mine = row_of(got, token, vocab.columns(rank));
    for (size_t c = 0; c < mine.size(); ++c) {
      const size_t id = vocab.begin(rank) + c;
      if (id < want.values.size() && want.scales[id] < 0) continue;
      const bool expected = id < want.values.size() && std::isnan(want.values[id])
                                ? std::isnan(mine[c])
                                : mine[c] == 0;
      EXPECT_TRUE(expected) << "token " << token << ", id " << id << ": " << mine[c];
    }
  }
};

}  // namespace gyre::test

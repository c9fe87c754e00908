// Every operation on rows, over a vocabulary split over all ranks, against its definition in double
// precision; and that slopes are the derivatives of values.

#include "row_operation_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace test;

GYRE_TEST_OPERATION(RowOperations);

/// Values of an operation at logits, by its definition.
Doubles defined(const RowOperations& o, const Doubles& logits, const Doubles& g, Doubles* slopes) {
  const Doubles logprobs = log_softmax_reference(logits, o.temperature);
  std::vector<std::span<const float>> inputs;
  for (const Floats& input : o.inputs)
    inputs.push_back(row_of(input, 0, std::ssize(input) / o.rows.tokens));
  WholeRow row;
  row.vocab_size = std::ssize(logits);
  row.ids = row_of(o.ids, 0, o.ids_per_token);
  row.inputs = inputs;
  row.parameters = o.parameters;
  row.logits = logits;
  row.logprobs = logprobs;
  row.temperature = o.temperature;
  const RowAnswer answer = o.operation.define(row, g);
  if (slopes != nullptr) *slopes = answer.d_logits;
  return answer.values;
}

TEST(RowOperation, DefinitionsHaveTheGradientsOfTheirValues) {
  for (const RowOperation& operation : row_operations()) {
    RowOperations o(operation, "", random_logits(1, 12, DType::f32), DType::f32, 3);
    if (!operation.at_temperature_1) o.temperature = 1.4;
    Doubles g;
    for (const RowResult& result : operation.results)
      for (int64_t k = 0; k < operation.width_of(result, o.ids_per_token); ++k)
        g.push_back(result.first_gradient < 0 ? 0 : 0.5 + double(k));
    const auto row = o.rows.row(0);
    const Doubles logits(row.begin(), row.end());
    Doubles slopes;
    defined(o, logits, g, &slopes);
    const auto weighted = [&](size_t v, double step) {
      Doubles moved = logits;
      moved[v] += step;
      const Doubles values = defined(o, moved, g, nullptr);
      return std::inner_product(values.begin(), values.end(), g.begin(), 0.0);
    };
    for (size_t v = 0; v < logits.size(); ++v) {
      constexpr double step = 1e-5;
      EXPECT_NEAR(slopes[v], (weighted(v, step) - weighted(v, -step)) / (2 * step), 1e-7)
          << operation.name << ", id " << v;
    }
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

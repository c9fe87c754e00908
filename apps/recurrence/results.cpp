// --output of gyre-recurrence.

#include "apps/recurrence/case.hpp"
#include "io/schemas/token_results.hpp"

namespace gyre {
namespace {

/// [tokens, heads, dim]; decays of heads and strengths are [tokens, heads].
h5::Shape shape_in_file(const RecurrenceShape& shape, RecurrenceArray array, int64_t tokens) {
  using enum RecurrenceArray;
  h5::Shape in_file{tokens, heads_of(shape, array)};
  if (array != d_beta && (array != d_g || shape.channel_decay))
    in_file.push_back(dim_of(shape, array));
  return in_file;
}

}  // namespace

void RecurrenceCase::write_results(OutputFile& output, const std::string& input_sha256,
                                   const Provenance& provenance) {
  const RecurrenceShape& shape = planned_.problem.shape;
  std::vector<int64_t> tokens(shard().slots, -1);
  for (const Fragment& f : shard().fragments)
    for (int64_t i = 0; i < f.length; ++i)
      tokens[f.local_begin.value() + i] = workload_.token_of(f, i);
  std::vector<std::vector<float>> values;
  std::vector<TokenArray> arrays;
  for (int a = static_cast<int>(first_result); a < recurrence_arrays; ++a) {
    const auto array = static_cast<RecurrenceArray>(a);
    const MatrixRef& from = executor_.data()[array];
    if (from.empty()) continue;
    std::vector<float>& to = values.emplace_back(from.rows * from.cols);
    const MatrixView<float> rows(to.data(), from.rows, from.cols);
    copy_converted(from, rows);
    arrays.push_back({std::string("/results/") + name_of(array),
                      shape_in_file(shape, array, workload_.tokens()), rows, &tokens});
  }
  write_token_results(
      output, {recurrence_results_schema, workload_.offsets, input_sha256, provenance}, arrays);
}

}  // namespace gyre

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

void write_results(OutputFile& output, RecurrenceCases& subject, const std::string& input_sha256,
                   const Provenance& provenance) {
  const RecurrenceWorkload& workload = subject.rank(0).workload();
  const RecurrenceShape& shape = subject.rank(0).planned().problem.shape;
  std::vector<int64_t> tokens;  // of rows of this process's ranks, one below the other
  for (int64_t r = 0; r < subject.size(); ++r) {
    const Shard& shard = subject.rank(r).shard();
    const int64_t first = std::ssize(tokens);
    tokens.resize(first + shard.slots, -1);
    for (const Fragment& f : shard.fragments)
      for (int64_t i = 0; i < f.length; ++i)
        tokens[first + f.local_begin.value() + i] = workload.token_of(f, i);
  }
  std::vector<std::vector<float>> values;
  std::vector<TokenArray> arrays;
  for (int a = static_cast<int>(first_result); a < recurrence_arrays; ++a) {
    const auto array = static_cast<RecurrenceArray>(a);
    if (!has_array(shape, array)) continue;
    const int64_t width = width_of(shape, array);
    std::vector<float>& to = values.emplace_back(std::ssize(tokens) * width);
    const MatrixView<float> rows(to.data(), std::ssize(tokens), width);
    int64_t first = 0;
    for (int64_t r = 0; r < subject.size(); ++r) {
      const HostCopy from = subject.rank(r).host(array);
      copy_converted(from.matrix(), rows.rows_from(first, from.matrix().rows));
      first += from.matrix().rows;
    }
    arrays.push_back({std::string("/results/") + name_of(array),
                      shape_in_file(shape, array, workload.tokens()), rows, &tokens});
  }
  write_token_results(
      output, {recurrence_results_schema, workload.offsets, input_sha256, provenance}, arrays);
}

}  // namespace gyre

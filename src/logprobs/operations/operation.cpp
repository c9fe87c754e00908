#include "logprobs/operations/operation.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "logprobs/operations/list.hpp"

namespace gyre {
namespace {

/// The elements of a member of all operations, those of one name once.
template <class T>
std::vector<T> collected(std::vector<T> RowOperation::*member) {
  std::vector<T> all;
  for (const RowOperation& operation : row_operations())
    for (const T& one : operation.*member)
      if (std::ranges::find(all, one.name, &T::name) == all.end()) all.push_back(one);
  return all;
}

}  // namespace

const std::vector<RowOperation>& row_operations() {
#define GYRE_CALL_OPERATION(name) name##_operation(),
  static const std::vector<RowOperation> all = {GYRE_ROW_OPERATIONS(GYRE_CALL_OPERATION)};
#undef GYRE_CALL_OPERATION
  return all;
}

const std::vector<RowParameter>& row_parameters() {
  static const std::vector<RowParameter> all = collected(&RowOperation::parameters);
  return all;
}

const std::vector<RowInput>& row_inputs() {
  static const std::vector<RowInput> all = collected(&RowOperation::own_inputs);
  return all;
}

std::string RowParameter::option() const {
  std::string text = "--" + name;
  std::ranges::replace(text, '_', '-');
  return text;
}

std::string RowParameter::range() const {
  return fmt::format("from {} to {}", least, most);
}

int64_t RowOperation::width(int64_t ids_per_row) const {
  int64_t width = 0;
  for (const RowResult& result : results) width += width_of(result, ids_per_row);
  return width;
}

int64_t RowOperation::sent_floats(int64_t ids_per_row) const {
  if (on_logits) return ids_per_row;
  return 2 + (entropy ? 1 : 0) + (mean_logprob ? 1 : 0) + ids_per_row;
}

void statistics_as_values(const OperationRow& row, std::span<double> values) {
  const auto [from, to] = std::ranges::copy(row.statistics.of_ids, values.begin());
  std::fill(to, values.end(), row.statistics.entropy);
}

void slopes_of_statistics(const OperationRow&, std::span<const double> g, RowSlopes& slopes) {
  const size_t ids = slopes.of_ids.size();
  for (size_t k = 0; k < ids; ++k) slopes.of_ids[k] += g[k];
  if (g.size() > ids) slopes.entropy += g.back();
}

}  // namespace gyre

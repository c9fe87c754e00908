#include "apps/common/array_output.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "harness/backend.hpp"

namespace gyre {
namespace {

/// "[2, 0, 5]": the place of element i in an array of this shape.
std::string place_of(int64_t i, const h5::Shape& shape) {
  h5::Shape place(shape.size());
  for (size_t d = shape.size(); d-- > 0; i /= std::max<int64_t>(1, shape[d]))
    place[d] = i % shape[d];
  return h5::to_string(place);
}

}  // namespace

int64_t compare_arrays(const std::string& name, const std::string& path, const ArrayFile& made,
                       bool all, Communicator& world, Verification& checks) {
  const std::map<std::string, ReadArray> found = read_arrays(world, path, made);
  Verification local(checks.tolerance_scale());
  Check& check = local.check(name, 0);
  if (world.rank() != 0) check.add_nothing();
  if (all && world.rank() == 0)
    check.add(std::ssize(found), std::ssize(made.arrays), [] { return "number of datasets"; });
  for (const NamedArray& array : made.arrays) {
    const auto yours = found.find(array.name);
    if (yours == found.end()) continue;
    const std::vector<double>& values = yours->second.values;
    if (values.empty()) check.add_nothing();
    std::visit(
        [&](const auto& mine) {
          for (size_t i = 0; i < values.size(); ++i)
            check.add(values[i], static_cast<double>(mine[i]),
                      [&] { return array.name + place_of(static_cast<int64_t>(i), array.shape); });
        },
        array.values);
  }
  local.merge_over(world);
  checks.merge(local);
  return std::ssize(found);
}

std::string write_and_compare(const ArrayFile& made, const ArrayPaths& paths, bool check,
                              AppContext& context, Verification& checks) {
  if (!paths.output.empty()) {
    OutputFile output(context.world, paths.output);
    fill_arrays(output, made);
    if (check)
      compare_arrays("file read back", output.temporary_path(), made, true, context.world, checks);
    context.outputs.add(std::move(output));
  }
  if (paths.yours.empty()) return "";
  const int64_t found = compare_arrays("yours", paths.yours, made, false, context.world, checks);
  return fmt::format("# yours: {} of {} datasets are in '{}', and were compared\n", found,
                     made.arrays.size(), paths.yours);
}

void check_arrays_fit(double bytes, AppContext& context) {
  run_agreed(context.world, "arrays of all ranks", [&] {
    const int64_t memory = memory_for_rank(context);
    // Rank 0 holds the arrays, their copy in rank order, and what it reads back as float64.
    if (memory > 0 && context.root() && 4 * bytes > static_cast<double>(memory))
      throw_usage(
          "rank 0 holds the arrays of all ranks to write or compare them, {:.3g} GB with copies, "
          "of {:.3g} GB that it may take: smaller inputs, or fewer ranks",
          4 * bytes / 1e9, static_cast<double>(memory) / 1e9);
  });
}

}  // namespace gyre

// gyre-compare: compares two HDF5 files, tensor by tensor.

#include <fmt/format.h>

#include <algorithm>

#include "comm/agree.hpp"
#include "io/compare.hpp"
#include "report/app.hpp"
#include "report/options.hpp"
#include "report/table.hpp"

namespace {

using namespace gyre;

struct Options {
  std::string a, b;
  std::string ties = "exact";
  CompareOptions compare;
};

void declare(OptionTable& table, Options& o) {
  const AddOptions add(table);
  add.required("a", "FILE.h5 or FILE.h5:/group", o.a);
  add.required("b", "FILE.h5 or FILE.h5:/group, the reference", o.b);
  add("--rtol", "Relative tolerance of reals: |a - b| <= rtol |b| + atol", o.compare.rtol,
      not_negative);
  add("--atol", "Absolute tolerance of reals", o.compare.atol, not_negative);
  add.flag("--equal-nan", "NaN agrees with NaN; without this option, it agrees with nothing",
           o.compare.equal_nan);
  add.choice("--ties",
             "Ids beside values (top_ids, top_values): in the order of the file, or any of those "
             "with equal values",
             o.ties, {"exact", "any"});
  add.flag("--common", "Compare only what both files have", o.compare.common_only);
}

/// The beginning of a text for the table, which has no room for long ones.
std::string shortened(const std::string& text) {
  return text.size() <= 24 ? text : text.substr(0, 21) + "...";
}

const Table<TensorComparison>& compare_table() {
  using Row = TensorComparison;
  static const Table<Row> table({
      {"tensor", "", 24, 0, &Row::path, Align::left},
      {"elements", "", 10, 0, &Row::elements},
      {"outside", "", 8, 0, &Row::outside},
      {"max_err", "", 10, 0, [](const Row& r) { return fmt::format("{:.3g}", r.max_error); }},
      {"err_over_tol", "", 12, 0,
       [](const Row& r) { return fmt::format("{:.3g}", r.err_over_tol); }},
      {"worst", "index", 12, 0, &Row::worst_index},
      {"a", "", 16, 0, [](const Row& r) { return shortened(r.worst_a); }},
      {"b", "", 16, 0, [](const Row& r) { return shortened(r.worst_b); }},
      {"verdict", "", 9, 0, [](const Row& r) { return describe(r); }, Align::left},
  });
  return table;
}

/// Prints the comparison; returns the exit code of its verdict.
ExitCode present(const std::vector<TensorComparison>& tensors, bool quiet, Outputs& outputs) {
  const auto same = std::count_if(tensors.begin(), tensors.end(),
                                  [](const auto& t) { return t.match == Match::same; });
  double worst = 0;
  for (const TensorComparison& tensor : tensors) worst = std::max(worst, tensor.err_over_tol);
  std::string text = quiet ? "" : compare_table().header();
  for (const TensorComparison& tensor : tensors)
    if (!quiet || tensor.match != Match::same) text += compare_table().row(tensor);
  const bool passed = same == std::ssize(tensors);
  outputs.print(text + fmt::format("VERIFY {} {}/{} max_err_over_tol={:.3g}\n",
                                   passed ? "PASSED" : "FAILED", same, tensors.size(), worst));
  return passed ? ExitCode::ok : ExitCode::verification_failed;
}

ExitCode run(Options& o, AppContext& context) {
  o.compare.any_of_ties = o.ties == "any";
  ExitCode code = ExitCode::ok;
  run_on_root(context.world, "comparing", [&] {
    const std::vector<TensorComparison> tensors = compare_files(o.a, o.b, o.compare);
    if (!context.quiet)
      context.outputs.print(fmt::format(
          "# A  {}\n# B  {}\n# reals agree when |a - b| <= {} + {} |b|{}; all else, when equal\n",
          o.a, o.b, o.compare.atol, o.compare.rtol,
          o.compare.equal_nan ? ", or both are NaN" : ""));
    code = present(tensors, context.quiet, context.outputs);
  });
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const AppInfo info{
      "gyre-compare", "Compares two HDF5 files, tensor by tensor; exit code 1 when they differ.",
      "Examples: gyre-compare old.h5 new.h5\n"
      "          gyre-compare --common scores.h5:/results docs.h5:/reference --rtol 1e-4",
      false};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare(table, options); },
      [&](AppContext& context) { return run(options, context); });
}

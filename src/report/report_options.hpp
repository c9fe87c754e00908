#pragma once
// The options of a run's report that all measuring apps share.

#include <string>
#include <string_view>

namespace CLI {
class App;
}

namespace gyre {

struct AppContext;

struct ReportOptions {
  std::string json;  ///< "" for none; a name that ends in ".jsonl": a line a row, as it is measured
  std::string csv;
  std::string resume = "none";      ///< "finished", "measured": rows of `json` that stay
  std::string columns = "default";  ///< "all", or names with commas between them

  bool in_lines() const { return json.ends_with(".jsonl"); }
};

/// Adds -J,--json, --csv, --resume and --columns.
void declare_report_options(CLI::App& app, ReportOptions& options);

/// For a mode that measures nothing ("--explain"): a usage error that names each of these options,
/// and --machine, that was given. All ranks throw alike.
void refuse_report_options(const AppContext& context, const ReportOptions& options,
                           std::string_view mode);

}  // namespace gyre

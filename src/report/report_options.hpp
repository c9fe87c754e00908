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
  std::string json;  ///< "": none. NAME.jsonl gets one line per row, written when measured
  std::string csv;
  std::string resume = "none";      ///< "finished" or "measured": which rows of `json` are kept
  std::string columns = "default";  ///< "default", "all" or comma-separated names

  bool in_lines() const { return json.ends_with(".jsonl"); }
};

/// Adds -J,--json, --csv, --resume and --columns.
void declare_report_options(CLI::App& app, ReportOptions& options);

/// Throws a usage error that names each of these options, and --machine, if given: `mode`
/// ("--explain") measures nothing. All ranks throw the same error.
void refuse_report_options(const AppContext& context, const ReportOptions& options,
                           std::string_view mode);

}  // namespace gyre

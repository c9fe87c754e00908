#include "report/report_options.hpp"

#include "core/error.hpp"
#include "report/app.hpp"
#include "report/options.hpp"

namespace gyre {

void declare_report_options(CLI::App& app, ReportOptions& options) {
  add_option(
      app,
      {"-J,--json",
       "Write the result here (gyre-result/1). FILE.jsonl: a line a row, appended as soon as "
       "it is measured"},
      options.json);
  add_option(app, {"--csv", "Write the table here, with all columns"}, options.csv);
  add_choice_option(app,
                    {"--resume",
                     "With -J FILE.jsonl: leave out rows that it has of the same run; all that are "
                     "finished and right, or only those whose timing meets the run rules"},
                    options.resume, {"none", "finished", "measured"});
  add_option(app, {"--columns", "Of the table: default, all, or names with commas between them"},
             options.columns);
}

void refuse_report_options(const AppContext& context, const ReportOptions& options,
                           std::string_view mode) {
  const ReportOptions usual;
  ConfigErrors errors;
  const auto refuse = [&](const char* option, bool given) {
    if (given) errors.add("{} goes with a run, not with {}", option, mode);
  };
  refuse("--json", options.json != usual.json);
  refuse("--csv", options.csv != usual.csv);
  refuse("--resume", options.resume != usual.resume);
  refuse("--columns", options.columns != usual.columns);
  refuse("--machine", context.machine != nullptr);
  errors.throw_if_any("impossible configuration");
}

}  // namespace gyre

#include "report/command_line.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <memory>

#include "core/error.hpp"
#include "io/resources.hpp"
#include "report/config_file.hpp"
#include "report/options.hpp"

namespace gyre {
namespace {

std::string complain_about_seconds(const std::string& text) {
  double seconds = -1;
  size_t used = 0;
  try {
    seconds = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (seconds >= 0 && used == text.size()) return {};
  return fmt::format("'{}' is not a number of seconds", text);
}

/// The complaint about a file that is unreadable, not regular (a pipe would block) or too large.
std::string complain_about_unreadable(const std::string& path) {
  try {
    read_text_file(path, "options in TOML");
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// Complaints about invalid values of flags (--flag=VALUE). CLI11 accepts any number, and throws
/// std::out_of_range for one beyond 64 bits.
std::vector<std::string> describe_switches(const CLI::App& app, int argc, const char* const* argv) {
  std::vector<std::string> complaints;
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    if (argument.rfind("--", 0) != 0 || equals == std::string::npos) continue;
    const std::string name = argument.substr(0, equals);
    const CLI::Option* option = app.get_option_no_throw(name);
    if (option == nullptr || option->get_items_expected_max() != 0) continue;
    const std::string complaint = complain_about_switch(name, argument.substr(equals + 1));
    if (!complaint.empty()) complaints.push_back(complaint);
  }
  return complaints;
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

/// One line for each argument that no option has taken.
std::vector<std::string> describe_leftovers(const CLI::App& app) {
  const std::vector<std::string> names = option_names(app);
  std::vector<std::string> options, others;
  for (const std::string& argument : app.remaining()) {
    const std::string name = argument.substr(0, argument.find('='));
    const bool dashed = name.size() > 1 && name[0] == '-';
    const std::string near = nearest(dashed ? name : "--" + name, names);
    const std::string hint = near.empty() ? "" : fmt::format("; nearest: {}", near);
    if (dashed)
      options.push_back(fmt::format("unknown option {}{}", name, hint));
    else
      others.push_back(fmt::format("unexpected argument {}{}", name, hint));
  }
  // The value of an unknown option is an unexpected argument as well: report only the cause.
  return options.empty() ? others : options;
}

}  // namespace

void declare_common(CLI::App& app, CommonOptions& common) {
  app.set_config("--config", "", "Read options from this TOML file; the command line wins")
      ->type_name("FILE")
      ->check(complain_about_empty)
      ->check(complain_about_unreadable)
      ->group("Common");
  app.add_option(timeout_option, common.timeout_seconds,
                 "End the run when one wait lasts longer, in seconds; 0: never")
      ->capture_default_str()
      ->check(complain_about_seconds)
      ->group("Common");
  add_choice_option(app,
                    {"--progress",
                     "Of runs above 5 s, on stderr: auto redraws a line on a terminal and writes "
                     "one every 10 s elsewhere; on: stderr ends at a terminal"},
                    common.progress, {"auto", "on", "off"});
  app.get_option("--progress")->group("Common");
  CLI::Option* verbose = app.add_flag("-v,--verbose", common.verbose, "Say more")->group("Common");
  app.add_flag("-q,--quiet", common.quiet, "Say less")->group("Common")->excludes(verbose);
  app.set_version_flag("--version", std::string("unused"), "Print version and build, and exit")
      ->configurable(false)
      ->group("Common");
  app.set_help_flag("-h,--help", "Print this help, and exit")->group("Common");
  app.config_formatter(std::make_shared<ConfigFile>(app));
  // Unknown arguments are collected, so that one error names them all, each with a suggestion.
  app.allow_extras();
}

Request parse_command_line(CLI::App& app, int argc, const char* const* argv) {
  std::vector<std::string> errors = describe_switches(app, argc, argv);
  std::string complaint;
  try {
    if (errors.empty()) app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Request::help;
  } catch (const CLI::CallForVersion&) {
    return Request::version;
  } catch (const CLI::ParseError& error) {
    complaint = error.what();
  }
  for (std::string& leftover : describe_leftovers(app)) errors.push_back(std::move(leftover));
  if (!complaint.empty()) errors.push_back(complaint);
  if (errors.empty()) return Request::run;
  errors.push_back(fmt::format("see {} --help", app.get_name()));
  throw Error(ExitCode::usage, fmt::format("{}", fmt::join(errors, "\n  ")));
}

}  // namespace gyre

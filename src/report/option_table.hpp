#pragma once
// The options of a program as a table: what a result records of each, and which files it names.

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "report/value.hpp"
#include "supervision/output_guard.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace gyre {

/// Names the part of a result that tells which value an option had.
enum class ToldBy {
  configuration,  ///< recorded under the option's name
  key,            ///< the option chooses rows; the keys of rows tell them apart
  input,          ///< the option names a file; its name and checksum are recorded
  nothing         ///< every value leaves the results the same: outputs, verbosity, limits of time
};

/// When the header of a run prints an option that the result records. usually: when it is given,
/// and at its default unless that is false, 0, "" or "none".
enum class Shown { usually, when_given, never };

/// Groups of options, in the order of --help.
struct OptionGroup {
  const char* name;
  ToldBy told_by = ToldBy::configuration;
  Shown shown = Shown::usually;
};
inline constexpr OptionGroup option_groups[] = {
    {"Options"},
    {"Problem"},
    {"Parallelism"},
    {"Measurement"},
    {"Plan"},
    {"Output", ToldBy::nothing},
    {"Advanced", ToldBy::configuration, Shown::when_given},
    {"Common", ToldBy::nothing}};

/// An option as it was declared. The functions that return the option itself add to a declaration.
struct Option {
  std::string flag;  ///< "--heads", or "paths" for positional arguments
  std::string name;  ///< "heads": its name in the configuration of a result
  ToldBy told_by;
  std::function<Value()> value;           ///< reads the variable: defaults are filled in later
  Value usual;                            ///< value() at the declaration
  std::vector<std::string> choices = {};  ///< texts that it takes; empty: not a choice
  Shown shown = Shown::usually;
  std::function<std::vector<std::string>()> reads = {};  ///< paths of files that the option reads
  std::function<std::string()> writes = {};  ///< path of the file that the option writes, or ""
  std::function<bool()> is_text = {};        ///< whether that file is written once, as one text
  bool is_problem_file = false, is_in_problem_file = false;  ///< see problem_file()

  bool is_given() const { return value() != usual; }

  Option& same_results() { return told(ToldBy::nothing); }
  Option& in_key() { return told(ToldBy::key); }
  /// The value is a file that has the values of all options in_problem_file(), which are refused
  /// beside it.
  Option& problem_file() {
    is_problem_file = true;
    return *this;
  }
  Option& in_problem_file() {
    is_in_problem_file = true;
    return *this;
  }
  Option& show(Shown when);
  /// Records the option under another name than its flag's.
  Option& called(const std::string& other);
  /// Records `text` for an empty value.
  Option& empty_is(const std::string& text);
  /// Records what `f` returns instead of the variable.
  Option& records(const std::function<Value()>& f);
  /// The value is the path of a file that is read, or the option has several such values.
  Option& reads_file();
  Option& reads_files(const std::vector<std::string>& values);
  /// The value may name a file that is read: path_of(value) returns it, or "".
  Option& names_file(const std::function<std::string(const std::string&)>& path_of);
  /// The value is the path of a file that is written: HDF5, or lines that are read again.
  Option& writes_file();
  /// The value is the path of a text that is written once.
  Option& writes_text();

 private:
  Option& told(ToldBy by);
};

/// The options of a program, in the order of their declaration.
class OptionTable {
 public:
  OptionTable(const std::string& description, const std::string& program);
  ~OptionTable();
  OptionTable(const OptionTable&) = delete;
  OptionTable& operator=(const OptionTable&) = delete;

  CLI::App& parser() const { return *parser_; }
  const std::deque<Option>& all() const { return options_; }
  /// Throws unless the option was declared.
  const Option& at(std::string_view flag) const;
  Option& add(Option option);

  /// The configuration of a result: `facts`, which the program derives, then the options that
  /// configurations tell apart. A fact replaces an option of its name only if that option was not
  /// given, so that two values of an option are never recorded alike.
  Fields configuration(const Fields& facts) const;
  /// Names in that configuration that the header of a run leaves out.
  std::vector<std::string> not_shown(const Fields& facts) const;

  /// While the table keeps them, values that options refuse become complaints, "--cp: '0' is ...",
  /// which do not end the parsing.
  bool keeps_complaints() const { return keeps_complaints_; }
  void keep_complaints(bool keeps) { keeps_complaints_ = keeps; }
  void complain(const std::string& complaint) { complaints_.push_back(complaint); }
  const std::vector<std::string>& complaints() const { return complaints_; }

  /// Files that the options read and write.
  RunFiles files() const;
  /// Paths of the files that were read and tell results apart.
  std::vector<std::string> inputs() const;

 private:
  std::unique_ptr<CLI::App> parser_;
  std::deque<Option> options_;  // references to its elements stay valid
  bool keeps_complaints_ = false;
  std::vector<std::string> complaints_;
};

}  // namespace gyre

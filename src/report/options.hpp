#pragma once
// Declaring the options of a program. An option is declared once: parsing, --help, configuration
// files, the recorded configuration of a result and the files of a run follow. The option parser,
// which takes seconds to compile, is not included.

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/nearest.hpp"
#include "report/option_table.hpp"

namespace gyre {

class ConfigErrors;

/// The largest size of an option. Sums and small multiples of such sizes fit 64-bit integers.
inline constexpr int64_t max_size = int64_t{1} << 48;

/// A name that an option takes, and the line that lists show of it.
struct Described {
  std::string name, summary;
};

/// The items of a list with commas; at least one, which may be empty.
std::vector<std::string> items_of(const std::string& list);

/// Whether a list that AddOptions::choices has read contains a name, and whether it may have more
/// than one.
bool lists(const std::string& list, std::string_view name);
bool lists_several(const std::string& list);

/// The finite numbers that an option takes, from `least` (`open`: above it) to `most`.
struct Range {
  double least = std::numeric_limits<double>::lowest();
  double most = std::numeric_limits<double>::max();
  bool open = false;
};
inline constexpr Range positive{.least = 0, .open = true}, not_negative{.least = 0};

/// Adds options to a table. `name` is as on the command line: "-n,--iters", or "files" for
/// positional arguments. The value of a variable at the call is the default that --help shows. A
/// declared option is recorded in results unless its group or its declaration says otherwise.
class AddOptions {
 public:
  /// Adds to a group of option_groups, or to that of the options before.
  explicit AddOptions(OptionTable& table, const std::string& group = "");

  Option& flag(const std::string& name, const std::string& help, bool& value) const;
  /// An option with a text, or with several texts. No text may be empty.
  Option& operator()(const std::string& name, const std::string& help, std::string& value) const;
  Option& operator()(const std::string& name, const std::string& help,
                     std::vector<std::string>& values) const;
  /// An option with a finite number.
  Option& operator()(const std::string& name, const std::string& help, double& value,
                     const Range& range = {}) const;
  /// An option with an integer from `minimum` to `maximum`.
  Option& operator()(const std::string& name, const std::string& help, int& value, int minimum,
                     int maximum = std::numeric_limits<int>::max()) const;
  /// An option, with a text or a finite number, that must be given.
  template <class T>
  Option& required(const std::string& name, const std::string& help, T& value) const {
    Option& option = (*this)(name, help, value);
    require();
    return option;
  }
  /// An option with an integer of at least 1, or `word`, which stands for the value 0.
  Option& count(const std::string& name, const std::string& help, int& value,
                const std::string& word) const;
  /// An option with a size from `minimum` to `maximum`, in the notation of parse_size.
  Option& size(const std::string& name, const std::string& help, int64_t& value,
               int64_t minimum = 0, int64_t maximum = max_size) const;
  /// Adds --seed, a size without an upper limit.
  Option& seed(const std::string& help, int64_t& value) const;
  /// An option with one of `choices`, or its index. Errors for other texts name the nearest choice.
  Option& choice(const std::string& name, const std::string& help, std::string& value,
                 const std::vector<std::string>& choices) const;
  Option& choice(const std::string& name, const std::string& help, int64_t& index,
                 const std::vector<std::string>& choices) const;
  /// An option with "all", one of `choices`, or several separated by commas. An error for a proper
  /// noun that the summary of a choice has ("Ulysses") names that choice.
  Option& choices(const std::string& name, const std::string& help, std::string& value,
                  const std::vector<Described>& choices) const;

 private:
  CLI::App& parser() const;  ///< set to the group
  void require() const;      ///< makes the option added last mandatory
  template <class Check>
  void checked(CLI::Option* option, const Check& check) const;
  Option& add(const std::string& name, const std::function<Value()>& value,
              const std::vector<std::string>& choices = {}) const;
  OptionTable& table_;
  std::string group_;
};

/// The complaint about an empty value of an option; "" for other values. An empty value is usually
/// an unset shell variable. If it meant "no file", a result would be lost.
std::string complain_about_empty(const std::string& text);

/// Format of a list of numbers: what they count, the allowed range and an example.
struct NumberList {
  const char* what;
  int least = 1, most = 1;
  const char* example;
};
/// Parses "8,16,32": any order, no repetition. Adds errors to `errors`.
std::vector<int> parse_numbers(const char* option, const std::string& text, const NumberList& list,
                               ConfigErrors& errors);

/// Parses "4096", "128K", "2M", "1G" with K, M, G = 2^10, 2^20, 2^30 (either case), exactly.
/// Throws a usage error for anything else: signs, fractions, other units, more than 2^63 - 1.
int64_t parse_size(std::string_view text);

struct TokenSweep {
  int64_t tokens = 0;        ///< the only size if there is no sweep
  int64_t min = 0, max = 0;  ///< min 0: no sweep
  double factor = 2;
  int64_t step = 0;  ///< if above 0: difference of neighbouring sizes; `factor` is then unused
  int cycles = 1;    ///< how often all sizes are run

  bool sweeps() const { return min > 0; }
  /// min, min · factor, min · factor², ... (rounded), or min, min + step, ..., up to max. Without
  /// a sweep only `tokens`. Requires factor > 1.
  std::vector<int64_t> sizes() const;
};

/// Adds --tokens, -b,--min, -e,--max, -f,--factor, -i,--step and -N,--cycles. `what` describes a
/// size: "Tokens of each sequence"; `most` is the largest.
void declare_sweep(OptionTable& table, const std::string& what, TokenSweep& sweep,
                   int64_t most = max_size);

/// Adds all errors of these options; `usual_tokens` is the default of --tokens.
void check_sweep(const TokenSweep& sweep, int64_t usual_tokens, ConfigErrors& errors);

}  // namespace gyre

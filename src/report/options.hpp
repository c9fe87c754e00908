#pragma once
// Declaring the options of an app without including the option parser, which takes seconds to
// compile.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/nearest.hpp"

namespace CLI {
class App;
}

namespace gyre {

class ConfigErrors;

/// `name` as on the command line: "-n,--iters", or "files" for positional arguments.
struct OptionSpec {
  std::string name;
  std::string description;
  bool required = false;
};

/// Each function binds a variable. Its value at the call is the default that --help shows.
void add_flag(CLI::App& app, const OptionSpec& spec, bool& value);
/// Texts must not be empty.
void add_option(CLI::App& app, const OptionSpec& spec, std::string& value);
void add_option(CLI::App& app, const OptionSpec& spec, std::vector<std::string>& values);
/// A finite number.
void add_option(CLI::App& app, const OptionSpec& spec, double& value);
/// An integer that is at least `minimum`.
void add_option(CLI::App& app, const OptionSpec& spec, int& value, int minimum);
/// A number of at least 1, or `word`, which is the value 0.
void add_count_option(CLI::App& app, const OptionSpec& spec, int& value, const std::string& word);
/// The largest size of an option. Sums and small multiples of such sizes fit 64-bit integers.
inline constexpr int64_t max_size = int64_t{1} << 48;
/// A size from `minimum` to `maximum`, in the notation of parse_size.
void add_size_option(CLI::App& app, const OptionSpec& spec, int64_t& value, int64_t minimum = 0,
                     int64_t maximum = max_size);
/// A seed: any size.
void add_seed_option(CLI::App& app, const std::string& description, int64_t& value);
/// One of `choices`. The error for any other text names the nearest choice.
void add_choice_option(CLI::App& app, const OptionSpec& spec, std::string& value,
                       const std::vector<std::string>& choices);

/// Binds the index of the choice.
void add_choice_option(CLI::App& app, const OptionSpec& spec, int64_t& index,
                       const std::vector<std::string>& choices);

/// The complaint about an empty text, or "". An empty text is usually an unset shell variable. If
/// it meant "no file", a result would be lost.
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
  int64_t tokens = 0;        ///< the only size without a sweep
  int64_t min = 0, max = 0;  ///< min 0: no sweep
  double factor = 2;
  int64_t step = 0;  ///< above 0: the difference of neighbours, instead of `factor`
  int cycles = 1;    ///< how often the sweep is run

  bool sweeps() const { return min > 0; }
  /// min, min · factor, min · factor², ... (rounded), or min, min + step, ..., up to max. Without
  /// a sweep only `tokens`. Requires factor > 1.
  std::vector<int64_t> sizes() const;
};

/// Adds --tokens, -b,--min, -e,--max, -f,--factor, -i,--step and -N,--cycles. `what` describes a
/// size: "Tokens of each sequence".
void declare_sweep(CLI::App& app, const std::string& what, TokenSweep& sweep);

/// Adds all errors of these options; `usual_tokens` is the default of --tokens.
void check_sweep(const TokenSweep& sweep, int64_t usual_tokens, ConfigErrors& errors);

}  // namespace gyre

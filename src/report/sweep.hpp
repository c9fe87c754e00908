#pragma once
// The sizes of a run: --tokens, or a sweep by --min, --max and --factor or --step.

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.hpp"

namespace CLI {
class App;
}

namespace gyre {

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

#pragma once
// --tokens, or a sweep over sizes: --min, --max, --factor.

#include <cstdint>
#include <vector>

#include "core/error.hpp"

namespace gyre {

struct TokenSweep {
  int64_t tokens = 0;        ///< the only size, where there is no sweep
  int64_t min = 0, max = 0;  ///< min 0: no sweep
  double factor = 2;

  bool sweeps() const { return min > 0; }
  /// The sizes from min to max, each the one before times factor, rounded; or tokens. factor > 1.
  std::vector<int64_t> sizes() const;
};

/// Adds all that is wrong with the options; `usual_tokens` is the default of --tokens.
void check_sweep(const TokenSweep& sweep, int64_t usual_tokens, ConfigErrors& problems);

}  // namespace gyre

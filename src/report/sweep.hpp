#pragma once
// The sizes of a run: --tokens, or a sweep by --min, --max and --factor.

#include <cstdint>
#include <vector>

#include "core/error.hpp"

namespace gyre {

struct TokenSweep {
  int64_t tokens = 0;        ///< the only size without a sweep
  int64_t min = 0, max = 0;  ///< min 0: no sweep
  double factor = 2;

  bool sweeps() const { return min > 0; }
  /// min, min · factor, min · factor², ..., rounded, up to max; without a sweep, tokens. factor
  /// > 1.
  std::vector<int64_t> sizes() const;
};

/// Adds all errors of these options; `usual_tokens` is the default of --tokens.
void check_sweep(const TokenSweep& sweep, int64_t usual_tokens, ConfigErrors& errors);

}  // namespace gyre

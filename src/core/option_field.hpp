#pragma once
// Options of algorithms as data, so that an app can offer them without naming them.

#include <cstdint>

namespace gyre {

/// One number of a struct of options.
template <class Options>
struct OptionField {
  using Member = int64_t Options::*;
  const char* name;  ///< "heads-at-once": --heads-at-once on a command line
  const char* summary;
  Member value;
  int64_t minimum;  ///< the smallest value that may be given
};

}  // namespace gyre

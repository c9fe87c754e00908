#pragma once
// Options of algorithms as data, so that an app can offer them without naming them.

#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

/// One number of a struct of options, or one of several words.
template <class Options>
struct OptionField {
  using Member = int64_t Options::*;
  const char* name;  ///< "heads-at-once": --heads-at-once on a command line
  const char* summary;
  Member value;
  int64_t minimum;  ///< the smallest value that may be given
  /// Words for the values 0, 1, ...; none: a number.
  std::vector<std::string> words;

  std::string text_of(int64_t number) const {
    return words.empty() ? std::to_string(number) : words[static_cast<size_t>(number)];
  }
};

}  // namespace gyre

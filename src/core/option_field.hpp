#pragma once
// Options of algorithms as data, so that an app can offer them without naming them.

#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

/// A numeric option, or an option with several words as values, stored in a member of `Options`.
template <class Options>
struct OptionField {
  using Member = int64_t Options::*;
  const char* name;  ///< "heads-at-once": --heads-at-once on a command line
  const char* summary;
  Member value;
  int64_t minimum;  ///< smallest valid value
  /// Words for the values 0, 1, ...; empty for a number.
  std::vector<std::string> words;

  std::string text_of(int64_t number) const {
    return words.empty() ? std::to_string(number) : words[number];
  }
};

}  // namespace gyre

#pragma once
// --at-least METRIC=VALUE: a run whose figures of merit are below a value ends with exit code 1.

#include <string>
#include <vector>

#include "core/error.hpp"
#include "report/result.hpp"

namespace gyre {

/// Throws a usage error unless `text` is "" or METRIC=VALUE with one of these metrics.
void check_at_least(const std::string& text, const std::vector<std::string>& metrics);

struct AtLeast {
  /// verification_failed: a figure is below; usage: the rows of this run have none
  ExitCode code = ExitCode::ok;
  std::string text;  ///< a "#" line for each of these figures, or for what is missing
};
/// Compares the figures of the metric with the value. An unknown figure (NaN) is below it.
AtLeast compare_at_least(const std::string& text, const std::vector<Fom>& foms);

}  // namespace gyre

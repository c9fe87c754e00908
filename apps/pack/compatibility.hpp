#pragma once
// Checks, before packing, whether attention over the packed streams is correct, by the table of
// packing/compatibility.hpp.

#include <string>

#include "packing/compatibility.hpp"

namespace CLI {
class App;
}

namespace gyre {

/// The attention and the device that will read the streams; see --help.
struct AttentionTarget {
  std::string attention;  ///< capabilities, joined by commas; "": no check
  std::string fused_flag = "unset";
  std::string device;  ///< "9.0"; "": unknown
  std::string probe = "not-run";
  bool forward_only = false, linear_attention = false;
};
void declare_target_options(CLI::App& app, AttentionTarget& target);

/// The query to the table. Throws a usage error for unknown capabilities or devices, and for other
/// options without --attention.
ParallelSetup setup_of(const AttentionTarget& target, int cp);

/// The "#" line with the table's answer; "" without --attention. Throws its errors as usage errors.
std::string compatibility_text(const AttentionTarget& target, int cp);

}  // namespace gyre

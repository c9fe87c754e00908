#pragma once
// Whether what gyre-pack packs can be attended to soundly: the table of packing/compatibility.hpp,
// asked before anything is packed.

#include <string>

#include "packing/compatibility.hpp"

namespace CLI {
class App;
}

namespace gyre {

/// The attention and the device that will read the streams; see --help.
struct AttentionTarget {
  std::string attention;  ///< capabilities, joined by commas; "": the table is not asked
  std::string fused_flag = "unset";
  std::string device;  ///< "9.0"; "": unknown
  std::string probe = "not-run";
  bool forward_only = false, linear_attention = false;
};
void declare_target_options(CLI::App& app, AttentionTarget& target);

/// What the table is asked. Throws a usage error for capabilities or devices that do not exist, and
/// for other options without --attention.
ParallelSetup setup_of(const AttentionTarget& target, int cp);

/// The "#" line with the table's answer; "" when it is not asked. Throws its errors as usage
/// errors.
std::string compatibility_text(const AttentionTarget& target, int cp);

}  // namespace gyre

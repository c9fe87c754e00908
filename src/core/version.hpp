#pragma once
// Identity of this build, recorded at build time.

#include <string>

namespace gyre {

struct BuildInfo {
  std::string version;     ///< "0.2.0"
  std::string git_sha;     ///< eight digits, or "unknown"
  std::string git_state;   ///< "clean", "dirty" or "no git"
  std::string build_type;  ///< "Release", "RelWithDebInfo", ...
  std::string compiler;    ///< "GNU 12.2.0"
  std::string flags = {};  ///< options of the compiler that the build chose: "-O3 -DNDEBUG"
  bool fast_math = false;  ///< the compiler may reorder sums, and assume that there is no NaN
};

BuildInfo build_info();

}  // namespace gyre

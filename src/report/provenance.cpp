#include "report/provenance.hpp"

#include <fmt/format.h>

#include "core/version.hpp"

namespace gyre {

Provenance provenance_of(const AppContext& context, const std::string& sources) {
  const BuildInfo build = build_info();
  return {{"generator", fmt::format("{} {} (git {}, {})", context.info.name, build.version,
                                    build.git_sha, build.git_state)},
          {"command", context.command_line},
          {"sources", sources}};
}

}  // namespace gyre

#include "core/version.hpp"

#include "gyre_build.hpp"

namespace gyre {

BuildInfo build_info() {
  return {GYRE_VERSION, GYRE_GIT_SHA, GYRE_GIT_STATE, GYRE_BUILD_TYPE, GYRE_COMPILER};
}

}  // namespace gyre

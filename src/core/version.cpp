#include "core/version.hpp"

#include "gyre_build.hpp"

namespace gyre {

namespace {

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || __FINITE_MATH_ONLY__ + 0 == 1
constexpr bool is_fast_math = true;
#else
constexpr bool is_fast_math = false;
#endif

}  // namespace

BuildInfo build_info() {
  return {.version = GYRE_VERSION,
          .git_sha = GYRE_GIT_SHA,
          .git_state = GYRE_GIT_STATE,
          .build_type = GYRE_BUILD_TYPE,
          .compiler = GYRE_COMPILER,
          .flags = GYRE_BUILD_FLAGS,
          .fast_math = is_fast_math};
}

}  // namespace gyre

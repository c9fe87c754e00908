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
  return {GYRE_VERSION,  GYRE_GIT_SHA,     GYRE_GIT_STATE, GYRE_BUILD_TYPE,
          GYRE_COMPILER, GYRE_BUILD_FLAGS, is_fast_math};
}

}  // namespace gyre

# GYRE_BUILD_FLAGS: the options of the compilers that this build chose. Results record them; those that the project adds
# follow from its sources.
# Options that let the compiler change sums, or assume that there is no NaN, are refused: kernels, references and checks
# of them rely on both.
string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
set(GYRE_BUILD_FLAGS "")
foreach(flags CMAKE_CXX_FLAGS CMAKE_CXX_FLAGS_${type} CMAKE_CUDA_FLAGS CMAKE_CUDA_FLAGS_${type})
  if(flags MATCHES "CUDA" AND NOT GYRE_WITH_CUDA)
    continue()
  endif()
  string(REGEX MATCH "(^| )(-Ofast|-f(fast-math|unsafe-math-optimizations|finite-math-only|associative-math|reciprocal-math)|--?use_fast_math)( |$)"
         refused "${${flags}}")
  if(refused)
    string(STRIP "${refused}" refused)
    message(FATAL_ERROR "${flags} has ${refused}: results would not be those of the sources, as sums may be reordered and NaN "
                        "is assumed away. Build without it, for example with -O3.")
  endif()
  string(STRIP "${GYRE_BUILD_FLAGS} ${${flags}}" GYRE_BUILD_FLAGS)
endforeach()

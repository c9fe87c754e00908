# gyre_flags: what every target of ours is compiled with.
add_library(gyre_flags INTERFACE)
target_include_directories(gyre_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_options(
  gyre_flags
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall
            -Wextra
            -Wpedantic
            -Wshadow
            -Wnon-virtual-dtor
            -Woverloaded-virtual
            -Wno-restrict # GCC 12 false positives in std::string (GCC bug 105651)
            -ffp-contract=off>
            $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${GYRE_WERROR}>>:-Werror>)
# fmt 9 turns constexpr off for nvcc, and then fails its own compile-time checks under C++20.
target_compile_definitions(gyre_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:FMT_USE_CONSTEXPR=1>)
# What a sanitizer finds ends the program: a message alone would fail no test.
if(GYRE_SANITIZE)
  target_compile_options(gyre_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${GYRE_SANITIZE}
                                              -fno-sanitize-recover=all -fno-omit-frame-pointer -g>)
  target_link_options(gyre_flags INTERFACE -fsanitize=${GYRE_SANITIZE})
endif()

# gyre_module(NAME DEPENDS ...): static library gyre_NAME from every .cpp (and .cu) below this folder.
# The DEPENDS lists are the dependency rule of the project; tests/unit/dependencies checks the includes.
function(gyre_module name)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cpp)
  file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cu)
  file(GLOB_RECURSE nccl_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/nccl*.cpp
       ${CMAKE_CURRENT_SOURCE_DIR}/${name}/cuda*.cpp)
  if(GYRE_WITH_CUDA)
    list(APPEND sources ${cuda_sources})
  elseif(nccl_sources)
    list(REMOVE_ITEM sources ${nccl_sources})
  endif()
  add_library(gyre_${name} STATIC ${sources})
  target_link_libraries(gyre_${name} PUBLIC gyre_flags ${ARG_DEPENDS})
  if(GYRE_WITH_CUDA)
    target_compile_definitions(gyre_${name} PUBLIC GYRE_WITH_CUDA=1)
  endif()
endfunction()

# gyre_app(NAME): program gyre-NAME from apps/NAME.cpp.
function(gyre_app name)
  add_executable(gyre-${name} ${name}.cpp)
  target_link_libraries(gyre-${name} PRIVATE gyre_all)
  install(TARGETS gyre-${name} RUNTIME)
endfunction()

add_custom_target(host-libraries) # all libraries compiled by gyre_static()

# gyre_flags: compile options of every target. Libraries link it PRIVATE: clients of the package get only its link
# options, which are the sanitizer's.
add_library(gyre_flags INTERFACE)
# "module/file.hpp" is found below src, "apps/app/file.hpp" from the root.
target_include_directories(gyre_flags INTERFACE "$<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/src;${CMAKE_SOURCE_DIR}>")
target_compile_options(
  gyre_flags
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall
            -Wextra
            -Wpedantic
            -Wshadow
            -Wnon-virtual-dtor
            -Woverloaded-virtual
            # GCC 12 false positives in std::string (GCC bug 105651); sources of a unity build are like headers.
            $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
            $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow>
            $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>
            # Clang 19: variables of sources that are compiled together, bindings that lambdas capture, and the buffers
            # of std::stable_sort in GCC 12's library.
            $<$<CXX_COMPILER_ID:Clang>:-Wno-shadow>
            $<$<CXX_COMPILER_ID:Clang>:-Wno-deprecated-declarations>
            -ffp-contract=off
            -ffunction-sections # unused functions can be dropped: tests/unit/reached.sh
            -fdata-sections>
            $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${GYRE_WERROR}>>:-Werror>)
# Fewer garbage collections in GCC: a tenth to a quarter less time, for about half a gigabyte more per job.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(gyre_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-expand=300
                                              --param=ggc-min-heapsize=500000>)
endif()
# nvcc: warnings of the host compiler too, except -Wpedantic, which would find code that nvcc itself generates.
target_compile_options(
  gyre_flags
  INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra
            --expt-relaxed-constexpr
            -lineinfo>
            $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${GYRE_WERROR}>>:-Werror=all-warnings>)
# Kernels that only have to compile: takes a quarter of the time.
target_compile_options(
  gyre_flags INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:Debug>,$<VERSION_GREATER_EQUAL:$<CUDA_COMPILER_VERSION>,12.9>>:-Ofc=max>)
# fmt 9 turns constexpr off under nvcc, and then fails its own compile-time checks under C++20.
target_compile_definitions(gyre_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:FMT_USE_CONSTEXPR=1>)
# FEW: a target without fused multiply-add, one with it, and the widest; with a sanitizer, the first and the last.
if(GYRE_SIMD STREQUAL "FEW")
  set(disabled HWY_SSSE3|HWY_SSE4)
  if(GYRE_SANITIZE)
    string(APPEND disabled |HWY_AVX2)
  endif()
  target_compile_definitions(gyre_flags INTERFACE "HWY_DISABLED_TARGETS=(${disabled})")
endif()
# A sanitizer's finding ends the program: a message alone would fail no test. With its checks, GCC warns that
# initialised variables may be uninitialised.
if(GYRE_SANITIZE)
  target_compile_options(gyre_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${GYRE_SANITIZE}
                                              -fno-sanitize-recover=all -fno-omit-frame-pointer -g1>
                                            $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
  target_link_options(gyre_flags INTERFACE -fsanitize=${GYRE_SANITIZE})
endif()

# Compile definitions of a program that uses the GPU.
function(gyre_cuda_definitions target)
  foreach(feature WITH_CUDA WITH_NCCL WITH_CUBLAS WITH_CUDNN SOFTGPU)
    if(GYRE_${feature})
      target_compile_definitions(${target} PUBLIC GYRE_${feature}=1)
    endif()
  endforeach()
endfunction()

# Without nvcc, as for the software GPU, *.cu files are C++. Call this in the directory that compiles the sources,
# including .cpp files.
function(gyre_cuda_sources)
  set(kernels ${ARGN})
  list(FILTER kernels INCLUDE REGEX "\\.cu$")
  if((GYRE_SOFTGPU OR NOT GYRE_WITH_CUDA) AND kernels)
    set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++")
  endif()
endfunction()

# With CMAKE_UNITY_BUILD, the sources of a target are compiled several at a time, since headers are most of the work.
# Exceptions: entries of a registry, which may use the same names, and sources that Highway compiles once per
# instruction set (foreach_target.h), which include themselves.
function(gyre_compile_alone)
  foreach(source ${ARGN})
    file(STRINGS ${source} self_inclusion REGEX "HWY_TARGET_INCLUDE" LIMIT_COUNT 1)
    if(self_inclusion OR source MATCHES "/(schedules|layouts)/[^/]*$")
      set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
endfunction()

# Compiles with the headers of src/precompiled.hpp, but not without optimisation: after precompiled headers and one of
# Highway's pragmas, GCC 12 treats its intrinsics as optimised ones.
function(gyre_use_precompiled target)
  if(NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
    target_precompile_headers(${target} REUSE_FROM gyre_precompiled)
  endif()
endfunction()

# gyre_export(TARGET...): targets that clients get from find_package(gyre), gyre_NAME as gyre::NAME; see
# GyrePackage.cmake. Does nothing where the libraries come from another build.
function(gyre_export)
  if(GYRE_HOST_LIBRARIES)
    return()
  endif()
  foreach(target ${ARGN})
    string(REGEX REPLACE "^gyre_" "" name ${target})
    set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  endforeach()
  install(TARGETS ${ARGN} EXPORT gyre OBJECTS DESTINATION ${CMAKE_INSTALL_LIBDIR}/gyre)
endfunction()

# Sorts sources by name: cuda*.cpp and *cuda*.cu are compiled with CUDA, no_cuda*.cpp without it, and likewise nccl*,
# cublas* and cudnn*. A no_* file defines the factories of what is missing; they throw. Other *.cu files, of loops for
# host and device (runtime/for_rows.cuh), are compiled in every build. Sets `others` and `device`.
macro(gyre_sort_sources folder)
  file(GLOB_RECURSE others CONFIGURE_DEPENDS ${folder}/*.cpp)
  file(GLOB_RECURSE device CONFIGURE_DEPENDS ${folder}/*.cu)
  if(NOT GYRE_WITH_CUDA)
    list(FILTER device EXCLUDE REGEX "cuda[^/]*$")
  endif()
  gyre_cuda_sources(${device})
  foreach(feature CUDA NCCL CUBLAS CUDNN)
    string(TOLOWER ${feature} prefix)
    file(GLOB_RECURSE with CONFIGURE_DEPENDS ${folder}/${prefix}*.cpp)
    file(GLOB_RECURSE without CONFIGURE_DEPENDS ${folder}/no_${prefix}*.cpp)
    if(with OR without)
      list(REMOVE_ITEM others ${with} ${without})
    endif()
    if(GYRE_WITH_${feature})
      list(APPEND device ${with})
    else()
      list(APPEND device ${without})
    endif()
  endforeach()
endmacro()

# gyre_static(NAME DEPENDS ... SOURCES ... DEFINITIONS ...): a static library that is the same in every build. It is
# compiled, or taken from the build that GYRE_HOST_LIBRARIES names. Options set on the library later, as by
# gyre_compile_quickly, do not apply to the sources in DEFINITIONS.
function(gyre_static target)
  cmake_parse_arguments(ARG "" "" "DEPENDS;SOURCES;DEFINITIONS" ${ARGN})
  if(GYRE_HOST_LIBRARIES)
    file(RELATIVE_PATH folder ${CMAKE_BINARY_DIR} ${CMAKE_CURRENT_BINARY_DIR})
    add_library(${target} STATIC IMPORTED GLOBAL)
    set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${GYRE_HOST_LIBRARIES}/${folder}/lib${target}.a)
    target_link_libraries(${target} INTERFACE ${ARG_DEPENDS})
  else()
    gyre_compile_alone(${ARG_SOURCES})
    add_library(${target} STATIC ${ARG_SOURCES})
    target_link_libraries(${target} PRIVATE gyre_flags PUBLIC ${ARG_DEPENDS})
    gyre_use_precompiled(${target})
    if(ARG_DEFINITIONS)
      add_library(${target}_definitions OBJECT ${ARG_DEFINITIONS})
      target_link_libraries(${target}_definitions PRIVATE gyre_flags PUBLIC ${ARG_DEPENDS})
      gyre_use_precompiled(${target}_definitions)
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_definitions>)
    endif()
    add_dependencies(host-libraries ${target})
  endif()
endfunction()

# gyre_module(NAME DEPENDS ...): static library gyre_NAME from the sources below this folder, and gyre_NAME_device from
# its device sources. The first only links the second: its compile options do not depend on the device. The DEPENDS
# lists are the project's dependency rule; tests/unit/dependencies checks the includes.
function(gyre_module name)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  gyre_sort_sources(${CMAKE_CURRENT_SOURCE_DIR}/${name})
  gyre_static(gyre_${name} DEPENDS ${ARG_DEPENDS} SOURCES ${others})
  gyre_export(gyre_${name})
  if(device)
    gyre_compile_alone(${device})
    add_library(gyre_${name}_device STATIC ${device})
    target_link_libraries(gyre_${name}_device PRIVATE gyre_flags PUBLIC gyre_${name})
    gyre_use_precompiled(gyre_${name}_device)
    gyre_cuda_definitions(gyre_${name}_device)
    foreach(needed ${ARG_DEPENDS})
      if(TARGET ${needed}_device)
        target_link_libraries(gyre_${name}_device PUBLIC ${needed}_device)
      endif()
    endforeach()
    target_link_libraries(gyre_${name} INTERFACE $<LINK_ONLY:gyre_${name}_device>)
    target_link_libraries(gyre_devices INTERFACE gyre_${name}_device)
    gyre_export(gyre_${name}_device)
  endif()
endfunction()

# For code that is slow to compile and takes no time at run time: options, JSON, tables and calls of HDF5.
function(gyre_compile_quickly target)
  get_target_property(taken ${target} IMPORTED)
  if(taken)
    return()
  endif()
  target_compile_options(${target} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>)
  if(GYRE_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  endif()
  if(TARGET gyre_precompiled_quickly AND NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)
    target_precompile_headers(${target} REUSE_FROM gyre_precompiled_quickly)
  endif()
endfunction()

# gyre_app_parts(FOLDER [LIBRARY...]): static library gyre_app_FOLDER from every .cpp of the folder but main.cpp, and
# the parts of other apps that it needs.
function(gyre_app_parts folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
  list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/main.cpp)
  set(needed gyre_all ${ARGN})
  if(TARGET gyre_app_common)
    list(APPEND needed gyre_app_common)
  endif()
  if(sources)
    set(definitions ${sources}) # operations compute in double precision: full optimisation
    list(FILTER definitions INCLUDE REGEX "/ops/")
    list(FILTER sources EXCLUDE REGEX "/ops/")
    gyre_static(gyre_app_${folder} DEPENDS ${needed} SOURCES ${sources} DEFINITIONS ${definitions})
    gyre_compile_quickly(gyre_app_${folder})
  else() # the app consists of its main file
    add_library(gyre_app_${folder} INTERFACE)
    target_link_libraries(gyre_app_${folder} INTERFACE ${needed})
  endif()
endfunction()

# gyre_app(NAME [LIBRARY...]): program gyre-NAME from apps/NAME/main.cpp and that folder's library, which tests also link.
function(gyre_app name)
  gyre_app_parts(${name} ${ARGN})
  add_executable(gyre-${name} ${name}/main.cpp)
  target_link_libraries(gyre-${name} PRIVATE gyre_app_${name})
  gyre_use_precompiled(gyre-${name})
  gyre_compile_quickly(gyre-${name})
  # Drops what the program cannot reach; tests/unit/reached.sh reads what stays.
  target_link_options(gyre-${name} PRIVATE -Wl,--gc-sections)
  install(TARGETS gyre-${name} RUNTIME)
  set_property(GLOBAL APPEND PROPERTY GYRE_APPS ${name})
endfunction()

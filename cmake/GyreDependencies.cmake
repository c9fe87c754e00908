# All dependencies of Gyre. Each package is required: a build that silently lost MPI or parallel HDF5 would measure
# something else.
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  message(FATAL_ERROR "Gyre needs an x86-64 processor: libxsmm 1.17 generates no kernels for ${CMAKE_SYSTEM_PROCESSOR}")
endif()

find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(MPI REQUIRED COMPONENTS C CXX)

set(HDF5_PREFER_PARALLEL ON) # otherwise CMake silently takes the serial library
find_package(HDF5 REQUIRED COMPONENTS C)
if(NOT HDF5_IS_PARALLEL)
  message(FATAL_ERROR "Gyre needs parallel HDF5 (Debian: libhdf5-mpich-dev); found a serial one: "
                      "${HDF5_C_LIBRARIES}")
endif()

include(CheckMpiOfHdf5)
gyre_check_mpi_of_hdf5("${HDF5_C_LIBRARIES}" "${MPI_C_LIBRARIES}")

find_package(fmt REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(hwy REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)

find_package(PkgConfig REQUIRED)
pkg_check_modules(hwloc REQUIRED IMPORTED_TARGET hwloc) # topology of hosts
# Configuration files. A compiled toml++, as in Debian, is found by pkg-config; headers alone compile for seconds.
pkg_check_modules(tomlplusplus REQUIRED IMPORTED_TARGET tomlplusplus)

# Small matrix products: libxsmm generates a kernel per shape at run time. It links against BLAS for shapes that it does
# not generate; Gyre uses none of those.
find_path(LIBXSMM_INCLUDE_DIR libxsmm.h REQUIRED)
find_library(LIBXSMM_LIBRARY xsmm REQUIRED)
find_library(LIBXSMM_NOBLAS_LIBRARY xsmmnoblas REQUIRED)
add_library(gyre_libxsmm INTERFACE)
target_include_directories(gyre_libxsmm SYSTEM INTERFACE ${LIBXSMM_INCLUDE_DIR})
target_link_libraries(gyre_libxsmm INTERFACE ${LIBXSMM_LIBRARY} ${LIBXSMM_NOBLAS_LIBRARY}
                                             Threads::Threads ${CMAKE_DL_LIBS})

find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED) # headers only: checksums

# CUDA needs nvcc. SOFTWARE compiles the same sources for the software GPU (softgpu/) instead: a device implemented in
# host code, for tests on machines without a GPU.
#
#   GYRE_WITH_CUDA   *cuda*.cu and cuda*.cpp are built, else no_cuda*.cpp        GYRE_WITH_NCCL   nccl*.cpp, no_nccl*.cpp
#   GYRE_WITH_CUBLAS cublas*.cpp                                            GYRE_WITH_CUDNN  cudnn*.cpp, no_cudnn*.cpp
set(GYRE_WITH_CUDA OFF)
set(GYRE_WITH_NCCL OFF)
set(GYRE_WITH_CUBLAS OFF)
set(GYRE_WITH_CUDNN OFF)
set(GYRE_SOFTGPU OFF)
if(GYRE_CUDA STREQUAL "SOFTWARE")
  set(GYRE_SOFTGPU ON)
  set(GYRE_WITH_CUDA ON)
  set(GYRE_WITH_NCCL ON) # over MPI: softgpu/nccl.cpp
  set(NCCL_LIBRARY gyre_softgpu)
  set(NCCL_INCLUDE_DIR ${CMAKE_SOURCE_DIR}/softgpu/include)
elseif(NOT GYRE_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE)
    find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
    find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    if(NCCL_LIBRARY AND NCCL_INCLUDE_DIR)
      set(GYRE_WITH_CUDA ON)
      set(GYRE_WITH_NCCL ON)
      set(GYRE_WITH_CUBLAS ON)
    endif()
  endif()
  if(GYRE_CUDA STREQUAL "ON" AND NOT GYRE_WITH_CUDA)
    message(FATAL_ERROR "GYRE_CUDA=ON needs nvcc and NCCL; one of them was not found")
  endif()
  if(GYRE_WITH_CUDA)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100") # 100: also PTX for later architectures
    endif()
    if(NOT DEFINED CMAKE_CUDA_COMPILER)
      set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
    endif()
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    # cuDNN: fused attention. Without it Gyre's own tiled kernel is used.
    find_library(CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR})
    find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    if(CUDNN_LIBRARY AND CUDNN_INCLUDE_DIR)
      include(CudnnFrontend)
      if(GYRE_CUDNN_FRONTEND_INCLUDE)
        set(GYRE_WITH_CUDNN ON)
      else()
        message(STATUS "Without cuDNN: ${GYRE_CUDNN_FRONTEND_WHY}")
      endif()
    else()
      message(STATUS "Without cuDNN: the library or cudnn.h was not found")
    endif()
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 may not know that nvcc has it
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
  endif()
endif()

// Device memory, streams and products in a build without CUDA: there is no device, and every
// request is an error. Profiler ranges and move_device_on() do nothing.

#include "core/error.hpp"
#include "runtime/cuda_gemm.hpp"
#include "runtime/cuda_memory.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/features.hpp"
#include "runtime/profile_range.hpp"
#include "runtime/row_copy.hpp"

namespace gyre {

const bool with_cuda = false;
const bool with_nccl = false;
const bool with_cudnn = false;
const bool software_gpu = false;

ProfileRange::ProfileRange(const char* /*name*/) {}
ProfileRange::~ProfileRange() {}

int usable_cuda_devices(std::string* why) {
  if (why != nullptr) *why = "this build has no CUDA";
  return 0;
}

void move_device_on() {}

void* cuda_allocate(size_t bytes, MemorySpace space, bool /*poison*/) {
  throw_runtime("no {} memory for a buffer of {} bytes: this build has no CUDA", name_of(space),
                bytes);
}

void cuda_release(void* /*pointer*/, MemorySpace /*space*/) noexcept {}

void use_device_memory_of(const DeviceMemoryLibrary& /*library*/) {}

int64_t cuda_releases() {
  return 0;
}

int64_t cuda_memory_available() {
  throw_runtime("memory of a GPU: this build has no CUDA");
}

std::unique_ptr<Stream> make_cuda_stream() {
  throw_runtime("a stream of a GPU: this build has no CUDA");
}

void cuda_gemm(ConstMatrixRef /*a*/, Transpose /*a_op*/, ConstMatrixRef /*b*/, Transpose /*b_op*/,
               MatrixRef /*c*/, bool /*accumulate*/, Stream& /*stream*/) {
  throw_runtime("a matrix product of a GPU: this build has no CUDA");
}

void cuda_copy_rows(std::span<const RowCopy> /*copies*/, Stream& /*stream*/) {
  throw_runtime("copies on a GPU: this build has no CUDA");
}

void gather_rows(Stream& /*stream*/, void* /*out*/, const void* /*in*/, const int32_t* /*map*/,
                 int64_t /*rows*/, int64_t /*in_rows*/, int64_t /*row_bytes*/,
                 const RowFill& /*fill*/) {
  throw_runtime("gather_rows: this build has no CUDA");
}

void scatter_rows(Stream& /*stream*/, void* /*out*/, const void* /*in*/, const int32_t* /*map*/,
                  int64_t /*rows*/, int64_t /*out_rows*/, int64_t /*row_bytes*/) {
  throw_runtime("scatter_rows: this build has no CUDA");
}

}  // namespace gyre

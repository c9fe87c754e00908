// An MPI library that takes device memory: with GYRE_SOFTGPU_MPI=1, the calls that Gyre hands
// arrays to, or that move them on, reach the software GPU's memory. Without it they are MPI's own,
// and the host's MPI that is given device memory ends the program.

#include <dlfcn.h>
#include <mpi.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "softgpu.hpp"

namespace {

bool is_gpu_aware() {
  static const bool is = [] {
    const char* wanted = std::getenv("GYRE_SOFTGPU_MPI");
    return wanted != nullptr && std::string_view(wanted) == "1";
  }();
  return is;
}

/// The function of this name behind the one here: that of MPI, or of a library which was loaded
/// before it to watch, or to change, what MPI is asked for.
template <class Function>
Function* next(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) softgpu::die(std::string("MPI has no ") + name);
  return reinterpret_cast<Function*>(found);
}

template <class Call, class... Arguments>
int with_device_memory(Call call, Arguments... arguments) {
  if (!is_gpu_aware()) return call(arguments...);
  const softgpu::DeviceAccess access;
  return call(arguments...);
}

/// Before MPI starts: UCX would let one process read the memory of another through the kernel,
/// which finds it closed.
const bool through_shared_memory = [] {
  return is_gpu_aware() && setenv("UCX_TLS", "posix,self", 1) == 0;
}();

}  // namespace

extern "C" {

int MPIX_GPU_query_support(int kind, int* is_supported) {
  if (kind != MPIX_GPU_SUPPORT_CUDA) return PMPIX_GPU_query_support(kind, is_supported);
  *is_supported = is_gpu_aware() && softgpu::devices() > 0 ? 1 : 0;
  return MPI_SUCCESS;
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request* request) {
  static auto* const call = next<decltype(MPI_Isend)>("MPI_Isend");
  return with_device_memory(call, data, count, type, peer, tag, comm, request);
}
int MPI_Irecv(void* data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request* request) {
  static auto* const call = next<decltype(MPI_Irecv)>("MPI_Irecv");
  return with_device_memory(call, data, count, type, peer, tag, comm, request);
}
int MPI_Iallgatherv(const void* from, int count, MPI_Datatype type, void* to, const int counts[],
                    const int offsets[], MPI_Datatype to_type, MPI_Comm comm,
                    MPI_Request* request) {
  static auto* const call = next<decltype(MPI_Iallgatherv)>("MPI_Iallgatherv");
  return with_device_memory(call, from, count, type, to, counts, offsets, to_type, comm, request);
}
int MPI_Ialltoallv(const void* from, const int counts[], const int offsets[], MPI_Datatype type,
                   void* to, const int to_counts[], const int to_offsets[], MPI_Datatype to_type,
                   MPI_Comm comm, MPI_Request* request) {
  static auto* const call = next<decltype(MPI_Ialltoallv)>("MPI_Ialltoallv");
  return with_device_memory(call, from, counts, offsets, type, to, to_counts, to_offsets, to_type,
                            comm, request);
}
int MPI_Ireduce_scatter_block(const void* from, void* to, int count, MPI_Datatype type, MPI_Op op,
                              MPI_Comm comm, MPI_Request* request) {
  static auto* const call = next<decltype(MPI_Ireduce_scatter_block)>("MPI_Ireduce_scatter_block");
  return with_device_memory(call, from, to, count, type, op, comm, request);
}
int MPI_Iallreduce(const void* from, void* to, int count, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request* request) {
  static auto* const call = next<decltype(MPI_Iallreduce)>("MPI_Iallreduce");
  return with_device_memory(call, from, to, count, type, op, comm, request);
}
int MPI_Ibcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request* request) {
  static auto* const call = next<decltype(MPI_Ibcast)>("MPI_Ibcast");
  return with_device_memory(call, data, count, type, root, comm, request);
}
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  static auto* const call = next<decltype(MPI_Ibarrier)>("MPI_Ibarrier");
  return with_device_memory(call, comm, request);
}
int MPI_Testall(int count, MPI_Request requests[], int* done, MPI_Status statuses[]) {
  static auto* const call = next<decltype(MPI_Testall)>("MPI_Testall");
  return with_device_memory(call, count, requests, done, statuses);
}
}

// An MPI library that takes device memory: with GYRE_SOFTGPU_MPI=1, the calls that Gyre hands
// arrays to, or that move them on, reach the software GPU's memory. Without it they are MPI's own,
// and the host's MPI that is given device memory ends the program.

#include <mpi.h>

#include <cstdlib>
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

template <class Call>
int with_device_memory(Call call) {
  if (!is_gpu_aware()) return call();
  const softgpu::DeviceAccess access;
  return call();
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
  return with_device_memory(
      [&] { return PMPI_Isend(data, count, type, peer, tag, comm, request); });
}
int MPI_Irecv(void* data, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
              MPI_Request* request) {
  return with_device_memory(
      [&] { return PMPI_Irecv(data, count, type, peer, tag, comm, request); });
}
int MPI_Iallgatherv(const void* from, int count, MPI_Datatype type, void* to, const int counts[],
                    const int offsets[], MPI_Datatype to_type, MPI_Comm comm,
                    MPI_Request* request) {
  return with_device_memory([&] {
    return PMPI_Iallgatherv(from, count, type, to, counts, offsets, to_type, comm, request);
  });
}
int MPI_Ialltoallv(const void* from, const int counts[], const int offsets[], MPI_Datatype type,
                   void* to, const int to_counts[], const int to_offsets[], MPI_Datatype to_type,
                   MPI_Comm comm, MPI_Request* request) {
  return with_device_memory([&] {
    return PMPI_Ialltoallv(from, counts, offsets, type, to, to_counts, to_offsets, to_type, comm,
                           request);
  });
}
int MPI_Ireduce_scatter_block(const void* from, void* to, int count, MPI_Datatype type, MPI_Op op,
                              MPI_Comm comm, MPI_Request* request) {
  return with_device_memory(
      [&] { return PMPI_Ireduce_scatter_block(from, to, count, type, op, comm, request); });
}
int MPI_Iallreduce(const void* from, void* to, int count, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request* request) {
  return with_device_memory(
      [&] { return PMPI_Iallreduce(from, to, count, type, op, comm, request); });
}
int MPI_Ibcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request* request) {
  return with_device_memory([&] { return PMPI_Ibcast(data, count, type, root, comm, request); });
}
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  return with_device_memory([&] { return PMPI_Ibarrier(comm, request); });
}
int MPI_Testall(int count, MPI_Request requests[], int* done, MPI_Status statuses[]) {
  return with_device_memory([&] { return PMPI_Testall(count, requests, done, statuses); });
}
}

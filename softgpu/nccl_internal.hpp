#pragma once
// What the parts of the software GPU's NCCL share: nccl.cpp (operations and groups),
// nccl_communicators.cpp and nccl_reductions.cpp.

#include <mpi.h>

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "nccl.h"

/// Memory that all members have registered together.
struct ncclWindow_vidmem {
  const std::byte* begin;
  size_t bytes;
};

namespace softgpu {

enum class Kind : int { send_recv, all_gather, all_reduce, reduce_scatter, broadcast };

/// What both ends of a message say about the operation that it belongs to.
struct Description {
  Kind kind = Kind::send_recv;
  int type = 0, op = 0, root = 0;  // send_recv: 0; types may differ
  size_t count = 0;                // of elements; send_recv: of bytes
  long from_at = -1, to_at = -1;   // of a collective: offsets in windows; -1: in none
  int registered = 0;              // bits 0 and 1: recorded, with input and output in NCCL's memory
  bool operator==(const Description&) const = default;
};

/// Tags of a communicator's messages.
enum Channel { descriptions, contents, notices, channels };

/// A communicator.
struct Shared {
  int rank = 0;
  std::vector<int> world;  // ranks of the members in MPI_COMM_WORLD
  int id = 0;
  bool aborted = false;
  ncclResult_t error = ncclSuccess;
  std::string last_error;
  int pending = 0;           // operations in streams
  bool in_progress = false;  // after a nonblocking call, until its state is asked for
  int notice = 0;
  MPI_Request notice_request = MPI_REQUEST_NULL;
  std::list<ncclWindow_vidmem> windows = {};

  /// Offset of `data` in a window; -1 if it is in none.
  long in_window(const void* data) const;

  int size() const { return static_cast<int>(world.size()); }
  int tag(Channel channel) const { return id * channels + channel; }
  void listen();
  /// Learns whether another rank has aborted.
  void hear();
  void stop_listening();
};

/// Returns the result of a call that has started something on a communicator: ncclInProgress with
/// NCCL_COMM_BLOCKING=0, else ncclSuccess.
ncclResult_t started(Shared& comm);
/// Keeps the text for ncclGetLastError, and returns `result`.
ncclResult_t fail(ncclResult_t result, std::string why);

// ---- nccl_reductions.cpp

std::string name_of(int type);
/// Bytes of an element; 0 for an unknown type.
size_t bytes_of(ncclDataType_t type);
/// to[i] <- to[i] op from[i] for all elements of the operation.
void reduce(std::byte* to, const std::byte* from, const Description& d);

}  // namespace softgpu

struct ncclComm {
  std::shared_ptr<softgpu::Shared> shared;
};

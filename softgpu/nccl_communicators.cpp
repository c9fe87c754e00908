// NCCL communicators of the software GPU: how ranks meet, split, part and hear of errors.

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <utility>

#include "nccl_internal.hpp"
#include "softgpu.hpp"

namespace softgpu {
namespace {

std::string last_error;

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
int world_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// A number that no other communicator of the run has.
int new_id() {
  static int made = 0;
  const int id = ++made * world_size() + world_rank();
  void* most = nullptr;
  int known = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &known);
  if (known != 0 && id > (*static_cast<int*>(most) - channels) / channels)
    die("more NCCL communicators than MPI has tags for");
  return id;
}

struct Member {
  int rank = 0, world = 0, size = 0;
  int color = 0, key = 0, id = 0;
  int device = 0;
  size_t window_bytes = 0;
  char host[64] = {};
};

Member myself(int rank, int size) {
  Member me;
  me.rank = rank;
  me.world = world_rank();
  me.size = size;
  cudaGetDevice(&me.device);
  gethostname(me.host, sizeof(me.host) - 1);
  return me;
}

void wait_all(std::vector<MPI_Request>& requests) {
  run_until([&] {
    int done = 0;
    MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
    return done != 0;
  });
}

/// Gathers the Members of all ranks on the rank that made the id, and sends them to all ranks.
std::vector<Member> meet(const Member& me, int root, int id) {
  std::vector<Member> all(static_cast<size_t>(me.size));
  constexpr int bytes = sizeof(Member);
  const int tag = id * channels;
  std::vector<MPI_Request> requests(1);
  MPI_Isend(&me, bytes, MPI_BYTE, root, tag + descriptions, MPI_COMM_WORLD, &requests[0]);
  if (me.world == root)
    for (Member& member : all)
      MPI_Irecv(&member, bytes, MPI_BYTE, MPI_ANY_SOURCE, tag + descriptions, MPI_COMM_WORLD,
                &requests.emplace_back());
  wait_all(requests);
  std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.rank < b.rank; });
  requests.assign(1, MPI_REQUEST_NULL);
  std::vector<Member> result(all.size());
  MPI_Irecv(result.data(), me.size * bytes, MPI_BYTE, root, tag + contents, MPI_COMM_WORLD,
            &requests[0]);
  if (me.world == root)
    for (const Member& member : all) {
      if (member.size != me.size)
        die("ncclCommInitRank with " + std::to_string(me.size) + " and with " +
            std::to_string(member.size) + " ranks");
      MPI_Isend(all.data(), me.size * bytes, MPI_BYTE, member.world, tag + contents, MPI_COMM_WORLD,
                &requests.emplace_back());
    }
  wait_all(requests);
  return result;
}

std::vector<Member> gather(const Shared& comm, const Member& mine) {
  std::vector<Member> all(comm.world.size());
  std::vector<MPI_Request> requests;
  for (size_t peer = 0; peer < all.size(); ++peer) {
    MPI_Irecv(&all[peer], sizeof(Member), MPI_BYTE, comm.world[peer], comm.tag(contents),
              MPI_COMM_WORLD, &requests.emplace_back());
    MPI_Isend(&mine, sizeof(Member), MPI_BYTE, comm.world[peer], comm.tag(contents), MPI_COMM_WORLD,
              &requests.emplace_back());
  }
  wait_all(requests);
  return all;
}

/// NCCL refuses two ranks on one device unless it is told to allow it.
std::string shared_device(const std::vector<Member>& members) {
  const char* allowed = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (allowed != nullptr && std::string(allowed) == "1") return "";
  for (const Member& a : members)
    for (const Member& b : members)
      if (a.rank < b.rank && a.device == b.device && std::strcmp(a.host, b.host) == 0)
        return "Duplicate GPU detected : rank " + std::to_string(a.rank) + " and rank " +
               std::to_string(b.rank) + " both on CUDA device " + std::to_string(a.device);
  return "";
}

}  // namespace

ncclResult_t fail(ncclResult_t result, std::string why) {
  last_error = std::move(why);
  return result;
}

void Shared::listen() {
  MPI_Irecv(&notice, 1, MPI_INT, MPI_ANY_SOURCE, tag(notices), MPI_COMM_WORLD, &notice_request);
}

void Shared::hear() {
  int heard = 0;
  if (notice_request != MPI_REQUEST_NULL) MPI_Test(&notice_request, &heard, MPI_STATUS_IGNORE);
  if (heard == 0 || error != ncclSuccess) return;
  error = ncclRemoteError;
  last_error = "rank " + std::to_string(notice) + " has aborted the communicator";
}

long Shared::in_window(const void* data) const {
  for (const ncclWindow_vidmem& window : windows) {
    const auto at = static_cast<const std::byte*>(data) - window.begin;
    if (at >= 0 && at < static_cast<long>(window.bytes)) return at;
  }
  return -1;
}

ncclResult_t started(Shared& comm) {
  const char* blocking = std::getenv("NCCL_COMM_BLOCKING");
  comm.in_progress = blocking != nullptr && *blocking == '0';
  return comm.in_progress ? ncclInProgress : ncclSuccess;
}

void Shared::stop_listening() {
  if (notice_request == MPI_REQUEST_NULL) return;
  MPI_Cancel(&notice_request);
  MPI_Wait(&notice_request, MPI_STATUS_IGNORE);
}

}  // namespace softgpu

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  int initialised = 0;
  MPI_Initialized(&initialised);
  if (initialised == 0) return softgpu::fail(ncclSystemError, "MPI is not initialised");
  const int content[2] = {softgpu::world_rank(), softgpu::new_id()};
  *id = {};
  std::memcpy(id->internal, content, sizeof(content));
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return result >= 0 && result <= ncclInProgress ? texts[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t comm) {
  return comm != nullptr && !comm->shared->last_error.empty() ? comm->shared->last_error.c_str()
                                                              : softgpu::last_error.c_str();
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  if (softgpu::devices() == 0) return softgpu::fail(ncclUnhandledCudaError, "no CUDA device");
  if (rank < 0 || rank >= ranks) return softgpu::fail(ncclInvalidArgument, "no such rank");
  int content[2];
  std::memcpy(content, id.internal, sizeof(content));
  const auto members = softgpu::meet(softgpu::myself(rank, ranks), content[0], content[1]);
  for (int r = 0; r < ranks; ++r)
    if (members[static_cast<size_t>(r)].rank != r)
      return softgpu::fail(ncclInvalidUsage, "two ranks of one number");
  if (const std::string text = softgpu::shared_device(members); !text.empty())
    return softgpu::fail(ncclInvalidUsage, text);
  auto shared = std::make_shared<softgpu::Shared>();
  shared->rank = rank;
  shared->id = content[1];
  for (const softgpu::Member& member : members) shared->world.push_back(member.world);
  shared->listen();
  *comm = new ncclComm{std::move(shared)};
  return started(*(*comm)->shared);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t*) {
  *part = nullptr;
  softgpu::Shared& parent = *comm->shared;
  if (parent.aborted) return softgpu::fail(ncclInvalidUsage, "the communicator was aborted");
  if (parent.pending > 0)
    softgpu::die("ncclCommSplit while operations of the communicator are under way");
  softgpu::Member mine = softgpu::myself(parent.rank, parent.size());
  mine.color = color;
  mine.key = key;
  mine.id = softgpu::new_id();
  auto members = softgpu::gather(parent, mine);
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::erase_if(members, [&](const softgpu::Member& member) { return member.color != color; });
  std::stable_sort(members.begin(), members.end(), [](auto& a, auto& b) { return a.key < b.key; });
  auto shared = std::make_shared<softgpu::Shared>();
  shared->id = members.front().id;
  for (const softgpu::Member& member : members) {
    if (member.world == mine.world) shared->rank = static_cast<int>(shared->world.size());
    shared->world.push_back(member.world);
  }
  shared->listen();
  *part = new ncclComm{std::move(shared)};
  started(*(*part)->shared);
  return started(*comm->shared);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  {
    const softgpu::DeviceAccess access;
    softgpu::run_until([&] { return comm->shared->pending == 0; });
  }
  comm->shared->stop_listening();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  softgpu::Shared& shared = *comm->shared;
  shared.aborted = true;
  shared.stop_listening();
  static auto& ranks = *new std::list<int>;  // MPI may read it until the end
  ranks.push_back(shared.rank);
  for (int peer = 0; peer < shared.size(); ++peer) {
    if (peer == shared.rank) continue;
    MPI_Request request;
    MPI_Isend(&ranks.back(), 1, MPI_INT, shared.world[static_cast<size_t>(peer)],
              shared.tag(softgpu::notices), MPI_COMM_WORLD, &request);
    MPI_Request_free(&request);
  }
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* win,
                                    int) {
  *win = nullptr;
  softgpu::Shared& shared = *comm->shared;
  if (shared.pending > 0)
    softgpu::die("ncclCommWindowRegister while operations of the communicator are under way");
  softgpu::Member mine = softgpu::myself(shared.rank, shared.size());
  mine.window_bytes = softgpu::is_nccl_memory(memory) ? bytes : 0;
  for (const softgpu::Member& member : softgpu::gather(shared, mine))
    if (member.window_bytes != mine.window_bytes || mine.window_bytes == 0)
      softgpu::die("ncclCommWindowRegister of " + std::to_string(mine.window_bytes) +
                   " bytes of ncclMemAlloc on rank " + std::to_string(shared.rank) + " and of " +
                   std::to_string(member.window_bytes) + " on another");
  *win =
      &shared.windows.emplace_back(ncclWindow_vidmem{static_cast<const std::byte*>(memory), bytes});
  return softgpu::started(shared);
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  std::list<ncclWindow_vidmem>& windows = comm->shared->windows;
  const size_t before = windows.size();
  windows.remove_if([win](const ncclWindow_vidmem& window) { return &window == win; });
  return windows.size() < before ? ncclSuccess
                                 : softgpu::fail(ncclInvalidArgument, "no such window");
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  comm->shared->hear();
  *error = std::exchange(comm->shared->in_progress, false) ? ncclInProgress : comm->shared->error;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  if (comm->shared->in_progress)
    return softgpu::fail(ncclInvalidUsage, "the communicator is still in progress");
  *rank = comm->shared->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = comm->shared->size();
  return ncclSuccess;
}

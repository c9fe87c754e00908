// NCCL for the software GPU, over MPI. Every operation is queued on a stream. It starts when all
// earlier work of the stream is done, and progresses whenever this process waits for anything.
//
//     start    copy the data to send out of device memory; for each peer: send a description of the
//              operation and the data, receive the peer's
//     then     compare descriptions; when all data is there, combine it in order of the ranks and
//              write it into device memory
//
// Messages are sent synchronously: as with NCCL, nothing is sent before its receiver is there.
// A collective is all-to-all, so that every rank sees how every other has called it.

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <utility>

#include "nccl_internal.hpp"
#include "softgpu.hpp"

namespace softgpu {
namespace {

std::string text_of(const Description& d, bool sent) {
  static const char* const ops[] = {"sum", "prod", "max", "min"};
  const std::string memory = d.registered == 0 ? "" : " in registered memory";
  if (d.kind == Kind::send_recv)
    return std::string(sent ? "ncclSend" : "ncclRecv") + " of " + std::to_string(d.count) +
           " bytes" + memory;
  const auto place = [](const char* side, long at) {
    return at < 0 ? std::string() : side + std::to_string(at) + " of a window";
  };
  const std::string what = " of " + std::to_string(d.count) + " " + name_of(d.type),
                    where = place(" from byte ", d.from_at) + place(" to byte ", d.to_at) + memory;
  if (d.kind == Kind::all_gather) return "ncclAllGather" + what + where;
  if (d.kind == Kind::broadcast)
    return "ncclBroadcast" + what + " from " + std::to_string(d.root) + where;
  const std::string name = d.kind == Kind::all_reduce ? "ncclAllReduce" : "ncclReduceScatter";
  return name + what + " (" + ops[d.op & 3] + ")" + where;
}

struct Message {
  int peer = 0;  // rank in the communicator
  Description description;
  std::vector<std::byte> data;
  MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  std::byte* to = nullptr;  // of a receive between two ranks
  bool collective = false;
};

struct Call {
  Description description;
  int peer = -1;  // of send and receive
  bool sends = false;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  size_t element = 1;

  size_t bytes() const { return description.count * element; }
};

/// The calls of a group on one communicator and stream.
class Operation {
 public:
  Operation(std::shared_ptr<Shared> comm, std::vector<Call> calls)
      : comm_(std::move(comm)), calls_(std::move(calls)) {
    ++comm_->pending;
  }

  Step step() {
    comm_->hear();
    if (comm_->aborted) return give_up();
    if (!started_) {
      start();
      return Step::moved;
    }
    if (failed_ || !arrived()) return Step::waits;
    for (Message& message : received_)
      if (!message.collective) copy(message.to, message.data);
    auto next = received_.begin();
    for (const Call& call : calls_)
      if (call.peer < 0) combine(call, next);
    --comm_->pending;
    return Step::done;
  }

 private:
  static void copy(std::byte* to, const std::vector<std::byte>& from) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }
  static std::vector<std::byte> read(const std::byte* from, size_t bytes) {
    return {from, from + bytes};
  }
  /// The bytes that `call` moves from rank `from` to rank `to`, and where they lie there.
  static std::pair<size_t, size_t> block(const Call& call, int from, int to) {
    const size_t bytes = call.bytes();
    switch (call.description.kind) {
      case Kind::reduce_scatter:
        return {static_cast<size_t>(to) * bytes, bytes};
      case Kind::broadcast:
        return {0, from == call.description.root ? bytes : 0};
      default:
        return {0, bytes};
    }
  }

  void start() {
    started_ = true;
    for (const Call& call : calls_) {
      if (call.peer < 0) {
        start_collective(call);
      } else if (call.sends) {
        sent_.push_back({call.peer, call.description, read(call.from, call.bytes())});
      } else {
        received_.push_back({call.peer, call.description, std::vector<std::byte>(call.bytes())});
        received_.back().to = call.to;
      }
    }
    match_own();
    for (Message& message : received_) receive(message);
    for (Message& message : sent_) send(message);
  }
  void start_collective(const Call& call) {
    const auto [own_begin, own_bytes] = block(call, comm_->rank, comm_->rank);
    own_.push_back(read(call.from + own_begin, own_bytes));
    for (int peer = 0; peer < comm_->size(); ++peer) {
      if (peer == comm_->rank) continue;
      const auto [begin, bytes] = block(call, comm_->rank, peer);
      sent_.push_back({peer, call.description, read(call.from + begin, bytes)});
      const size_t incoming = block(call, peer, comm_->rank).second;
      received_.push_back({peer, call.description, std::vector<std::byte>(incoming)});
      received_.back().collective = true;
    }
  }
  /// Messages of the rank to itself.
  void match_own() {
    const auto own = [&](const Message& m) { return m.peer == comm_->rank; };
    while (true) {
      const auto from = std::find_if(sent_.begin(), sent_.end(), own);
      const auto to = std::find_if(received_.begin(), received_.end(), own);
      if (from == sent_.end() && to == received_.end()) return;
      if (from == sent_.end() || to == received_.end())
        die("rank " + std::to_string(comm_->rank) +
            " sends to itself, or receives from itself, and not both in one group");
      compare(to->description, from->description, comm_->rank);
      copy(to->to, from->data);
      sent_.erase(from);
      received_.erase(to);
    }
  }
  void send(Message& message) {
    const int peer = world(message.peer);
    MPI_Issend(&message.description, sizeof(Description), MPI_BYTE, peer, comm_->tag(descriptions),
               MPI_COMM_WORLD, &message.requests[0]);
    if (!message.data.empty())
      MPI_Issend(message.data.data(), static_cast<int>(message.data.size()), MPI_BYTE, peer,
                 comm_->tag(contents), MPI_COMM_WORLD, &message.requests[1]);
  }
  void receive(Message& message) {
    const int peer = world(message.peer);
    Description& theirs = *theirs_.emplace(theirs_.end());
    MPI_Irecv(&theirs, sizeof(Description), MPI_BYTE, peer, comm_->tag(descriptions),
              MPI_COMM_WORLD, &message.requests[0]);
    if (!message.data.empty())
      MPI_Irecv(message.data.data(), static_cast<int>(message.data.size()), MPI_BYTE, peer,
                comm_->tag(contents), MPI_COMM_WORLD, &message.requests[1]);
  }
  bool arrived() {
    bool all = true;
    auto theirs = theirs_.begin();
    for (Message& message : received_) {
      const bool known = message.requests[0] == MPI_REQUEST_NULL;
      if (done(message.requests[0])) {
        if (!known) compare(message.description, *theirs, message.peer);
        all &= done(message.requests[1]);  // not before the description: it may be truncated
      } else {
        all = false;
      }
      ++theirs;
    }
    for (Message& message : sent_)
      for (MPI_Request& request : message.requests) all &= done(request);
    return all;
  }
  static bool done(MPI_Request& request) {
    int flag = 1;
    if (request != MPI_REQUEST_NULL) MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
    return flag != 0;
  }
  void compare(const Description& mine, const Description& theirs, int peer) {
    if (mine == theirs) return;
    failed_ = true;  // tests go on after die(): the operation must not be tried again
    die(text_of(mine, false) + " on rank " + std::to_string(comm_->rank) + " of " +
        std::to_string(comm_->size()) + " meets " + text_of(theirs, true) + " on rank " +
        std::to_string(peer));
  }

  /// Writes the result of a collective, whose messages are the next of received_.
  void combine(const Call& call, std::vector<Message>::iterator& next) {
    std::vector<std::byte> result;
    for (int peer = 0; peer < comm_->size(); ++peer) {
      if (peer != comm_->rank)
        next = std::find_if(next, received_.end(), [](const Message& m) { return m.collective; });
      const std::vector<std::byte>& part = peer == comm_->rank ? own_.front() : (next++)->data;
      if (call.description.kind == Kind::all_gather || call.description.kind == Kind::broadcast)
        result.insert(result.end(), part.begin(), part.end());
      else if (peer == 0)
        result = part;
      else
        reduce(result.data(), part.data(), call.description);
    }
    own_.erase(own_.begin());
    copy(call.to, result);
  }

  /// After an abort. What MPI may still read or write stays.
  Step give_up() {
    for (auto* messages : {&received_, &sent_})
      for (Message& message : *messages)
        for (MPI_Request& request : message.requests)
          if (request != MPI_REQUEST_NULL) {
            if (messages == &received_) MPI_Cancel(&request);
            MPI_Request_free(&request);
          }
    static auto& graveyard = *new std::vector<std::vector<Message>>;
    static auto& descriptions_kept = *new std::vector<std::list<Description>>;
    graveyard.push_back(std::move(received_));
    graveyard.push_back(std::move(sent_));
    descriptions_kept.push_back(std::move(theirs_));
    --comm_->pending;
    return Step::done;
  }

  int world(int peer) const { return comm_->world[static_cast<size_t>(peer)]; }

  std::shared_ptr<Shared> comm_;
  std::vector<Call> calls_;
  std::vector<Message> sent_, received_;
  std::list<Description> theirs_;  // of received_, in its order
  std::vector<std::vector<std::byte>> own_;
  bool started_ = false, failed_ = false;
};

struct Grouped {
  std::shared_ptr<Shared> comm;
  cudaStream_t stream;
  std::vector<Call> calls;
};
int group_depth = 0;
std::vector<Grouped> group;
ncclResult_t submit_group() {
  ncclResult_t result = ncclSuccess;
  for (Grouped& part : std::exchange(group, {})) {
    submit_made(part.stream, [comm = part.comm, calls = std::move(part.calls)] {
      auto operation = std::make_shared<Operation>(comm, calls);
      return Task{[operation] { return operation->step(); }, nullptr, true, {}};
    });
    result = started(*part.comm);
  }
  return result;
}

}  // namespace

bool in_nccl_group() {
  return group_depth > 0;
}

namespace {
std::map<const std::byte*, size_t> nccl_memory;  // bytes by the begin of a block
}  // namespace

bool is_nccl_memory(const void* pointer) {
  const auto* at = static_cast<const std::byte*>(pointer);
  const auto after = nccl_memory.upper_bound(at);
  if (after == nccl_memory.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return at < begin + bytes;
}

namespace {

ncclResult_t add(ncclComm_t comm, cudaStream_t stream, const Call& call) {
  if (comm == nullptr || comm->shared->aborted) return fail(ncclInvalidArgument, "no communicator");
  const Shared& shared = *comm->shared;
  if (shared.in_progress) return fail(ncclInvalidUsage, "the communicator is still in progress");
  for (const void* data : {static_cast<const void*>(call.from), static_cast<const void*>(call.to)})
    if (data != nullptr && call.description.count > 0 && place_of(data) != Place::device)
      return fail(ncclInvalidArgument, "an array that is not in device memory");
  if (call.peer >= shared.size() || call.description.root >= shared.size() ||
      call.description.root < 0 || call.element == 0)
    return fail(ncclInvalidArgument, "no such rank, or no such type");
  const auto same = [&](const Grouped& part) {
    return part.comm == comm->shared && part.stream == stream;
  };
  auto part = std::find_if(group.begin(), group.end(), same);
  if (part == group.end()) part = group.insert(part, {comm->shared, stream, {}});
  part->calls.push_back(call);
  Description& description = part->calls.back().description;
  // A graph registers what is in memory of ncclMemAlloc. NCCL's behaviour is undefined where one
  // rank of an operation passes registered memory and another does not.
  if (is_recorded(stream) && call.description.count > 0)
    description.registered = int{is_nccl_memory(call.from)} | 2 * int{is_nccl_memory(call.to)};
  if (call.peer >= 0) {
    description.registered = description.registered != 0;
  } else {
    description.from_at = shared.in_window(call.from);
    description.to_at = shared.in_window(call.to);
  }
  return group_depth == 0 ? submit_group() : ncclSuccess;
}

Call call_of(Kind kind, const void* from, void* to, size_t count, ncclDataType_t type, int op = 0,
             int root = 0) {
  Call call;
  call.description = {kind, type, op, root, count};
  call.from = static_cast<const std::byte*>(from);
  call.to = static_cast<std::byte*>(to);
  call.element = bytes_of(type);
  return call;
}
Call message_of(bool sends, const void* from, void* to, size_t count, ncclDataType_t type,
                int peer) {
  Call call;
  call.description.count = count * bytes_of(type);
  call.from = static_cast<const std::byte*>(from);
  call.to = static_cast<std::byte*>(to);
  call.peer = peer;
  call.sends = sends;
  return call;
}

}  // namespace
}  // namespace softgpu

using softgpu::call_of;
using softgpu::Kind;
using softgpu::message_of;

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  if (cudaMalloc(pointer, bytes) != cudaSuccess) return ncclUnhandledCudaError;
  softgpu::nccl_memory[static_cast<const std::byte*>(*pointer)] = bytes;
  return ncclSuccess;
}
ncclResult_t ncclMemFree(void* pointer) {
  if (softgpu::nccl_memory.erase(static_cast<const std::byte*>(pointer)) == 0)
    return softgpu::fail(ncclInvalidArgument, "memory that is not of ncclMemAlloc");
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclGroupStart() {
  ++softgpu::group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (softgpu::group_depth == 0)
    return softgpu::fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --softgpu::group_depth == 0 ? softgpu::submit_group() : ncclSuccess;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return softgpu::add(comm, stream, message_of(true, data, nullptr, count, type, peer));
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return softgpu::add(comm, stream, message_of(false, nullptr, data, count, type, peer));
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return softgpu::add(comm, stream, call_of(Kind::all_gather, from, to, count, type));
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return softgpu::add(comm, stream, call_of(Kind::all_reduce, from, to, count, type, op));
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return softgpu::add(comm, stream, call_of(Kind::reduce_scatter, from, to, count, type, op));
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return softgpu::add(comm, stream, call_of(Kind::broadcast, from, to, count, type, 0, root));
}

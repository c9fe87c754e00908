// NCCL for the software GPU, over MPI. Every operation is work of a stream: it starts when what is
// before it in the stream is done, and moves on whenever this process waits for anything.
//
//     start    copy what is sent out of device memory; for each peer: send a description of the
//              operation and the data, receive the peer's
//     then     compare descriptions; when all data is there, combine it in order of the ranks and
//              write it into device memory
//
// Messages are sent synchronously: as with NCCL, nothing is sent before its receiver is there.
// A collective is all-to-all, so that every rank sees how every other has called it.

#include "nccl.h"

#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/bf16.hpp"
#include "softgpu.hpp"

namespace softgpu {
namespace {

enum class Kind : int { send_recv, all_gather, all_reduce, reduce_scatter, broadcast };

/// What both ends of a message say about the operation that it belongs to.
struct Description {
  Kind kind = Kind::send_recv;
  int type = 0, op = 0, root = 0;  // send_recv: 0; types may differ
  size_t count = 0;                // of elements; send_recv: of bytes
  bool operator==(const Description&) const = default;
};

enum Channel { descriptions, contents, notices, channels };

struct Shared {
  int rank = 0;
  std::vector<int> world;  // ranks of the members in MPI_COMM_WORLD
  int id = 0;
  bool aborted = false;
  ncclResult_t error = ncclSuccess;
  std::string last_error;
  int pending = 0;  // operations in streams
  int notice = 0;
  MPI_Request notice_request = MPI_REQUEST_NULL;

  int size() const { return static_cast<int>(world.size()); }
  int tag(Channel channel) const { return id * channels + channel; }
  void listen() {
    MPI_Irecv(&notice, 1, MPI_INT, MPI_ANY_SOURCE, tag(notices), MPI_COMM_WORLD, &notice_request);
  }
  /// Learns whether another rank has aborted.
  void hear() {
    int heard = 0;
    if (notice_request != MPI_REQUEST_NULL) MPI_Test(&notice_request, &heard, MPI_STATUS_IGNORE);
    if (heard == 0 || error != ncclSuccess) return;
    error = ncclRemoteError;
    last_error = "rank " + std::to_string(notice) + " has aborted the communicator";
  }
  void stop_listening() {
    if (notice_request == MPI_REQUEST_NULL) return;
    MPI_Cancel(&notice_request);
    MPI_Wait(&notice_request, MPI_STATUS_IGNORE);
  }
};

std::string name_of(int type) {
  switch (static_cast<ncclDataType_t>(type)) {
    case ncclInt8:
      return "int8";
    case ncclUint8:
      return "uint8";
    case ncclInt32:
      return "int32";
    case ncclUint32:
      return "uint32";
    case ncclInt64:
      return "int64";
    case ncclUint64:
      return "uint64";
    case ncclFloat32:
      return "float32";
    case ncclFloat64:
      return "float64";
    case ncclBfloat16:
      return "bfloat16";
  }
  return "type " + std::to_string(type);
}

std::string text_of(const Description& d, bool sent) {
  static const char* const ops[] = {"sum", "prod", "max", "min"};
  if (d.kind == Kind::send_recv)
    return std::string(sent ? "ncclSend" : "ncclRecv") + " of " + std::to_string(d.count) +
           " bytes";
  const std::string what = " of " + std::to_string(d.count) + " " + name_of(d.type);
  if (d.kind == Kind::all_gather) return "ncclAllGather" + what;
  if (d.kind == Kind::broadcast) return "ncclBroadcast" + what + " from " + std::to_string(d.root);
  const std::string name = d.kind == Kind::all_reduce ? "ncclAllReduce" : "ncclReduceScatter";
  return name + what + " (" + ops[d.op & 3] + ")";
}

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
  }
  return 0;
}

// ---- reductions: to[i] <- to[i] op from[i]

template <class T, class Compute>
void reduce(std::byte* to, const std::byte* from, size_t count, Compute compute) {
  for (size_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, to + i * sizeof(T), sizeof(T));
    std::memcpy(&b, from + i * sizeof(T), sizeof(T));
    a = compute(a, b);
    std::memcpy(to + i * sizeof(T), &a, sizeof(T));
  }
}
template <class T>
T reduced(T a, T b, int op) {
  switch (op) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}
void reduce(std::byte* to, const std::byte* from, const Description& d) {
  const auto plain = [&](auto a, auto b) { return reduced(a, b, d.op); };
  switch (static_cast<ncclDataType_t>(d.type)) {
    case ncclInt8:
      return reduce<int8_t>(to, from, d.count, plain);
    case ncclUint8:
      return reduce<uint8_t>(to, from, d.count, plain);
    case ncclInt32:
      return reduce<int32_t>(to, from, d.count, plain);
    case ncclUint32:
      return reduce<uint32_t>(to, from, d.count, plain);
    case ncclInt64:
      return reduce<int64_t>(to, from, d.count, plain);
    case ncclUint64:
      return reduce<uint64_t>(to, from, d.count, plain);
    case ncclFloat32:
      return reduce<float>(to, from, d.count, plain);
    case ncclFloat64:
      return reduce<double>(to, from, d.count, plain);
    case ncclBfloat16:
      return reduce<gyre::bf16>(to, from, d.count, [&](gyre::bf16 a, gyre::bf16 b) {
        return gyre::to_bf16(reduced(gyre::to_float(a), gyre::to_float(b), d.op));
      });
  }
}

// ---- operations

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
    failed_ = true;  // and is not tried again, where tests go on
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
std::string last_error;

ncclResult_t fail(ncclResult_t result, std::string why) {
  last_error = std::move(why);
  return result;
}

void submit_group() {
  for (Grouped& part : std::exchange(group, {})) {
    auto operation = std::make_shared<Operation>(part.comm, std::move(part.calls));
    submit(part.stream, Task{[operation] { return operation->step(); }, nullptr, true, {}});
  }
}

}  // namespace

bool in_nccl_group() {
  return group_depth > 0;
}

}  // namespace softgpu

struct ncclComm {
  std::shared_ptr<softgpu::Shared> shared;
};

namespace softgpu {
namespace {

ncclResult_t add(ncclComm_t comm, cudaStream_t stream, const Call& call) {
  if (comm == nullptr || comm->shared->aborted) return fail(ncclInvalidArgument, "no communicator");
  const Shared& shared = *comm->shared;
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
  if (group_depth == 0) submit_group();
  return ncclSuccess;
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

// ---- communicators

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

/// Everyone's Member at the rank that made the id, and from there at everyone.
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
}  // namespace softgpu

using softgpu::call_of;
using softgpu::Kind;
using softgpu::message_of;

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
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t*) {
  *part = nullptr;
  const softgpu::Shared& parent = *comm->shared;
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
  return ncclSuccess;
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

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  comm->shared->hear();
  *error = comm->shared->error;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->shared->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = comm->shared->size();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++softgpu::group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (softgpu::group_depth == 0)
    return softgpu::fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--softgpu::group_depth == 0) softgpu::submit_group();
  return ncclSuccess;
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

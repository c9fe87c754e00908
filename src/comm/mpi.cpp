#include "comm/mpi.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "comm/agree.hpp"
#include "core/bf16.hpp"
#include "core/error.hpp"
#include "runtime/mpi_env.hpp"

namespace gyre {
namespace {

MPI_Datatype mpi_type(DType type) {
  switch (type) {
    case DType::f32:
      return MPI_FLOAT;
    case DType::f64:
      return MPI_DOUBLE;
    case DType::bf16:
      return MPI_UINT16_T;  // reduced by user-defined operations
    case DType::i32:
      return MPI_INT32_T;
    case DType::i64:
      return MPI_INT64_T;
  }
  return MPI_DATATYPE_NULL;
}

/// An MPI reduction of bf16. Rounds each partial result, as NCCL does.
template <class Combine>
void reduce_bf16(void* in, void* inout, int* count, MPI_Datatype* /*type*/) {
  const auto* from = static_cast<const bf16*>(in);
  auto* to = static_cast<bf16*>(inout);
  for (int i = 0; i < *count; ++i) to[i] = to_bf16(Combine()(to_float(from[i]), to_float(to[i])));
}
struct Max {
  float operator()(float a, float b) const { return std::max(a, b); }
};
struct Min {
  float operator()(float a, float b) const { return std::min(a, b); }
};

MPI_Op bf16_op(ReduceOp op) {
  const auto make = [](MPI_User_function* function) {
    MPI_Op made = MPI_OP_NULL;
    check_mpi(MPI_Op_create(function, 1, &made), "MPI_Op_create");
    return made;
  };
  static const std::array ops = {make(reduce_bf16<std::plus<>>), make(reduce_bf16<Max>),
                                 make(reduce_bf16<Min>)};
  return ops.at(static_cast<size_t>(op));
}

MPI_Op mpi_op(ReduceOp op, DType type) {
  if (type == DType::bf16) return bf16_op(op);
  switch (op) {
    case ReduceOp::sum:
      return MPI_SUM;
    case ReduceOp::max:
      return MPI_MAX;
    case ReduceOp::min:
      return MPI_MIN;
  }
  return MPI_OP_NULL;
}

/// MPI counts are int; throws for a larger transfer, so that no count overflows silently.
int to_int(int64_t count, std::string_view what) {
  if (count > std::numeric_limits<int>::max())
    throw_runtime("{}: {} elements are more than one MPI call takes ({})", what, count,
                  std::numeric_limits<int>::max());
  return static_cast<int>(count);
}

/// Contiguous part of a message.
struct Part {
  const std::byte* data;
  int bytes;
};

/// All parts as one MPI message. May be destroyed while an operation in flight uses its type.
class Gathered {
 public:
  explicit Gathered(const std::vector<Part>& parts) {
    if (parts.size() == 1) {  // needs no derived type
      start_ = const_cast<std::byte*>(parts[0].data);
      count_ = parts[0].bytes;
      return;
    }
    std::vector<int> lengths;
    std::vector<MPI_Aint> addresses;
    for (const Part& part : parts) {
      lengths.push_back(part.bytes);
      MPI_Get_address(part.data, &addresses.emplace_back());
    }
    check_mpi(MPI_Type_create_hindexed(static_cast<int>(parts.size()), lengths.data(),
                                       addresses.data(), MPI_BYTE, &type_),
              "MPI_Type_create_hindexed");
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~Gathered() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;
  void* start() const { return start_; }
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  void* start_ = MPI_BOTTOM;
  int count_ = 1;
  MPI_Datatype type_ = MPI_BYTE;
};

class MpiWork final : public Work {
 public:
  /// `pause`: sleep between two polls of a wait, in seconds.
  MpiWork(std::string_view what, std::vector<int> peers, double pause)
      : what_(what), peers_(std::move(peers)), pause_(pause) {}

  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }
  /// Like add(), for a message that must have exactly `bytes` bytes.
  MPI_Request* add_receive(int peer, int64_t bytes) {
    receives_.push_back({requests_.size(), peer, bytes});
    return add();
  }
  /// Must precede the first add(): callers of add() keep pointers to requests.
  void reserve(size_t n) { requests_.reserve(n); }
  /// Keeps count and displacement arrays alive as long as the operation.
  std::vector<int>& keep(std::vector<int> values) { return kept_.emplace_back(std::move(values)); }
  void reserve_kept(size_t n) { kept_.reserve(n); }

  bool test() override {
    if (done_) return true;
    int done = 0;
    statuses_.resize(requests_.size());
    check_mpi(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done,
                          receives_.empty() ? MPI_STATUSES_IGNORE : statuses_.data()),
              "MPI_Testall");
    done_ = done != 0;
    if (done_) check_lengths();
    return done_;
  }
  void wait() override {
    if (test()) return;
    WaitScope scope(what_, peers_);
    while (!test()) pause_politely(pause_);
  }

 private:
  struct Receive {
    size_t request;
    int peer;
    int64_t bytes;
  };
  /// MPI reports a message that is too long as an error, but not one that is too short.
  void check_lengths() const {
    for (const Receive& receive : receives_) {
      MPI_Count bytes = 0;
      MPI_Get_elements_x(&statuses_[receive.request], MPI_BYTE, &bytes);
      if (bytes != receive.bytes)
        throw_runtime("{}: {} bytes came from rank {} of the group, not {}", what_, int64_t{bytes},
                      receive.peer, receive.bytes);
    }
  }

  std::string what_;
  std::vector<int> peers_;
  double pause_;
  std::vector<MPI_Request> requests_;
  std::vector<Receive> receives_;
  std::vector<MPI_Status> statuses_;
  bool done_ = false;
  std::vector<std::vector<int>> kept_;
};

class MpiCommunicator final : public Communicator {
 public:
  /// `world_ranks`: the members' ranks in the world, for the watchdog's report.
  MpiCommunicator(MPI_Comm comm, std::vector<int> world_ranks, double pause = 0)
      : comm_(comm), world_ranks_(std::move(world_ranks)), pause_(pause) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  ~MpiCommunicator() override { MPI_Comm_free(&comm_); }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  MemorySpace space() const override { return MemorySpace::host; }
  std::string_view backend() const override { return "mpi"; }
  void sleep_between_polls(double seconds) override { pause_ = seconds; }
  MPI_Comm handle() const { return comm_; }

  std::unique_ptr<Communicator> split(int color) override {
    WaitScope scope("splitting a communicator", world_ranks_);
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(comm_, color, rank_, &part), "MPI_Comm_split");
    const std::vector<int64_t> colors = all_gather_value(*this, int64_t{color});
    std::vector<int> members;
    for (size_t r = 0; r < colors.size(); ++r)
      if (colors[r] == color) members.push_back(world_ranks_[r]);
    return std::make_unique<MpiCommunicator>(part, std::move(members), pause_);
  }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs, Stream&,
                      std::string_view what) override {
    std::vector<int> peers;
    const auto parts_of = [&](const auto& slices) {
      std::map<int, std::vector<Part>> parts;
      for (const auto& slice : slices)
        parts[slice.peer].push_back({slice.data.data(), to_int(std::ssize(slice.data), what)});
      for (const auto& [peer, all] : parts) peers.push_back(world_ranks_[peer]);
      return parts;
    };
    const auto incoming = parts_of(recvs), outgoing = parts_of(sends);
    auto work = std::make_unique<MpiWork>(what, std::move(peers), pause_);
    work->reserve(incoming.size() + outgoing.size());
    for (const auto& [peer, parts] : incoming) {
      const Gathered m(parts);
      int64_t bytes = 0;
      for (const Part& part : parts) bytes += part.bytes;
      check_mpi(
          MPI_Irecv(m.start(), m.count(), m.type(), peer, 0, comm_, work->add_receive(peer, bytes)),
          "MPI_Irecv");
    }
    for (const auto& [peer, parts] : outgoing) {
      const Gathered m(parts);
      check_mpi(MPI_Isend(m.start(), m.count(), m.type(), peer, 0, comm_, work->add()),
                "MPI_Isend");
    }
    return work;
  }

  WorkPtr do_collective(const Collective& call, Stream&, std::string_view what) override {
    auto work = std::make_unique<MpiWork>(what, world_ranks_, pause_);
    work->reserve(1);
    work->reserve_kept(4);
    MPI_Request* const request = work->add();
    const void* const send = call.send.data();
    void* const recv = call.recv.data();
    using Kind = Collective::Kind;
    switch (call.kind) {
      case Kind::all_gather: {
        const std::vector<int>& counts = work->keep(to_ints(call.recv_bytes, what));
        const std::vector<int>& offsets = work->keep(prefix_sums(counts, what));
        check_mpi(MPI_Iallgatherv(send, to_int(std::ssize(call.send), what), MPI_BYTE, recv,
                                  counts.data(), offsets.data(), MPI_BYTE, comm_, request),
                  "MPI_Iallgatherv");
        break;
      }
      case Kind::all_to_all: {
        const std::vector<int>& sent = work->keep(to_ints(call.send_bytes, what));
        const std::vector<int>& sent_from = work->keep(prefix_sums(sent, what));
        const std::vector<int>& received = work->keep(to_ints(call.recv_bytes, what));
        const std::vector<int>& received_at = work->keep(prefix_sums(received, what));
        check_mpi(MPI_Ialltoallv(send, sent.data(), sent_from.data(), MPI_BYTE, recv,
                                 received.data(), received_at.data(), MPI_BYTE, comm_, request),
                  "MPI_Ialltoallv");
        break;
      }
      case Kind::reduce_scatter:
        check_mpi(
            MPI_Ireduce_scatter_block(send, recv, to_int(call.count(), what), mpi_type(call.type),
                                      mpi_op(call.op, call.type), comm_, request),
            "MPI_Ireduce_scatter_block");
        break;
      case Kind::all_reduce:
        check_mpi(MPI_Iallreduce(MPI_IN_PLACE, recv, to_int(call.count(), what),
                                 mpi_type(call.type), mpi_op(call.op, call.type), comm_, request),
                  "MPI_Iallreduce");
        break;
      case Kind::broadcast:
        check_mpi(MPI_Ibcast(recv, to_int(std::ssize(call.recv), what), MPI_BYTE, call.root, comm_,
                             request),
                  "MPI_Ibcast");
        break;
      case Kind::barrier:
        check_mpi(MPI_Ibarrier(comm_, request), "MPI_Ibarrier");
        break;
    }
    return work;
  }

 private:
  static std::vector<int> to_ints(std::span<const int64_t> values, std::string_view what) {
    std::vector<int> result;
    for (int64_t value : values) result.push_back(to_int(value, what));
    return result;
  }
  static std::vector<int> prefix_sums(const std::vector<int>& counts, std::string_view what) {
    std::vector<int> offsets(counts.size(), 0);
    for (size_t i = 1; i < counts.size(); ++i)
      offsets[i] = to_int(int64_t{offsets[i - 1]} + counts[i - 1], what);
    return offsets;
  }

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<int> world_ranks_;
  double pause_;  // sleep between two polls, in seconds
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world) {
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(world, &copy), "MPI_Comm_dup");
  int size = 1;
  MPI_Comm_size(copy, &size);
  std::vector<int> world_ranks(size);
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  return std::make_unique<MpiCommunicator>(copy, std::move(world_ranks));
}

MPI_Comm mpi_handle(const Communicator& comm) {
  const auto* mpi = dynamic_cast<const MpiCommunicator*>(&comm.transport());
  GYRE_CHECK(mpi != nullptr, "a communicator of backend '{}' has no MPI handle", comm.backend());
  return mpi->handle();
}

}  // namespace gyre

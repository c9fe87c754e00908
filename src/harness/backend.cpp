#include "harness/backend.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "comm/agree.hpp"
#include "comm/checked.hpp"
#include "comm/cuda_device.hpp"
#include "comm/host_staging.hpp"
#include "comm/mpi.hpp"
#include "comm/nccl.hpp"
#include "comm/staged.hpp"
#include "report/options.hpp"
#include "runtime/cuda_memory.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/features.hpp"

namespace gyre {
namespace {

/// Resolves the default of --comm.
std::string comm_of(const BackendOptions& o) {
  if (!o.comm.empty()) return o.comm;
  if (!o.on_gpu()) return "mpi";
  return with_nccl && !o.share_gpus ? "nccl" : "staged";  // NCCL needs a GPU per rank
}

void check_backend_options(const BackendOptions& o) {
  ConfigErrors errors;
  const std::string comm = comm_of(o);
  if (!o.on_gpu() && comm != "mpi")
    errors.add("--comm {} moves GPU memory; with --backend cpu it is mpi, or: --backend cuda",
               comm);
  else if (o.on_gpu() && comm == "mpi")
    errors.add("--comm mpi moves host memory; with --backend cuda it is nccl, staged or mpi-gpu");
  if (o.share_gpus && !o.on_gpu()) errors.add("--share-gpus goes with --backend cuda");
  errors.throw_if_any("these options do not go together:");
}

void check_build(const BackendOptions& o) {
  if (o.on_gpu() && !with_cuda)
    throw_runtime(
        "--backend cuda: this build has no CUDA; build with nvcc (preset cuda), or run "
        "with --backend cpu");
  if (comm_of(o) == "nccl" && !with_nccl)
    throw_runtime("--comm nccl: this build has no NCCL; run with --comm staged");
}

/// Communicator for arrays on GPUs. `network` checks messages, for which it reads them on the host.
std::unique_ptr<Communicator> make_device_world(const std::string& comm, AppContext& context,
                                                Communicator& network) {
  if (comm == "nccl") return make_nccl_communicator(context.world);
  if (comm == "mpi-gpu")
    return make_gpu_aware_communicator(make_mpi_communicator(context.mpi.world()));
  return make_staged_communicator(network);
}

int64_t ranks_here(const AppContext& context) {
  const auto& peers = context.mpi.peers();
  const std::string& host = peers[context.world.rank()].host;
  return std::count_if(peers.begin(), peers.end(),
                       [&](const PeerProcess& peer) { return peer.host == host; });
}

}  // namespace

struct Backend::State {
  const AppContext& context;
  std::string comm;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<CheckedCommunicator> network;  ///< all ranks, by MPI
  std::unique_ptr<Communicator> device_world;    ///< none on CPUs
  std::unique_ptr<Communicator> host_staging;    ///< none on CPUs
  std::vector<RankDevice> devices;               ///< none on CPUs
};

const std::vector<std::string>& backend_names() {
  static const std::vector<std::string> names = {"cpu", "cuda"};
  return names;
}

const std::vector<std::string>& comm_names() {
  static const std::vector<std::string> names = {"mpi", "staged", "mpi-gpu", "nccl"};
  return names;
}

std::vector<std::string> built_backends() {
  std::vector<std::string> names = backend_names();
  if (!with_cuda) std::erase(names, "cuda");
  return names;
}

std::vector<std::string> built_comms() {
  std::vector<std::string> names = comm_names();
  if (!with_cuda) std::erase_if(names, [](const auto& name) { return name != "mpi"; });
  if (!with_nccl) std::erase(names, "nccl");
  return names;
}

void declare_backend_options(OptionTable& table, BackendOptions& o) {
  const AddOptions add(table, "Parallelism");
  add.choice("--backend", "Compute on cpu or cuda", o.backend, backend_names());
  add.choice("--comm",
             "Communicate by mpi (CPUs), nccl, staged (GPUs: MPI by way of the host) or mpi-gpu "
             "(MPI that takes GPU memory); default: mpi, nccl, or staged where there is no NCCL or "
             "GPUs are shared",
             o.comm, comm_names())
      .records([&o] { return comm_of(o); });
  add.flag("--share-gpus", "Let ranks share a GPU: for checking, not for timing", o.share_gpus);
}

Backend::Backend(AppContext& context, const BackendOptions& o)
    : state_(std::make_unique<State>(
          State{context, comm_of(o), nullptr, nullptr, nullptr, nullptr, {}})) {
  run_agreed(context.world, "--backend", [&] {
    check_backend_options(o);
    check_build(o);
  });
  state_->network =
      std::make_unique<CheckedCommunicator>(make_mpi_communicator(context.mpi.world()));
  if (!o.on_gpu()) {
    state_->stream = std::make_unique<HostStream>();
    return;
  }
  state_->devices = bind_device(context.world, o.share_gpus);
  if (const std::string note = visibility_note(state_->devices);
      !note.empty() && state_->comm == "nccl" && !context.quiet)
    context.outputs.print("# note: " + note + "\n");
  run_agreed(context.world, "preparing the GPU", [&] { state_->stream = make_cuda_stream(); });
  state_->device_world = make_device_world(state_->comm, context, *state_->network);
  state_->host_staging = make_host_staging_communicator(*state_->device_world, *state_->stream);
}

Backend::~Backend() = default;

MemorySpace Backend::space() const {
  return state_->stream->space();
}

Stream& Backend::stream() {
  return *state_->stream;
}

Communicator& Backend::world() {
  return on_gpu() ? *state_->device_world : *state_->network;
}

Communicator& Backend::host_staging() {
  return on_gpu() ? *state_->host_staging : *state_->network;
}

void Backend::check_messages(bool on) {
  state_->network->check_messages(on);
}

int64_t Backend::memory_bytes() const {
  if (!on_gpu()) return memory_for_rank(state_->context);
  const size_t rank = state_->context.world.rank();
  return cuda_memory_available() / state_->devices[rank].sharers;
}

void Backend::describe(RunReport& report) const {
  if (!on_gpu()) return;
  bool shared = false;
  for (const RankDevice& device : state_->devices) {
    RankInfo& rank = report.ranks[device.rank];
    rank.device = to_string(device);
    rank.device_uuid = device.uuid;
    shared = shared || device.sharers > 1;
  }
  if (shared) report.unofficial_reasons.push_back("shared GPU");
  if (software_gpu) report.unofficial_reasons.push_back("software GPU");
}

int64_t memory_for_rank(const AppContext& context) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kilobytes = 0;
  for (std::string line; std::getline(file, line);)
    if (std::istringstream words(line); words >> name >> kilobytes && name == "MemAvailable:")
      return kilobytes * 1024 / ranks_here(context);
  return 0;
}

double ranks_per_core(const AppContext& context) {
  return static_cast<double>(ranks_here(context)) /
         static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN));
}

std::string crowding(const AppContext& context, int threads) {
  const int64_t ranks = ranks_here(context), cores = sysconf(_SC_NPROCESSORS_ONLN);
  if (ranks * threads <= cores) return "";
  return fmt::format("{} ranks of {} threads on {} cores", ranks, threads, cores);
}

}  // namespace gyre

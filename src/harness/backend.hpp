#pragma once
// Device and communicator of a run: --backend, --comm, --share-gpus.

#include <memory>
#include <string>
#include <vector>

#include "report/app.hpp"
#include "report/result.hpp"
#include "runtime/stream.hpp"

namespace gyre {

struct BackendOptions {
  std::string backend = "cpu";  ///< cpu or cuda
  std::string comm;             ///< mpi, staged, mpi-gpu or nccl; "": see declare_backend_options
  bool share_gpus = false;      ///< several ranks on one GPU: for checking, never for timing
  bool on_gpu() const { return backend == "cuda"; }
};

/// Values of --backend: cpu, cuda.
const std::vector<std::string>& backend_names();
/// Values of --comm: mpi, staged, mpi-gpu, nccl.
const std::vector<std::string>& comm_names();

/// Values of --backend, and of --comm, that this build supports.
std::vector<std::string> built_backends();
std::vector<std::string> built_comms();

/// Adds --backend, --comm and --share-gpus. --comm defaults to mpi on CPUs. On GPUs it
/// defaults to nccl, or staged if the build has no NCCL or GPUs are shared.
void declare_backend_options(OptionTable& table, BackendOptions& o);

class Backend {
 public:
  /// Collective. All ranks throw the same usage error for an unsupported combination. They throw
  /// the same runtime error (exit code 3) for no driver, no device, a device older than compute
  /// capability 8.0, two ranks on one device without share_gpus, a build without CUDA or NCCL, or
  /// an MPI library without support for GPU memory.
  Backend(AppContext& context, const BackendOptions& o);
  ~Backend();

  bool on_gpu() const { return space() == MemorySpace::device; }
  /// Memory of the arrays that are computed on and communicated: host or device.
  MemorySpace space() const;
  /// The stream of this rank's computations.
  Stream& stream();
  /// Communicator of all ranks for arrays in space().
  Communicator& world();
  /// Communicator of all ranks for small arrays in host memory. On CPUs it uses MPI, on GPUs the
  /// links of world(). See comm/host_staging.hpp.
  Communicator& host_staging();
  /// Switches the check that messages arrive as sent (comm/checked.hpp), which only mpi and staged
  /// have. It starts on, and is off in timed runs. All ranks must switch it between the same
  /// operations.
  void check_messages(bool on);
  /// Bytes that this rank may allocate in space() now; 0: unknown.
  int64_t memory_bytes() const;

  /// Adds devices, backend, communicator, and reasons why figures are unofficial (a shared GPU, the
  /// software GPU) to a report.
  void describe(RunReport& report) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Available bytes of memory on this rank's host divided by the number of ranks on it; 0: unknown.
int64_t memory_for_rank(const AppContext& context);
/// Number of ranks on this rank's host divided by the number of its cores.
double ranks_per_core(const AppContext& context);
/// "4 ranks of 1 threads on 2 cores" if this rank's host has fewer cores than threads, else "".
std::string crowding(const AppContext& context, int threads);

}  // namespace gyre

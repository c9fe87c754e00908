#pragma once
// What a run computes on and communicates with: --backend, --comm, --share-gpus.

#include <memory>
#include <string>
#include <vector>

#include "report/app.hpp"
#include "report/result.hpp"
#include "runtime/stream.hpp"

namespace CLI {
class App;
}

namespace gyre {

struct BackendOptions {
  std::string backend = "cpu";  ///< cpu or cuda
  std::string comm;         ///< mpi, staged, mpi-gpu or nccl; "": what declare_backend_options says
  bool share_gpus = false;  ///< several ranks on one GPU: for checking, never for timing
  bool on_gpu() const { return backend == "cuda"; }
};

/// What --backend may be: cpu, cuda.
const std::vector<std::string>& backend_names();
/// What --comm may be: mpi, staged, mpi-gpu, nccl.
const std::vector<std::string>& comm_names();

/// The backends, and the communicators, of this build.
std::vector<std::string> built_backends();
std::vector<std::string> built_comms();

/// Adds the three options. The default of --comm: mpi on CPUs; on GPUs nccl, or staged where the
/// build has no NCCL or GPUs are shared.
void declare_backend_options(CLI::App& app, BackendOptions& o);

class Backend {
 public:
  /// Collective. All ranks throw the same usage error for a combination that does not exist, and
  /// the same runtime error (exit code 3) where a GPU, or what drives it, is missing: no driver, no
  /// device, a device older than compute capability 8.0, two ranks on one device without
  /// share_gpus, a build without CUDA or NCCL, an MPI library that takes no GPU memory.
  Backend(AppContext& context, const BackendOptions& o);
  ~Backend();

  bool on_gpu() const { return space() == MemorySpace::device; }
  /// host or device: where arrays lie that are computed on and communicated.
  MemorySpace space() const;
  /// Where what is computed on this rank is submitted.
  Stream& stream();
  /// All ranks, arrays in space().
  Communicator& world();
  /// All ranks, small arrays of host memory: by MPI on CPUs, and on GPUs over the same links as
  /// world(). See comm/host_staging.hpp.
  Communicator& host_staging();
  /// Whether what MPI carries for world() is compared with what was sent (comm/checked.hpp), as it
  /// is at first. Off for what is timed. All ranks switch between the same operations.
  void check_messages(bool on);
  /// Bytes that this rank may allocate in space() now; 0: unknown.
  int64_t memory_bytes() const;

  /// Adds devices, library versions and what makes figures unofficial (a shared GPU, the software
  /// GPU) to a report.
  void describe(RunReport& report) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gyre

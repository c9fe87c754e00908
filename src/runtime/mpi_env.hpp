#pragma once
// MPI library of this process, and the identity of all ranks.

#include <mpi.h>

#include <string>
#include <vector>

#include "runtime/watchdog.hpp"

namespace gyre {

/// Initialises MPI (MPI_THREAD_FUNNELED), gathers host and process id of every rank and starts the
/// watchdog. The destructor finalises MPI after a barrier. One per program; nothing else in Gyre
/// uses MPI_COMM_WORLD.
class MpiEnvironment {
 public:
  MpiEnvironment(int& argc, char**& argv, std::string program);
  ~MpiEnvironment();
  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Number of ranks in the launcher's environment variables, 0 without them. If it differs from
  /// size(), the launcher belongs to another MPI library.
  int launched_ranks() const { return launched_ranks_; }
  MPI_Comm world() const { return world_; }
  const std::vector<PeerProcess>& peers() const { return peers_; }
  /// "MPICH 4.0.2"
  static std::string library_version();
  /// Ends all ranks at once with `code`, with MPI initialised or not. For errors that only this
  /// rank has found.
  [[noreturn]] static void abort(int code);
  /// Number of ranks of the run; 1 before the first MpiEnvironment.
  static int world_size();

 private:
  int rank_ = 0;
  int size_ = 1;
  int launched_ranks_ = 0;
  MPI_Comm world_ = MPI_COMM_NULL;
  std::vector<PeerProcess> peers_;
};

/// Whether the MPI library accepts pointers to CUDA device memory, by its own account.
bool mpi_takes_gpu_memory();

/// Throws a runtime error with the MPI library's text if `code` is not MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// Yields the core between two polls of MPI.
void yield_politely();

/// Sleeps `seconds` between two polls; 0: yields the core.
void pause_politely(double seconds);

/// Waits for all `requests`: polls, and yields the core while nothing has completed.
void wait_politely(std::vector<MPI_Request>& requests);

}  // namespace gyre

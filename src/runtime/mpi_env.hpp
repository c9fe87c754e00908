#pragma once
// The MPI library of this process, and what the ranks know about each other.

#include <mpi.h>

#include <string>
#include <vector>

#include "runtime/watchdog.hpp"

namespace gyre {

/// Initialises MPI (MPI_THREAD_FUNNELED), gathers host and process id of every rank, starts the
/// watchdog, and on destruction finalises MPI after a barrier. One per program; nothing else in
/// Gyre names MPI_COMM_WORLD.
class MpiEnvironment {
 public:
  MpiEnvironment(int& argc, char**& argv, std::string program);
  ~MpiEnvironment();
  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Number of ranks that the launcher's variables announce, or 0 when they say nothing; a mismatch
  /// with size() means that the program was started by another MPI's launcher.
  int launched_ranks() const { return launched_ranks_; }
  MPI_Comm world() const { return world_; }
  const std::vector<PeerProcess>& peers() const { return peers_; }
  /// "MPICH 4.0.2"
  static std::string library_version();
  /// Ends all ranks now with `code`, whether MPI is up or not. For an error that only this rank has
  /// seen.
  [[noreturn]] static void abort(int code);
  /// Number of ranks of the run; 1 before there is an environment.
  static int world_size();

 private:
  int rank_ = 0;
  int size_ = 1;
  int launched_ranks_ = 0;
  MPI_Comm world_ = MPI_COMM_NULL;
  std::vector<PeerProcess> peers_;
};

/// Whether the MPI library says that it takes pointers to memory of CUDA devices.
bool mpi_takes_gpu_memory();

/// Throws a runtime error with the MPI library's text when `code` is not MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// Between two polls of MPI: gives the core to others.
void yield_politely();

/// The same, asleep for `seconds`; 0: as above.
void pause_politely(double seconds);

/// Waits for all `requests` politely: polls, and yields the core when nothing has happened.
void wait_politely(std::vector<MPI_Request>& requests);

}  // namespace gyre

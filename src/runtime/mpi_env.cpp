#include "runtime/mpi_env.hpp"

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>  // Open MPI's extensions
#endif

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "core/error.hpp"
#include "runtime/clock.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/sleep.hpp"
#include "runtime/surroundings.hpp"

namespace gyre {
namespace {

/// Number of ranks according to the launcher's environment variables; 0 without them. The first
/// variable that is set counts, because in a Slurm job the tasks of Slurm are mpiexec's proxies.
int announced_ranks() {
  for (const char* name :
       {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (const char* value = std::getenv(name)) return std::atoi(value);
  return 0;
}

/// Ends all ranks. If this rank ended by itself, as MPI_Abort does, the launcher might report the
/// signal that killed the others instead of `code`.
void end_all(int code) {
  surroundings().end_run(code);
  int started = 0, finished = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&finished);
  if (started == 0 || finished != 0) return;
  // MPI_Abort may call exit(), whose handlers free what other threads still compute with, such as
  // generated code. The handler that is registered last runs first.
  on_exit([](int status, void*) { _exit(status); }, nullptr);
  MPI_Abort(MPI_COMM_WORLD, code);
}

int ranks_of_run = 1;

struct Identity {
  char host[256];
  int64_t pid;
};

}  // namespace

bool mpi_takes_gpu_memory() {
#if defined(MPIX_GPU_SUPPORT_CUDA)  // MPICH and its descendants
  int supported = 0;
  return MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &supported) == MPI_SUCCESS && supported != 0;
#elif defined(MPIX_CUDA_AWARE_SUPPORT)  // Open MPI
  return MPIX_Query_cuda_support() == 1;
#else
  return false;
#endif
}

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw_runtime("{} failed: {}", call, text);
}

void yield_politely() {
  move_device_on();
  sched_yield();
}

void pause_politely(double seconds) {
  if (seconds > 0)
    sleep_until(monotonic_seconds() + seconds);
  else
    yield_politely();
}

void wait_politely(std::vector<MPI_Request>& requests) {
  int done = 0;
  while (true) {
    check_mpi(
        MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
    if (done) return;
    yield_politely();
  }
}

MpiEnvironment::MpiEnvironment(int& argc, char**& argv, std::string program) {
  launched_ranks_ = announced_ranks();
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_dup(MPI_COMM_WORLD, &world_);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world_, &rank_);
  MPI_Comm_size(world_, &size_);
  ranks_of_run = size_;

  Identity mine = {};
  gethostname(mine.host, sizeof(mine.host) - 1);
  mine.pid = getpid();
  std::vector<Identity> all(size_);
  std::vector<MPI_Request> request(1);
  check_mpi(MPI_Iallgather(&mine, sizeof(Identity), MPI_BYTE, all.data(), sizeof(Identity),
                           MPI_BYTE, world_, request.data()),
            "MPI_Iallgather");
  wait_politely(request);
  for (int r = 0; r < size_; ++r) {
    const Identity& identity = all[r];
    peers_.push_back({r, identity.host, identity.pid});
  }
  Watchdog::start(std::move(program), rank_, peers_, 0, end_all);
  surroundings().enter(RankPhase::running);
}

MpiEnvironment::~MpiEnvironment() {
  {
    WaitScope scope("all ranks at the end of the program");
    std::vector<MPI_Request> request(1);
    MPI_Ibarrier(world_, request.data());
    wait_politely(request);
  }
  Watchdog::stop();
  surroundings().enter(RankPhase::finalising);
  MPI_Comm_free(&world_);
  MPI_Finalize();
}

std::string MpiEnvironment::library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  // MPICH returns a page of configuration; its first line is "MPICH Version:\t4.0.2".
  std::string line(text, std::strcspn(text, "\n"));
  if (const size_t colon = line.find(" Version:"); colon != std::string::npos) {
    size_t begin = colon + std::strlen(" Version:");
    while (begin < line.size() && std::isspace(static_cast<unsigned char>(line[begin]))) ++begin;
    return line.substr(0, colon) + " " + line.substr(begin);
  }
  return line;
}

void MpiEnvironment::abort(int code) {
  end_all(code);
  _exit(code);
}

int MpiEnvironment::world_size() {
  return ranks_of_run;
}

}  // namespace gyre

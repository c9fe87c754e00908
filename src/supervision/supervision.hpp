#pragma once
// The processes around a rank, and how to do without them.
//
//     launcher (mpiexec, srun)
//     `- supervisor   under a launcher: passes on signals and what rank and launcher say to each
//        |            other, waits for the rank, and ends the run when the rank cannot
//        |- guard     removes unfinished outputs of a rank that was killed; the guard of the first
//        |            rank of a host then removes what MPI leaves in /dev/shm
//        `- rank      the program; its watchdog (runtime/watchdog) ends a run that hangs
//           `- reader while it reads a file for the first time, which may crash HDF5 (io/trust)
//
// The first process forks guard and rank before it initialises MPI or starts a thread, and becomes
// the supervisor. Without a launcher it forks the guard and becomes the rank.
//
// GYRE_SUPERVISE=0 in the environment, for profilers and debuggers, runs the rank as one process
// that forks nothing; so does a debugger that is attached at the start. This is lost:
//   - a rank that is killed leaves its temporary files (NAME.tmp-*), and those in /dev/shm;
//   - a rank that is killed or crashes ends the run with an exit code of the launcher, which may
//     end the other ranks before they report; so does MPI when it aborts;
//   - nothing ends a run that is stopped, or hangs in MPI_Init or MPI_Finalize;
//   - a damaged file that crashes HDF5 ends the rank, which names the file first.
// Outputs still get their names by renaming, when they are complete.

#include <string_view>

namespace gyre {

/// Must be the first call in main. Afterwards
/// - a write to a pipe without a reader, or beyond `ulimit -f`, fails with its errno and raises no
///   signal; children can be waited for, whatever the parent process ignores;
/// - a closed standard stream is open but cannot be written, so no other file gets its number;
/// - if a library calls exit() with a code that is no ExitCode, as MPI does if MPI_Init fails, the
///   process ends with ExitCode::runtime.
void prepare_process();

/// Starts the processes of the tree above, and returns in the rank. To be called before MPI is
/// initialised and before any thread is started; later calls do nothing. Without a supervisor,
/// abort() then ends the process with ExitCode::runtime. Throws a runtime error if a process cannot
/// be started, and a usage error if GYRE_SUPERVISE is neither 0 nor 1.
void start_supervised(std::string_view program, int argc, char** argv);

/// Whether this rank may fork nothing: GYRE_SUPERVISE=0, or a debugger was attached at the start.
bool runs_alone();

}  // namespace gyre

/* Two UCX entry points that MPICH 4.0 calls, overridden in the executable.
 *
 * ucp_worker_progress: MPICH's blocking calls poll it without ever giving the core away, so that
 * with more ranks than cores an 8-byte all-reduce takes tens of milliseconds. Yielding when a poll
 * finds nothing brings it back to microseconds and costs nothing when every rank has its own core.
 * It also serves the MPI calls inside HDF5 and MPI-IO, which this suite cannot reach otherwise.
 *
 * ucp_disconnect_nb: over TCP with three or more ranks MPI_Finalize of MPICH 4.0 can wait for ever
 * for a flush of a peer that no longer progresses (fixed upstream in 2023). Answering "done" is
 * safe after the barrier with which MpiEnvironment precedes MPI_Finalize.
 *
 * With an MPI that does not use UCX neither symbol is ever called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stddef.h>

unsigned ucp_worker_progress(void* worker) {
  static unsigned (*real)(void*);
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, "ucp_worker_progress");
  unsigned events = real(worker);
  if (events == 0) sched_yield();
  return events;
}

void* ucp_disconnect_nb(void* endpoint) {
  (void)endpoint;
  return NULL;
}

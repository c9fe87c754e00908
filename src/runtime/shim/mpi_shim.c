/* Three UCX entry points that MPICH 4.0 calls, overridden in the executable.
 *
 * ucp_worker_progress: MPICH's blocking calls poll it without yielding the core, so that with more
 * ranks than cores an 8-byte all-reduce takes tens of milliseconds. Yielding after a poll without
 * events reduces this to microseconds and costs nothing when every rank has its own core. It also
 * covers the MPI calls inside HDF5 and MPI-IO, which this suite cannot change otherwise.
 *
 * ucp_disconnect_nb: over TCP with three or more ranks, MPI_Finalize of MPICH 4.0 can wait for ever
 * for a flush of a peer that no longer progresses (fixed upstream in 2023). Returning "done" is
 * safe after MpiEnvironment's barrier before MPI_Finalize.
 *
 * ucp_ep_create: its handles are recorded, because UCX reports the transports in use only for a
 * handle.
 *
 * An MPI library without UCX calls none of them. */
#define _GNU_SOURCE
#include "runtime/shim/mpi_shim.h"

#include <dlfcn.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>

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

static void** all_endpoints;
static int endpoint_count;

int ucp_ep_create(void* worker, const void* parameters, void** endpoint) {
  static int (*real)(void*, const void*, void**);
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, "ucp_ep_create");
  int status = real(worker, parameters, endpoint);
  if (status != 0) return status;
  if ((endpoint_count & (endpoint_count - 1)) == 0) { /* full: 1, 2, 4, 8, ... */
    size_t room = endpoint_count == 0 ? 1 : 2 * (size_t)endpoint_count;
    void** more = realloc(all_endpoints, room * sizeof(void*));
    if (more == NULL) return status; /* an unrecorded endpoint is no error */
    all_endpoints = more;
  }
  all_endpoints[endpoint_count++] = *endpoint;
  return status;
}

int gyre_ucx_endpoints(void* const** endpoints) {
  if (endpoints != NULL) *endpoints = all_endpoints;
  return endpoint_count;
}

/* What the shim knows about MPICH's use of UCX. */
#ifndef GYRE_MPI_SHIM_H
#define GYRE_MPI_SHIM_H

#ifdef __cplusplus
extern "C" {
#endif

/* The number of endpoints that MPICH has made, and through `endpoints` (which may be NULL) the list
 * of them: UCX's handles, in the order in which they were made. MPICH 4 makes one for each rank of
 * the world, in order of rank, when it starts. 0 with an MPI that does not use UCX. */
int gyre_ucx_endpoints(void* const** endpoints);

#ifdef __cplusplus
}
#endif

#endif

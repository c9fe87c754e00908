/* MPICH's UCX endpoints, as recorded by the shim. */
#ifndef GYRE_MPI_SHIM_H
#define GYRE_MPI_SHIM_H

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the number of endpoints that MPICH has created; `endpoints` (may be NULL) receives their
 * UCX handles in order of creation. MPICH 4 creates one per rank of the world, in rank order, at
 * start-up. Returns 0 if MPI does not use UCX. */
int gyre_ucx_endpoints(void* const** endpoints);

#ifdef __cplusplus
}
#endif

#endif

#pragma once
// GYRE_HOST_DEVICE marks functions that kernels also use. Code that decides a kernel's result is
// written in such functions, so that host tests cover it.

#ifdef __CUDACC__
#define GYRE_HOST_DEVICE __host__ __device__
#else
#define GYRE_HOST_DEVICE
#endif

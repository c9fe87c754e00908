#pragma once
// GYRE_HOST_DEVICE marks functions that kernels use too. Code that decides a kernel's result is
// written in such functions, so that tests on the host cover it.

#ifdef __CUDACC__
#define GYRE_HOST_DEVICE __host__ __device__
#else
#define GYRE_HOST_DEVICE
#endif

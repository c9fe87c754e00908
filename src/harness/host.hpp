#pragma once
// Resources of a rank on its host.

#include <string>

#include "report/app.hpp"

namespace gyre {

/// Available bytes of memory on this rank's host divided by the number of ranks on it; 0: unknown.
int64_t memory_for_rank(const AppContext& context);
/// Number of ranks on this rank's host divided by the number of its cores.
double ranks_per_core(const AppContext& context);
/// "4 ranks of 1 threads on 2 cores" if this rank's host has fewer cores than that, else "".
std::string crowding(const AppContext& context, int threads);

}  // namespace gyre

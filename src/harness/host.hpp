#pragma once
// What a rank can have of the host that it runs on.

#include <string>

#include "report/app.hpp"

namespace gyre {

/// Bytes of memory that are available on this rank's host now, over the ranks there; 0: unknown.
int64_t memory_for_rank(const AppContext& context);
/// Ranks on this rank's host, over the cores there.
double ranks_per_core(const AppContext& context);
/// "4 ranks of 1 threads on 2 cores" if this rank's host has fewer cores than that, else "".
std::string crowding(const AppContext& context, int threads);

}  // namespace gyre

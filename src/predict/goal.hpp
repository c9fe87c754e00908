#pragma once
// Programs of all ranks as a GOAL schedule (Hoefler, Siebert, Lumsdaine: Group Operation Assembly
// Language, ICPP 2009), the input of LogGOPSim and ATLAHS. The tasks are those of task_graph.hpp:
//
//     compute         calc NANOSECONDS
//     send, receive   send BYTESb to RANK tag N, recv BYTESb from RANK tag N
//
// Latency and bandwidth are the simulator's. Kernels have the time that this machine's links slow
// them down.

#include <string>
#include <vector>

#include "predict/program.hpp"

namespace gyre {

/// The passes follow each other on every rank. Throws a usage error if one has a library's
/// collective, which has no messages.
std::string goal_text(const std::vector<Programs>& passes);

}  // namespace gyre

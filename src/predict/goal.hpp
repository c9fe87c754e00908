#pragma once
// Programs of all ranks as a GOAL schedule (Hoefler, Siebert, Lumsdaine: Group Operation Assembly
// Language, ICPP 2009), the input of LogGOPSim and ATLAHS:
//
//     spend           calc NANOSECONDS; the operations of a rank follow each other
//     send, receive   send BYTESb to RANK tag N, recv BYTESb from RANK tag N; they require what the
//                     rank has done before, and nothing requires them but a wait
//     wait            calc 0, which requires the messages of its exchange
//
// The tag is the number of earlier messages between the two ranks, so that messages match in order.
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

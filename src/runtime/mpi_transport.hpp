#pragma once
// Transports that carry MPI's messages, as far as the libraries report them.

#include <string>

namespace gyre {

/// "ch4:ucx" from MPICH's version text (MPI_Get_library_version); "" for other libraries.
std::string mpich_device(const std::string& version_text);
/// The device of this program's MPI library.
std::string mpich_device();

/// "UCX 1.13.1" if MPI has created UCX endpoints, else "".
std::string transport_version();

/// Transports of one UCX endpoint.
struct UcxLanes {
  std::string small;  ///< for short messages: "sysv/memory", "tcp/eth0"; "" if unknown
  std::string large;  ///< for long messages; several are joined by "+"
};

/// Parses the output of ucp_ep_print_info, in which each lane lists its uses after an arrow:
///     #     lane[0]:  3:sysv/memory.0 md[2]  -> md[2]/sysv/sysdev[255] am am_bw#0
///     #     lane[1]:  5:cma/memory.0 md[4]   -> md[4]/cma/sysdev[255] rma_bw#0
/// Short messages are active messages (am). Long messages are read from or written to the other
/// process's memory (rma_bw) or, if no lane supports this, split into active messages (am_bw).
UcxLanes parse_lanes(const std::string& endpoint_info);

/// Transports from this rank to another of the `world_size` ranks. Unknown without UCX, or if MPI
/// has not created exactly one endpoint per rank.
UcxLanes lanes_to(int rank, int world_size);

}  // namespace gyre

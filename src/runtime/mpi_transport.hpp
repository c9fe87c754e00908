#pragma once
// What carries MPI's messages in the end, as far as the libraries tell.

#include <string>

namespace gyre {

/// "ch4:ucx" of MPICH's version text (MPI_Get_library_version); "" of another library's.
std::string mpich_device(const std::string& version_text);
/// The same of this program's library.
std::string mpich_device();

/// "UCX 1.13.1", if MPI has made endpoints by UCX; else "".
std::string transport_version();

/// The transports of one endpoint of UCX.
struct UcxLanes {
  std::string small;  ///< of short messages: "sysv/memory", "tcp/eth0"; "": unknown
  std::string large;  ///< of long ones; several are joined by "+"
};

/// From what ucp_ep_print_info says, in which each lane has its uses after an arrow:
///     #     lane[0]:  3:sysv/memory.0 md[2]  -> md[2]/sysv/sysdev[255] am am_bw#0
///     #     lane[1]:  5:cma/memory.0 md[4]   -> md[4]/cma/sysdev[255] rma_bw#0
/// Short messages are active messages (am); long ones are read or written in the other process's
/// memory (rma_bw), or, where no lane can, come in pieces (am_bw).
UcxLanes parse_lanes(const std::string& endpoint_info);

/// The transports to a rank of the world of `world_size`. Unknown without UCX, and where MPI has
/// not made exactly one endpoint for each rank.
UcxLanes lanes_to(int rank, int world_size);

}  // namespace gyre

#pragma once
// The programs of a rank as a Chakra execution trace, the input of ASTRA-sim (messages
// GlobalMetadata and Node of et_def.proto, github.com/mlcommons/chakra; each behind its length). The
// tasks are those of task_graph.hpp:
//
//     compute         COMP_NODE, with duration_micros
//     send, receive   COMM_SEND_NODE, COMM_RECV_NODE, with comm_src, comm_dst, comm_size and comm_tag
//     required        data_deps
//
// Durations are whole microseconds; what rounding leaves is added to the next computation of the
// rank.

#include <string>
#include <vector>

#include "predict/program.hpp"

namespace gyre {

/// The bytes of PREFIX.RANK.et. The passes follow each other. Throws a usage error if one has a
/// library's collective, which has no messages.
std::string chakra_trace(const std::vector<Programs>& passes, int rank);

}  // namespace gyre

#pragma once
// The results file of gyre-attention.

#include <string>

#include "apps/attention/case.hpp"
#include "io/attention_file.hpp"

namespace gyre {

/// Writes out, log-sum-exps and gradients of all tokens, after a forward and a backward pass.
/// Collective.
void write_results(OutputFile& output, AttentionCase& of, const std::string& input_sha256,
                   const Provenance& provenance);

/// Bytes that a rank needs while results are written: four copies of its rows of the largest array
/// (sent, received, in file order, in MPI-IO). 0 without an output.
int64_t writing_bytes(const std::string& output, const AttentionWorkload& workload, int ranks);

}  // namespace gyre

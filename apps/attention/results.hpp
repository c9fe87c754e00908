#pragma once
// The results file of gyre-attention.

#include <string>

#include "apps/attention/run.hpp"
#include "io/attention_file.hpp"

namespace gyre {

/// Writes out, log-sum-exps and gradients of all tokens, after a forward and a backward pass.
/// Collective.
void write_results(OutputFile& output, AttentionRun& run, const std::string& input_sha256,
                   const Provenance& provenance, Communicator& world);

}  // namespace gyre

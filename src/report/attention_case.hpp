#pragma once
// From options and files to the problems of gyre-attention, and from its arrays to a file.

#include "io/attention_file.hpp"
#include "report/attention_options.hpp"
#include "report/attention_run.hpp"

namespace gyre {

/// `size` tokens a sequence, or one pack of made-up documents; inputs by --seed. Throws usage
/// errors of --gen.
AttentionCase made_up_case(const AttentionOptions& o, int64_t size);
/// What a file holds; its shape and mask replace those of the options.
AttentionCase case_of(const AttentionFile& file, AttentionOptions& o);
/// Rows of the file, which must outlive them.
std::unique_ptr<TensorRows> rows_of(const AttentionFile& file);

/// Writes out, log-sum-exps and gradients of all tokens, after both passes. Collective.
void write_results(OutputFile& output, AttentionRun& run, const std::string& input_sha256,
                   const Provenance& provenance, Communicator& world);

/// A plan of all ranks, explained and drawn.
struct Explanation {
  std::string text, svg;
};
Explanation explain_case(const AttentionCase& problem, const AttentionOptions& o);

}  // namespace gyre

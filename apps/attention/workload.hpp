#pragma once
// From options and files to the problems of gyre-attention, and from its arrays to a file.

#include "apps/attention/options.hpp"
#include "apps/attention/run.hpp"
#include "apps/common/host.hpp"
#include "io/attention_file.hpp"
#include "report/app.hpp"

namespace gyre {

/// `size` tokens a sequence, or one pack of made-up documents; inputs by --seed. Throws usage
/// errors of --gen.
AttentionWorkload generated_workload(const AttentionOptions& o, int64_t size);
/// What a file holds; its shape and mask replace those of the options.
AttentionWorkload workload_of(const AttentionFile& file, AttentionOptions& o);
/// Rows of the file, which must outlive them, rounded to `type`.
std::unique_ptr<TensorRows> rows_of(const AttentionFile& file, DType type);
/// Whether all inputs of the file are numbers of `type`: only then do its references belong to what
/// is computed from rounded ones.
bool has_exact_inputs(const AttentionFile& file, DType type);

/// One schedule under one layout, as the options want it.
AttentionSetup setup_of(const AttentionOptions& o, const Schedule& schedule,
                        const LayoutKind& layout, int64_t memory_bytes);
/// With one schedule and one layout: throws a usage error that lists all sizes that they refuse, or
/// that do not fit the memory of `rank`. With several, a run goes on with those that do.
void check_workloads(const std::vector<AttentionWorkload>& cases, const AttentionOptions& o,
                     int64_t memory_bytes, int rank);

/// Writes out, log-sum-exps and gradients of all tokens, after both passes. Collective.
void write_results(OutputFile& output, AttentionRun& run, const std::string& input_sha256,
                   const Provenance& provenance, Communicator& world);

/// A plan of all ranks, explained and drawn, in the directions of --pass.
struct Explanation {
  std::string text, svg;
};
/// Throws a usage error that names the nearest --cp if the plans of all ranks are too large to be
/// held (some 30 million entries, a few GB).
Explanation explain_workload(const AttentionWorkload& problem, const AttentionOptions& o);

}  // namespace gyre

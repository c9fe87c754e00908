#pragma once
// The runs of gyre-shard that plan no layouts.

#include "apps/shard/options.hpp"
#include "report/app.hpp"

namespace gyre {

/// Shards a batch of rows (gyre/bshd) over the ranks of --cp. Collective.
ExitCode run_batch(const ShardOptions& o, AppContext& context);

/// Runs Ulysses on packed streams over the ranks of the run. Collective.
ExitCode run_heads_for_tokens(const ShardOptions& o, const PackedHeader& header,
                              const PackedSlots& slots, AppContext& context, RunReport& report);

}  // namespace gyre

#pragma once
// The runs of gyre-pack that no packer takes part in, and what all runs end with.

#include "apps/pack/options.hpp"
#include "apps/pack/report.hpp"
#include "report/app.hpp"

namespace gyre {

/// The table of a run, and the "#" lines below it.
struct Outcome {
  std::vector<PackingResult> rows;
  std::string notes;
};

/// Ends a run that packs once: its row, with what the checks have found.
void add_checked_row(PackingResult row, RunReport& report, Outcome& outcome);

/// Writes --output from streams that are complete on every rank: they are small, and one rank
/// brings all. Of those that a device has made, `expected` are the host's. Collective.
void write_on_root(const PackOptions& o, const PackedHeader& header, const PackedSlots& slots,
                   AppContext& context, RunReport& report, const PackedSlots* expected = nullptr);

/// Documents, or lengths alone, into rows (--rows). Collective.
void pack_into_rows(const PackOptions& o, AppContext& context, RunReport& report, Outcome& outcome);

/// Packed streams for another number of ranks (--repad). Collective.
void repad_streams(const PackOptions& o, AppContext& context, RunReport& report, Outcome& outcome);

}  // namespace gyre

#pragma once
// The runs of gyre-pack that use no packer, and the common end of all runs.

#include "apps/pack/options.hpp"
#include "apps/pack/report.hpp"
#include "report/app.hpp"

namespace gyre {

/// The table of a run, and the "#" lines below it.
struct Outcome {
  std::vector<PackingResult> rows;
  std::string notes;
};

/// The "#" line on the attention that is to read these streams, which may have padding between
/// segments. An unsound setup is a usage error. Collective.
std::string judgement(const PackOptions& o, const PackedHeader& header, Communicator& world);

/// Ends a run that packs once: adds its row with the verdict of the checks.
void add_checked_row(PackingResult row, RunReport& report, Outcome& outcome);

/// Writes --output from streams that are complete on every rank. They are small, so one rank writes
/// all. If a device made them, `expected` are the host's slots. Collective.
void write_on_root(const PackOptions& o, const PackedHeader& header, const PackedSlots& slots,
                   AppContext& context, RunReport& report, const PackedSlots* expected = nullptr);

/// Converts a batch of a training framework to packed streams. Collective.
void pack_batch(const PackOptions& o, const std::string& schema, AppContext& context,
                Backend& backend, RunReport& report, Outcome& outcome);

/// Packs documents, or lengths alone, into rows (--rows). Collective.
void pack_into_rows(const PackOptions& o, AppContext& context, RunReport& report, Outcome& outcome);

/// Pads packed streams for another number of ranks (--repad). Collective.
void repad_streams(const PackOptions& o, AppContext& context, RunReport& report, Outcome& outcome);

/// Lengthens every stream as NeMo-RL packs for Megatron-LM (round_sequences). With Tail::keep, the
/// new slots join the last segment. With Tail::own_segment, they become a segment without tokens,
/// of a document that is added after the `documents` of the header. Adds to `checks` that documents
/// keep their places and that streams have the requested lengths. Throws the usage errors of
/// round_sequences, with the number of the stream.
void round_streams(PackedHeader& header, const RoundOptions& options, Verification& checks);

}  // namespace gyre

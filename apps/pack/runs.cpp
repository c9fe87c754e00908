#include "apps/pack/runs.hpp"

#include <fmt/format.h>

#include <numeric>

#include "apps/pack/rows.hpp"
#include "apps/pack/streams.hpp"
#include "comm/agree.hpp"
#include "harness/host.hpp"
#include "packing/lengths.hpp"
#include "report/provenance.hpp"

namespace gyre {

void add_checked_row(PackingResult row, RunReport& report, Outcome& outcome) {
  row.check = check_text(report, report.verification);
  add_row(report, row);
  outcome.rows.push_back(row);
}

void write_on_root(const PackOptions& o, const PackedHeader& header, const PackedSlots& slots,
                   AppContext& context, RunReport& report, const PackedSlots* expected) {
  const PackedSlots nothing;
  const PackedSlots& mine = context.root() ? slots : nothing;
  write_checked(o.output, header, mine, 0, context.root() ? header.bin_count() : 0, context.world,
                o.check != "none", report.verification, context.outputs,
                context.root() ? expected : nullptr);
}

void pack_into_rows(const PackOptions& o, AppContext& context, RunReport& report,
                    Outcome& outcome) {
  Communicator& world = context.world;
  Documents documents;
  LengthSpec spec;
  DocumentRows rows;
  if (!o.input.empty()) documents = read_documents(world, o.input);
  run_agreed(world, "packing rows", [&] {
    std::vector<int64_t> lengths;
    if (o.input.empty()) lengths = draw_lengths(spec = parse_length_spec(o.generate));
    for (int64_t i = 0; i < documents.count(); ++i) lengths.push_back(documents.length(i));
    if (o.input.empty())
      check_slots_fit(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}),
                      memory_for_rank(context));
    const int64_t vocab_size = o.input.empty() ? synthetic_vocab : documents.vocab_size;
    const TokenSource tokens =
        o.input.empty() ? synthetic_tokens(spec.seed, vocab_size) : tokens_of(documents);
    const RowPackOptions options{
        o.row, o.cp, o.oversize == "drop" ? OversizeSample::drop : OversizeSample::reject};
    rows = make_rows(lengths, options, tokens, vocab_size);
    if (o.check != "none") check_rows(rows, lengths, options, tokens, report.verification);
  });
  outcome.notes += fmt::format("# {} rows of {} slots, {} documents dropped\n", rows.arrays.rows,
                               rows.arrays.slots, rows.packing.dropped.size());
  if (!o.output.empty())
    write_rows(o.output, rows.arrays,
               provenance_of(context, o.input.empty() ? to_string(spec) : o.input), world,
               o.check != "none", report.verification, context.outputs);
  add_checked_row(rows.row, report, outcome);
}

void repad_streams(const PackOptions& o, AppContext& context, RunReport& report, Outcome& outcome) {
  Communicator& world = context.world;
  const PackedHeader header = read_packed_header(world, o.input);
  const PackedSlots slots = read_packed_slots(world, o.input, header, 0, header.bin_count());
  if (header.slot_offsets().back() == 0) report.nothing_to_verify = "no slots";
  RepaddedStreams streams;
  run_agreed(world, "padding " + o.input, [&] {
    streams = repad_streams(header, slots, o.document_multiple(), report.verification);
  });
  streams.header.provenance = provenance_of(context, o.input);
  if (!o.output.empty()) write_on_root(o, streams.header, streams.slots, context, report);
  add_checked_row(measured_row(streams.header, header.algorithm), report, outcome);
}

}  // namespace gyre

// gyre-pack: packs documents (or lengths drawn from a distribution, or batches of a training
// framework) into streams, and compares packers.

#include <fmt/format.h>

#include "apps/pack/inputs.hpp"
#include "apps/pack/more_labels.hpp"
#include "apps/pack/options.hpp"
#include "apps/pack/runs.hpp"
#include "comm/agree.hpp"
#include "harness/backend.hpp"
#include "packing/lengths.hpp"
#include "report/app.hpp"

namespace {

using namespace gyre;

/// Writes the slots of this rank's bins. If the backend has a device, it fills them, and the check
/// of the file compares them with the host's.
void write_slots(const PackOptions& o, const PackedHeader& header, const TokenSource& tokens,
                 AppContext& context, Backend& backend, RunReport& report) {
  const std::vector<int64_t> parts = split_bins(header, context.world.size());
  const int64_t first = parts[context.world.rank()];
  const int64_t last = parts[context.world.rank() + 1];
  run_agreed(context.world, "slots", [&] {
    const std::vector<int64_t> slots = header.slot_offsets();
    if (o.input.empty()) check_slots_fit(slots[last] - slots[first], memory_for_rank(context));
  });
  const bool check = o.check != "none", on_gpu = backend.on_gpu();
  PackedSlots slots, expected;
  Verification* const checks = check ? &report.verification : nullptr;
  if (check || !on_gpu) {
    expected = fill_slots(header, first, last, tokens);
    add_more_labels(o, header, first, last, expected, checks);
  }
  if (on_gpu)
    run_agreed(context.world, "packing on the device", [&] {
      slots = fill_slots(header, first, last, tokens, backend.stream());
      add_more_labels(o, header, first, last, slots, nullptr);
    });
  write_checked({.path = o.output,
                 .header = header,
                 .mine = on_gpu ? slots : expected,
                 .expected = expected,
                 .first = first,
                 .last = last,
                 .check = check},
                context.world, report.verification, context.outputs);
}

/// Packs documents, or lengths alone, with one packer, several or all.
void pack_lengths(const PackOptions& o, AppContext& context, Backend& backend, RunReport& report,
                  Outcome& outcome) {
  Communicator& world = context.world;
  Documents documents;
  LengthSpec spec;
  PrefixForest forest;
  PackJob job;
  job.algorithm = o.algorithm.empty() ? "first-fit-decreasing" : o.algorithm;
  job.by_step = o.by_step();
  job.multiple = o.document_multiple();
  job.repeats = o.repeats;
  job.check = o.check != "none";
  job.options = {.capacity = o.bin_slots(),
                 .min_bin_count = o.min_bins,
                 .bin_count_multiple = o.bin_multiple,
                 .seed = static_cast<uint64_t>(o.seed),
                 .max_items = o.max_items,
                 .oversize = o.oversize == "reject" ? Oversize::reject : Oversize::own_bin,
                 .cp = o.cp,
                 .time = o.attention.time_model()};
  if (o.dp > 1) job.options = options_for_ranks(job.options, o.dp);
  if (!o.input.empty()) documents = read_documents(world, o.input);
  std::vector<PackedBatch> batches;
  PackedHeader header;
  run_agreed(world, "packing", [&] {
    if (o.input.empty()) {
      spec = parse_length_spec(o.generate);
      job.lengths = draw_lengths(spec);
      header.vocab_size = synthetic_vocab;
      header.tokenizer = "synthetic";
    } else {
      forest = o.prefixes.forest_of({documents.tokens, documents.offsets}, o.bin_slots());
      job.lengths = forest.lengths();
      for (int64_t t = 0; t < forest.trees(); ++t)
        job.documents.push_back(forest.documents_of(forest.tree(t).front()).front());
      if (o.prefixes.share) outcome.notes += savings_text(forest);
      header.vocab_size = documents.vocab_size;
      header.tokenizer = documents.tokenizer;
    }
    if (job.lengths.empty()) report.nothing_to_verify = "no documents";
    check_lengths(job, documents);
    batches = run_packers(job, report, outcome.rows, outcome.notes);
    set_bins(header, batches, job.options.capacity, job.multiple);
    header.bins.prefixes = tables_of(forest);
    header.documents = std::ssize(job.lengths);
    header.algorithm = job.algorithm;
    header.names = documents.names;
    if (!o.rounding.wanted()) return;
    round_streams(header, o.round_options(), report.verification);
    outcome.notes += fmt::format("# streams rounded: {} slots in all, {} documents with padding\n",
                                 header.slot_offsets().back(), header.documents);
  });
  outcome.notes += judgement(o, header, world);
  if (o.output.empty()) return;
  describe_more_labels(o, header);
  const TokenSource tokens =
      o.input.empty() ? synthetic_tokens(spec.seed, synthetic_vocab) : tokens_of(forest, documents);
  header.provenance = provenance_of(context, o.input.empty() ? to_string(spec) : o.input);
  write_slots(o, header, tokens, context, backend, report);
}

ExitCode run(PackOptions& o, AppContext& context) {
  Communicator& world = context.world;
  std::string source = o.input;
  run_agreed(world, "options", [&] {
    check_options(o);
    o.report.metrics = metrics_of(o);
    if (o.unpack) refuse_report_options(context, "--unpack");
    compatibility_text(o.target, o.cp, false);  // throws for what no streams make sound
    if (o.input.empty()) source = to_string(parse_length_spec(o.generate));
  });
  Backend backend(context, o.backend);
  plan_outputs(context);
  if (o.unpack) {
    const std::string text =
        unpack_file(world, o.input, o.output, provenance_of(context, o.input), context.outputs);
    context.outputs.publish(context.quiet ? "" : text);
    return ExitCode::ok;
  }
  const std::string schema = o.input.empty() ? documents_schema : schema_of(world, o.input);
  const bool is_batch = schema == bshd_schema || schema == salm_schema;
  run_agreed(world, "options", [&] {
    if (is_batch)
      check_batch_options(o, schema);
    else
      check_audio_options(o, schema);
  });
  Fields facts{{"source", source}};
  if (!is_batch) facts.emplace_back("capacity", o.bin_slots());
  RunReport report = begin_report(context, facts, {{"hdf5", h5::library_version()}});
  backend.describe(report);
  start_run(context, report, o.report, 0);
  Outcome outcome;
  if (is_batch)
    pack_batch(o, schema, context, backend, report, outcome);
  else if (o.repad)
    repad_streams(o, context, report, outcome);
  else if (o.row > 0)
    pack_into_rows(o, context, report, outcome);
  else
    pack_lengths(o, context, backend, report, outcome);
  if (context.quiet) outcome.notes.clear();
  return finish_run(context, report, o.report, [&] {
    return shown_table(context, o.report, packing_table()).text(outcome.rows) + outcome.notes;
  });
}

}  // namespace

int main(int argc, char** argv) {
  PackOptions options;
  const AppInfo info{
      "gyre-pack", "Packs documents into streams, compares packers, converts batches.",
      "Examples: gyre-pack --input docs.h5 --capacity 8K --cp 2 -o packed.h5\n"
      "          gyre-pack --gen dist=long-tailed,max=64K --capacity 64K --algorithm all\n"
      "          gyre-pack --input packed.h5 --unpack -o docs.h5\n"
      "          gyre-pack --input packed.h5 --repad --cp 8 -o packed8.h5\n"
      "          gyre-pack --input docs.h5 --rows 4K --cp 2 -o batch.h5\n" +
          packer_help()};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare_options(table, options); },
      [&](AppContext& context) { return run(options, context); });
}

// gyre-pack: documents (or lengths drawn from a distribution, or batches of a training framework)
// into packed streams; packers compared.

#include <fmt/format.h>

#include "comm/agree.hpp"
#include "io/sha256.hpp"
#include "packing/lengths.hpp"
#include "report/app.hpp"
#include "report/options.hpp"
#include "report/pack_inputs.hpp"
#include "report/provenance.hpp"

namespace {

using namespace gyre;

struct Options {
  std::string input, generate, output, json, csv,
      algorithm = "first-fit-decreasing", oversize = "reject", tail = "own-segment", check = "last";
  int64_t capacity = 8192, min_bins = 0, bin_multiple = 1, seed = 1, max_items = 0, chunks = 1;
  int cp = 1, tp = 1, dp = 1, iterations = 1;
  bool unpack = false;
};

void declare(CLI::App& app, Options& o) {
  std::vector<std::string> names{"all"};
  for (const BinPacker& packer : bin_packers()) names.push_back(packer.name);
  add_option(app,
             {"--input",
              "What to pack (HDF5): gyre/documents, gyre/bshd or gyre/salm; or what to "
              "unpack: gyre/packed"},
             o.input);
  add_option(app, {"--gen", length_help()}, o.generate);
  add_option(app, {"-o,--output", "Write packed streams here (HDF5, gyre/packed), or documents"},
             o.output);
  add_flag(app, {"--unpack", "Turn packed streams back into documents, in their old order"},
           o.unpack);
  add_choice_option(app, {"--algorithm", "How documents come into bins"}, o.algorithm, names);
  add_size_option(app, {"--capacity", "Slots of a bin"}, o.capacity, 1);
  add_option(app, {"--cp", "Context-parallel ranks to pack for: segments take multiples of 2 cp"},
             o.cp, 1);
  add_option(app, {"--dp", "Data-parallel ranks: the number of bins is a multiple of it"}, o.dp, 1);
  add_option(app, {"--tp", "gyre/salm: ranks that share a sequence"}, o.tp, 1);
  add_size_option(app, {"--min-bins", "At least so many bins"}, o.min_bins);
  add_size_option(app, {"--bin-multiple", "The number of bins is a multiple of this"},
                  o.bin_multiple, 1);
  add_size_option(app, {"--max-items", "next-fit: most documents of a bin; 0: any number"},
                  o.max_items);
  add_size_option(app, {"--seed", "Of first-fit-shuffle"}, o.seed);
  add_choice_option(app, {"--oversize", "Documents longer than a bin"}, o.oversize,
                    {"reject", "own-bin"});
  add_size_option(app, {"--chunks", "gyre/bshd: streams to make of the rows"}, o.chunks, 1);
  add_choice_option(app, {"--tail", "gyre/bshd: what becomes of padding at the end of a row"},
                    o.tail, {"own-segment", "keep", "absorb"});
  add_option(app, {"-n,--iters", "Times to pack"}, o.iterations, 1);
  add_choice_option(app, {"-c,--check", "Verify bins and files, or nothing"}, o.check,
                    {"none", "last"});
  add_option(app, {"-J,--json", "Write the result here (gyre-result/1)"}, o.json);
  add_option(app, {"--csv", "Write the table here"}, o.csv);
}

/// Everything that is wrong with the options, at once.
void check_options(const Options& o) {
  Problems problems;
  if (o.input.empty() == o.generate.empty())
    problems.add("one of --input and --gen is needed, and not both");
  if (!o.output.empty() && o.algorithm == "all")
    problems.add("--output needs one --algorithm, not all");
  if (o.unpack && (o.input.empty() || o.output.empty()))
    problems.add("--unpack needs --input and --output");
  problems.throw_if_any("impossible configuration");
}

struct Outcome {
  std::vector<PackingRow> rows;
  std::string notes;
};

/// Documents, or lengths alone, through one packer or all.
void pack_lengths(const Options& o, AppContext& context, RunReport& report, Outcome& outcome) {
  Communicator& world = context.world;
  Documents documents;
  LengthSpec spec;
  PackJob job{{}, o.algorithm, {}, o.cp > 1 ? 2 * o.cp : 1, o.dp, o.iterations, o.check != "none"};
  job.options = {o.capacity,     o.min_bins,
                 o.bin_multiple, static_cast<uint64_t>(o.seed),
                 o.max_items,    o.oversize == "reject" ? Oversize::reject : Oversize::own_bin};
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
      for (int64_t i = 0; i < documents.count(); ++i) job.lengths.push_back(documents.length(i));
      header.vocab_size = documents.vocab_size;
      header.tokenizer = documents.tokenizer;
    }
    batches = run_packers(job, report, outcome.rows, outcome.notes);
    set_bins(header, batches, o.capacity, job.multiple);
  });
  if (o.output.empty()) return;
  header.documents = std::ssize(job.lengths);
  header.algorithm = o.algorithm;
  header.names = documents.names;
  const std::vector<int64_t> parts = split_bins(header, world.size());
  const int64_t first = parts[static_cast<size_t>(world.rank())];
  const int64_t last = parts[static_cast<size_t>(world.rank()) + 1];
  const TokenSource tokens =
      o.input.empty() ? synthetic_tokens(spec.seed, synthetic_vocab) : tokens_of(documents);
  header.provenance = provenance_of(context, o.input.empty() ? o.generate : o.input);
  write_checked(o.output, header, fill_slots(header, first, last, tokens), first, last, world,
                job.check, report.verification);
}

/// A batch of a training framework as packed streams.
void pack_batch(const Options& o, const std::string& schema, AppContext& context, RunReport& report,
                Outcome& outcome) {
  Communicator& world = context.world;
  ConvertedBatch batch;
  if (schema == bshd_schema) {
    const BshdArrays arrays = read_bshd(world, o.input);
    run_agreed(world, "converting " + o.input, [&] {
      ThdOptions options;
      options.sentinel = arrays.sentinel;
      options.slot_multiple = o.cp > 1 ? 2 * o.cp : 1;
      options.tail = o.tail == "absorb" ? Tail::absorb
                     : o.tail == "keep" ? Tail::keep
                                        : Tail::own_segment;
      batch = convert(arrays, o.chunks, options);
    });
  } else {
    const SalmArrays arrays = read_salm(world, o.input);
    SalmOptions options{arrays.pad_id, arrays.placeholder_id, o.cp, o.tp, TpRounding::per_rank};
    batch = convert(arrays, options, world, report.verification);
  }
  add_row(report, batch.row, {});
  outcome.rows.push_back(batch.row);
  outcome.notes += batch.notes;
  if (o.output.empty()) return;
  batch.header.provenance = provenance_of(context, o.input);
  const bool root = context.root();  // these are small: one rank brings all
  write_checked(o.output, batch.header, root ? batch.slots : PackedSlots(), 0,
                root ? batch.header.bin_count() : 0, world, o.check != "none", report.verification);
}

ExitCode run(const Options& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o); });
  if (o.unpack) {
    const std::string text = unpack_file(world, o.input, o.output, provenance_of(context, o.input));
    if (context.root() && !context.quiet) fmt::print("{}", text);
    return ExitCode::ok;
  }
  run_on_root(world, "outputs", [&] {
    for (const std::string& path : {o.json, o.csv, o.output})
      check_output_place(path);
  });
  RunReport report = begin_report(context,
                                  {{"source", o.input.empty() ? o.generate : o.input},
                                   {"capacity", o.capacity},
                                   {"cp", int64_t{o.cp}},
                                   {"dp", int64_t{o.dp}},
                                   {"iters", int64_t{o.iterations}}},
                                  {{"hdf5", h5::library_version()}});
  if (!o.input.empty()) report.inputs = {{o.input, sha256_of_file(world, o.input)}};
  if (context.root() && !context.quiet) fmt::print("{}", header_text(report));
  Outcome outcome;
  const std::string schema = o.input.empty() ? documents_schema : schema_of(world, o.input);
  if (schema == bshd_schema || schema == salm_schema)
    pack_batch(o, schema, context, report, outcome);
  else
    pack_lengths(o, context, report, outcome);
  run_on_root(world, "report", [&] {
    present_packing(report, outcome.rows, outcome.notes, context.quiet);
    if (!o.csv.empty()) write_file_atomically(o.csv, packing_table().csv(outcome.rows));
    if (!o.json.empty()) write_json(report, o.json);
  });
  return exit_code_of(judge(report));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const AppInfo info{"gyre-pack",
                     "Packs documents into streams, compares packers, converts batches.",
                     "Examples: gyre-pack --input docs.h5 --capacity 8K --cp 2 -o packed.h5\n"
                     "          gyre-pack --gen dist=long-tailed,count=100K,max=64K --capacity 64K "
                     "--algorithm all\n"
                     "          gyre-pack --input packed.h5 --unpack -o docs.h5"};
  return run_app(
      argc, argv, info, [&](CLI::App& app) { declare(app, options); },
      [&](AppContext& context) { return run(options, context); });
}

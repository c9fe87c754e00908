// gyre-shard: packed streams over context-parallel ranks: who owns what, who computes what, who
// needs whose keys, under every layout, for any number of ranks.

#include <fmt/format.h>

#include "comm/agree.hpp"
#include "io/sha256.hpp"
#include "io/shard_file.hpp"
#include "report/app.hpp"
#include "report/options.hpp"
#include "report/packed_streams.hpp"
#include "report/packing_report.hpp"
#include "report/provenance.hpp"
#include "report/sharding_report.hpp"

namespace {

using namespace gyre;

struct Options {
  std::string input, generate, layout = "all", output, svg, json, csv, dtype = "bf16",
                               check = "last", algorithm = "first-fit-shuffle";
  int cp = 2, heads = 32, kv_heads = 8, head_dim = 128;
  int64_t capacity = 65536, chunk = 0, stripe = 1, bin = 0;
  double tflops = 400, gbytes_per_s = 50;
  bool repad = false;
};

void declare(CLI::App& app, Options& o) {
  std::vector<std::string> names{"all"};
  for (const LayoutKind& kind : layout_kinds()) names.push_back(kind.name);
  std::vector<std::string> packers;
  for (const BinPacker& packer : bin_packers()) packers.push_back(packer.name);
  add_option(app, {"--input", "Packed streams (HDF5, gyre/packed), as gyre-pack writes them"},
             o.input);
  add_option(app, {"--gen", length_help()}, o.generate);
  add_size_option(app, {"--capacity", "With --gen: slots of a bin"}, o.capacity, 1);
  add_choice_option(app, {"--algorithm", "With --gen: how documents come into bins"}, o.algorithm,
                    packers);
  add_option(app, {"--cp", "Context-parallel ranks, any number"}, o.cp, 1);
  add_choice_option(app, {"--layout", "Who owns which slots"}, o.layout, names);
  add_size_option(app, {"--chunk", "Slots of a chunk of the balanced layouts; 0: by size"},
                  o.chunk);
  add_size_option(app, {"--stripe", "Slots of a run of the striped layout"}, o.stripe, 1);
  add_flag(
      app,
      {"--repad", "Round the slots of every segment up to a multiple of 2 cp, for all layouts"},
      o.repad);
  add_option(app, {"--heads", "Query heads, for times"}, o.heads, 1);
  add_option(app, {"--kv-heads", "Key and value heads, for bytes"}, o.kv_heads, 1);
  add_option(app, {"--head-dim", "Elements of a head"}, o.head_dim, 1);
  add_choice_option(app, {"-d,--dtype", "Type of keys and values"}, o.dtype, {"f32", "bf16"});
  add_option(app, {"--tflops", "Attention rate of a rank, TFLOP/s, for times"}, o.tflops);
  add_option(app, {"--gbps", "What a rank receives, GB/s, for times"}, o.gbytes_per_s);
  add_size_option(app, {"--bin", "The bin that --svg draws"}, o.bin);
  add_option(app, {"--svg", "Draw the layouts here"}, o.svg);
  add_option(app, {"-o,--output", "Write the shards of one layout here (HDF5, gyre/shards)"},
             o.output);
  add_choice_option(app, {"-c,--check", "Verify round trips and sums, or nothing"}, o.check,
                    {"none", "last"});
  add_option(app, {"-J,--json", "Write the result here (gyre-result/1)"}, o.json);
  add_option(app, {"--csv", "Write the table here"}, o.csv);
}

/// Everything that is wrong with the options, at once.
void check_options(const Options& o) {
  Problems problems;
  if (o.input.empty() == o.generate.empty())
    problems.add("one of --input and --gen is needed, and not both");
  if (!o.output.empty() && o.layout == "all") problems.add("--output needs one --layout, not all");
  if (o.kv_heads > o.heads || o.heads % o.kv_heads != 0)
    problems.add("--heads {} is not a multiple of --kv-heads {}; the nearest is {}", o.heads,
                 o.kv_heads, round_up(o.heads, o.kv_heads));
  if (!(o.tflops > 0)) problems.add("--tflops {} must be positive", o.tflops);
  if (!(o.gbytes_per_s > 0)) problems.add("--gbps {} must be positive", o.gbytes_per_s);
  problems.throw_if_any("impossible configuration");
}

/// The streams to shard: from a file, or made up.
struct Streams {
  PackedHeader header;
  PackedSlots slots;  ///< of all bins, when something is checked or written
  std::vector<InputInfo> inputs;
  std::string origin;
};

Streams open_streams(const Options& o, Communicator& world) {
  Streams streams;
  PackedHeader& header = streams.header;
  const bool wanted = o.check != "none" || !o.output.empty();
  if (!o.input.empty()) {
    header = read_packed_header(world, o.input);
    streams.inputs = {{o.input, sha256_of_file(world, o.input)}};
    streams.origin = o.input;
    if (wanted) streams.slots = read_packed_slots(world, o.input, header, 0, header.bin_count());
    return streams;
  }
  run_agreed(world, "drawing lengths", [&] {
    streams.origin = generate_streams(o.generate, o.algorithm, o.capacity, 2 * o.cp, wanted, header,
                                      streams.slots);
  });
  return streams;
}

void check_bin_exists(const Options& o, const PackedHeader& header) {
  if (!o.svg.empty() && o.bin >= header.bin_count())
    throw_usage("--bin {}: there are {} bins; the last is {}", o.bin, header.bin_count(),
                header.bin_count() - 1);
}

struct Outcome {
  std::vector<ShardingRow> rows;
  std::string details;  ///< lines below the table
};

/// Plans, checks and writes one layout.
void do_layout(const Options& o, const LayoutKind& kind, const Streams& streams,
               const AttentionShape& shape, AppContext& context, RunReport& report,
               Outcome& outcome) {
  Communicator& world = context.world;
  LayoutOptions options{o.cp, o.stripe, o.chunk, shape.time_model()};
  ShardingPlan plan(streams.header, kind, options, o.repad);
  std::vector<RankCost> costs;
  ShardingRow row = plan_layout(plan, shape, world, costs);
  if (o.check != "none") {
    Verification checks(1);
    check_layout(plan, streams.slots, world, checks);
    row.check = checks.passed() ? "ok" : "FAILED";
    report.verification.merge(checks);
  }
  if (context.verbose) outcome.details += rank_costs_text(kind.name, costs, shape);
  add_row(report, row);
  outcome.rows.push_back(row);
  if (o.output.empty() || row.check == "FAILED") return;
  OutputFile output(world, o.output);
  ShardsHeader header = shards_header(plan);
  header.packed_sha256 = streams.inputs.empty() ? "" : streams.inputs[0].sha256;
  header.provenance = provenance_of(context, streams.origin);
  fill_shards(output, header, make_shard_rows(plan, streams.slots, world));
  if (o.check != "none")
    check_shard_file(plan, streams.slots, output.temporary_path(), header, world,
                     report.verification);
  if (report.verification.empty() || report.verification.passed()) output.commit();
}

ExitCode run(Options& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o); });
  run_on_root(world, "outputs", [&] {
    for (const std::string& path : {o.json, o.csv, o.svg, o.output}) check_output_place(path);
  });
  const Streams streams = open_streams(o, world);
  run_agreed(world, "--bin", [&] { check_bin_exists(o, streams.header); });
  const AttentionShape shape{o.heads,  o.kv_heads,    o.head_dim, o.dtype == "f32" ? 4 : 2,
                             o.tflops, o.gbytes_per_s};
  RunReport report = begin_sharding_report(context, streams.header, streams.origin, o.cp, shape);
  report.inputs = streams.inputs;
  if (context.root() && !context.quiet) fmt::print("{}", header_text(report));

  Outcome outcome;
  std::vector<std::string> refused;
  for (const LayoutKind& kind : layout_kinds()) {
    if (o.layout != "all" && o.layout != kind.name) continue;
    try {
      do_layout(o, kind, streams, shape, context, report, outcome);
    } catch (const Error& error) {
      if (!error.agreed() || error.code() != ExitCode::usage || o.layout != "all") throw;
      refused.push_back(error.what());
    }
  }
  run_on_root(world, "report", [&] {
    present_sharding(report, outcome.rows, refused, outcome.details, context.quiet);
    if (!o.csv.empty()) write_file_atomically(o.csv, sharding_table().csv(outcome.rows));
    if (!o.json.empty()) write_json(report, o.json);
    if (!o.svg.empty())
      write_file_atomically(o.svg,
                            picture_of_bin(streams.header, o.bin, o.layout,
                                           {o.cp, o.stripe, o.chunk, shape.time_model()}, o.repad));
  });
  return exit_code_of(judge(report));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const AppInfo info{
      "gyre-shard", "Shards packed streams over context-parallel ranks, under every layout.",
      "Examples: gyre-shard --input packed.h5 --cp 8 --layout all --svg layouts.svg\n"
      "          gyre-shard --gen dist=long-tailed,count=4096,max=16K --capacity 64K --cp 32\n"
      "          mpirun -n 4 gyre-shard --input packed.h5 --cp 4 --layout balanced -o shards.h5"};
  return run_app(
      argc, argv, info, [&](CLI::App& app) { declare(app, options); },
      [&](AppContext& context) { return run(options, context); });
}

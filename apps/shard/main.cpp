// gyre-shard shards packed streams over any number of context-parallel ranks under every layout. It
// shows what each rank owns and computes, and whose keys it needs.

#include <fmt/ranges.h>

#include <algorithm>

#include "apps/common/extras.hpp"
#include "apps/common/packed_streams.hpp"
#include "apps/common/registry_options.hpp"
#include "apps/shard/options.hpp"
#include "apps/shard/report.hpp"
#include "apps/shard/slots.hpp"
#include "comm/agree.hpp"
#include "harness/backend.hpp"
#include "io/schemas/shard_file.hpp"
#include "report/app.hpp"

namespace {

using namespace gyre;

/// The streams to shard, from a file or generated.
struct Streams {
  PackedHeader header;
  PackedSlots slots;  ///< slots of all bins, if checked or written
  std::string origin;
  std::string notes;  ///< "#" lines
};

Streams open_streams(const ShardOptions& o, AppContext& context) {
  Communicator& world = context.world;
  Streams streams;
  PackedHeader& header = streams.header;
  const bool wanted = o.check != "none" || o.files().wanted() || o.ulysses;
  if (!o.input.empty()) {
    header = read_packed_header(world, o.input);
    streams.notes = extras_text(header.extras, o.cp > 1) + other_labels_text(header.extras);
    if (o.cp > 1) header.extras.erase(attention_mask_extra);
    streams.origin = o.input;
    if (wanted) streams.slots = read_packed_slots(world, o.input, header, 0, header.bin_count());
    return streams;
  }
  run_agreed(world, "drawing lengths", [&] {
    const int64_t multiple = int64_t{chunks_for_all_layouts()} * o.cp;
    const int64_t capacity = o.capacity > 0 ? o.capacity : round_up(65536, multiple);
    streams.origin = generate_streams(
        o.generate, o.algorithm.empty() ? "first-fit-shuffle" : o.algorithm,
        {.capacity = capacity, .cp = o.cp, .time = o.layout_options().weights()}, multiple,
        memory_for_rank(context), header, wanted ? &streams.slots : nullptr);
  });
  return streams;
}

void check_bin_exists(const ShardOptions& o, const PackedHeader& header) {
  if (o.svg.empty()) return;
  if (header.bin_count() == 0) throw_usage("--svg: there is no bin to draw");
  if (o.bin >= header.bin_count())
    throw_usage("--bin {}: there are {} bins; the last is {}", o.bin, header.bin_count(),
                header.bin_count() - 1);
}

/// State that the layouts of a run share.
struct Setting {
  const ShardOptions& o;
  const Streams& streams;
  const AttentionShape& shape;
  AppContext& context;
  Backend& backend;
  RunReport& report;
  std::vector<ShardingResult> rows = {};
  std::string details = {};  ///< lines below the table
};

/// Plans, checks and writes one layout.
void do_layout(Setting& s, const LayoutKind& kind) {
  const ShardOptions& o = s.o;
  const Streams& streams = s.streams;
  AppContext& context = s.context;
  Communicator& world = context.world;
  ShardingPlan plan(streams.header, kind, o.layout_options(), o.repad);
  std::vector<RankCost> costs;
  ShardingResult row = plan_layout(plan, s.shape, world, costs);
  if (o.check != "none") {
    Verification checks(1);
    check_layout(plan, streams.slots, world, checks, &s.backend);
    if (!o.gradient.empty()) s.details += check_gather_gradients(plan, o.gradient, world, checks);
    if (!o.relayout.empty()) {
      ShardingPlan other(streams.header, find_layout(o.relayout), o.layout_options(), o.repad);
      s.details += check_relayout(plan, other, world, checks);
    }
    row.check = check_text(s.report, checks);
    s.report.verification.merge(checks);
  }
  if (context.verbose) s.details += rank_costs_text(kind.name, costs, s.shape);
  add_row(s.report, row);
  s.rows.push_back(row);
  if (!o.files().wanted() || row.check == "FAILED") return;
  ShardsHeader header = shards_header(plan);
  header.packed_sha256 = checksum_of(s.report, o.input);
  const std::vector<ShardRows> rows = make_shard_rows(plan, streams.slots, world, &s.backend);
  if (!o.yours.empty()) check_your_shards(rows, o.yours, header, world, s.report.verification);
  if (o.output.empty()) return;
  OutputFile output(world, o.output);
  header.provenance = provenance_of(context, streams.origin);
  fill_shards(output, header, rows);
  if (o.check != "none")
    check_shard_file(plan, streams.slots, output.temporary_path(), header, world,
                     s.report.verification);
  context.outputs.add(std::move(output));
}

/// Refuses a mask that shards of these streams cannot keep.
void check_mask(const ShardOptions& o, const PackedHeader& header) {
  if (o.mask.empty()) return;
  int64_t most = 0;
  for (int64_t b = 0; b < header.bin_count(); ++b)
    most = std::max<int64_t>(most, std::ssize(header.documents_of(b)));
  check_mask_contract(o.cp > 1, find_mask(o.mask), most);
}

ExitCode run(ShardOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_options(o); });
  o.report.metrics = metrics_of(o);
  Backend backend(context, o.backend);
  plan_outputs(context);
  if (!o.input.empty() && schema_of(world, o.input) == bshd_schema) return run_batch(o, context);
  const Streams streams = open_streams(o, context);
  run_agreed(world, "--bin", [&] {
    check_bin_exists(o, streams.header);
    check_mask(o, streams.header);
  });
  const AttentionShape shape = o.attention;
  RunReport report = begin_sharding_report(context, streams.header, streams.origin, shape);
  if (streams.header.slot_offsets().back() == 0) report.nothing_to_verify = "no slots";
  backend.describe(report);
  start_run(context, report, o.report, 0);
  if (o.ulysses) return run_heads_for_tokens(o, streams.header, streams.slots, context, report);

  Setting setting{.o = o,
                  .streams = streams,
                  .shape = shape,
                  .context = context,
                  .backend = backend,
                  .report = report,
                  .details = streams.notes};
  std::vector<std::string> refused;
  for (const LayoutKind& kind : layout_kinds()) {
    if (!o.layout.wants(kind.name)) continue;
    try {
      do_layout(setting, kind);
    } catch (const AgreedError& error) {
      if (error.code() != ExitCode::usage || !o.layout.several()) throw;
      refused.push_back(error.what());
    }
  }
  if (context.quiet) setting.details.clear();
  return finish_run(context, report, o.report, [&] {
    if (setting.rows.empty()) throw_usage("{}", fmt::join(refused, "\n"));
    if (!o.svg.empty())
      context.outputs.add_text(
          o.svg, picture_of_bin(streams.header, o.bin, o.layout, o.layout_options(), o.repad));
    std::string text = shown_table(context, o.report, sharding_table()).text(setting.rows);
    for (const std::string& reason : refused) text += fmt::format("# refused: {}\n", reason);
    return text + setting.details;
  });
}

}  // namespace

int main(int argc, char** argv) {
  ShardOptions options;
  const AppInfo info{
      "gyre-shard",
      "Shards packed streams over context-parallel ranks, under every layout; or batches of rows.",
      "Examples: gyre-shard --input packed.h5 --cp 8 --layout all --svg layouts.svg\n"
      "          gyre-shard --gen dist=long-tailed,count=4096,max=16K --capacity 64K --cp 32\n"
      "          mpirun -n 4 gyre-shard --input packed.h5 --cp 4 --layout balanced -o shards.h5\n"
      "          mpirun -n 4 gyre-shard --input packed.h5 --ulysses --heads 32 --kv-heads 8\n"
      "          gyre-shard --input batch.h5 --cp 4 --format bshd --tp 2\n" +
          layout_help()};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare_options(table, options); },
      [&](AppContext& context) { return run(options, context); });
}

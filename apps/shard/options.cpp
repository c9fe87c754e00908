#include "apps/shard/options.hpp"

#include <fmt/format.h>

#include "apps/common/workload_options.hpp"
#include "core/error.hpp"
#include "packing/bins.hpp"

namespace gyre {
namespace {

void declare_outputs(OptionTable& table, ShardOptions& o) {
  const AddOptions output(table, "Output");
  output.size("--bin", "The bin that --svg draws", o.bin);
  output("--svg", "Draw the layouts into this file (SVG)", o.svg).writes_text();
  output("-o,--output",
         "Write shards of one layout, shards of rows, or what --ulysses exchanges here (HDF5)",
         o.output)
      .writes_file();
  AddOptions(table, "Problem")(
      "--yours", "Compare a file of another program with what --output would write", o.yours)
      .reads_file();
  AddOptions(table, "Measurement")
      .choice("-c,--check", "Verify round trips and sums, or nothing", o.check, {"none", "last"});
  declare_report_options(table, o.report, {});  // metrics_of() knows the figures
}

}  // namespace

void declare_options(OptionTable& table, ShardOptions& o) {
  const AddOptions add(table, "Problem"), ranks(table, "Parallelism"),
      measurement(table, "Measurement");
  std::vector<std::string> packers;
  for (const BinPacker& packer : bin_packers()) packers.push_back(packer.name);
  add("--input",
      "What to shard (HDF5): packed streams as gyre-pack writes them (gyre/packed), or a batch of "
      "rows (gyre/bshd)",
      o.input)
      .reads_file();
  declare_generated(table, o.generate);
  const int chunks = chunks_for_all_layouts();
  add.size(
      "--capacity",
      fmt::format("With --gen: slots of a bin, a multiple of {} cp; 0: 64K, rounded up", chunks),
      o.capacity);
  add.choice("--algorithm", "With --gen: packer of documents into bins; default: first-fit-shuffle",
             o.algorithm, packers);
  ranks("--cp", "Context-parallel ranks, up to 65536, whatever the run has", o.cp, 1, max_ranks);
  layout_choices().declare(table, o.layout, "Who owns which slots", true);
  add.flag("--repad",
           fmt::format("Round slots of segments up to multiples of {} cp, for all layouts", chunks),
           o.repad);
  add.choice("--mask",
             "Mask of attention over the shards, refused if they cannot keep it; default: "
             "causal-segments, or causal with --format bshd",
             o.mask, mask_names());
  measurement.choice(
      "--gather-gradient",
      "With as many ranks as --cp: check how the gradient of a gathered stream comes back",
      o.gradient, {"split", "sum", "none", "all"});
  std::vector<std::string> layouts;
  for (const LayoutKind& kind : layout_kinds()) layouts.push_back(kind.name);
  measurement.choice(
      "--relayout",
      "With as many ranks as --cp: turn shards of each --layout into those of this one, and back",
      o.relayout, layouts);
  ranks.flag(
      "--ulysses",
      "Run Ulysses instead of layouts: ranks of the run slice tokens, and exchange them for heads",
      o.ulysses);
  declare_batch_options(table, o.batch);
  declare_attention_shape(table, o.attention);
  declare_backend_options(table, o.backend);
  declare_outputs(table, o);
}

std::vector<std::string> metrics_of(const ShardOptions& o) {
  if (o.ulysses) return {};
  return {"pair_ratio", "needed_share"};
}

void check_options(const ShardOptions& o) {
  ConfigErrors errors;
  if (o.input.empty() == o.generate.empty())
    errors.add("one of --input and --gen is needed, and not both");
  if (o.files().wanted() && o.layout.several() && !o.ulysses && o.batch.format != "bshd")
    errors.add("{} needs one --layout, not {}", o.output.empty() ? "--yours" : "--output",
               o.layout.name);
  if (!o.input.empty() && (o.capacity != 0 || !o.algorithm.empty()))
    errors.add("--capacity and --algorithm go with --gen; the bins of --input are packed");
  layout_choices().check(o.layout, errors);
  if (o.bin != 0 && o.svg.empty()) errors.add("--bin says what --svg draws, and there is none");
  check_head_groups(o.attention.heads, "--kv-heads", o.attention.kv_heads, errors);
  if (o.ulysses && (o.layout.name != ShardOptions().layout.name || !o.svg.empty() || o.repad ||
                    !o.gradient.empty() || !o.relayout.empty()))
    errors.add("--ulysses takes no --layout, --repad, --gather-gradient, --relayout or --svg");
  if (o.check == "none" && (!o.gradient.empty() || !o.relayout.empty() || !o.yours.empty()))
    errors.add("--gather-gradient, --relayout and --yours are checks: leave --check none out");
  if (o.ulysses && o.backend.on_gpu()) errors.add("--ulysses works on the host: --backend cpu");
  errors.throw_if_any("impossible configuration");
}

void check_batch_options(const ShardOptions& o) {
  ConfigErrors errors;
  if (!o.svg.empty() || o.repad || o.ulysses || !o.gradient.empty() || !o.relayout.empty())
    errors.add(
        "'{}' is a batch of rows: --repad, --ulysses, --gather-gradient, --relayout and --svg are "
        "for packed streams, which gyre-pack makes of it",
        o.input);
  if (o.files().wanted() && o.batch.format != "bshd")
    errors.add(
        "'{}' is a batch of rows: --output and --yours take --format bshd; streams of segments "
        "are shards of what gyre-pack makes of it",
        o.input);
  if (o.backend.on_gpu()) errors.add("batches are sharded on the host: --backend cpu");
  const BatchOptions& batch = o.batch;
  const bool swapped = o.layout.wants(default_layout().name);
  if (o.layout.several() && o.layout.name != ShardOptions().layout.name)
    errors.add("'{}' is a batch of rows: --layout takes one layout, not {}", o.input,
               o.layout.name);
  if (batch.format == "bshd" && (!swapped || batch.chunks > 1 || !batch.tail.empty()))
    errors.add(
        "--format bshd cuts whole rows by dual-chunk-swap: --layout, --chunks and --tail "
        "are for --format thd");
  if (batch.format == "thd" && batch.tp > 1)
    errors.add("--tp {} pads the rows of --format bshd", batch.tp);
  errors.throw_if_any("impossible configuration");
}

}  // namespace gyre

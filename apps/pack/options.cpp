#include "apps/pack/options.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <sstream>

#include "apps/pack/report.hpp"
#include "core/error.hpp"
#include "io/schemas/batch_file.hpp"
#include "packing/bins.hpp"
#include "packing/labels_ahead.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

/// Declares the options for the shape of streams, or of rows.
void declare_shape_options(OptionTable& table, PackOptions& o) {
  const AddOptions add(table, "Advanced");
  add.size("--chunks", "gyre/bshd: number of streams that the rows become", o.chunks, 1);
  add.choice("--tail",
             "What becomes of padding at the end of a row (gyre/bshd), or of a stream that is "
             "rounded: not absorb",
             o.tail, {"own-segment", "keep", "absorb"});
  add.size("--stream-multiple",
           "Slots of every stream of documents are a multiple of this, a multiple of 2 cp tp",
           o.rounding.multiple, 1);
  add.size("--stream-slots", "Slots of every stream of documents; 0: as many as needed",
           o.rounding.slots);
  add.size("--rows",
           "Pack documents, in their order, into rows of so many slots (gyre/bshd); 0: streams",
           o.row);
  add("--mtp",
      "Multi-token prediction: labels of so many tokens ahead; from the 2nd on as extras, "
      "labels_2, labels_3, ...",
      o.mtp, 1, most_labels_ahead);
  add.choice(
      "--tp-rounding",
      "gyre/salm: --tp divides the slots of every context-parallel rank (per-rank), or of all "
      "together, as upstream does (total)",
      o.tp_rounding, {"per-rank", "total"});
  add.flag("--repad",
           "Pad packed streams again, for another --cp: segments take multiples of 2 cp tp",
           o.repad);
}

AttentionCapabilities capabilities_of(const std::string& list) {
  AttentionCapabilities can;
  const std::vector<std::pair<std::string, bool*>> known{{"varlen", &can.varlen},
                                                         {"padded-offsets", &can.padded_offsets},
                                                         {"cp-aware", &can.cp_aware}};
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    if (item == "none") continue;
    bool found = false;
    std::vector<std::string> names{"none"};
    for (const auto& [name, flag] : known) {
      names.push_back(name);
      if (item == name) *flag = found = true;
    }
    if (!found)
      throw_usage("--attention: '{}' is none of {}{}", item, fmt::join(names, ", "),
                  nearest(item, names).empty() ? "" : "; nearest: " + nearest(item, names));
  }
  return can;
}

DeviceCapability device_of(const std::string& text) {
  DeviceCapability device;
  const char* const end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, device.major);
  if (major.ec == std::errc() && major.ptr != end && *major.ptr == '.') {
    const auto minor = std::from_chars(major.ptr + 1, end, device.minor);
    if (minor.ec == std::errc() && minor.ptr == end && device.major > 0 && device.minor >= 0)
      return device;
  }
  throw_usage("--device '{}' is no compute capability such as 9.0", text);
}

std::vector<std::string> packers_by_step() {
  std::vector<std::string> names;
  for (const BinPacker& packer : bin_packers())
    if (packer.by_step) names.push_back(packer.name);
  return names;
}

}  // namespace

void declare_options(OptionTable& table, PackOptions& o) {
  const AddOptions add(table, "Problem"), ranks(table, "Parallelism"),
      measurement(table, "Measurement"), output(table, "Output");
  std::vector<Described> packers;
  for (const BinPacker& packer : bin_packers()) packers.push_back({packer.name, packer.summary});
  add("--input",
      "What to pack (HDF5): gyre/documents, gyre/bshd or gyre/salm; or what to unpack: gyre/packed",
      o.input)
      .reads_file();
  declare_generated(table, o.generate);
  output("-o,--output", "Write packed streams here (HDF5, gyre/packed), or documents", o.output)
      .writes_file();
  output("--encoder",
         "gyre/salm: write here the encodings that the ranks make together, and their gradients "
         "(HDF5, gyre/encoder)",
         o.encoder.output)
      .writes_file();
  add("--yours", "gyre/salm: compare a file of another program with what --encoder would write",
      o.encoder.yours)
      .reads_file();
  add.flag("--unpack", "Turn packed streams back into documents, in their old order", o.unpack)
      .same_results();
  add.choices("--algorithm", "Packer of documents into bins; default: first-fit-decreasing",
              o.algorithm, packers)
      .in_key();
  add.size("--capacity", "Slots of a bin; 0: 8K, rounded up to what --cp needs", o.capacity);
  ranks("--cp", "Context-parallel ranks to pack for; above 1, segments take multiples of 2 cp",
        o.cp, 1, max_ranks);
  ranks("--dp", "Data-parallel ranks: the number of bins is a multiple of it", o.dp, 1, max_ranks);
  ranks(
      "--tp",
      "Tensor-parallel ranks that share a sequence: segments take multiples of 2 cp tp (gyre/salm: "
      "the stream alone grows; gyre/bshd: not used)",
      o.tp, 1, max_ranks);
  add.size("--min-bins", "Least number of bins", o.min_bins);
  add.size("--bin-multiple", "The number of bins is a multiple of this", o.bin_multiple, 1);
  add.size("--max-items", "Largest number of documents in a bin of next-fit; 0: no limit",
           o.max_items);
  add.seed("Seed of the order of first-fit-shuffle", o.seed);
  add.choice("--oversize",
             "What becomes of documents that are longer than a bin, or (drop) than a row",
             o.oversize, {"reject", "own-bin", "drop"});
  declare_attention_shape(table, o.attention);
  declare_shape_options(table, o);
  declare_prefix_options(table, o.prefixes);
  declare_target_options(table, o.target);
  declare_backend_options(table, o.backend);
  declare_repeats(table, "Timed repetitions of packing; the time of one is no measurement",
                  o.repeats);
  measurement.choice("-c,--check", "Verify bins and files, or nothing", o.check, {"none", "last"});
  declare_report_options(table, o.report, {});  // metrics_of() knows the figures
}

bool PackOptions::by_step() const {
  return std::ranges::any_of(packers_by_step(),
                             [this](const std::string& name) { return lists(algorithm, name); });
}

RoundOptions PackOptions::round_options() const {
  RoundOptions options;
  options.multiple = document_multiple();
  options.cp = cp;
  options.tp = tp;
  options.stream_multiple = rounding.multiple;
  options.stream_slots = rounding.slots;
  options.tail = tail == "keep" ? Tail::keep : Tail::own_segment;
  return options;
}

std::vector<std::string> metrics_of(const PackOptions& o) {
  std::vector<std::string> metrics = {"utilisation", "cost_imbalance"};
  if (o.repeats.iterations != 1) metrics.emplace_back("documents_per_s");
  return metrics;
}

void check_options(const PackOptions& o) {
  ConfigErrors errors;
  if (o.input.empty() == o.generate.empty())
    errors.add("one of --input and --gen is needed, and not both");
  if (!o.output.empty() && lists_several(o.algorithm))
    errors.add("--output needs one --algorithm, not {}", o.algorithm);
  if (o.unpack && (o.input.empty() || o.output.empty()))
    errors.add("--unpack takes --input and --output");
  const bool rounded = o.rounding.wanted();
  check_prefix_options(o.prefixes, errors);
  if (o.prefixes.share && (o.input.empty() || o.unpack || o.repad || o.row > 0 || rounded))
    errors.add(
        "--share-prefixes packs the documents of --input into streams: --gen, --unpack, --repad, "
        "--rows, --stream-multiple and --stream-slots do not apply");
  if (o.repad && (o.input.empty() || o.unpack || o.row > 0 || rounded || o.tail != "own-segment"))
    errors.add("--repad takes the packed streams of --input as they are");
  if (o.row > 0 && (o.unpack || rounded || o.tp > 1 || !o.algorithm.empty() || o.capacity > 0 ||
                    o.dp > 1 || o.min_bins > 0 || o.bin_multiple > 1 || o.max_items > 0))
    errors.add(
        "--rows fills rows in order: --algorithm, --capacity, --tp, --dp, --min-bins, "
        "--bin-multiple, --max-items, --stream-multiple and --stream-slots do not apply");
  if (o.oversize == (o.row > 0 ? "own-bin" : "drop"))
    errors.add("--oversize {}: {}", o.oversize,
               o.row > 0 ? "rows have one width" : "--rows alone leaves documents out");
  if (rounded && o.tail == "absorb")
    errors.add("--tail absorb counts padding of a stream as tokens; keep and own-segment do not");
  if ((o.repad || o.row > 0) && o.backend.on_gpu())
    errors.add("--repad and --rows work on the host: --backend cpu");
  if (o.unpack && o.backend.on_gpu()) errors.add("--unpack works on the host: --backend cpu");
  if (o.mtp > 1 && (o.unpack || o.row > 0))
    errors.add("--mtp {} adds to packed streams: not with --unpack or --rows", o.mtp);
  if (o.mtp > 1 && o.output.empty()) errors.add("--mtp {} needs --output", o.mtp);
  if (o.max_items > 0 && lists_several(o.algorithm) && !lists(o.algorithm, "next-fit"))
    errors.add("--max-items is an option of next-fit, which --algorithm {} lacks", o.algorithm);
  if (o.mtp > 1 && o.prefixes.share)
    errors.add(
        "--mtp {}: with --share-prefixes, documents go on differently after a shared prefix, so "
        "that its tokens have no such label; pack without one of the two",
        o.mtp);
  check_head_groups(o.attention.heads, "--kv-heads", o.attention.kv_heads, errors);
  if (o.attention != AttentionShape() && !o.by_step())
    errors.add("{} go with --algorithm {}", attention_options, fmt::join(packers_by_step(), ", "));
  errors.throw_if_any("impossible configuration");
}

void check_batch_options(const PackOptions& o, const std::string& schema) {
  if (!o.algorithm.empty() || o.capacity > 0 || o.dp > 1 || o.min_bins > 0 || o.max_items > 0 ||
      o.bin_multiple > 1 || o.row > 0 || o.rounding.wanted() || o.prefixes.share)
    throw_usage(
        "'{}' is a batch of packed rows ({}): --algorithm, --capacity, --dp, --min-bins, "
        "--bin-multiple, --max-items, --rows, --stream-multiple, --stream-slots and "
        "--share-prefixes do not apply",
        o.input, schema);
  check_audio_options(o, schema);
}

void check_audio_options(const PackOptions& o, const std::string& schema) {
  const bool asked = o.encoder.wanted() || o.tp_rounding != PackOptions().tp_rounding;
  if (asked && schema != salm_schema)
    throw_usage("--encoder, --yours and --tp-rounding are for text with audio ({}), not {}",
                salm_schema, schema);
  if (!o.encoder.yours.empty() && o.check == "none")
    throw_usage("--yours is a check: leave --check none out");
}

void declare_target_options(OptionTable& table, AttentionTarget& target) {
  const AddOptions add(table, "Advanced");
  add("--attention",
      "Pack only if attention with these abilities (varlen, padded-offsets, cp-aware; joined by "
      "commas, or none) reads the streams correctly",
      target.attention)
      .same_results();
  add("--fused-flag", "With --attention: value of NVTE_FUSED_ATTN; only 0 matters",
      target.fused_flag)
      .same_results();
  add("--device", "With --attention: compute capability of the GPU, e.g. 9.0", target.device)
      .same_results();
  add.choice("--gradient-probe",
             "With --attention: whether the fused gradient on that device agrees with a reference",
             target.probe, {"not-run", "agrees", "differs"})
      .same_results();
  add.flag("--unpacked",
           "With --attention: judge rows of one document each, with their padding, not streams",
           target.unpacked)
      .same_results();
  add.flag("--forward-only", "With --attention: there is no backward pass", target.forward_only)
      .same_results();
  add.flag("--linear-attention", "With --attention: the model has linear-attention layers",
           target.linear_attention)
      .same_results();
}

ParallelSetup setup_of(const AttentionTarget& target, int cp, bool padding) {
  if (target.attention.empty() &&
      (target.fused_flag != "unset" || !target.device.empty() || target.probe != "not-run" ||
       target.forward_only || target.linear_attention || target.unpacked))
    throw_usage(
        "--fused-flag, --device, --gradient-probe, --unpacked, --forward-only and "
        "--linear-attention go with --attention");
  ParallelSetup setup;
  setup.packed = !target.unpacked;
  setup.padding = padding;
  setup.cp = cp;
  setup.attention = capabilities_of(target.attention);
  if (target.fused_flag != "unset") setup.fused_flag = target.fused_flag;
  if (!target.device.empty()) setup.device = device_of(target.device);
  if (target.probe == "agrees") setup.probe = GradientProbe::agrees;
  if (target.probe == "differs") setup.probe = GradientProbe::differs;
  setup.forward_only = target.forward_only;
  setup.linear_attention = target.linear_attention;
  return setup;
}

std::string compatibility_text(const AttentionTarget& target, int cp, bool padding) {
  const ParallelSetup setup = setup_of(target, cp, padding);
  if (target.attention.empty()) return "";
  const Compatibility answer = require_compatible(setup);
  if (answer.level == Compatibility::Level::ok)
    return fmt::format("# compatibility: ok: {} rows with cp {}\n",
                       setup.packed ? "packed" : "unpacked", cp);
  return fmt::format("# compatibility: warning: {}\n", answer.message);
}

}  // namespace gyre

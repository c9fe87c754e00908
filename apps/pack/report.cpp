#include "apps/pack/report.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "apps/common/extras.hpp"
#include "packing/lengths.hpp"
#include "report/options.hpp"
#include "runtime/clock.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// Ratio of the largest cost to its lower bound, the larger of the mean and the longest document's
/// cost. If it is 1, no packing into as many bins can be better.
double over_bound(const PackingResult& row) {
  const double n = row.longest;
  const double bound = std::max(row.measures.mean_cost, n * (n + 1) / 2);
  return bound > 0 ? row.measures.max_cost / bound : 1;
}

/// Reads the packed file at `path` back and compares it with its source. All ranks end with the
/// same checks.
void check_packed_file(const std::string& path, const PackedFile& file, Communicator& world,
                       Verification& checks) {
  const PackedHeader& header = file.header;
  const PackedSlots& mine = file.expected;
  Verification local(checks.tolerance_scale());
  Check& tables = local.check("tables read back", 0);
  Check& contents = local.check("slots read back", 0);
  const PackedHeader read = read_packed_header(world, path);
  tables.add_all(read.bins.bin_offsets, header.bins.bin_offsets, "bin_offsets");
  tables.add_all(read.bins.document, header.bins.document, "document");
  tables.add_all(read.bins.cu_seqlens, header.bins.cu_seqlens, "cu_seqlens");
  tables.add_all(read.bins.cu_seqlens_padded, header.bins.cu_seqlens_padded, "cu_seqlens_padded");
  compare_extras(tables, read.extras, header.extras);
  const PackedSlots slots = read_packed_slots(world, path, read, file.first, file.last);
  contents.add_all(slots.ids, mine.ids, "ids");
  contents.add_all(slots.embeddings, mine.embeddings, "embeddings");
  contents.add_all(slots.labels, mine.labels, "labels");
  contents.add_all(slots.positions, mine.positions, "positions");
  compare_slot_extras(contents, slots, mine, "slots");
  if (header.slot_offsets().back() == 0) contents.add_nothing();
  local.merge_over(world);
  checks.merge(local);
}

/// Cost imbalance of data-parallel ranks if bins are dealt in turn, and by cost.
std::string ranks_text(const PackingResult& row, int dp) {
  const std::vector<double>& costs = row.measures.costs;
  const auto ratio = [&](const std::vector<std::vector<int64_t>>& dealt) {
    std::vector<double> sums;
    for (const std::vector<int64_t>& bins : dealt) {
      sums.push_back(0);
      for (int64_t bin : bins) sums.back() += costs[bin];
    }
    return 1 + imbalance(sums);
  };
  return fmt::format("# {} over dp={} ranks: cost max/mean {:.4f} in turn, {:.4f} by cost\n",
                     row.algorithm, dp, ratio(assign_bins_to_ranks(std::ssize(costs), dp)),
                     ratio(balance_over_groups(costs, dp)));
}

/// The "#" line with the time of a step by each packer.
std::string steps_text(const std::vector<PackingResult>& rows, const TimeModel& time) {
  std::vector<std::string> steps;
  for (const PackingResult& row : rows)
    steps.push_back(fmt::format("{} {}", row.algorithm, si_text(row.step_s, "s")));
  return fmt::format(
      "# attention of a step if ranks share each document as it needs (for other programs: "
      "--pairs-per-key {:.0f}): "
      "{}\n",
      std::max(1.0, std::round(time.seconds_per_kv_token / time.seconds_per_pair)),
      fmt::join(steps, ", "));
}

}  // namespace

const Table<PackingResult>& packing_table() {
  using Row = PackingResult;
  static const Table<Row> table({
      {"algorithm", "", 29, 0, &Row::algorithm, Align::left},
      Column<Row>{"items", "", 8, 0, &Row::items}.extra(),
      {"tokens", "", 11, 0, [](const Row& r) { return r.measures.tokens; }},
      {"bins", "", 8, 0, [](const Row& r) { return r.measures.bins; }},
      {"util", "%", 7, 2, [](const Row& r) { return 100 * r.measures.utilisation; }},
      {"eff", "%", 7, 2, [](const Row& r) { return 100 * r.measures.efficiency; }},
      {"pad", "%", 6, 2,
       [](const Row& r) {
         const double all = r.measures.tokens + r.measures.padding;
         return all > 0 ? 100 * r.measures.padding / all : 0;
       }},
      Column<Row>{"balance", "", 8, 4, [](const Row& r) { return r.measures.balance; }}.extra(),
      {"cost", "max/mean", 9, 4, [](const Row& r) { return r.measures.cost_imbalance; }},
      Column<Row>{"cost_bound", "max/bound", 10, 4, [](const Row& r) { return over_bound(r); }}
          .extra(),
      Column<Row>{"step", "ms", 10, 3, [](const Row& r) { return 1e3 * r.step_s; }}.extra(),
      Column<Row>{"time", "ms", 10, 3, [](const Row& r) { return r.time_ms.median; }}.doubted(
          [](const Row& r) { return !breaches_of(r.timing).empty(); }),
      {"check", "", 6, 0, &Row::check, Align::left},
  });
  return table;
}

PackingResult measured_row(const PackedHeader& header, const std::string& algorithm) {
  std::vector<int64_t> lengths, slots;
  std::vector<Bin> bins;
  for (int64_t b = 0; b < header.bin_count(); ++b) {
    const auto real = header.cu_seqlens(b), padded = header.cu_seqlens_padded(b);
    Bin& bin = bins.emplace_back();
    for (size_t i = 0; i + 1 < real.size(); ++i) {
      bin.push_back(std::ssize(lengths));
      lengths.push_back(real[i + 1] - real[i]);
      slots.push_back(padded[i + 1] - padded[i]);
    }
  }
  const int64_t capacity = std::max<int64_t>(1, header.bins.bin_capacity);
  const BinMeasures costs = measure_bins(bins, lengths, capacity);
  PackingResult row;
  row.algorithm = algorithm;
  row.items = std::ssize(lengths);
  row.measures = measure_bins(bins, slots, capacity);
  row.measures.tokens = costs.tokens;
  row.measures.padding = header.slot_offsets().back() - costs.tokens;
  row.measures.costs = costs.costs;
  row.measures.max_cost = costs.max_cost;
  row.measures.mean_cost = costs.mean_cost;
  row.measures.cost_imbalance = costs.cost_imbalance;
  row.longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  row.time_ms.median = std::nan("");  // nothing was packed
  return row;
}

void check_lengths(const PackJob& job, const Documents& documents) {
  if (job.options.oversize == Oversize::own_bin) return;
  if (job.options.capacity % job.multiple != 0) return;  // pack_documents throws for it
  const auto oversized = longest_above(job.lengths, job.options.capacity);
  if (!oversized) return;
  const int64_t slots = round_up(oversized->length, job.multiple);
  throw_usage(
      "{} of {} tokens takes {} slots, a bin has {}{}; --capacity {} would hold all, "
      "--oversize own-bin gives each a bin of its own, {}",
      documents.count() > 0 ? documents.label(job.documents[oversized->item])
                            : fmt::format("document {}", oversized->item),
      oversized->length, slots, job.options.capacity, oversized->others_text(), slots,
      documents.count() > 0 ? "gyre-import --max-tokens cuts documents"
                            : fmt::format("max={} in --gen cuts documents", job.options.capacity));
}

std::vector<PackedBatch> run_packers(const PackJob& job, RunReport& report,
                                     std::vector<PackingResult>& rows, std::string& notes) {
  std::vector<PackedBatch> batches;
  std::vector<std::string> refused;
  const bool several = lists_several(job.algorithm);
  std::vector<int64_t> slots;
  for (const int64_t length : job.lengths) slots.push_back(round_up(length, job.multiple));
  for (const BinPacker& packer : bin_packers()) {
    if (!lists(job.algorithm, packer.name)) continue;
    BinOptions options = job.options;
    if (packer.pack != next_fit && several) options.max_items = 0;
    Repeats repeats(job.repeats, nullptr);
    set_current_step(packer.name);
    try {
      while (repeats.next())
        repeats.time([&] { batches = pack_documents(job.lengths, job.multiple, packer, options); });
    } catch (const Error& error) {
      if (!several || error.code() != ExitCode::usage) throw;
      refused.push_back(fmt::format("{}: {}", packer.name, error.what()));
      continue;
    }
    std::vector<Bin> bins;
    for (const PackedBatch& batch : batches) bins.push_back(batch.documents);
    PackingResult row;
    row.algorithm = packer.name;
    row.items = std::ssize(job.lengths);
    row.measures = measure_bins(bins, job.lengths, options.capacity, job.multiple);
    if (!job.lengths.empty())
      row.longest = *std::max_element(job.lengths.begin(), job.lengths.end());
    if (job.by_step) row.step_s = step_seconds(bins, slots, options);
    set_times(row, repeats, job.repeats);
    if (job.check) {
      Verification checks(report.verification.tolerance_scale());
      check_bins(bins, job.lengths, options.capacity, job.multiple, packer.name, checks);
      row.check = check_text(report, checks);
      report.verification.merge(checks);
    }
    if (options.dp > 1) notes += ranks_text(row, options.dp);
    add_row(report, row);
    rows.push_back(row);
  }
  if (rows.empty()) throw_usage("{}", fmt::join(refused, "\n"));
  if (job.by_step) notes += steps_text(rows, job.options.time);
  for (const std::string& reason : refused) notes += fmt::format("# refused: {}\n", reason);
  return batches;
}

void check_bins(std::span<const Bin> bins, std::span<const int64_t> lengths, int64_t capacity,
                int64_t multiple, const std::string& algorithm, Verification& checks) {
  Check& once = checks.check("items in one bin", 0);
  Check& fits = checks.check("bins within capacity", 0);
  std::vector<int> times(lengths.size(), 0);
  for (size_t b = 0; b < bins.size(); ++b) {
    int64_t slots = 0, longest = 0;
    for (int64_t item : bins[b]) {
      ++times[item];
      const int64_t length = round_up(lengths[item], multiple);
      slots += length;
      longest = std::max(longest, length);
    }
    fits.add(std::max<int64_t>(0, slots - std::max(capacity, longest)), 0,
             [&] { return fmt::format("{} bin {}: {} slots", algorithm, b, slots); });
  }
  for (size_t i = 0; i < times.size(); ++i)
    once.add(times[i], 1, [&] { return fmt::format("{} item {}", algorithm, i); });
  if (lengths.empty())  // nothing to pack: both hold
    for (Check* check : {&once, &fits}) check->add_nothing();
}

void write_checked(const PackedFile& file, Communicator& world, Verification& checks,
                   Outputs& outputs) {
  OutputFile output(world, file.path);
  fill_packed(output, file.header, file.mine);
  if (file.check) check_packed_file(output.temporary_path(), file, world, checks);
  outputs.add(std::move(output));
}

void set_times(PackingResult& row, const Repeats& times, const RepeatOptions& repeats) {
  const Timing timing = times.timing();
  row.time_ms = timing.statistics();
  if (repeats.iterations != 1) row.timing = timing;
}

void add_row(RunReport& report, PackingResult& row) {
  row.key = {{"algorithm", row.algorithm}};
  if (!row.timing.samples_ms.empty())
    report.foms.push_back({"documents_per_s",
                           1e3 * static_cast<double>(row.items) / row.time_ms.median, "1/s",
                           row.key});
  report.foms.push_back({"utilisation", row.measures.utilisation, "of slots", row.key, 1});
  report.foms.push_back({"cost_imbalance", row.measures.cost_imbalance, "max/mean", row.key});
  report.results.push_back(entry_of(row, packing_table()));
}

std::string packer_help() {
  std::string text = "Packers:\n";
  for (const BinPacker& packer : bin_packers())
    text += fmt::format("  {:31}{}\n", packer.name, packer.summary);
  return text;
}

}  // namespace gyre

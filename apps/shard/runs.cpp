#include "apps/shard/runs.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "apps/common/extras.hpp"
#include "apps/shard/ulysses.hpp"
#include "comm/agree.hpp"
#include "io/sha256.hpp"
#include "report/provenance.hpp"

namespace gyre {
namespace {

/// Prints the table and the "#" lines below it, and writes the requested files.
template <class Row>
ExitCode present(const ShardOptions& o, AppContext& context, RunReport& report,
                 const Table<Row>& table, const std::vector<Row>& rows, const char* key,
                 const std::string& notes = "") {
  for (const Row& row : rows) {
    ResultEntry entry = entry_of(row, table);
    entry.verified.reset();
    if (!report.verification.empty()) entry.verified = report.verification.passed();
    entry.key = {*std::find_if(entry.measurements.begin(), entry.measurements.end(),
                               [&](const auto& field) { return field.first == key; })};
    report.results.push_back(std::move(entry));
  }
  return finish_run(context, report, o.report, [&] {
    return shown_table(context, o.report, table).text(rows) + (context.quiet ? "" : notes);
  });
}

}  // namespace

ExitCode run_batch(const ShardOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_batch_options(o); });
  const BshdArrays arrays = read_bshd(world, o.input);
  RunReport report = begin_report(context,
                                  {{"source", o.input},
                                   {"cp", int64_t{o.cp}},
                                   {"format", o.batch.format},
                                   {"rows", arrays.rows},
                                   {"slots", arrays.slots}},
                                  {{"hdf5", h5::library_version()}});
  report.inputs = {{o.input, sha256_of_file(world, o.input)}};
  start_run(context, report, o.report, 0);
  const std::string usual = o.batch.format == "thd" ? "causal-segments" : "causal";
  const LayoutOptions layout = o.layout_options();
  const BatchJob job{
      o.batch,       o.cp,         o.layout.all() ? default_layout().name : o.layout.name,
      layout.stripe, layout.chunk, find_mask(o.mask.empty() ? usual : o.mask)};
  Verification checks(1);
  const std::vector<BatchResult> rows = shard_batch(o.input, arrays, job, world, checks);
  if (o.check != "none") report.verification.merge(checks);
  const std::string notes = extras_text(arrays.extras, o.batch.format == "thd" && o.cp > 1);
  return present(o, context, report, batch_table(), rows, "stream", notes);
}

ExitCode run_heads_for_tokens(const ShardOptions& o, const PackedHeader& header,
                              const PackedSlots& slots, AppContext& context, RunReport& report) {
  std::vector<UlyssesResult> rows =
      run_ulysses(header, slots, {o.heads, o.kv_heads, o.head_dim}, context.world,
                  o.check != "none", report.verification);
  for (UlyssesResult& row : rows)
    if (check_text(report, report.verification) == "-") row.check = "-";
  return present(o, context, report, ulysses_table(), rows, "step");
}

}  // namespace gyre

#include "apps/common/array_output.hpp"
#include "apps/common/extras.hpp"
#include "apps/shard/present.hpp"
#include "comm/agree.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

ExitCode run_batch(const ShardOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] { check_batch_options(o); });
  const BshdArrays arrays = read_bshd(world, o.input);
  RunReport report =
      begin_report(context, {{"source", o.input}, {"rows", arrays.rows}, {"slots", arrays.slots}},
                   {{"hdf5", h5::library_version()}});
  start_run(context, report, o.report, 0);
  const std::string usual = o.batch.format == "thd" ? "causal-segments" : "causal";
  const BatchJob job{.options = o.batch,
                     .cp = o.cp,
                     .layout = o.layout.several() ? default_layout().name : o.layout.name,
                     .layout_options = o.layout_options(),
                     .mask = find_mask(o.mask.empty() ? usual : o.mask)};
  if (o.batch.format == "bshd" && o.files().wanted())
    check_arrays_fit(row_shard_bytes(arrays, job), context);
  Verification checks(1);
  KeptRows kept;
  const std::vector<BatchResult> rows =
      shard_batch(o.input, arrays, job, world, checks, o.files().wanted() ? &kept : nullptr);
  if (o.check != "none") report.verification.merge(checks);
  std::string notes = extras_text(arrays.extras, o.batch.format == "thd" && o.cp > 1);
  if (o.files().wanted()) {
    ArrayFile made = row_shards_of(kept, arrays, job, world);
    made.input_sha256 = checksum_of(report, o.input);
    made.provenance = provenance_of(context, o.input);
    notes += write_and_compare(made, o.files(), o.check != "none", context, report.verification);
  }
  return present(o, context, report, batch_table(), rows, "stream", notes);
}

}  // namespace gyre

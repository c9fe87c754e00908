#pragma once
// Measurements and checks of gyre-pack.

#include <limits>
#include <string>
#include <vector>

#include "apps/common/packed_streams.hpp"
#include "harness/row.hpp"
#include "io/outputs.hpp"
#include "io/schemas/packed_file.hpp"
#include "packing/packing.hpp"

namespace gyre {

/// One way of packing, measured on rank 0. The timing has no samples if it was packed only once.
struct PackingResult : MeasuredRow {
  std::string algorithm;
  int64_t items = 0;     ///< documents, or segments of a batch
  BinMeasures measures;  ///< see packing/bins.hpp
  int64_t longest = 0;   ///< tokens of the longest document; its pairs are a lower bound of cost
  /// step_seconds of the bins, with documents as long as their slots; NaN unless a packer of the run
  /// chooses by it.
  double step_s = std::numeric_limits<double>::quiet_NaN();
};
const Table<PackingResult>& packing_table();

/// The row of streams that are packed already: tokens and costs by real lengths, the rest by slots.
PackingResult measured_row(const PackedHeader& header, const std::string& algorithm);

/// Input and parameters of packing.
struct PackJob {
  std::vector<int64_t> lengths;
  std::vector<int64_t> documents;  ///< the first one of each item, for messages
  std::string algorithm;           ///< names of packers, or "all"
  BinOptions options;
  bool by_step = false;  ///< whether a packer chooses by step_seconds, which the table then shows
  int64_t multiple = 1;  ///< lengths are rounded up to it
  RepeatOptions repeats = {1};
  bool check = true;
};

/// Throws a usage error that names the first document that no bin can hold, unless such documents
/// get bins of their own. `documents` is empty if lengths were drawn.
void check_lengths(const PackJob& job, const Documents& documents);

/// Runs the packers of the job. Adds to `report` rows, figures of merit, and the checks that every
/// item is in one bin and no bin exceeds its capacity. Appends to `rows` and `notes`. Returns the
/// bins of the last packer as streams. Throws the usage errors of pack_documents; with "all",
/// refusals are noted instead unless every packer refuses.
std::vector<PackedBatch> run_packers(const PackJob& job, RunReport& report,
                                     std::vector<PackingResult>& rows, std::string& notes);

/// Checks that every item is in one bin and that no bin exceeds the capacity, except the bin of an
/// item that exceeds it alone.
void check_bins(std::span<const Bin> bins, std::span<const int64_t> lengths, int64_t capacity,
                int64_t multiple, const std::string& algorithm, Verification& checks);

/// A line for each packer.
std::string packer_help();

/// A packed file to write from every rank's slots.
struct PackedFile {
  const std::string& path;
  const PackedHeader& header;
  const PackedSlots& mine;      ///< slots of bins [first, last)
  const PackedSlots& expected;  ///< the same, or the host's if a device filled `mine`
  int64_t first = 0, last = 0;
  bool check = true;
};
/// Writes the file, one of the `outputs`. With `check`, reads it back first, and adds to `checks`
/// that its tables equal the header and its slots the expected ones. Collective.
void write_checked(const PackedFile& file, Communicator& world, Verification& checks,
                   Outputs& outputs);

/// Sets the times of a row; one repetition is no measurement.
void set_times(PackingResult& row, const Repeats& times, const RepeatOptions& repeats);

/// Adds the row to the results, with the measured times, and its figures of merit.
void add_row(RunReport& report, PackingResult& row);

}  // namespace gyre

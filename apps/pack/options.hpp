#pragma once
// Options of gyre-pack.

#include <string>
#include <vector>

#include "apps/common/array_output.hpp"
#include "apps/common/attention_shape.hpp"
#include "apps/common/workload_options.hpp"
#include "core/index.hpp"
#include "harness/backend.hpp"
#include "packing/compatibility.hpp"
#include "packing/padding.hpp"
#include "report/options.hpp"

namespace gyre {

/// The attention and the device that will read the streams; see --help.
struct AttentionTarget {
  std::string attention;  ///< its capabilities, joined by commas; "": no check
  std::string fused_flag = "unset";
  std::string device;  ///< "9.0"; "": unknown
  std::string probe = "not-run";
  bool forward_only = false, linear_attention = false, unpacked = false;
};
void declare_target_options(OptionTable& table, AttentionTarget& target);

/// The setup that packing/compatibility judges. Throws a usage error for unknown capabilities or
/// devices, and for other options without --attention. `padding`: whether segments have padding
/// between them.
ParallelSetup setup_of(const AttentionTarget& target, int cp, bool padding);

/// The "#" line with that judgement; "" without --attention. An unsound setup is a usage error.
std::string compatibility_text(const AttentionTarget& target, int cp, bool padding);

/// Requirements on the lengths of whole streams.
struct StreamRounding {
  int64_t multiple = 1;  ///< divisor of every stream's slots
  int64_t slots = 0;     ///< slots of every stream; 0: as many as it needs
  bool wanted() const { return multiple > 1 || slots > 0; }
};

/// Options of gyre-pack; see --help.
struct PackOptions {
  std::string input, generate, output, algorithm, oversize = "reject", tail = "own-segment",
                                                  check = "last", tp_rounding = "per-rank";
  ArrayPaths encoder;  ///< --encoder and --yours
  int64_t capacity = 0, min_bins = 0, bin_multiple = 1, seed = 1, max_items = 0, chunks = 1;
  int cp = 1, tp = 1, dp = 1;
  int mtp = 1;  ///< labels of so many tokens ahead
  RepeatOptions repeats = {1};
  ReportOptions report;
  int64_t row = 0;  ///< slots of a row; 0: streams instead of rows
  bool unpack = false, repad = false;
  StreamRounding rounding;
  PrefixChoice prefixes;
  AttentionTarget target;
  BackendOptions backend;
  AttentionShape attention;

  /// Whether a packer of --algorithm chooses bins by the time of a step.
  bool by_step() const;
  /// Divisor of the slots of a segment.
  int64_t multiple() const { return cp > 1 ? 2 * cp : 1; }
  /// Divisor of the slots of a segment if sequence-parallel ranks share the stream of documents.
  int64_t document_multiple() const { return multiple() * tp; }
  int64_t bin_slots() const {
    return capacity > 0 ? capacity : round_up(8192, document_multiple());
  }
  RoundOptions round_options() const;
};

void declare_options(OptionTable& table, PackOptions& o);

/// Names of the figures of merit of a run with these options.
std::vector<std::string> metrics_of(const PackOptions& o);

/// Throws a usage error that lists all problems of the options.
void check_options(const PackOptions& o);
/// Throws a usage error for options of packers, which do not apply to rows that are packed already.
void check_batch_options(const PackOptions& o, const std::string& schema);
/// Throws a usage error for options of text with audio that are given with another kind of input.
void check_audio_options(const PackOptions& o, const std::string& schema);

}  // namespace gyre

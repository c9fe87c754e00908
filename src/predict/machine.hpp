#pragma once
// Machine model for predictions: links by tier, kernel rates, copy rate.

#include <limits>
#include <string>
#include <vector>

#include "predict/decoder_model.hpp"
#include "predict/kernel_model.hpp"
#include "predict/recurrence_model.hpp"

namespace gyre {

/// Links between the ranks of a tier, such as a node. Each rank sends on a link of its own; a
/// message of n bytes occupies it for n / rate(n), and arrives one latency later.
struct LinkTier {
  static constexpr double unlimited = std::numeric_limits<double>::infinity();

  std::string name = "network";  ///< core, socket, node, rack, switch
  int ranks = 0;                 ///< consecutive ranks that it joins; 0: all (the outermost tier)
  double latency_s = 0;
  double bytes_per_s = unlimited;  ///< from one rank to another, for long messages
  /// Rates of shorter messages: ascending in bytes, or empty. Between two points the time of a
  /// message is linear; above the last point the rate is bytes_per_s.
  struct RatePoint {
    double bytes = 0, bytes_per_s = unlimited;
  };
  std::vector<RatePoint> curve;
  /// Fraction of the rate that each rank gets while all ranks send, as predictions assume.
  double all_at_once = 1;
  /// Seconds that a kernel loses per second of a concurrent transfer of its rank: a transfer uses
  /// memory bandwidth, and the core or multiprocessors that copy.
  double kernel_slowdown = 0;

  /// Seconds for which a message of this size occupies the link.
  double seconds(double bytes) const;
};

inline constexpr size_t max_tiers = 8;

/// How far predictions of a pass are from measured times.
struct PredictionError {
  Pass pass = Pass::forward;
  bool several_ranks = false;  ///< else of one rank
  double share = 0;            ///< of the predicted time; 9 in 10 errors are smaller
};

/// A machine of equal ranks. An infinite rate means that its work takes no time.
struct MachineModel {
  std::string name;             ///< "8 x H100 SXM"; may be empty
  std::vector<LinkTier> links;  ///< innermost first; none: messages take no time
  KernelModel kernel;
  RecurrenceModel recurrence;
  DecoderModel decoder;  ///< operations of a scoring pass other than attention
  /// Bytes moved per second; per byte, packing and unpacking move 2, adding 3, clearing 1.
  double copy_bytes_per_s = LinkTier::unlimited;
  /// Of rows that a call of attention reads and writes; 0: copy_bytes_per_s.
  double kernel_bytes_per_s = 0;
  double rate_of_rows() const {
    return kernel_bytes_per_s > 0 ? kernel_bytes_per_s : copy_bytes_per_s;
  }
  double memory_bytes = 0;  ///< per rank; 0: unknown
  std::vector<PredictionError> errors;
  /// If one of two predicted times is longer by this share or more, so is the measured one 9 times
  /// in 10; 0: unknown.
  double order_margin = 0;

  /// The share of a predicted time of attention within which the measured one is 9 times in 10, on
  /// this many ranks of a sequence; NaN: unknown.
  double error_of(Pass pass, int ranks) const;

  /// Index of the innermost tier that joins two ranks of the machine. links may not be empty.
  int tier_between(int64_t a, int64_t b) const;
};

/// A machine with one kind of link and one kernel rate.
MachineModel flat_machine(double flops_per_s = LinkTier::unlimited,
                          double bytes_per_s = LinkTier::unlimited, double latency_s = 0);

/// Throws a usage error that names the first invalid number: rates must be at least 1, times finite
/// and at least 0; the ranks of each tier must be a multiple of those of the tier inside it.
void check_machine(const MachineModel& machine);

}  // namespace gyre

#pragma once
// The machine that predictions assume: links by tier, the rate of the attention kernel, copies.

#include <limits>
#include <string>
#include <vector>

#include "predict/decoder_model.hpp"
#include "predict/kernel_model.hpp"

namespace gyre {

/// Links between the ranks of a tier, such as those of a node. Each rank sends on a link of its
/// own; a message of n bytes holds it for n / rate(n), and arrives one latency later.
struct LinkTier {
  static constexpr double unlimited = std::numeric_limits<double>::infinity();

  std::string name = "network";  ///< core, socket, node, rack, switch
  int ranks = 0;                 ///< consecutive ranks that it joins; 0: all, of the outermost tier
  double latency_s = 0;
  double bytes_per_s = unlimited;  ///< from one rank to another, of long messages
  /// Rates of shorter messages: ascending in bytes, or empty. Between two points the time of a
  /// message grows linearly; above the last one bytes_per_s is the last rate.
  struct RatePoint {
    double bytes = 0, bytes_per_s = unlimited;
  };
  std::vector<RatePoint> curve;
  /// What each rank gets of the rate while all send: predictions take it that all do.
  double all_at_once = 1;
  /// Seconds that a kernel loses for each second that a transfer of its rank is under way beside
  /// it: a transfer takes memory bandwidth, and the core or the multiprocessors that copy.
  double kernel_slowdown = 0;

  /// How long a message of this size holds the link.
  double seconds(double bytes) const;
};

inline constexpr size_t most_tiers = 8;

/// A machine of equal ranks. A rate may be infinite: what it limits then takes no time.
struct MachineModel {
  std::string name;             ///< "8 x H100 SXM"; may be empty
  std::vector<LinkTier> links;  ///< from the innermost; none: messages take no time
  KernelModel kernel;
  DecoderModel decoder;  ///< what is beside attention in a scoring pass
  /// Bytes read and written by packing and unpacking (2 for each byte), adding (3), clearing (1).
  double copy_bytes_per_s = LinkTier::unlimited;
  double memory_bytes = 0;  ///< of a rank; 0: unknown

  /// Index of the innermost tier that joins two ranks of the machine. links may not be empty.
  int tier_between(int64_t a, int64_t b) const;
};

/// All links alike, one rate for all kernels.
MachineModel flat_machine(double flops_per_s = LinkTier::unlimited,
                          double bytes_per_s = LinkTier::unlimited, double latency_s = 0);

/// Throws a usage error that names the first invalid number: rates must be positive, times finite
/// and at least 0; tiers must grow outwards, each a multiple of the one before.
void check_machine(const MachineModel& machine);

}  // namespace gyre

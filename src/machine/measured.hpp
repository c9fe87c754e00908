#pragma once
// Measured performance of a machine: rates of cores and memory, times of messages.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gyre {

/// A measured value and the samples that it was chosen from.
struct Sampled {
  double value = 0;
  std::vector<double> samples;
  bool operator==(const Sampled&) const = default;
};

/// Best sample, for rates; 0 without samples.
Sampled best_of(std::vector<double> samples);
/// Median sample, for times; 0 without samples.
Sampled median_of(std::vector<double> samples);

/// Work per second. 0: unknown.
struct WorkRates {
  Sampled fma;                 ///< f32 FLOP/s; a multiply-add counts as two
  Sampled read, update, copy;  ///< memory bandwidths, bytes/s; count bytes read plus bytes written
  bool operator==(const WorkRates&) const = default;
};

struct MeasuredRates {
  std::string how;
  int64_t array_bytes = 0;  ///< per rank
  Sampled one_core_fma;     ///< FLOP/s of one thread of the first rank
  WorkRates one_rank;       ///< the first rank, while all others sleep
  WorkRates all_ranks;      ///< sum over the ranks of a host, all at once; slowest host
  bool operator==(const MeasuredRates&) const = default;
};

struct MessageTime {
  int64_t bytes = 0;
  Sampled seconds;  ///< from the start of the send to the end of the receive
  bool operator==(const MessageTime&) const = default;
};

struct MeasuredLink {
  std::vector<int> ranks;    ///< ranks that exchanged messages
  double alpha_seconds = 0;  ///< time of the shortest message
  double bytes_per_s = 0;    ///< rate of the longest message
  std::vector<MessageTime> messages;
  bool operator==(const MeasuredLink&) const = default;
};

struct MeasuredMessages {
  std::string how;
  std::optional<MeasuredLink> inside_host;    ///< two ranks of one host, the others asleep
  std::optional<MeasuredLink> between_hosts;  ///< first ranks of two hosts, the others asleep
  std::optional<MeasuredLink> all_at_once;    ///< each rank to the next; slowest rank
  bool operator==(const MeasuredMessages&) const = default;
};

/// Memory bandwidth of the slowest GPU while all are active.
struct MeasuredGpu {
  std::string how;
  int64_t array_bytes = 0;
  double fill = 0, copy = 0;  ///< bytes/s
  bool operator==(const MeasuredGpu&) const = default;
};

struct MeasuredMachine {
  std::string time;  ///< UTC, at the end of the measurement
  std::string backend, comm;
  int ranks = 0;
  int ranks_of_a_host = 0;  ///< maximum over hosts
  int threads = 1;          ///< per rank
  double window_seconds = 0;
  /// CPU time of other processes during the measurements, as a number of cores, on the host with
  /// the most; 0 if unknown. Above a few hundredths, the machine was busy and the values are
  /// affected.
  double cores_used_by_others = 0;
  MeasuredRates rates;
  MeasuredMessages messages;
  std::optional<MeasuredGpu> gpu;
  bool operator==(const MeasuredMachine&) const = default;
};

}  // namespace gyre

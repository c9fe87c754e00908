#pragma once
// What a machine can do, measured: rates of cores and memory, times of messages.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gyre {

/// A figure, and the measurements that it was chosen from.
struct Sampled {
  double value = 0;
  std::vector<double> samples;
  bool operator==(const Sampled&) const = default;
};

/// The best of the samples, of rates; 0 without samples.
Sampled best_of(std::vector<double> samples);
/// The median of the samples, of times; 0 without samples.
Sampled median_of(std::vector<double> samples);

/// What ranks did in a second. 0: unknown.
struct WorkRates {
  Sampled fma;                 ///< f32 FLOP/s; a multiply-add is two
  Sampled read, update, copy;  ///< of memory, bytes/s; bytes read and bytes written both count
  bool operator==(const WorkRates&) const = default;
};

struct MeasuredRates {
  std::string how;
  int64_t array_bytes = 0;  ///< of a rank
  Sampled one_core_fma;     ///< FLOP/s of one thread of the first rank
  WorkRates one_rank;       ///< the first one, while all others sleep
  WorkRates all_ranks;      ///< of a host at once, their sum; the slowest host
  bool operator==(const MeasuredRates&) const = default;
};

struct MessageTime {
  int64_t bytes = 0;
  Sampled seconds;  ///< from the beginning of sending to the end of receiving
  bool operator==(const MessageTime&) const = default;
};

struct MeasuredLink {
  std::vector<int> ranks;    ///< that sent to each other
  double alpha_seconds = 0;  ///< of the shortest message
  double bytes_per_s = 0;    ///< of the longest message
  std::vector<MessageTime> messages;
  bool operator==(const MeasuredLink&) const = default;
};

struct MeasuredMessages {
  std::string how;
  std::optional<MeasuredLink> inside_host;    ///< two ranks of one host, the others asleep
  std::optional<MeasuredLink> between_hosts;  ///< first ranks of two hosts, the others asleep
  std::optional<MeasuredLink> all_at_once;    ///< each rank to the next one; the slowest
  bool operator==(const MeasuredMessages&) const = default;
};

/// Memory of the GPU that is slowest while all work.
struct MeasuredGpu {
  std::string how;
  int64_t array_bytes = 0;
  double fill = 0, copy = 0;  ///< bytes/s
  bool operator==(const MeasuredGpu&) const = default;
};

struct MeasuredMachine {
  std::string time;  ///< UTC, at the end
  std::string backend, comm;
  int ranks = 0;
  int ranks_of_a_host = 0;  ///< most
  int threads = 1;          ///< of a rank
  double window_seconds = 0;
  /// CPU time that other processes used during the measurements, as a number of cores; the host
  /// where it is most; 0 where it is not known. Above a few hundredths, the figures are those of a
  /// busy machine.
  double cores_used_by_others = 0;
  MeasuredRates rates;
  MeasuredMessages messages;
  std::optional<MeasuredGpu> gpu;
  bool operator==(const MeasuredMachine&) const = default;
};

}  // namespace gyre

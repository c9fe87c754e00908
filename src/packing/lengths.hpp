#pragma once
// Made-up document lengths, for runs without a data set.
//
//     dist=fixed,length=512,count=100
//     dist=uniform,min=100,max=4K
//     dist=log-normal,median=1024,sigma=1.2,max=64K
//     dist=long-tailed,count=4096,max=64K,seed=7
//     dist=speech,count=1000
//
// Every text names all that a repetition needs; the same text gives the same lengths everywhere
// (random.hpp). Integers take K, M, G = 2^10, 2^20, 2^30.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// How lengths are drawn. Which fields count depends on the distribution; length_distributions()
/// lists them with their defaults. Lengths are tokens, and less than 2^30.
struct LengthSpec {
  std::string distribution = "long-tailed";
  int64_t count = 1024;  ///< documents
  uint64_t seed = 1;
  int64_t length = 1024;  ///< fixed: of every document
  int64_t min = 1;        ///< uniform, log-normal: the shortest document
  int64_t max =
      int64_t{1} << 20;  ///< all but fixed: longer documents are cut; uniform: the longest
  double median = 1024;  ///< log-normal
  double sigma = 1;      ///< log-normal, speech: standard deviation of ln(length)
  double seconds = 8;    ///< speech: median duration of an utterance
  double min_seconds = 1;
  double max_seconds = 40;
  double frame_rate = 12.5;  ///< speech: audio frames per second
  double text_rate = 3.5;    ///< speech: text tokens per second, on average
  friend bool operator==(const LengthSpec&, const LengthSpec&) = default;
};

/// A distribution and how it is described to a user.
struct LengthDistribution {
  std::string name;
  std::string summary;
  std::vector<std::string> keys;  ///< besides dist, count and seed
  LengthSpec defaults;
};
/// fixed, uniform, log-normal, long-tailed, speech.
///
/// long-tailed: documents of a pre-training mix. In the published histogram of MagiAttention's
/// benchmark data (13.46 M documents) the mean is about 1.8K tokens, 46 % of all tokens are in
/// documents above 8K and 25 % in documents above 32K. Here these are 1.81K, 46.0 % and 25.0 %; how
/// the documents spread below and between those lengths (64 to 2^20 tokens, even within an octave)
/// is our choice. `max` cuts documents, which lowers all three.
///
/// speech: log-normal durations, cut to min_seconds .. max_seconds; an utterance is its audio
/// frames and its text, whose rate varies by up to 30 % either way.
const std::vector<LengthDistribution>& length_distributions();

/// Reads "key=value,key=value,..." in any order, what is not named having its default. Throws a
/// usage error for an unknown distribution or key (with those that there are), a key that is given
/// twice, a value that is no number or out of range (with the nearest valid one), and min > max.
LengthSpec parse_length_spec(std::string_view text);

/// The text that parse_length_spec turns into the same specification: every key, the seed included.
std::string to_string(const LengthSpec& spec);

/// The lengths [count]. Throws usage errors like parse_length_spec when `spec` was made otherwise.
std::vector<int64_t> draw_lengths(const LengthSpec& spec);

}  // namespace gyre

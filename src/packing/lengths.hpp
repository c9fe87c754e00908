#pragma once
// Synthetic document lengths, for runs without a data set.
//
//     dist=fixed,length=512,count=100
//     dist=uniform,min=100,max=4K
//     dist=log-normal,median=1024,sigma=1.2,max=64K
//     dist=long-tailed,count=4096,max=64K,seed=7
//     dist=speech,count=1000
//     dist=histogram,file=inputs/lengths/prolong64k.csv,tokens=512K,seed=42
//     dist=list,file=lengths.txt
//
// Such a text, with its file (length_file.hpp), defines a repeatable run: it gives the same lengths
// on every machine (random.hpp).
// Integers take K, M, G = 2^10, 2^20, 2^30.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// Distribution of document lengths, in tokens, each less than 2^30. length_distributions() lists
/// which fields each distribution uses, and their defaults.
struct LengthSpec {
  std::string distribution = "long-tailed";
  int64_t count = 1024;  ///< documents, if `tokens` is 0
  int64_t tokens = 0;    ///< if above 0: draw until there are so many, and cut the last document
  uint64_t seed = 1;
  int64_t length = 1024;  ///< fixed: length of every document
  int64_t min = 1;        ///< uniform, log-normal: the shortest document
  int64_t max =
      int64_t{1} << 20;  ///< all but fixed: the longest document; those drawn longer are cut
  double median = 1024;  ///< log-normal
  double sigma = 1;      ///< log-normal, speech: standard deviation of ln(length)
  double seconds = 8;    ///< speech: median duration of an utterance
  double min_seconds = 1;
  double max_seconds = 40;
  double frame_rate = 12.5;  ///< speech: audio frames per second
  double text_rate = 3.5;    ///< speech: text tokens per second, on average
  std::string file;          ///< histogram, list
  friend bool operator==(const LengthSpec&, const LengthSpec&) = default;
};

/// A distribution with its description for users.
struct LengthDistribution {
  std::string name;
  std::string summary;
  std::vector<std::string> keys;  ///< besides dist, seed and, if it draws, count and tokens
  LengthSpec defaults;
  bool draws = true;
};
/// fixed, uniform, log-normal, long-tailed, speech, histogram, list.
///
/// long-tailed: documents of a pre-training mix. In the published histogram of MagiAttention's
/// benchmark data (13.46 M documents) the mean is about 1.8K tokens, 46 % of all tokens are in
/// documents above 8K and 25 % in documents above 32K. Here these are 1.81K, 46.0 % and 25.0 %. The
/// spread below and between those lengths (64 to 2^20 tokens, uniform within an octave) is our
/// choice. `max` cuts documents, which lowers all three.
///
/// speech: log-normal durations, cut to min_seconds .. max_seconds. The length of an utterance is
/// its audio frames plus its text tokens, whose rate varies by up to ±30 %.
///
/// histogram: an interval by its share, and a length of it, uniformly. list: the lengths of a file.
const std::vector<LengthDistribution>& length_distributions();
/// Throws a usage error that lists all if there is none of this name.
const LengthDistribution& find_length_distribution(std::string_view name);

/// Reads "key=value,key=value,..." in any order; other keys get their defaults. Throws a usage
/// error for an unknown distribution or key (lists the valid ones), a repeated key, a value that is
/// not a number or out of range (with the nearest valid one), min > max, both count and tokens, and
/// no file where one is needed. Does not open the file.
LengthSpec parse_length_spec(std::string_view text);

/// Inverse of parse_length_spec: writes every key of the distribution, including the seed, and
/// either count or tokens.
std::string to_string(const LengthSpec& spec);

/// Draws lengths [count], or as many as have `tokens`. Throws the usage errors of parse_length_spec
/// if `spec` is invalid, and those of its file.
std::vector<int64_t> draw_lengths(const LengthSpec& spec);

}  // namespace gyre

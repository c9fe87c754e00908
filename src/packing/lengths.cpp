#include "packing/lengths.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <numbers>
#include <numeric>
#include <variant>

#include "core/error.hpp"
#include "packing/length_file.hpp"
#include "packing/random.hpp"

namespace gyre {
namespace {

constexpr int64_t most = int64_t{1} << 30;
constexpr int64_t max_documents = int64_t{1} << 24;  // packers take seconds for each million

/// A key of the specification text and its valid range.
struct Key {
  std::string_view name;
  std::variant<int64_t LengthSpec::*, uint64_t LengthSpec::*, double LengthSpec::*,
               std::string LengthSpec::*>
      field;
  double least = 0;  // unused for the seed, which may have any value, and for texts
  double largest = 0;
};

const std::vector<Key>& all_keys() {
  static const std::vector<Key> keys = {
      {"count", &LengthSpec::count, 1, max_documents},
      {"tokens", &LengthSpec::tokens, 0, double(int64_t{1} << 48)},
      {"file", &LengthSpec::file},
      {"length", &LengthSpec::length, 0, most},
      {"min", &LengthSpec::min, 0, most},
      {"max", &LengthSpec::max, 1, most},
      {"median", &LengthSpec::median, 1, most},
      {"sigma", &LengthSpec::sigma, 0, 10},
      {"seconds", &LengthSpec::seconds, 0.1, 86400},
      {"min-seconds", &LengthSpec::min_seconds, 0.1, 86400},
      {"max-seconds", &LengthSpec::max_seconds, 0.1, 86400},
      {"frame-rate", &LengthSpec::frame_rate, 0.1, 1000},
      {"text-rate", &LengthSpec::text_rate, 0, 1000},
      {"seed", &LengthSpec::seed},
  };
  return keys;
}

LengthSpec defaults_of(std::string_view distribution) {
  LengthSpec spec;
  spec.distribution = distribution;
  if (distribution == "uniform") spec.max = 4096;
  if (distribution == "speech") spec.sigma = 0.6;
  return spec;
}

bool is_amount(const Key& key) {
  return key.name == "count" || key.name == "tokens";
}

/// Keys of a distribution in output order, without "dist".
std::vector<Key> keys_of(const LengthDistribution& distribution) {
  std::vector<Key> keys;
  for (const Key& key : all_keys())
    if (key.name == "seed" || (distribution.draws && is_amount(key)) ||
        std::find(distribution.keys.begin(), distribution.keys.end(), key.name) !=
            distribution.keys.end())
      keys.push_back(key);
  return keys;
}

/// Reads digits, with K, M or G after them if `units`; false for other texts and above 2^64 - 1.
bool read_integer(std::string_view text, bool units, uint64_t& value) {
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  if (error != std::errc()) return false;
  if (end == last) return true;
  const size_t unit = std::string_view("KMGkmg").find(*end);
  if (!units || end + 1 != last || unit == std::string_view::npos) return false;
  const int shift = 10 * (1 + static_cast<int>(unit % 3));
  if (value > std::numeric_limits<uint64_t>::max() >> shift) return false;
  value <<= shift;
  return true;
}

[[noreturn]] void throw_not_a(std::string_view what, const Key& key, std::string_view text) {
  throw_usage("{}: '{}' is not {}", key.name, text, what);
}

void set_value(LengthSpec& spec, const Key& key, std::string_view text) {
  if (const auto* word = std::get_if<std::string LengthSpec::*>(&key.field)) {
    spec.*(*word) = text;
    return;
  }
  if (const auto* real = std::get_if<double LengthSpec::*>(&key.field)) {
    double value = 0;
    const char* const last = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data(), last, value);
    if (error != std::errc() || end != last || !std::isfinite(value))
      throw_not_a("a number", key, text);
    spec.*(*real) = value;
    return;
  }
  uint64_t value = 0;
  if (const auto* seed = std::get_if<uint64_t LengthSpec::*>(&key.field)) {
    if (!read_integer(text, false, value)) throw_not_a("an integer from 0 to 2^64 - 1", key, text);
    spec.*(*seed) = value;
    return;
  }
  if (!read_integer(text, true, value))
    throw_not_a("a size (digits, then K, M or G for 2^10, 2^20, 2^30)", key, text);
  // A value too large for the field also exceeds the range of the key.
  spec.*std::get<int64_t LengthSpec::*>(key.field) =
      std::min(value, static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
}

template <class Value>
void check_range(const Key& key, Value value) {
  const auto least = static_cast<Value>(key.least), largest = static_cast<Value>(key.largest);
  if (value >= least && value <= largest) return;
  throw_usage("{}={}: must be from {} to {}; the nearest is {}", key.name, value, least, largest,
              value > largest ? largest : least);
}

/// Throws a usage error unless every value that the distribution uses is valid.
void check_spec(const LengthSpec& spec) {
  const LengthDistribution& distribution = find_length_distribution(spec.distribution);
  for (const Key& key : keys_of(distribution)) {
    if (const auto* integer = std::get_if<int64_t LengthSpec::*>(&key.field))
      check_range(key, spec.*(*integer));
    if (const auto* real = std::get_if<double LengthSpec::*>(&key.field))
      check_range(key, spec.*(*real));
    if (const auto* word = std::get_if<std::string LengthSpec::*>(&key.field))
      if ((spec.*(*word)).empty())
        throw_usage("dist={} needs {}=FILE", spec.distribution, key.name);
  }
  const bool bounded = spec.distribution == "uniform" || spec.distribution == "log-normal";
  if (bounded && spec.min > spec.max)
    throw_usage("min={} is more than max={}; at most {}", spec.min, spec.max, spec.max);
  if (spec.distribution != "speech") return;
  if (spec.seconds < spec.min_seconds || spec.seconds > spec.max_seconds)
    throw_usage("seconds={}, the median, must be from min-seconds={} to max-seconds={}",
                spec.seconds, spec.min_seconds, spec.max_seconds);
}

/// Draws from the standard normal distribution (Box-Muller, the cosine of each pair).
double draw_normal(RandomBits& random) {
  const double radius = std::sqrt(-2 * std::log(uniform_open(random)));
  return radius * std::cos(2 * std::numbers::pi * uniform_open(random));
}

int64_t draw_uniform(const LengthSpec& spec, RandomBits& random) {
  const uint64_t values = spec.max - spec.min + 1;
  return spec.min + uniform_below(random, values);
}

int64_t draw_log_normal(const LengthSpec& spec, RandomBits& random) {
  const double value = spec.median * std::exp(spec.sigma * draw_normal(random));
  const double cut = std::clamp<double>(value, spec.min, spec.max);
  return std::llround(cut);
}

/// Documents with 64 · 2^k to 128 · 2^k - 1 tokens, per million documents.
constexpr std::array<int64_t, 14> documents_per_octave = {
    105706, 132133, 217075, 259546, 148649, 75504, 32561, 16222, 7373, 3318, 1290, 461, 138, 24};
static_assert(std::accumulate(documents_per_octave.begin(), documents_per_octave.end(),
                              int64_t{0}) == 1'000'000);

int64_t draw_long_tailed(const LengthSpec& spec, RandomBits& random) {
  int64_t document = uniform_below(random, 1'000'000);
  int64_t shortest = 64;
  for (int64_t documents : documents_per_octave) {
    if (document < documents) break;
    document -= documents;
    shortest *= 2;
  }
  const auto within = uniform_below(random, static_cast<uint64_t>(shortest));
  return std::min(spec.max, shortest + static_cast<int64_t>(within));
}

int64_t draw_of(const LengthHistogram& histogram, const LengthSpec& spec, RandomBits& random) {
  const double at = uniform_open(random) * histogram.up_to.back();
  const auto first = std::upper_bound(histogram.up_to.begin(), histogram.up_to.end(), at);
  const auto interval =
      std::min<int64_t>(first - histogram.up_to.begin(), std::ssize(histogram.up_to) - 1);
  const int64_t begin = interval == 0 ? 1 : histogram.below[interval - 1];
  const auto lengths = static_cast<uint64_t>(histogram.below[interval] - begin);
  return std::min(spec.max, begin + static_cast<int64_t>(uniform_below(random, lengths)));
}

int64_t draw_speech(const LengthSpec& spec, RandomBits& random) {
  const double seconds = std::clamp(spec.seconds * std::exp(spec.sigma * draw_normal(random)),
                                    spec.min_seconds, spec.max_seconds);
  const double text_rate = spec.text_rate * (0.7 + 0.6 * uniform_open(random));
  const double tokens = std::ceil(seconds * spec.frame_rate) + std::ceil(seconds * text_rate);
  return std::min(spec.max, static_cast<int64_t>(tokens));
}

}  // namespace

const std::vector<LengthDistribution>& length_distributions() {
  static const std::vector<LengthDistribution> distributions = {
      {"fixed", "all documents of one length", {"length"}, defaults_of("fixed")},
      {"uniform", "from min to max, evenly", {"min", "max"}, defaults_of("uniform")},
      {"log-normal",
       "log-normal, cut to min .. max",
       {"min", "max", "median", "sigma"},
       defaults_of("log-normal")},
      {"long-tailed",
       "a pre-training mix: half of the tokens in few long documents",
       {"max"},
       defaults_of("long-tailed")},
      {"speech",
       "utterances: audio frames and their text",
       {"max", "sigma", "seconds", "min-seconds", "max-seconds", "frame-rate", "text-rate"},
       defaults_of("speech")},
      {"histogram",
       "intervals of lengths and their shares, of a file",
       {"file", "max"},
       defaults_of("histogram")},
      {"list", "the lengths in a file, one a line", {"file"}, defaults_of("list"), false},
  };
  return distributions;
}

const LengthDistribution& find_length_distribution(std::string_view name) {
  std::vector<std::string> names;
  for (const LengthDistribution& distribution : length_distributions()) {
    if (distribution.name == name) return distribution;
    names.push_back(distribution.name);
  }
  throw_usage("there is no length distribution '{}'; there are {}", name, fmt::join(names, ", "));
}

LengthSpec parse_length_spec(std::string_view text) {
  std::map<std::string_view, std::string_view> values;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos || equals == 0)
      throw_usage("'{}' is not of the form key=value", part);
    if (!values.emplace(part.substr(0, equals), part.substr(equals + 1)).second)
      throw_usage("key '{}' is given twice", part.substr(0, equals));
    begin = end + 1;
  }
  const auto dist = values.find("dist");
  const LengthDistribution& distribution =
      find_length_distribution(dist == values.end() ? LengthSpec().distribution : dist->second);
  LengthSpec spec = distribution.defaults;
  if (dist != values.end()) values.erase(dist);
  const std::vector<Key> keys = keys_of(distribution);
  for (const auto& [name, value] : values) {
    const auto key = std::find_if(keys.begin(), keys.end(),
                                  [wanted = name](const Key& k) { return k.name == wanted; });
    if (key == keys.end()) {
      std::vector<std::string_view> names;
      for (const Key& known : keys) names.push_back(known.name);
      throw_usage("dist={} has no key '{}'; it has dist, {}", distribution.name, name,
                  fmt::join(names, ", "));
    }
    set_value(spec, *key, value);
  }
  if (values.contains("count") && spec.tokens > 0)
    throw_usage("count={} and tokens={}: one of them", spec.count, spec.tokens);
  check_spec(spec);
  return spec;
}

std::string to_string(const LengthSpec& spec) {
  std::string text = "dist=" + spec.distribution;
  for (const Key& key : keys_of(find_length_distribution(spec.distribution)))
    if (!is_amount(key) || (key.name == "tokens") == (spec.tokens > 0))
      std::visit([&](auto field) { text += fmt::format(",{}={}", key.name, spec.*field); },
                 key.field);
  return text;
}

std::vector<int64_t> draw_lengths(const LengthSpec& spec) {
  check_spec(spec);
  if (spec.distribution == "list") return read_length_list(spec.file, most + 1);
  LengthHistogram histogram;
  if (spec.distribution == "histogram") histogram = read_length_histogram(spec.file, most + 1);
  RandomBits random(spec.seed);
  const auto draw = [&] {
    if (spec.distribution == "fixed") return spec.length;
    if (spec.distribution == "uniform") return draw_uniform(spec, random);
    if (spec.distribution == "log-normal") return draw_log_normal(spec, random);
    if (spec.distribution == "long-tailed") return draw_long_tailed(spec, random);
    if (spec.distribution == "histogram") return draw_of(histogram, spec, random);
    return draw_speech(spec, random);
  };
  std::vector<int64_t> lengths;
  int64_t left = spec.tokens;
  const auto is_complete = [&] {
    return spec.tokens > 0 ? left == 0 : std::ssize(lengths) == spec.count;
  };
  while (!is_complete()) {
    if (std::ssize(lengths) == max_documents)
      throw_usage("tokens={}: these are more than {} documents", spec.tokens, max_documents);
    lengths.push_back(spec.tokens > 0 ? std::min(left, draw()) : draw());
    left -= lengths.back();
  }
  return lengths;
}

}  // namespace gyre

#include "packing/length_file.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <utility>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Calls f(line) for each line of the file that is no comment, and adds its place to what f throws.
void for_each_line(const std::string& path, const std::function<void(std::string_view)>& f) {
  std::ifstream file(path);
  if (!file) throw_usage("{}: {}", path, std::strerror(errno));
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || line.starts_with('#')) continue;
    try {
      f(line);
    } catch (const Error& error) {
      throw_usage("{}: line {}: {}", path, number, error.what());
    }
  }
  if (file.bad() || number == 0) throw_usage("{}: it cannot be read, or is empty", path);
}

template <class Number>
bool reads_as(std::string_view text, Number& number) {
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  return error == std::errc() && end == last;
}

}  // namespace

LengthHistogram read_length_histogram(const std::string& path, int64_t end) {
  constexpr std::string_view header = "below,share";
  LengthHistogram histogram;
  bool begun = false;
  for_each_line(path, [&](std::string_view line) {
    if (!std::exchange(begun, true)) {
      if (line != header) throw_usage("'{}': a histogram begins with the line {}", line, header);
      return;
    }
    const size_t comma = std::min(line.find(','), line.size());
    int64_t below = 0;
    double share = 0;
    if (!reads_as(line.substr(0, comma), below) || comma == line.size() ||
        !reads_as(line.substr(comma + 1), share))
      throw_usage("'{}' is no length and share, such as 96,0.05438", line);
    const int64_t least = histogram.below.empty() ? 2 : histogram.below.back() + 1;
    if (below < least || below > end)
      throw_usage("below={}: must be from {} to {}", below, least, end);
    if (!(share >= 0) || !std::isfinite(share)) throw_usage("share={}: must be at least 0", share);
    histogram.below.push_back(below);
    histogram.up_to.push_back(share + (histogram.up_to.empty() ? 0 : histogram.up_to.back()));
  });
  if (histogram.up_to.empty() || !(histogram.up_to.back() > 0))
    throw_usage("{}: no interval has a share above 0", path);
  return histogram;
}

std::vector<int64_t> read_length_list(const std::string& path, int64_t end) {
  std::vector<int64_t> lengths;
  for_each_line(path, [&](std::string_view line) {
    int64_t length = 0;
    if (!reads_as(line, length)) throw_usage("'{}' is no length, such as 4096", line);
    if (length < 0 || length >= end) throw_usage("{}: must be from 0 to {}", length, end - 1);
    lengths.push_back(length);
  });
  return lengths;
}

}  // namespace gyre

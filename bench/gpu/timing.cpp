#include "timing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <sstream>

namespace gyre::bench {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Seconds of one run, between two marks.
double seconds_of(const Alternative& a, Stream& stream) {
  if (a.timed) return a.timed();
  const MarkPtr begin = stream.mark();
  a.run();
  const MarkPtr end = stream.mark();
  stream.synchronize();
  return end->seconds() - begin->seconds();
}

/// The quantity compared; more is better.
double rate(const Alternative& a, double seconds) {
  const double work = a.bytes > 0 ? a.bytes : a.flops > 0 ? a.flops : 1;
  return work / seconds;
}

}  // namespace

void Suite::measure(const std::string& group, const nlohmann::json& shape,
                    const std::vector<Alternative>& alternatives) {
  std::vector<std::vector<double>> seconds(alternatives.size());
  for (int i = -options_.warmup; i < options_.repetitions; ++i)
    for (size_t turn = 0; turn < alternatives.size(); ++turn) {
      // Alternates the direction: none always follows the alternative that heats the GPU most.
      const size_t n = i % 2 == 0 ? turn : alternatives.size() - 1 - turn;
      const double taken = seconds_of(alternatives[n], stream_);
      if (i >= 0) seconds[n].push_back(taken);
    }
  double baseline = 0;
  for (size_t n = 0; n < alternatives.size(); ++n) {
    const Alternative& a = alternatives[n];
    const double middle = median(seconds[n]), here = rate(a, middle);
    nlohmann::json entry = {{"group", group},
                            {"shape", shape},
                            {"name", a.name},
                            {"seconds", seconds[n]},
                            {"median_s", middle}};
    if (a.bytes > 0) entry["bytes_per_s"] = here;
    if (a.bytes <= 0 && a.flops > 0) entry["flops_per_s"] = here;
    if (n == 0) {
      baseline = here;
    } else {
      entry["baseline"] = alternatives[0].name;
      entry["ratio"] = here / baseline;
    }
    fmt::print(
        "{:<20} {:<44} {:<20} {:>10.4g} ms {:>10.4g} {:<8} {}\n", group, shape.dump(), a.name,
        middle * 1e3,
        here / (a.bytes > 0   ? 1e9
                : a.flops > 0 ? 1e12
                              : 1),
        a.bytes > 0   ? "GB/s"
        : a.flops > 0 ? "TFLOP/s"
                      : "runs/s",
        n == 0 ? "baseline" : fmt::format("{:.3f} of {}", here / baseline, alternatives[0].name));
    results_.push_back(std::move(entry));
  }
}

nlohmann::json device_state(int device) {
  constexpr std::array fields = {"driver_version", "clocks.sm",   "clocks.max.sm",  "clocks.mem",
                                 "clocks.max.mem", "power.limit", "temperature.gpu"};
  std::string query;
  for (const char* field : fields) query += (query.empty() ? "" : ",") + std::string(field);
  const std::string command = fmt::format(
      "nvidia-smi --id={} --format=csv,noheader --query-gpu={} 2>/dev/null", device, query);
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string text;
  std::array<char, 512> buffer{};
  while (pipe != nullptr && fgets(buffer.data(), buffer.size(), pipe.get()) != nullptr)
    text += buffer.data();
  std::istringstream stream(text);
  nlohmann::json state;
  for (const char* field : fields) {
    std::string value;
    if (!std::getline(stream, value, ',')) return nullptr;
    const size_t begin = value.find_first_not_of(" \n"), end = value.find_last_not_of(" \n");
    state[field] = begin == std::string::npos ? "" : value.substr(begin, end - begin + 1);
  }
  return state;
}

}  // namespace gyre::bench

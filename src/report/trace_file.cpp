#include "report/trace_file.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "runtime/host.hpp"
#include "runtime/output_guard.hpp"

namespace gyre {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array lanes = {TraceLane::compute, TraceLane::communication};

const char* name_of(TraceLane lane) {
  return lane == TraceLane::compute ? "compute" : "communication";
}

/// Messages of one double.
void send_double(Communicator& world, int peer, const double& value) {
  HostStream stream;
  const SendSlice slice{peer, bytes_of(std::span<const double>(&value, 1))};
  world.exchange(std::span(&slice, 1), {}, stream, "comparing clocks")->wait();
}
double receive_double(Communicator& world, int peer) {
  HostStream stream;
  double value = 0;
  const RecvSlice slice{peer, writable_bytes_of(std::span<double>(&value, 1))};
  world.exchange({}, std::span(&slice, 1), stream, "comparing clocks")->wait();
  return value;
}

/// A span on the common clock, in whole nanoseconds: spans that do not overlap do not overlap in
/// print either.
struct PlacedSpan {
  const TraceSpan* span;
  int64_t begin, end;
};

/// The spans of one lane of a rank, in as few rows as possible without overlap.
std::vector<std::vector<PlacedSpan>> rows_of(const RankTrace& rank, TraceLane lane, double origin) {
  std::vector<PlacedSpan> spans;
  const auto place = [&](double time) {
    return std::llround((time + rank.clock.seconds - origin) * 1e9);
  };
  for (const TraceSpan& span : rank.spans)
    if (span.lane == lane) spans.push_back({&span, place(span.begin), place(span.end)});
  std::stable_sort(spans.begin(), spans.end(),
                   [](const PlacedSpan& a, const PlacedSpan& b) { return a.begin < b.begin; });
  std::vector<std::vector<PlacedSpan>> rows;
  for (const PlacedSpan& span : spans) {
    const auto free = std::find_if(rows.begin(), rows.end(),
                                   [&](const auto& row) { return row.back().end <= span.begin; });
    if (free == rows.end())
      rows.push_back({span});
    else
      free->push_back(span);
  }
  return rows;
}

Json metadata(const char* what, size_t pid, int tid, const char* key, const Json& value) {
  return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{key, value}}}};
}

void add_rank(Json& events, size_t pid, const RankTrace& rank, double origin) {
  const std::string name = fmt::format("rank {} on {}", pid, rank.host);
  events.push_back(metadata("process_name", pid, 0, "name", name));
  events.push_back(metadata("process_sort_index", pid, 0, "sort_index", pid));
  int tid = 0;
  for (const TraceLane lane : lanes) {
    const auto rows = rows_of(rank, lane, origin);
    for (size_t i = 0; i < rows.size(); ++i, ++tid) {
      const std::string row = i == 0 ? name_of(lane) : fmt::format("{} {}", name_of(lane), i + 1);
      events.push_back(metadata("thread_name", pid, tid, "name", row));
      events.push_back(metadata("thread_sort_index", pid, tid, "sort_index", tid));
      for (const PlacedSpan& span : rows[i])
        events.push_back({{"ph", "X"},
                          {"name", span.span->name},
                          {"cat", name_of(lane)},
                          {"pid", pid},
                          {"tid", tid},
                          {"ts", static_cast<double>(span.begin) / 1000},
                          {"dur", static_cast<double>(span.end - span.begin) / 1000}});
    }
  }
}

/// A rank's trace as it travels to rank 0.
std::vector<uint8_t> packed(const RankTrace& rank) {
  Json spans = Json::array();
  for (const TraceSpan& span : rank.spans)
    spans.push_back({static_cast<int>(span.lane), span.name, span.begin, span.end});
  return Json::to_cbor({rank.host, rank.clock.seconds, rank.clock.uncertainty_s, spans});
}

RankTrace unpacked(std::span<const uint8_t> bytes) {
  const Json json = Json::from_cbor(bytes.begin(), bytes.end());
  RankTrace rank{json[0], {json[1], json[2]}, {}};
  for (const Json& span : json[3])
    rank.spans.push_back({static_cast<TraceLane>(span[0].get<int>()), span[1], span[2], span[3]});
  return rank;
}

/// The bytes of all ranks on rank 0, in rank order; nothing on other ranks.
std::vector<std::vector<uint8_t>> gather_on_root(Communicator& world,
                                                 const std::vector<uint8_t>& mine) {
  const std::vector<int64_t> sizes = all_gather_value(world, std::ssize(mine));
  std::vector<std::vector<uint8_t>> all;
  std::vector<RecvSlice> recvs;
  if (world.rank() == 0) {
    all.resize(sizes.size());
    for (size_t r = 0; r < sizes.size(); ++r) {
      all[r].resize(static_cast<size_t>(sizes[r]));
      recvs.push_back({static_cast<int>(r), writable_bytes_of(std::span(all[r]))});
    }
  }
  HostStream stream;
  const SendSlice send{0, bytes_of(std::span<const uint8_t>(mine))};
  world.exchange(std::span(&send, 1), recvs, stream, "traces for rank 0")->wait();
  return all;
}

}  // namespace

ClockOffset align_clocks(Communicator& world, int rounds, const TraceClock& now) {
  GYRE_CHECK(rounds >= 1, "{} rounds", rounds);
  ClockOffset best;
  for (int peer = 1; peer < world.size(); ++peer)
    for (int round = 0; round < rounds; ++round) {
      if (world.rank() == 0) {
        receive_double(world, peer);
        send_double(world, peer, now());
      } else if (world.rank() == peer) {
        const double asked = now();
        send_double(world, 0, asked);
        const double root_time = receive_double(world, 0), answered = now();
        const double half = (answered - asked) / 2;
        if (round > 0 && half >= best.uncertainty_s) continue;
        best = {root_time - (asked + half), half};
      }
    }
  return best;
}

std::string trace_json(const std::vector<RankTrace>& ranks) {
  double origin = std::numeric_limits<double>::infinity();
  for (const RankTrace& rank : ranks)
    for (const TraceSpan& span : rank.spans)
      origin = std::min(origin, span.begin + rank.clock.seconds);
  Json events = Json::array(), clocks = Json::array();
  for (size_t r = 0; r < ranks.size(); ++r) {
    add_rank(events, r, ranks[r], origin);
    clocks.push_back({{"rank", r},
                      {"offset_us", ranks[r].clock.seconds * 1e6},
                      {"uncertainty_us", ranks[r].clock.uncertainty_s * 1e6}});
  }
  const Json document = {{"displayTimeUnit", "ms"},
                         {"otherData", {{"clocks", std::move(clocks)}}},
                         {"traceEvents", std::move(events)}};
  // Names of hosts may hold any bytes; JSON requires UTF-8.
  return document.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string trace_text(const Trace& mine, Communicator& world, const ClockOffset& clock) {
  const std::vector<std::vector<uint8_t>> all =
      gather_on_root(world, packed({host_name(), clock, mine.spans()}));
  std::string text;
  run_on_root(world, "the timeline", [&] {
    std::vector<RankTrace> ranks;
    for (const std::vector<uint8_t>& rank : all) ranks.push_back(unpacked(rank));
    text = trace_json(ranks);
  });
  return text;
}

}  // namespace gyre

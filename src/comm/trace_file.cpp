#include "comm/trace_file.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/json.hpp"
#include "runtime/host.hpp"

namespace gyre {
namespace {

constexpr std::array lanes = {TraceLane::compute, TraceLane::communication};

const char* name_of(TraceLane lane) {
  return lane == TraceLane::compute ? "compute" : "communication";
}

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

constexpr int64_t nanoseconds(double seconds) {
  return std::llround(seconds * 1e9);
}

/// A span on the common clock. Whole nanoseconds keep disjoint spans disjoint in the text. A
/// transfer lasts at least 2 ns, so that its arrows begin and end inside it.
struct PlacedSpan {
  const TraceSpan* span;
  int64_t begin, end;
  int tid = 0;
};

/// All spans of a rank, in the order of `rank.spans`.
std::vector<PlacedSpan> placed(const RankTrace& rank, double origin) {
  std::vector<PlacedSpan> spans;
  for (const TraceSpan& span : rank.spans) {
    const int64_t begin = nanoseconds(span.begin + rank.clock.seconds - origin);
    const int64_t end = nanoseconds(span.end + rank.clock.seconds - origin);
    const bool arrows = !span.sent.empty() || !span.received.empty();
    spans.push_back({&span, begin, std::max(end, begin + (arrows ? 2 : 0))});
  }
  return spans;
}

/// The spans of one lane, in as few rows as possible without overlap.
std::vector<std::vector<PlacedSpan*>> rows_of(std::vector<PlacedSpan>& spans, TraceLane lane) {
  std::vector<PlacedSpan*> in_order;
  for (PlacedSpan& span : spans)
    if (span.span->lane == lane) in_order.push_back(&span);
  std::stable_sort(in_order.begin(), in_order.end(),
                   [](const PlacedSpan* a, const PlacedSpan* b) { return a->begin < b->begin; });
  std::vector<std::vector<PlacedSpan*>> rows;
  for (PlacedSpan* const span : in_order) {
    const auto free = std::find_if(rows.begin(), rows.end(),
                                   [&](const auto& row) { return row.back()->end <= span->begin; });
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

/// Returns `messages` as a JSON list, and adds their bytes to `total`.
Json messages_json(const std::vector<TraceMessage>& messages, int64_t& total) {
  Json list = Json::array();
  for (const TraceMessage& m : messages) {
    list.push_back({{"peer", m.peer}, {"bytes", m.bytes}});
    total += m.bytes;
  }
  return list;
}

Json args_of(const TraceSpan& span) {
  Json args = Json::object();
  if (!span.direction.empty()) args["pass"] = span.direction;
  if (span.step >= 0) args["step"] = span.step;
  if (span.kind != SpanKind::message) return args;
  int64_t sent = 0, received = 0;
  Json to = messages_json(span.sent, sent), from = messages_json(span.received, received);
  args.update({{"bytes_sent", sent}, {"bytes_received", received}});
  args.update({{"to", std::move(to)}, {"from", std::move(from)}});
  return args;
}

double microseconds(int64_t nanoseconds) {
  return nanoseconds / 1e3;
}

/// Adds the metadata and the spans of a rank, and sets the thread of each span.
void add_rank(Json& events, size_t pid, const std::string& host, std::vector<PlacedSpan>& spans) {
  const std::string name = fmt::format("rank {} on {}", pid, host);
  events.push_back(metadata("process_name", pid, 0, "name", name));
  events.push_back(metadata("process_sort_index", pid, 0, "sort_index", pid));
  int tid = 0;
  for (const TraceLane lane : lanes) {
    const auto rows = rows_of(spans, lane);
    for (size_t i = 0; i < rows.size(); ++i, ++tid) {
      const std::string row = i == 0 ? name_of(lane) : fmt::format("{} {}", name_of(lane), i + 1);
      events.push_back(metadata("thread_name", pid, tid, "name", row));
      events.push_back(metadata("thread_sort_index", pid, tid, "sort_index", tid));
      for (PlacedSpan* const span : rows[i]) {
        span->tid = tid;
        events.push_back({{"ph", "X"},
                          {"name", span->span->name},
                          {"cat", name_of(span->span->kind)},
                          {"pid", pid},
                          {"tid", tid},
                          {"ts", microseconds(span->begin)},
                          {"dur", microseconds(span->end - span->begin)},
                          {"args", args_of(*span->span)}});
      }
    }
  }
}

/// One end of a message: its rank, the index of its span there, and its bytes.
struct MessageEnd {
  size_t rank, span;
  int64_t bytes;
};
/// A message that has been sent and received.
struct Arrow {
  MessageEnd from, to;
};

/// Pairs the k-th message from one rank to another with the k-th that the other receives.
std::vector<Arrow> arrows_of(const std::vector<RankTrace>& ranks) {
  struct Channel {
    std::vector<MessageEnd> sent, received;
  };
  std::map<std::pair<size_t, size_t>, Channel> channels;
  for (size_t r = 0; r < ranks.size(); ++r)
    for (size_t i = 0; i < ranks[r].spans.size(); ++i) {
      const TraceSpan& span = ranks[r].spans[i];
      for (const TraceMessage& m : span.sent)
        channels[{r, static_cast<size_t>(m.peer)}].sent.push_back({r, i, m.bytes});
      for (const TraceMessage& m : span.received)
        channels[{static_cast<size_t>(m.peer), r}].received.push_back({r, i, m.bytes});
    }
  std::vector<Arrow> arrows;
  for (const auto& [ends, channel] : channels)
    for (size_t k = 0; k < std::min(channel.sent.size(), channel.received.size()); ++k)
      arrows.push_back({channel.sent[k], channel.received[k]});
  return arrows;
}

/// Moves clocks forward until no message is received before it is sent (Lamport's condition, CACM
/// 21, 1978). Offsets that fulfil all conditions exist. They are longest paths, which the
/// Bellman-Ford algorithm finds in at most as many rounds as there are ranks.
void keep_order(std::vector<RankTrace>& ranks, const std::vector<Arrow>& arrows) {
  constexpr double least = 3e-9;  // keeps the order after rounding to whole nanoseconds
  bool moved = true;
  for (size_t round = 0; moved && round <= ranks.size(); ++round) {
    moved = false;
    for (const auto& [from, to] : arrows) {
      const RankTrace &sender = ranks[from.rank], &receiver = ranks[to.rank];
      const double late = sender.spans[from.span].begin + sender.clock.seconds + least -
                          receiver.spans[to.span].end - receiver.clock.seconds;
      if (late <= 0) continue;
      ranks[to.rank].clock.seconds += late;
      moved = true;
    }
  }
}

void add_arrow(Json& events, size_t id, const std::vector<std::vector<PlacedSpan>>& spans,
               const Arrow& arrow) {
  const PlacedSpan &from = spans[arrow.from.rank][arrow.from.span],
                   &to = spans[arrow.to.rank][arrow.to.span];
  const auto add = [&](const char* phase, const MessageEnd& at, const PlacedSpan& span,
                       const MessageEnd& other, int64_t time) -> Json& {
    events.push_back(
        {{"ph", phase},
         {"id", id},
         {"name", from.span->name},
         {"cat", name_of(SpanKind::message)},
         {"pid", at.rank},
         {"tid", span.tid},
         {"ts", microseconds(time)},
         {"args", {{"peer", other.rank}, {"bytes", at.bytes}, {"step", span.span->step}}}});
    return events.back();
  };
  add("s", arrow.from, from, arrow.to, from.begin);
  // The arrow is bound to the enclosing span, so it ends 1 ns before the span does.
  add("f", arrow.to, to, arrow.from, to.end - 1)["bp"] = "e";
}

Json packed(const std::vector<TraceMessage>& messages) {
  Json list = Json::array();
  for (const TraceMessage& m : messages) list.push_back({m.peer, m.bytes});
  return list;
}

std::vector<TraceMessage> messages_from(const Json& list) {
  std::vector<TraceMessage> messages;
  for (const Json& m : list) messages.push_back({m[0], m[1]});
  return messages;
}

/// Serializes a rank's trace for sending to rank 0.
std::vector<uint8_t> packed(const RankTrace& rank) {
  Json spans = Json::array();
  for (const TraceSpan& span : rank.spans)
    spans.push_back({static_cast<int>(span.lane), span.name, span.begin, span.end,
                     static_cast<int>(span.kind), span.step, span.direction, packed(span.sent),
                     packed(span.received)});
  return Json::to_cbor({rank.host, rank.clock.seconds, rank.clock.uncertainty_s, spans});
}

RankTrace unpacked(std::span<const uint8_t> bytes) {
  const Json json = Json::from_cbor(bytes.begin(), bytes.end());
  RankTrace rank{json[0], {json[1], json[2]}, {}};
  for (const Json& span : json[3])
    rank.spans.push_back({static_cast<TraceLane>(span[0].get<int>()), span[1], span[2], span[3],
                          static_cast<SpanKind>(span[4].get<int>()), span[5], span[6],
                          messages_from(span[7]), messages_from(span[8])});
  return rank;
}

/// The bytes of all ranks in rank order on rank 0; an empty list on other ranks.
std::vector<std::vector<uint8_t>> gather_on_root(Communicator& world,
                                                 const std::vector<uint8_t>& mine) {
  const std::vector<int64_t> sizes = all_gather_value(world, std::ssize(mine));
  std::vector<std::vector<uint8_t>> all;
  std::vector<RecvSlice> recvs;
  if (world.rank() == 0) {
    all.resize(sizes.size());
    for (size_t r = 0; r < sizes.size(); ++r) {
      all[r].resize(sizes[r]);
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

int64_t monotonic_clock_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code failed;
  const std::string space = std::filesystem::read_symlink("/proc/self/ns/time", failed);
  return boot.empty() ? 0 : static_cast<int64_t>(std::hash<std::string>()(boot + space));
}

ClockOffset common_clock(Communicator& world, int64_t clock_id) {
  const std::vector<int64_t> ids = all_gather_value(world, clock_id);
  const auto shared = [&](size_t peer) { return clock_id != 0 && ids[peer] == clock_id; };
  if (ids[0] != 0 && std::count(ids.begin(), ids.end(), ids[0]) == world.size()) return {};
  ClockOffset best = align_clocks(world);
  const std::vector<double> offsets = all_gather_value(world, best.seconds),
                            errors = all_gather_value(world, best.uncertainty_s);
  for (size_t peer = 0; peer < ids.size(); ++peer)
    if (shared(peer) && errors[peer] < best.uncertainty_s) best = {offsets[peer], errors[peer]};
  return best;
}

std::string trace_json(std::vector<RankTrace> ranks) {
  const std::vector<Arrow> arrows = arrows_of(ranks);
  keep_order(ranks, arrows);
  double origin = std::numeric_limits<double>::infinity();
  for (const RankTrace& rank : ranks)
    for (const TraceSpan& span : rank.spans)
      origin = std::min(origin, span.begin + rank.clock.seconds);
  Json events = Json::array(), clocks = Json::array();
  std::vector<std::vector<PlacedSpan>> spans;
  for (size_t r = 0; r < ranks.size(); ++r) {
    spans.push_back(placed(ranks[r], origin));
    add_rank(events, r, ranks[r].host, spans[r]);
    clocks.push_back({{"rank", r},
                      {"offset_us", ranks[r].clock.seconds * 1e6},
                      {"uncertainty_us", ranks[r].clock.uncertainty_s * 1e6}});
  }
  // Arrows follow the spans: an arrow is bound to a span that is read before it.
  for (size_t i = 0; i < arrows.size(); ++i) add_arrow(events, i + 1, spans, arrows[i]);
  const Json document = {{"displayTimeUnit", "ms"},
                         {"otherData", {{"clocks", std::move(clocks)}}},
                         {"traceEvents", std::move(events)}};
  return dump_json(document) + "\n";
}

std::string trace_text(const Trace& mine, Communicator& world, const ClockOffset& clock) {
  const std::vector<std::vector<uint8_t>> all =
      gather_on_root(world, packed({host_name(), clock, mine.spans()}));
  std::string text;
  run_on_root(world, "the timeline", [&] {
    std::vector<RankTrace> ranks;
    for (const std::vector<uint8_t>& rank : all) ranks.push_back(unpacked(rank));
    text = trace_json(std::move(ranks));
  });
  return text;
}

}  // namespace gyre

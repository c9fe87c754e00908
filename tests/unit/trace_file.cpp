// What a trace file says: processes, lanes, times.

#include "report/trace_file.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "errors.hpp"
#include "io/outputs.hpp"
#include "io_files.hpp"

namespace gyre {
namespace GYRE_FILE {

using Json = nlohmann::json;

struct Event {
  std::string name;
  double ts, dur;
  int64_t end_ns() const { return std::llround(ts * 1000) + std::llround(dur * 1000); }
};

/// Spans of every lane, by rank and the lane's name, in the order of the file.
using Lanes = std::map<std::pair<int, std::string>, std::vector<Event>>;

/// The names that metadata of a kind gives, by (pid, tid).
std::map<std::pair<int, int>, std::string> names(const Json& document, const std::string& what) {
  std::map<std::pair<int, int>, std::string> result;
  for (const Json& event : document["traceEvents"])
    if (event["ph"] == "M" && event["name"] == what)
      result[{event["pid"], event["tid"]}] = event["args"]["name"];
  return result;
}

Lanes lanes_of(const Json& document) {
  const auto threads = names(document, "thread_name");
  Lanes lanes;
  for (const Json& event : document["traceEvents"])
    if (event["ph"] == "X")
      lanes[{event["pid"], threads.at({event["pid"], event["tid"]})}].push_back(
          {event["name"], event["ts"], event["dur"]});
  return lanes;
}

TEST(TraceFile, RanksLanesAndTimesOnACommonClock) {
  const std::vector<RankTrace> ranks = {
      {"node1",
       {0, 0},
       {{TraceLane::communication, "KV", 100.001, 100.002},
        {TraceLane::compute, "own kv", 100.0, 100.0025}}},
      {"node2", {-50, 1e-6}, {{TraceLane::compute, "own kv", 150.0005, 150.0015}}},
  };
  const Json document = Json::parse(trace_json(ranks));
  const auto processes = names(document, "process_name");
  EXPECT_EQ(processes.size(), 2U);
  EXPECT_EQ(processes.at({0, 0}), "rank 0 on node1");
  EXPECT_EQ(processes.at({1, 0}), "rank 1 on node2");
  const Lanes lanes = lanes_of(document);
  ASSERT_EQ(lanes.size(), 3U);
  const Event first = lanes.at({0, "compute"}).at(0), kv = lanes.at({0, "communication"}).at(0),
              second = lanes.at({1, "compute"}).at(0);
  EXPECT_EQ(first.name, "own kv");
  EXPECT_EQ(first.ts, 0);
  EXPECT_EQ(first.dur, 2500);
  EXPECT_EQ(kv.name, "KV");
  EXPECT_EQ(kv.ts, 1000);
  EXPECT_EQ(kv.dur, 1000);
  EXPECT_EQ(second.ts, 500);  // 150.0005 - 50 on rank 0's clock
  EXPECT_EQ(second.dur, 1000);
  EXPECT_EQ(document["otherData"]["clocks"][1]["offset_us"], -50e6);
  EXPECT_EQ(document["otherData"]["clocks"][1]["uncertainty_us"], 1);
}

TEST(TraceFile, OverlappingSpansGoToFurtherLanes) {
  std::vector<RankTrace> ranks(1);
  const auto add = [&](TraceLane lane, const char* name, double begin, double end) {
    ranks[0].spans.push_back({lane, name, begin, end});
  };
  add(TraceLane::communication, "c", 3, 7);  // not in order of time
  add(TraceLane::communication, "a", 0, 4);
  add(TraceLane::communication, "b", 1, 3);
  add(TraceLane::communication, "d", 4, 5);
  add(TraceLane::communication, "e", 4.5, 6);
  add(TraceLane::compute, "x", 0, 2);
  add(TraceLane::compute, "y", 2, 4);
  const Lanes lanes = lanes_of(Json::parse(trace_json(ranks)));
  const auto spans = [&](const std::string& lane) {
    std::string text;
    for (const Event& event : lanes.at({0, lane})) text += event.name;
    return text;
  };
  EXPECT_EQ(spans("communication"), "ad");
  EXPECT_EQ(spans("communication 2"), "bc");
  EXPECT_EQ(spans("communication 3"), "e");
  EXPECT_EQ(spans("compute"), "xy");
  EXPECT_EQ(lanes.size(), 4U);
}

TEST(TraceFile, EverySpanOnceInOrderAndApart) {
  EXPECT_TRUE(rc::check([] {
    std::vector<RankTrace> ranks(static_cast<size_t>(*rc::gen::inRange(1, 4)));
    std::multimap<std::string, double> wanted;  // name and duration in us
    double origin = HUGE_VAL;
    for (RankTrace& rank : ranks) {
      rank.clock.seconds = *rc::gen::inRange(-1000, 1000) * 0.37;
      for (int i = *rc::gen::inRange(0, 20); i > 0; --i) {
        // Times of a machine that has been up for months, in steps of 0.1 us.
        const double begin = 2e7 + *rc::gen::inRange(0, 500) * 1e-7;
        const double end = begin + *rc::gen::inRange(0, 200) * 1e-7;
        const auto lane = *rc::gen::element(TraceLane::compute, TraceLane::communication);
        rank.spans.push_back({lane, std::to_string(wanted.size()), begin, end});
        wanted.emplace(rank.spans.back().name, (end - begin) * 1e6);
        origin = std::min(origin, begin + rank.clock.seconds);
      }
    }
    const Lanes lanes = lanes_of(Json::parse(trace_json(ranks)));
    size_t count = 0;
    double first = HUGE_VAL;
    for (const auto& [lane, events] : lanes) {
      for (size_t i = 0; i < events.size(); ++i) {
        const auto found = wanted.find(events[i].name);
        RC_ASSERT(found != wanted.end());
        RC_ASSERT(std::abs(found->second - events[i].dur) < 0.01);
        if (i > 0) RC_ASSERT(events[i - 1].end_ns() <= std::llround(events[i].ts * 1000));
        first = std::min(first, events[i].ts);
        ++count;
      }
    }
    RC_ASSERT(count == wanted.size());
    RC_ASSERT(count == 0 || first == 0);
  }));
}

TEST(TraceFile, NoSpansAtAll) {
  const Json document = Json::parse(trace_json({{"a", {}, {}}, {"b", {}, {}}}));
  EXPECT_EQ(names(document, "process_name").size(), 2U);
  EXPECT_TRUE(lanes_of(document).empty());
}

TEST(TraceFile, NamesOfAnyBytes) {
  const RankTrace rank{"h\xff", {}, {{TraceLane::compute, "a \"b\" \\ \n", 0, 1}}};
  const Lanes lanes = lanes_of(Json::parse(trace_json({rank})));
  EXPECT_EQ(lanes.at({0, "compute"}).at(0).name, "a \"b\" \\ \n");
}

TEST(Outputs, WhatCannotBeWrittenIsAUsageError) {
  const test::SharedFolder folder;
  Outputs outputs(test::world());
  EXPECT_EQ(test::usage_message([&] { outputs.add_text(folder.file("none/trace.json"), ""); }),
            fmt::format("cannot write '{0}/none/trace.json': there is no folder '{0}/none'",
                        folder.path()));
}

}  // namespace GYRE_FILE
}  // namespace gyre

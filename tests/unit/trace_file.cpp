// What a trace file says: processes, lanes, times.

#include "comm/trace_file.hpp"

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
    std::vector<RankTrace> ranks(*rc::gen::inRange(1, 4));
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

/// A transfer that lasts from `begin` to `end` seconds.
TraceSpan transfer(const char* name, double begin, double end, std::vector<TraceMessage> sent,
                   std::vector<TraceMessage> received) {
  return {TraceLane::communication, name, begin, end, SpanKind::message, 4, "bwd", std::move(sent),
          std::move(received)};
}

std::vector<Json> events_of(const Json& document, const std::string& phase) {
  std::vector<Json> events;
  for (const Json& event : document["traceEvents"])
    if (event["ph"] == phase) events.push_back(event);
  return events;
}

TEST(TraceFile, TransfersSayPeersBytesAndStep) {
  const Json document = Json::parse(
      trace_json({{"a", {}, {transfer("KV", 1, 2, {{1, 100}, {2, 50}}, {{2, 30}})}},
                  {"b", {}, {{TraceLane::compute, "wait KV", 1, 2, SpanKind::wait, 5, "fwd"}}}}));
  const std::vector<Json> spans = events_of(document, "X");
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0]["cat"], "message");
  EXPECT_EQ(spans[0]["args"], Json::parse(R"({"pass": "bwd", "step": 4,
      "bytes_sent": 150, "bytes_received": 30, "from": [{"peer": 2, "bytes": 30}],
      "to": [{"peer": 1, "bytes": 100}, {"peer": 2, "bytes": 50}]})"));
  EXPECT_EQ(spans[1]["cat"], "wait");
  EXPECT_EQ(spans[1]["args"], Json::parse(R"({"pass": "fwd", "step": 5})"));
  EXPECT_TRUE(events_of(document, "s").empty());  // nobody receives what rank 0 sends
}

TEST(TraceFile, AnArrowGoesFromEachSendToItsReceive) {
  // Two messages from rank 0 to rank 1, which receives the first in a transfer of another name.
  const Json document = Json::parse(trace_json(
      {{"a", {}, {transfer("KV", 0, 2, {{1, 8}}, {}), transfer("V", 1, 3, {{1, 9}}, {})}},
       {"b", {}, {transfer("X", 0, 4, {}, {{0, 8}}), transfer("V", 3, 5, {}, {{0, 9}})}}}));
  const std::vector<Json> starts = events_of(document, "s"), ends = events_of(document, "f");
  ASSERT_EQ(starts.size(), 2U);
  ASSERT_EQ(ends.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(starts[i]["id"], ends[i]["id"]);
    EXPECT_EQ(starts[i]["name"], i == 0 ? "KV" : "V");
    EXPECT_EQ(ends[i]["name"], starts[i]["name"]);
    EXPECT_EQ(starts[i]["cat"], ends[i]["cat"]);
    EXPECT_EQ(ends[i]["bp"], "e");
    EXPECT_EQ(starts[i]["pid"], 0);
    EXPECT_EQ(ends[i]["pid"], 1);
    EXPECT_EQ(starts[i]["ts"], i == 0 ? 0 : 1e6);
    EXPECT_EQ(ends[i]["ts"], (i == 0 ? 4e6 : 5e6) - 1e-3);  // inside its span, 1 ns before the end
    EXPECT_EQ(starts[i]["args"], (Json{{"peer", 1}, {"bytes", 8 + i}, {"step", 4}}));
    EXPECT_EQ(ends[i]["args"], (Json{{"peer", 0}, {"bytes", 8 + i}, {"step", 4}}));
  }
  EXPECT_NE(starts[0]["id"], starts[1]["id"]);
  EXPECT_NE(starts[0]["tid"], starts[1]["tid"]);  // the two overlap
  EXPECT_EQ(document["otherData"]["clocks"][1]["offset_us"], 0);
}

TEST(TraceFile, ClocksMoveForwardUntilNothingArrivesBeforeItIsSent) {
  // Down a chain of four, each rank's clock is further behind than the one before.
  std::vector<RankTrace> ranks(4);
  for (int r = 0; r < 4; ++r) {
    std::vector<TraceMessage> sent, received;
    if (r < 3) sent.push_back({r + 1, 10});
    if (r > 0) received.push_back({r - 1, 10});
    ranks[r].spans = {transfer("KV", 10 - r, 10 - r + 0.25, sent, received)};
  }
  const Json document = Json::parse(trace_json(ranks));
  const std::vector<Json> starts = events_of(document, "s"), ends = events_of(document, "f");
  ASSERT_EQ(starts.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_LT(starts[i]["ts"], ends[i]["ts"]);
    EXPECT_NEAR(starts[i]["ts"], 0.75e6 - 0.25e6 * static_cast<double>(i), 0.1);
    EXPECT_NEAR(document["otherData"]["clocks"][i]["offset_us"], 0.75e6 * static_cast<double>(i),
                0.1);
  }
}

TEST(TraceFile, ATransferThatTakesNoTimeHoldsTheEndsOfItsArrows) {
  const std::vector<RankTrace> ranks = {{"a", {}, {transfer("KV", 5, 5, {{1, 10}}, {})}},
                                        {"b", {}, {transfer("KV", 5, 5, {}, {{0, 10}})}}};
  const Json document = Json::parse(trace_json(ranks));
  for (const Json& span : events_of(document, "X")) EXPECT_EQ(span["dur"], 0.002);
  EXPECT_LE(events_of(document, "s")[0]["ts"], events_of(document, "f")[0]["ts"]);
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

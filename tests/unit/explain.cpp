// Plans in words and in pictures.

#include "predict/explain.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "attention/schedules/registry.hpp"
#include "layout_cases.hpp"
#include "mask_cases.hpp"
#include "predict/plan_json.hpp"
#include "predict/plan_svg.hpp"
#include "report/svg.hpp"
#include "report/value.hpp"

namespace gyre {
namespace GYRE_FILE {

struct Explained {
  Layout layout;
  AttentionProblem problem;
  Plan plan;
  MachineModel machine = flat_machine();

  Explained(const std::string& schedule, const std::string& kind, int cp, int64_t tokens,
            const MaskRule& mask = MaskKind::causal)
      : layout(find_layout(kind).make(test::full_bounds({tokens}).view(), options(cp))),
        problem{&layout, {4, 2, 8, 0.35F}, mask, {}},
        plan(plan_all(find_schedule(schedule), problem)) {
    machine.kernel.flops_per_s = 1e9;
    machine.links[0].bytes_per_s = 1e6;
    machine.links[0].latency_s = 1e-4;
  }
  std::string text(bool verbose = false) const {
    return explain(plan, problem, {}, directions(), verbose);
  }
  std::vector<Simulation> directions() const {
    std::vector<Simulation> both;
    for (const Pass pass : {Pass::forward, Pass::backward})
      both.push_back(simulate(plan, pass, problem.heads, {}, machine));
    return both;
  }
  std::string svg() const { return plan_svg(plan, problem, directions(), "of a machine"); }

 private:
  static LayoutOptions options(int cp) {
    LayoutOptions result;
    result.cp = cp;
    return result;
  }
};

TEST(PlanJson, SaysWhichDiagonalsAMaskHas) {
  // A document of 8 on one rank: its regions are the rectangles.
  const Explained e("ring", "contiguous", 1, 8, test::mixed_mask({8}));
  std::multiset<std::string> masks;
  const auto plan = plan_json(e.plan, e.problem, {}, e.directions(), true);
  for (const auto& step : plan["passes"][0]["ranks"][0]["steps"])
    if (step["step"] == "compute")
      for (const auto& r : step["rectangles"])
        masks.insert(!r.contains("mask")                ? "full"
                     : !r["mask"]["causal"].get<bool>() ? "inverse"
                     : r["mask"]["window"] > 0          ? "window"
                                                        : "causal");
  EXPECT_EQ(masks.count("inverse"), 1U);
  EXPECT_EQ(masks.count("full"), 1U);
  EXPECT_NE(e.text().find("1 inverse causal"), std::string::npos) << e.text();
}

TEST(SiText, HasThreeDigitsAndAPrefix) {
  EXPECT_EQ(si_text(16.8e6, "B"), "16.8 MB");
  EXPECT_EQ(si_text(0.0021, "s"), "2.1 ms");
  EXPECT_EQ(si_text(512, ""), "512");
  EXPECT_EQ(si_text(2.5e9, ""), "2.5 G");
  EXPECT_EQ(si_text(0, "s"), "0 s");
  EXPECT_EQ(si_text(999.4, "B"), "999 B");
  EXPECT_EQ(si_text(999.6, "B"), "1 kB");
  EXPECT_EQ(si_text(999600, "B"), "1 MB");
  EXPECT_EQ(si_text(0.9999, "s"), "1 s");
  EXPECT_EQ(si_text(1e-9, "s"), "1 ns");
  EXPECT_EQ(si_text(-1500, "B"), "-1.5 kB");
}

TEST(ShownRanks, AreAllOrEvenlySpacedWithBothEnds) {
  EXPECT_EQ(shown_ranks(3, 8), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(shown_ranks(9, 3), (std::vector<int>{0, 4, 8}));
  EXPECT_EQ(shown_ranks(100, 1), (std::vector<int>{0}));
  EXPECT_EQ(shown_ranks(64, 16).size(), 16U);
  EXPECT_EQ(shown_ranks(64, 16).back(), 63);
}

TEST(PlanTitle, NamesScheduleLayoutAndMask) {
  const auto title = [](const MaskRule& mask) {
    const Explained e("ring", "zigzag", 2, 9, mask);
    return plan_title(e.plan, e.problem);
  };
  EXPECT_EQ(title(MaskKind::causal), "ring, zigzag, cp = 2, 9 tokens, causal");
  EXPECT_EQ(title(MaskKind::full), "ring, zigzag, cp = 2, 9 tokens, full mask");
  EXPECT_EQ(title({MaskKind::causal, 4}), "ring, zigzag, cp = 2, 9 tokens, causal window of 4");
}

TEST(Explain, TablesThenStepsOfARing) {
  // Chunks 1 and 2 of 0..3, five slots each, the last of the stream a pad of the other rank.
  const std::string text = Explained("ring", "zigzag", 2, 19).text();
  const std::string tables =
      "# ring, zigzag, cp = 2, 19 tokens, causal; 4 query heads, 2 KV heads, dim 8\n"
      "# forward\n"
      "#  rank           pairs   of mean  messages      sent  received  transient     "
      " time   exposed\n"
      "#                                                (kB)      (kB)       (kB)     "
      " (ms)      (ms)\n"
      "      0             340    0.8947         1     1.280     1.280      1.280    "
      " 1.385     1.374\n"
      "      1             420    1.1053         1     1.280     1.280      1.280    "
      " 1.386     1.373\n"
      "# all ranks: 760 pairs, 2.56 kB sent; 1.39 ms, compute only 13.4 us, exposed"
      " 1.37 ms\n"
      "# backward\n"
      "#  rank           pairs   of mean  messages      sent  received  transient     "
      " time   exposed\n"
      "#                                                (kB)      (kB)       (kB)     "
      " (ms)      (ms)\n"
      "      0             340    0.8947         1     1.280     1.280      3.840    "
      " 1.396     1.369\n"
      "      1             420    1.1053         1     1.280     1.280      3.840    "
      " 1.393     1.359\n"
      "# all ranks: 760 pairs, 2.56 kB sent; 1.4 ms, compute only 33.6 us, exposed"
      " 1.36 ms\n";
  EXPECT_EQ(text.substr(0, tables.size()), tables);
  const std::string forward =
      "forward, rank 1 of 2: 10 slots, 10 tokens\n"
      "  step  0  Clear        own out\n"
      "  step  1  Clear        own stats\n"
      "  step  2  Exchange #0  KV: own kv -> rank 0 (10 tokens, 1.28 kB)\n"
      "                        A (kv of rank 0) <- rank 0 (10 tokens, 1.28 kB)\n"
      "  step  3  Compute      own kv: 1 rectangle (1 causal), 55 pairs, 55.0 % of"
      " their area, for 4 heads\n"
      "  step  4  Wait #0      KV\n"
      "  step  5  Compute      A (kv of rank 0): 1 rectangle (1 full), 50 pairs, 100.0"
      " % of their area, for 4 heads\n"
      "  step  6  Finish       own out: sinks\n";
  EXPECT_NE(text.find("\n\n" + forward + "\nbackward, rank 0 of 2: "), std::string::npos) << text;
  const std::string backward =
      "backward, rank 1 of 2: 10 slots, 10 tokens\n"
      "  step  0  Delta        own stats\n"
      "  step  1  Clear        own d_q\n"
      "  step  2  Clear        C (d_kv of rank 0)\n"
      "  step  3  Compute      A (kv of rank 0): 1 rectangle (1 full), 50 pairs, 100.0"
      " % of their area, for 4 heads\n"
      "                        to own d_q and C (d_kv of rank 0)\n"
      "  step  4  Exchange #1  dKV: C (d_kv of rank 0) -> rank 0 (10 tokens, 1.28 kB)\n"
      "                        own d_kv, added <- rank 0 (10 tokens, 1.28 kB)\n"
      "  step  5  Clear        own d_kv\n"
      "  step  6  Compute      own kv: 1 rectangle (1 causal), 55 pairs, 55.0 % of"
      " their area, for 4 heads\n"
      "                        to own d_q and own d_kv\n"
      "  step  7  Wait #1      dKV\n"
      "  step  8  SinkGradient own stats, to be summed over ranks\n";
  EXPECT_TRUE(text.ends_with("\n\n" + backward)) << text;
}

/// How often `part` occurs.
int64_t occurrences(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Explain, StepsOfAllRanksOfASmallGroupAndOnRequestOfOneOfALargeOne) {
  EXPECT_EQ(occurrences(Explained("ring", "contiguous", 8, 64).text(), "forward, rank "), 8);
  const Explained large("ring", "contiguous", 9, 64);
  EXPECT_EQ(occurrences(large.text(), "forward, rank "), 0);
  EXPECT_EQ(occurrences(large.text(), "# 8 of 9 ranks\n"), 2);
  EXPECT_EQ(occurrences(large.text(), "# -v: more ranks, and steps\n"), 1);
  EXPECT_EQ(occurrences(large.text(true), "forward, rank "), 1);
  EXPECT_EQ(occurrences(large.text(true), "forward, rank 0 of 9: 8 slots, 8 tokens\n"), 1);
}

TEST(Explain, ALargeTableIsCutAndSaysSo) {
  const std::string text = Explained("ring", "contiguous", 65, 65).text(true);
  EXPECT_EQ(occurrences(text, "# 64 of 65 ranks\n"), 2);
  EXPECT_EQ(occurrences(Explained("ring", "contiguous", 64, 64).text(true), "of 64 ranks\n"), 0);
}

TEST(Explain, OnlyTheDirectionsThatWereSimulated) {
  const Explained e("ring", "contiguous", 2, 8);
  const std::string text = explain(e.plan, e.problem, {}, {e.directions().back()});
  EXPECT_EQ(occurrences(text, "backward, rank "), 2);
  EXPECT_EQ(occurrences(text, "forward, rank "), 0);
}

/// A rectangle of a picture.
struct Box {
  double x, y, width, height;
  std::string fill;
};
std::vector<Box> boxes(const std::string& svg) {
  std::vector<Box> result;
  for (size_t at = svg.find("<rect "); at != std::string::npos; at = svg.find("<rect ", at + 1)) {
    Box box;
    char fill[32], end = 0;
    const int found =
        std::sscanf(&svg[at], R"(<rect x="%lf" y="%lf" width="%lf" height="%lf" fill="%31[^"]"/%c)",
                    &box.x, &box.y, &box.width, &box.height, fill, &end);
    if (found < 6 || end != '>') continue;  // another kind of rectangle
    box.fill = fill;
    result.push_back(box);
  }
  return result;
}

/// Boxes of the upper lanes, which are 20 high, band by band.
std::vector<std::vector<Box>> upper_lanes(const std::string& svg) {
  std::map<double, std::vector<Box>> lanes;
  for (const Box& box : boxes(svg))
    if (box.height == 20) lanes[box.y].push_back(box);
  std::vector<std::vector<Box>> result;
  for (const auto& [y, lane] : lanes) result.push_back(lane);
  return result;
}

TEST(PlanSvg, BandsShowWhatIsComputedAndAwaited) {
  for (const char* schedule : {"ring", "all-to-all"}) {
    SCOPED_TRACE(schedule);
    const Explained e(schedule, "contiguous", 4, 512);
    const std::string svg = e.svg();
    EXPECT_EQ(occurrences(svg, ">rank "), 2 * 4);
    for (const char* bad : {"nan", "inf", "=\"-"}) EXPECT_EQ(svg.find(bad), std::string::npos);
    EXPECT_EQ(occurrences(svg, "<svg"), occurrences(svg, "</svg>"));
    const auto lanes = upper_lanes(svg);
    ASSERT_EQ(lanes.size(), 2U * 4);
    const std::vector<Simulation> both = e.directions();
    const double longest = std::max(both[0].makespan(), both[1].makespan());
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      const RankTimeline& times = both[lane / 4].ranks[lane % 4];
      double x = 0, computed = 0, waited = 0;
      for (const Box& box : lanes[lane]) {
        EXPECT_GE(box.x, x - 0.02);
        x = box.x + box.width;
        (box.fill == "url(#wait)" ? waited : computed) += box.width;
      }
      EXPECT_LE(x, 24 + 62 + 900 + 0.02);
      const auto count = static_cast<double>(lanes[lane].size());
      EXPECT_NEAR(computed, 900 * times.compute / longest, 0.51 * count);
      EXPECT_NEAR(waited, 900 * times.wait / longest, 0.02 * count);
    }
  }
}

TEST(PlanSvg, ColoursAreThoseOfTheOwnersOfKeys) {
  const auto lanes = upper_lanes(Explained("ring", "contiguous", 4, 512).svg());
  const auto fills = [&](size_t lane) {
    std::vector<std::string> result;
    for (const Box& box : lanes.at(lane))
      if (box.fill != "url(#wait)") result.push_back(box.fill);
    return result;
  };
  const std::string blue = "#0072b2", orange = "#e69f00", green = "#009e73", sky = "#56b4e9";
  EXPECT_EQ(fills(0), (std::vector<std::string>{blue}));
  EXPECT_EQ(fills(3), (std::vector<std::string>{sky, green, orange, blue}));
  EXPECT_EQ(fills(4 + 3), (std::vector<std::string>{blue, orange, green, sky}));
}

/// Linear light of a colour as readers without one sort of cones see it (Viénot, Brettel and Mollon
/// 1999: red and green cones), or as all do.
std::array<double, 3> seen(const std::string& hex, bool colour_blind) {
  std::array<double, 3> c{};
  for (size_t i = 0; i < 3; ++i)
    c[i] = std::pow(std::stoi(hex.substr(1 + 2 * i, 2), nullptr, 16) / 255.0, 2.2);
  if (!colour_blind) return c;
  const double yellow = 0.29275 * c[0] + 0.70725 * c[1];  // deuteranopes see red and green alike
  return {yellow, yellow, c[2] - 0.02234 * (c[0] - c[1])};
}

double distance(const std::string& a, const std::string& b, bool colour_blind) {
  const auto x = seen(a, colour_blind), y = seen(b, colour_blind);
  double sum = 0;
  for (size_t i = 0; i < 3; ++i)
    sum += std::pow(std::pow(std::max(0.0, x[i]), 1 / 2.2) - std::pow(std::max(0.0, y[i]), 1 / 2.2),
                    2);
  return std::sqrt(sum);
}

TEST(PlanSvg, ColourBlindReadersTellRanksApart) {
  for (const bool blind : {false, true}) {
    for (int cp = 2; cp <= 8; ++cp)
      for (int a = 0; a < cp; ++a)
        for (int b = 0; b < a; ++b)
          EXPECT_GT(distance(svg::color(a, cp), svg::color(b, cp), blind), 0.2)
              << a << " and " << b << " of " << cp;
    for (const int cp : {9, 64, 1000})  // neighbours at least
      for (int a = 1; a < cp; ++a)
        EXPECT_GT(distance(svg::color(a, cp), svg::color(a - 1, cp), blind), 0.3) << a;
    for (int a = 0; a < 8; ++a)
      for (int b = 0; b < a; ++b)
        EXPECT_GT(distance(svg::tint(a), svg::tint(b), blind), 0.1) << a << " and " << b;
  }
}

TEST(PlanSvg, SentMessagesDoNotOverlapOnALane) {
  for (const int ranks_per_node : {0, 2}) {  // links inside a node are busy at the same time
    Explained e("all-gather", "contiguous", 4, 512);
    if (ranks_per_node > 0) {
      e.machine.links.insert(e.machine.links.begin(), LinkTier());
      e.machine.links[0].ranks = ranks_per_node;
      e.machine.links[0].bytes_per_s = 2e6;
    }
    int64_t sent = 0, drawn = 0;
    for (const Simulation& s : e.directions())
      for (const RankTimeline& rank : s.ranks)
        for (const SimulatedSpan& span : rank.spans) sent += span.kind == SpanKind::message ? 1 : 0;
    std::map<double, double> ends;
    for (const Box& box : boxes(e.svg()))
      if (box.height == (ranks_per_node == 0 ? 8 : 4)) {
        EXPECT_GE(box.x, ends[box.y] - 0.02);
        ends[box.y] = box.x + box.width;
        ++drawn;
      }
    EXPECT_EQ(drawn, sent);
    EXPECT_EQ(ends.size(), ranks_per_node == 0 ? 2U * 4 : 2U * 4 * 2);
  }
}

TEST(PlanSvg, ManyRanksAreASelectionWithTheSlowest) {
  const Explained e("ring", "contiguous", 33, 33 * 8);
  for (const size_t slowest : {7U, 0U, 31U, 32U}) {
    std::vector<Simulation> both = e.directions();
    for (Simulation& s : both) s.ranks[slowest].total *= 1.1;
    const std::string svg = plan_svg(e.plan, e.problem, both, "");
    EXPECT_EQ(occurrences(svg, ">rank "), 2 * 16);
    EXPECT_EQ(occurrences(svg, "; 16 of 33 ranks, the slowest among them<"), 2);
    EXPECT_EQ(occurrences(svg, fmt::format(">rank {}<", slowest)), 2);
    EXPECT_EQ(occurrences(svg, ">rank 32<"), 2);
  }
}

TEST(PlanSvg, NothingToDoIsAPictureToo) {
  const std::string svg = Explained("ring", "contiguous", 1, 0).svg();
  EXPECT_EQ(occurrences(svg, ">rank 0<"), 2);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

}  // namespace GYRE_FILE
}  // namespace gyre

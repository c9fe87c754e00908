#include "predict/explain.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "core/error.hpp"
#include "report/table.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

constexpr size_t max_messages = 4;  // lines for sends, or receives; the last may sum up the rest
constexpr int few_ranks = 8, many_ranks = 64;  // in the table over ranks

/// Names of storages in order: "A", "B", ..., "Z", "A1".
std::string storage_name(int storage) {
  const int i = storage - array_kinds;
  const std::string letter(1, static_cast<char>('A' + i % 26));
  return i < 26 ? letter : letter + std::to_string(i / 26);
}

/// "rank 3", "ranks 0, 2-7"; "40 ranks" for more than three runs of ranks.
std::string owners_text(const std::vector<RankRows>& rows) {
  std::set<int> ranks;
  for (const RankRows& run : rows) ranks.insert(run.rank);
  if (ranks.empty()) return "nobody";
  const std::vector<std::string> runs = ranges_text({ranks.begin(), ranks.end()});
  if (runs.size() > 3) return fmt::format("{} ranks", ranks.size());
  return fmt::format("rank{} {}", ranks.size() > 1 ? "s" : "", fmt::join(runs, ", "));
}

/// Writes the steps of one rank as text.
class StepWriter {
 public:
  StepWriter(const RankPlan& plan, const AttentionProblem& problem, const ElementTypes& types)
      : plan_(plan), problem_(problem), types_(types) {}

  std::string steps(Pass pass) {
    const std::vector<Step>& steps = plan_.steps(pass);
    std::string text;
    for (size_t i = 0; i < steps.size(); ++i)
      text += fmt::format("  step {:2}  {}\n", i,
                          std::visit([&](const auto& step) { return line(step); }, steps[i]));
    return text;
  }

 private:
  static constexpr const char* indent = "\n                        ";

  static std::string named(const std::string& name, const std::string& rest) {
    return fmt::format("{:<12} {}", name, rest);
  }
  const PlanArray& array(int index) const { return plan_.arrays[index]; }
  /// "own kv", "A (kv of rank 2)"; with its heads if it does not have all of them.
  std::string name(int index) const {
    const PlanArray& a = array(index);
    if (index < array_kinds) return fmt::format("own {}", name_of(a.kind));
    const HeadRange all = plan_.arrays[static_cast<size_t>(a.kind)].heads;
    return fmt::format("{} ({} of {}{})", storage_name(a.storage), name_of(a.kind),
                       owners_text(a.rows), heads_text(a.heads, all));
  }
  static std::string heads_text(HeadRange heads, HeadRange all) {
    if (heads == all) return "";
    if (heads.count == 1) return fmt::format(", head {}", heads.begin);
    return fmt::format(", heads {}-{}", heads.begin, heads.end() - 1);
  }
  std::string slice_text(const Slice& slice) const {
    const PlanArray& a = array(slice.array);
    std::string text = name(slice.array);
    if (slice.rows != a.tokens())
      text += fmt::format(", rows {}-{}", slice.row, slice.row + slice.rows - 1);
    return text + heads_text(slice.heads, a.heads) + (slice.add ? ", added" : "");
  }
  int64_t message_bytes(const Message& m) const {
    int64_t bytes = 0;
    for (const Slice& s : m.slices)
      bytes += wire_bytes(array(s.array).kind, s, problem_.heads, types_);
    return bytes;
  }
  /// "own kv -> rank 2 (4096 tokens, 16.8 MB)"; for several slices "own kv, 3 runs of rows".
  std::string message_text(const Message& m, const char* arrow) const {
    std::vector<std::string> slices;
    for (const Slice& s : m.slices) {
      const auto same = [&](const Slice& x) { return x.array == s.array; };
      const auto first = std::find_if(m.slices.begin(), m.slices.end(), same);
      if (&*first != &s) continue;
      const auto count = std::count_if(m.slices.begin(), m.slices.end(), same);
      slices.push_back(count == 1 ? slice_text(s)
                                  : fmt::format("{}, {} runs of rows", name(s.array), count));
    }
    int64_t tokens = 0;
    for (const Slice& s : m.slices)
      if (s.array == m.slices[0].array) tokens += s.rows;
    return fmt::format("{} {} {} ({}, {})", fmt::join(slices, " and "), arrow,
                       m.peer == plan_.rank ? "itself" : fmt::format("rank {}", m.peer),
                       count_text(tokens, "token"), si_text(message_bytes(m), "B"));
  }
  std::vector<std::string> messages_text(const std::vector<Message>& messages,
                                         const char* arrow) const {
    std::vector<std::string> lines;
    const size_t shown = messages.size() > max_messages ? max_messages - 1 : messages.size();
    for (size_t i = 0; i < shown; ++i) lines.push_back(message_text(messages[i], arrow));
    if (shown == messages.size()) return lines;
    int64_t bytes = 0;
    for (size_t i = shown; i < messages.size(); ++i) bytes += message_bytes(messages[i]);
    lines.push_back(fmt::format("and {} {} more ranks ({} in all)", arrow, messages.size() - shown,
                                si_text(bytes, "B")));
    return lines;
  }

  std::string line(const step::Exchange& e) {
    what_[e.id] = e.what;
    std::vector<std::string> lines = messages_text(e.sends, "->");
    const std::vector<std::string> received = messages_text(e.recvs, "<-");
    lines.insert(lines.end(), received.begin(), received.end());
    if (lines.empty()) lines.emplace_back("nothing to move");
    if (e.transport != Transport::messages)
      lines.push_back(
          fmt::format("by the library's {} of {} ranks", name_of(e.transport), e.group.size()));
    return named(fmt::format("Exchange #{}", e.id),
                 fmt::format("{}: {}", e.what, fmt::join(lines, indent)));
  }
  std::string line(const step::Wait& w) {
    return named(fmt::format("Wait #{}", w.id), what_[w.id]);
  }
  std::string line(const step::Clear& c) { return named("Clear", name(c.array)); }
  std::string line(const step::Compute& c) {
    int64_t area = 0, full = 0, window = 0, causal = 0, inverse = 0;
    for (const Rectangle& r : c.rectangles) {
      area += r.q_length * r.k_length;
      ++(r.mask.full() ? full : !r.mask.causal ? inverse : r.mask.window > 0 ? window : causal);
    }
    std::vector<std::string> masks;
    for (const auto& [count, mask] :
         {std::pair(full, "full"), std::pair(causal, "causal"),
          std::pair(inverse, "inverse causal"), std::pair(window, "window")})
      if (count > 0) masks.push_back(fmt::format("{} {}", count, mask));
    const int64_t pairs = total_pairs(c.rectangles);
    const int64_t heads = query_heads_of(array(c.q).heads, c.kv_heads, problem_.heads).count;
    std::string text = c.q == own(ArrayKind::q) ? "" : name(c.q) + " x ";
    text += fmt::format(
        "{}: {} ({}), {}, {:.1f} % of their area, for {}", name(c.kv),
        count_text(std::ssize(c.rectangles), "rectangle"), fmt::join(masks, ", "),
        si_text(pairs, "") + " pairs",
        100 * static_cast<double>(pairs) / static_cast<double>(std::max<int64_t>(1, area)),
        count_text(heads, "head"));
    if (c.d_out >= 0) {
      std::vector<std::string> results;
      for (const int index : {c.d_q, c.d_kv})
        if (index >= 0) results.push_back(name(index));
      text += fmt::format("{}to {}", indent, fmt::join(results, " and "));
    }
    return named("Compute", text);
  }
  std::string line(const step::Merge& m) {
    return named("Merge", fmt::format("{} <- {}", name(m.out),
                                      count_text(std::ssize(m.partials), "partial result")));
  }
  std::string line(const step::Finish& f) { return named("Finish", name(f.out) + ": sinks"); }
  std::string line(const step::Delta& d) { return named("Delta", name(d.stats)); }
  std::string line(const step::SinkGradient& s) {
    return named("SinkGradient", name(s.stats) + (s.complete ? "" : ", to be summed over ranks"));
  }

  const RankPlan& plan_;
  const AttentionProblem& problem_;
  const ElementTypes& types_;
  std::map<int, std::string> what_;
};

struct RankRow {
  int rank;
  PlanCount count;
  const RankTimeline* times;
};

/// A unit in which the largest value has one to three digits before the decimal point.
struct Scale {
  double factor;
  std::string unit;
};
Scale scale_for(double largest, const std::string& unit) {
  const std::string text = si_text(largest, unit);
  const std::string name = text.substr(text.find(' ') + 1);
  for (const auto& [prefix, factor] :
       {std::pair("n", 1e-9), std::pair("u", 1e-6), std::pair("m", 1e-3), std::pair("k", 1e3),
        std::pair("M", 1e6), std::pair("G", 1e9), std::pair("T", 1e12)})
    if (name == prefix + unit) return {factor, name};
  return {1, unit};
}

std::string rank_table(const std::vector<RankRow>& rows, const std::vector<int>& shown) {
  double pairs = 0, bytes = 0, seconds = 0;
  for (const RankRow& row : rows) {
    pairs += static_cast<double>(row.count.pairs) / static_cast<double>(rows.size());
    const auto most =
        std::max({row.count.bytes_sent, row.count.bytes_received, row.count.transient_bytes});
    bytes = std::max(bytes, static_cast<double>(most));
    seconds = std::max(seconds, row.times->total);
  }
  const Scale size = scale_for(bytes, "B"), time = scale_for(seconds, "s");
  const auto sized = [&](int64_t value) { return static_cast<double>(value) / size.factor; };
  const Table<RankRow> table({
      {"rank", "", 5, 0, [](const RankRow& r) { return int64_t{r.rank}; }},
      {"pairs", "", 14, 0, [](const RankRow& r) { return r.count.pairs; }},
      {"of mean", "", 8, 4,
       [=](const RankRow& r) {
         return pairs > 0 ? static_cast<double>(r.count.pairs) / pairs : 1;
       }},
      {"messages", "", 8, 0, [](const RankRow& r) { return r.count.messages; }},
      {"sent", size.unit, 8, 3, [=](const RankRow& r) { return sized(r.count.bytes_sent); }},
      {"received", size.unit, 8, 3,
       [=](const RankRow& r) { return sized(r.count.bytes_received); }},
      {"transient", size.unit, 9, 3,
       [=](const RankRow& r) { return sized(r.count.transient_bytes); }},
      {"time", time.unit, 8, 3, [=](const RankRow& r) { return r.times->total / time.factor; }},
      {"exposed", time.unit, 8, 3,
       [=](const RankRow& r) { return r.times->exposed() / time.factor; }},
  });
  std::string text = table.header();
  for (const int rank : shown) text += table.row(rows[rank]);
  return text;
}

std::string direction_summary(const Plan& plan, const Simulation& times,
                              const AttentionProblem& problem, const ElementTypes& types,
                              int most_ranks) {
  std::vector<RankRow> rows;
  for (size_t r = 0; r < plan.ranks.size(); ++r)
    rows.push_back({static_cast<int>(r), count(plan.ranks[r], times.pass, problem.heads, types),
                    &times.ranks[r]});
  const std::vector<int> shown = shown_ranks(problem.cp(), most_ranks);
  std::string text = rank_table(rows, shown);
  if (std::ssize(shown) < problem.cp())
    text += fmt::format("# {} of {} ranks\n", shown.size(), problem.cp());
  double pairs = 0, bytes = 0;
  for (const RankRow& row : rows) {
    pairs += static_cast<double>(row.count.pairs);
    bytes += row.count.bytes_sent;
  }
  return text + fmt::format("# all ranks: {}, {} sent; {}, compute only {}, exposed {}\n",
                            si_text(pairs, "") + " pairs", si_text(bytes, "B"),
                            si_text(times.makespan(), "s"), si_text(times.compute_only(), "s"),
                            si_text(times.exposed(), "s"));
}

const char* name_of_direction(Pass pass) {
  return pass == Pass::forward ? "forward" : "backward";
}

std::string steps_of(const RankPlan& plan, int rank, const AttentionProblem& problem,
                     const ElementTypes& types, Pass pass) {
  const Shard& shard = problem.layout->shard(rank);
  int64_t tokens = 0;
  for (const Fragment& fragment : shard.fragments) tokens += fragment.length;
  return fmt::format("{}, rank {} of {}: {}, {}\n", name_of_direction(pass), rank, problem.cp(),
                     count_text(shard.slots, "slot"), count_text(tokens, "token")) +
         StepWriter(plan, problem, types).steps(pass);
}

}  // namespace

std::vector<int> shown_ranks(int ranks, int most) {
  std::vector<int> shown;
  const int count = std::min(ranks, most);
  for (int i = 0; i < count; ++i)
    shown.push_back(count < 2 ? 0 : static_cast<int>(int64_t{i} * (ranks - 1) / (count - 1)));
  return shown;
}

std::string plan_title(const Plan& plan, const AttentionProblem& problem) {
  int64_t tokens = 0;
  for (const Shard& shard : problem.layout->shards)
    for (const Fragment& fragment : shard.fragments) tokens += fragment.length;
  return fmt::format("{}, {}, cp = {}, {}, {}", plan.schedule, problem.layout->name, problem.cp(),
                     count_text(tokens, "token"), name_of(problem.mask));
}

std::string explain(const Plan& plan, const AttentionProblem& problem, const ElementTypes& types,
                    const std::vector<Simulation>& directions, bool verbose) {
  const HeadShape& heads = problem.heads;
  std::string text =
      fmt::format("# {}; {} query heads, {} KV heads, dim {}\n", plan_title(plan, problem),
                  heads.heads, heads.kv_heads, name_of_dims(heads));
  for (const Simulation& direction : directions)
    text += fmt::format("# {}\n", name_of_direction(direction.pass)) +
            direction_summary(plan, direction, problem, types, verbose ? many_ranks : few_ranks);
  if (problem.cp() > few_ranks && !verbose) return text + "# -v: more ranks, and steps\n";
  const int described = problem.cp() > few_ranks ? 1 : problem.cp();
  for (const Simulation& direction : directions)
    for (int r = 0; r < described; ++r)
      text += '\n' + steps_of(plan.ranks[r], r, problem, types, direction.pass);
  return text;
}

}  // namespace gyre

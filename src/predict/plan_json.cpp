#include "predict/plan_json.hpp"

#include <nlohmann/json.hpp>

namespace gyre {
namespace {

Json heads_json(HeadRange heads) {
  return Json::array({heads.begin, heads.end()});
}

/// Steps and arrays of one rank.
class RankWriter {
 public:
  RankWriter(const RankPlan& plan, const AttentionProblem& problem, const ElementTypes& types)
      : plan_(plan), problem_(problem), types_(types) {}

  Json arrays() const {
    Json all = Json::array();
    for (const PlanArray& array : plan_.arrays) {
      Json rows = Json::array();
      for (const RankRows& run : array.rows)
        rows.push_back({{"rank", run.rank}, {"slot", run.begin.value()}, {"count", run.length}});
      all.push_back({{"kind", name_of(array.kind)},
                     {"storage", array.storage},
                     {"heads", heads_json(array.heads)},
                     {"rows", std::move(rows)}});
    }
    return all;
  }
  Json steps(Pass pass) const {
    Json all = Json::array();
    for (const Step& step : plan_.steps(pass))
      all.push_back(std::visit([&](const auto& s) { return json(s); }, step));
    return all;
  }

 private:
  Json json(const step::Exchange& e) const {
    Json json = {{"step", "exchange"},
                 {"id", e.id},
                 {"what", e.what},
                 {"carrier", name_of(e.transport)},
                 {"sends", messages(e.sends)},
                 {"receives", messages(e.recvs)}};
    if (e.transport != Transport::messages) json["group"] = e.group;
    return json;
  }
  static Json json(const step::Wait& w) { return {{"step", "wait"}, {"id", w.id}}; }
  static Json json(const step::Clear& c) { return {{"step", "clear"}, {"array", c.array}}; }
  static Json json(const step::Compute& c) {
    Json json = {{"step", "compute"}, {"q", c.q}, {"kv", c.kv}, {"stats", c.stats}};
    for (const auto& [name, array] :
         {std::pair{"out", c.out}, {"d_out", c.d_out}, {"d_q", c.d_q}, {"d_kv", c.d_kv}})
      if (array >= 0) json[name] = array;
    json["kv_heads"] = heads_json(c.kv_heads);
    Json& rectangles = json["rectangles"] = Json::array();
    for (const Rectangle& r : c.rectangles) {
      Json rectangle = {{"q", r.q_begin},
                        {"q_count", r.q_length},
                        {"k", r.k_begin},
                        {"k_count", r.k_length},
                        {"pairs", r.pairs()}};
      if (!r.mask.full())
        rectangle["mask"] = {{"causal", r.mask.causal},
                             {"offset", r.mask.offset},
                             {"q_stride", r.mask.q_stride},
                             {"k_stride", r.mask.k_stride},
                             {"window", r.mask.window}};
      rectangles.push_back(std::move(rectangle));
    }
    return json;
  }
  static Json json(const step::Merge& m) {
    Json partials = Json::array();
    for (const auto& [out, stats] : m.partials)
      partials.push_back({{"out", out}, {"stats", stats}});
    return {
        {"step", "merge"}, {"out", m.out}, {"stats", m.stats}, {"partials", std::move(partials)}};
  }
  static Json json(const step::Finish& f) {
    return {{"step", "finish"}, {"out", f.out}, {"stats", f.stats}};
  }
  static Json json(const step::Delta& d) {
    return {{"step", "delta"}, {"out", d.out}, {"stats", d.stats}, {"d_out", d.d_out}};
  }
  static Json json(const step::SinkGradient& s) {
    return {{"step", "sink_gradient"}, {"stats", s.stats}, {"complete", s.complete}};
  }

  Json messages(const std::vector<Message>& all) const {
    Json list = Json::array();
    for (const Message& m : all) {
      int64_t bytes = 0;
      Json slices = Json::array();
      for (const Slice& slice : m.slices) {
        bytes += wire_bytes(plan_.arrays[slice.array].kind, slice, problem_.heads, types_);
        Json json = {{"array", slice.array},
                     {"row", slice.row},
                     {"count", slice.rows},
                     {"heads", heads_json(slice.heads)}};
        if (slice.add) json["add"] = true;
        slices.push_back(std::move(json));
      }
      list.push_back({{"peer", m.peer}, {"bytes", bytes}, {"slices", std::move(slices)}});
    }
    return list;
  }

  const RankPlan& plan_;
  const AttentionProblem& problem_;
  const ElementTypes& types_;
};

}  // namespace

Json plan_json(const Plan& plan, const AttentionProblem& problem, const ElementTypes& types,
               const std::vector<Simulation>& directions, bool steps) {
  Json passes = Json::array();
  for (const Simulation& s : directions) {
    Json ranks = Json::array();
    for (size_t r = 0; r < plan.ranks.size(); ++r) {
      const PlanCount counted = count(plan.ranks[r], s.pass, problem.heads, types);
      Json rank = {{"rank", r},
                   {"pairs", counted.pairs},
                   {"messages", counted.messages},
                   {"bytes_sent", counted.bytes_sent},
                   {"bytes_received", counted.bytes_received},
                   {"transient_bytes", counted.transient_bytes},
                   {"seconds", s.ranks[r].total},
                   {"exposed_seconds", s.ranks[r].exposed()}};
      if (steps) rank["steps"] = RankWriter(plan.ranks[r], problem, types).steps(s.pass);
      ranks.push_back(std::move(rank));
    }
    passes.push_back({{"pass", name_of(s.pass)},
                      {"seconds", s.makespan()},
                      {"compute_only_seconds", s.compute_only()},
                      {"exposed_seconds", s.exposed()},
                      {"ranks", std::move(ranks)}});
  }
  Json json = {{"schedule", plan.schedule}, {"layout", problem.layout->name}};
  if (steps) {
    Json& arrays = json["arrays"] = Json::array();
    for (const RankPlan& rank : plan.ranks)
      arrays.push_back(RankWriter(rank, problem, types).arrays());
  }
  json["passes"] = std::move(passes);
  return json;
}

}  // namespace gyre

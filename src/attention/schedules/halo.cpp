// Attention with a causal window in which queries see keys of their own rank and its neighbours
// only: one halo exchange, as in a stencil code.
//
// Forward:
//
//     start sending to r-1 and r+1 the rows of own KV that their queries see, receiving theirs
//     attend own queries to own keys
//     wait
//     attend own queries to the received rows
//
// Backward reuses the received rows, which are few and kept from forward, and returns their
// gradients while it computes on its own keys:
//
//     gradient of the received rows; start sending it to their owners, to be added there
//     gradient of own keys
//     wait
//
// Ranks cp-1 and 0 are neighbours too. Example, a window of w tokens, one document, cp = 3: under
// dual-chunk-swap (chunks 0|5, 1|4, 2|3) chunk 1 needs the last w-1 tokens of chunk 0, chunk 4
// those of chunk 3, and so on: rank 1 gets w-1 tokens from rank 0 and w-1 from rank 2, if w-1 is at
// most a chunk. Under contiguous each rank gets w-1 tokens from the previous rank.

#include <algorithm>
#include <limits>
#include <tuple>

#include "attention/schedules/builder/forms.hpp"
#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

/// Largest window in which queries see only tokens of the rank and its neighbours.
struct Reach {
  int64_t window = std::numeric_limits<int64_t>::max();  ///< max(): no limit
  int reader = 0, owner = 0;                             ///< above it, reader needs keys of owner
};

bool are_neighbours(int a, int b, int cp) {
  const int distance = (a - b + cp) % cp;
  return distance <= 1 || distance == cp - 1;
}

/// O(runs log runs) if the runs before a run soon include one of a rank that is no neighbour.
Reach reach_of(const Layout& layout) {
  struct Run {
    int64_t segment;
    DocPosition begin;
    int64_t length;
    int rank;
  };
  Reach reach;
  if (layout.cp() <= 3) return reach;  // all ranks are neighbours
  std::vector<Run> runs;
  for (int r = 0; r < layout.cp(); ++r)
    for (const Fragment& f : layout.shard(r).fragments) {
      const int64_t run = f.stride == 1 ? f.length : 1;
      for (int64_t i = 0; i < f.length; i += run)
        runs.push_back({f.segment, f.start + i * f.stride, run, r});
    }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return std::tie(a.segment, a.begin) < std::tie(b.segment, b.begin);
  });
  for (auto q = runs.begin(); q != runs.end(); ++q)
    for (auto k = q; k != runs.begin();) {
      --k;
      if (k->segment != q->segment) break;
      if (are_neighbours(q->rank, k->rank, layout.cp())) continue;
      const int64_t distance = q->begin - (k->begin + (k->length - 1));
      if (distance < reach.window) reach = {distance, q->rank, k->rank};
      break;
    }
  return reach;
}

class Halo {
 public:
  explicit Halo(PlanBuilder& plan) : plan_(plan) {
    const int cp = plan.cp(), before = (plan.rank() + cp - 1) % cp, after = (plan.rank() + 1) % cp;
    if (cp > 1) neighbours_.push_back({before, {}, {}});
    if (cp > 2) neighbours_.push_back({after, {}, {}});
    std::vector<RankRows> rows;
    for (Neighbour& n : neighbours_) {
      n.seen_there = needed_rows(plan.problem(), n.rank, plan.rank());
      n.seen_here = needed_rows(plan.problem(), plan.rank(), n.rank);
      rows.insert(rows.end(), n.seen_here.begin(), n.seen_here.end());
    }
    kv_ = plan.add_array(ArrayKind::kv, rows, plan.all_heads(ArrayKind::kv));
    d_kv_ = plan.add_array(ArrayKind::d_kv, rows, plan.all_heads(ArrayKind::d_kv));
  }

  void forward() {
    plan_.clear(set_.out);
    plan_.clear(set_.stats);
    std::vector<Message> sends;
    for (const Neighbour& n : neighbours_)
      sends.push_back({n.rank, plan_.slices_of(ArrayKind::kv, n.seen_there)});
    const int id = plan_.exchange("KV halo", std::move(sends), messages(kv_));
    plan_.compute(set_, set_.kv);
    plan_.wait(id);
    plan_.compute(set_, kv_);
    plan_.finish(set_);
  }

  void backward() {
    plan_.delta(set_);
    for (const int sum : {set_.d_q, set_.d_kv, d_kv_}) plan_.clear(sum);
    plan_.compute(set_, kv_, d_kv_);
    std::vector<Message> recvs;
    for (const Neighbour& n : neighbours_)
      recvs.push_back({n.rank, plan_.slices_of(ArrayKind::d_kv, n.seen_there, true)});
    const int id = plan_.exchange("dKV halo", messages(d_kv_), std::move(recvs));
    plan_.compute(set_, set_.kv, set_.d_kv);
    plan_.wait(id);
    plan_.sink_gradient(set_.stats);
  }

 private:
  struct Neighbour {
    int rank = 0;
    std::vector<RankRows> seen_there, seen_here;  // own rows seen there; its rows seen here
  };
  /// Slices of an array of received rows, grouped by the neighbour that owns them.
  std::vector<Message> messages(int array) const {
    std::vector<Message> messages;
    for (const Neighbour& n : neighbours_) messages.push_back({n.rank, {}});
    const std::vector<RankRows>& rows = plan_.array(array).rows;
    const std::vector<Slice> slices = plan_.slices_of(array);
    for (size_t i = 0; i < rows.size(); ++i)
      messages[rows[i].rank == neighbours_.front().rank ? 0 : 1].slices.push_back(slices[i]);
    return messages;
  }

  PlanBuilder& plan_;
  ArraySet set_;
  std::vector<Neighbour> neighbours_;
  int kv_ = -1, d_kv_ = -1;
};

/// Error that names a rank that sees keys of a rank that is not its neighbour; "" if none does.
std::string far_reader(const AttentionProblem& problem) {
  for (int reader = 0; reader < problem.cp(); ++reader)
    for (int owner = 0; owner < problem.cp(); ++owner)
      if (!are_neighbours(reader, owner, problem.cp()) &&
          !needed_rows(problem, reader, owner).empty())
        return fmt::format(
            "rank {} needs keys of rank {}, which is not its neighbour, under a {}; "
            "group-cast sends rows to whoever sees them",
            reader, owner, name_of(problem.mask));
  return "";
}

std::string refusal(const AttentionProblem& problem) {
  const Reach reach = reach_of(*problem.layout);
  const bool any = reach.window == std::numeric_limits<int64_t>::max();
  if (problem.mask.kind == MaskKind::regions) return far_reader(problem);
  if (problem.mask.window == 0)
    return any ? "needs a causal mask with a window; any will do"
               : fmt::format("needs a causal mask with a window; the largest that works is {}",
                             reach.window);
  if (problem.mask.window <= reach.window) return "";
  return fmt::format(
      "with a window of {}, rank {} needs keys of rank {}, which is not its neighbour; the largest "
      "window that works is {}",
      problem.mask.window, reach.reader, reach.owner, reach.window);
}

/// One exchange with the previous and the next rank: only the rows that the receiver needs.
ClosedForm closed_form(const FormContext& c) {
  ClosedForm form;
  form.pairs = own_pairs(c);
  const int cp = c.problem.cp();
  std::vector<int> neighbours;
  if (cp > 1) neighbours.push_back((c.rank + cp - 1) % cp);
  if (cp > 2) neighbours.push_back((c.rank + 1) % cp);
  int64_t sent = 0, received = 0;
  for (const int other : neighbours) {
    const int64_t there = needed(c, other, c.rank), here = needed(c, c.rank, other);
    sent += there;
    received += here;
    form.messages += (c.forward() ? there : here) > 0 ? 1 : 0;
  }
  form.transient_bytes = stored(c, ArrayKind::kv, received, c.kv_heads());
  form.bytes_sent = wire(c, ArrayKind::kv, sent, c.kv_heads());
  form.bytes_received = wire(c, ArrayKind::kv, received, c.kv_heads());
  if (c.forward()) {
    form.transient_bytes += kv_copies(c, sent, received, c.kv_heads());
    return form;
  }
  form.bytes_sent = wire(c, ArrayKind::d_kv, received, c.kv_heads());
  form.bytes_received = wire(c, ArrayKind::d_kv, sent, c.kv_heads());
  form.transient_bytes += stored(c, ArrayKind::d_kv, received, c.kv_heads()) +
                          hop_copies(c, received, sent, c.kv_heads());
  return form;
}

}  // namespace

Schedule halo_schedule() {
  return {.name = "halo",
          .summary = "causal windows: one halo exchange with the neighbours",
          .plan = plan_both_passes<Halo>,
          .closed_form = closed_form,
          .refusal = refusal};
}

}  // namespace gyre

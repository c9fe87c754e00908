#include "attention/closed_forms.hpp"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "attention/schedules/builder.hpp"

namespace gyre {
namespace {

/// `count` sequences of `length` tokens, which fill the stream.
struct EqualSequences {
  int64_t count = 0;
  int64_t length = 0;
};

std::map<SegmentIndex, int64_t> lengths_of(const Layout& layout) {
  std::map<SegmentIndex, int64_t> lengths;
  for (const Shard& shard : layout.shards)
    for (const Fragment& f : shard.fragments) lengths[f.segment] += f.length;
  return lengths;
}

std::optional<EqualSequences> equal_sequences(const Layout& layout) {
  EqualSequences result;
  for (const auto& [segment, length] : lengths_of(layout)) {
    if (result.count > 0 && length != result.length) return std::nullopt;
    ++result.count;
    result.length = length;
  }
  if (result.count * result.length != layout.stream_slots) return std::nullopt;
  return result;
}

/// Whether slot t of the stream is on rank t mod cp.
bool striped_by_one(const Layout& layout) {
  const std::vector<SlotRun>& pieces = layout.shard(0).runs;
  return layout.name == "striped" && pieces.size() == 1 && pieces.front().stride == layout.cp();
}

/// Pairs of the first t queries of a sequence.
int64_t prefix_pairs(int64_t t, int64_t length, const MaskRule& mask) {
  return mask.kind == MaskKind::full ? t * length : visible_pairs(t, mask);
}

/// Pairs of the queries in slots [begin, end) of a stream of equal sequences.
int64_t range_pairs(int64_t begin, int64_t end, const EqualSequences& all, const MaskRule& mask) {
  const auto up_to = [&](int64_t slot) {
    slot = std::min(slot, all.count * all.length);
    return slot / all.length * prefix_pairs(all.length, all.length, mask) +
           prefix_pairs(slot % all.length, all.length, mask);
  };
  return up_to(end) - up_to(begin);
}

/// Pairs of tokens r, r + cp, ... of one sequence: token p sees min(p + 1, window) keys.
int64_t striped_pairs(int64_t rank, int64_t cp, int64_t length, const MaskRule& mask) {
  const int64_t tokens = length / cp;
  if (mask.kind == MaskKind::full) return tokens * length;
  int64_t whole = tokens;  // tokens that see all before them
  if (mask.window > 0) whole = std::clamp<int64_t>(ceil_div(mask.window - rank, cp), 0, tokens);
  return whole * (rank + 1) + cp * (whole * (whole - 1) / 2) + (tokens - whole) * mask.window;
}

/// The formulas of one problem and rank.
class Forms {
 public:
  Forms(const AttentionProblem& problem, const ElementTypes& types, int rank, Pass pass)
      : problem_(problem),
        types_(types),
        rank_(rank),
        cp_(problem.cp()),
        forward_(pass == Pass::forward),
        slots_(problem.layout->shard(rank).slots) {}

  ClosedForm ring(bool turn_round) const;
  ClosedForm all_gather(int64_t heads_at_once) const;
  ClosedForm all_to_all(int inner) const;
  ClosedForm group_cast() const;
  ClosedForm halo() const;
  ClosedForm canonical() const;

 private:
  bool same_types(ArrayKind kind) const { return types_.stored(kind) == types_.on_wire(kind); }
  int64_t wire(ArrayKind kind, int64_t rows, int64_t heads) const {
    const Slice slice = {0, 0, rows, {0, heads}};
    return wire_bytes(kind, slice, problem_.heads, types_);
  }
  int64_t stored(ArrayKind kind, int64_t rows, int64_t heads) const {
    const PlanArray array = {kind, {{0, LocalToken(0), rows}}, {0, heads}};
    return stored_bytes(array, problem_.heads, types_);
  }
  /// Bytes of the copy that a message of `heads` of an array's `all` heads needs.
  int64_t copy(ArrayKind kind, int64_t rows, int64_t heads, int64_t all) const {
    return heads == all && same_types(kind) ? 0 : wire(kind, rows, heads);
  }
  /// Copies of a d_kv that is sent from an array of its heads, and of one that is added.
  int64_t hop_copies(int64_t sent_rows, int64_t added_rows, int64_t heads) const {
    return copy(ArrayKind::d_kv, sent_rows, heads, heads) +
           wire(ArrayKind::d_kv, added_rows, heads);
  }
  /// Rows of `owner` that `reader` sees.
  int64_t needed(int reader, int owner) const {
    int64_t rows = 0;
    for (const RankRows& run : needed_rows(problem_, reader, owner)) rows += run.length;
    return rows;
  }
  int64_t kv_heads() const { return problem_.heads.kv_heads; }
  std::optional<int64_t> own_pairs() const {
    const auto pairs = visible_pairs_of(problem_, rank_);
    return pairs ? std::optional(*pairs * problem_.heads.heads) : std::nullopt;
  }

  ClosedForm ring_of(int members, int64_t rows, int64_t heads, bool turn_round,
                     bool sees_other) const;
  std::optional<int64_t> group_pairs(int first, int inner, int64_t heads) const;
  int64_t heads_at(ArrayKind kind, int inner, int member) const;
  int64_t to_heads(ClosedForm& form, int inner, ArrayKind kind) const;
  int64_t to_tokens(ClosedForm& form, int inner, ArrayKind kind, bool adds) const;
  std::pair<bool, bool> group_sees(int inner) const;

  const AttentionProblem& problem_;
  const ElementTypes& types_;
  int rank_;
  int64_t cp_;
  bool forward_;
  int64_t slots_;
};

/// A ring of `members` blocks of `rows` rows and `heads` KV heads. `sees_other`, of two members:
/// whether this one sees anything of the other's block.
ClosedForm Forms::ring_of(int members, int64_t rows, int64_t heads, bool turn_round,
                          bool sees_other) const {
  ClosedForm form;
  const int64_t n = members;
  if (n == 1 || rows == 0 || heads == 0) return form;
  const int64_t block = stored(ArrayKind::kv, rows, heads);
  // Two storages take turns, or one does all; one that forward left behind counts if it is used.
  const int64_t held =
      n == 2 && !forward_ && turn_round && !sees_other ? 0 : std::min(n - 1, int64_t{2});
  form.transient_bytes = held * block;
  int64_t kv_hops = n - 1, d_kv_hops = 0;
  form.messages = n - 1;
  if (!forward_) {
    kv_hops = turn_round ? n - 2 : n - 1;
    d_kv_hops = turn_round ? n - 1 : n;
    // A block and the gradients of the one before it travel as one message; the first block goes
    // alone, and so do the gradients of the last one, and of the own one if it has to come home.
    form.messages = turn_round ? (n == 2 ? 1 : n) : n + 1;
    const int64_t sums = turn_round ? std::min(n - 1, int64_t{2}) : 2;
    form.transient_bytes +=
        sums * stored(ArrayKind::d_kv, rows, heads) + hop_copies(rows, rows, heads);
  }
  form.bytes_sent = form.bytes_received =
      kv_hops * wire(ArrayKind::kv, rows, heads) + d_kv_hops * wire(ArrayKind::d_kv, rows, heads);
  return form;
}

ClosedForm Forms::ring(bool turn_round) const {
  const bool sees = cp_ == 2 && needed(rank_, 1 - rank_) > 0;
  ClosedForm form = ring_of(problem_.cp(), slots_, kv_heads(), turn_round, sees);
  form.pairs = own_pairs();
  return form;
}

/// Stages of the given KV heads: cp - 1 messages each, and cp - 1 hops of the reduce-scatter
/// backward.
ClosedForm Forms::all_gather(int64_t heads_at_once) const {
  ClosedForm form;
  form.pairs = own_pairs();
  if (cp_ == 1 || slots_ == 0) return form;
  const int64_t others = cp_ - 1, rows = others * slots_;
  const std::vector<HeadRange> stages = head_stages(kv_heads(), heads_at_once);
  int64_t hop = 0, most_copies = 0;  // copies of one hop of the stage before
  for (size_t g = 0; g < stages.size(); ++g) {
    const int64_t heads = stages[g].count;
    form.messages += others * (forward_ ? 1 : 2);
    form.bytes_sent += others * wire(ArrayKind::kv, slots_, heads);
    if (!forward_) form.bytes_sent += others * wire(ArrayKind::d_kv, slots_, heads);
    if (g < 2) {  // later stages use the same storages
      form.transient_bytes += stored(ArrayKind::kv, rows, heads);
      if (!forward_) form.transient_bytes += stored(ArrayKind::d_kv, rows, heads);
    }
    // The gather of this stage is under way during the hops of the stage before.
    const int64_t gather = others * copy(ArrayKind::kv, slots_, heads, kv_heads());
    most_copies = std::max(most_copies, gather + hop);
    hop = forward_ ? 0 : hop_copies(slots_, slots_, heads);
    most_copies = std::max(most_copies, hop);
  }
  form.bytes_received = form.bytes_sent;
  form.transient_bytes += most_copies;
  return form;
}

/// Sum over the ranks of a group; for all ranks together there is a form for any documents.
std::optional<int64_t> Forms::group_pairs(int first, int inner, int64_t heads) const {
  int64_t pairs = 0;
  if (inner == cp_) {
    for (const auto& [segment, length] : lengths_of(*problem_.layout))
      pairs += visible_pairs(length, problem_.mask);
    return pairs * heads;
  }
  for (int r = first; r < first + inner; ++r) {
    const auto of_rank = visible_pairs_of(problem_, r);
    if (!of_rank) return std::nullopt;
    pairs += *of_rank;
  }
  return pairs * heads;
}

int64_t Forms::heads_at(ArrayKind kind, int inner, int member) const {
  const HeadRange q = dealt_heads(problem_.heads.heads, inner, member);
  const bool kv = kind == ArrayKind::kv || kind == ArrayKind::d_kv;
  return kv ? kv_heads_read(q, problem_.heads).count : q.count;
}

/// What member j sends when its tokens go to the others' heads: n · heads_m to each other member m,
/// of which it gets n · heads_j. Returns the bytes of copies.
int64_t Forms::to_heads(ClosedForm& form, int inner, ArrayKind kind) const {
  const int mine = rank_ % inner;
  const int64_t all = kind == ArrayKind::kv ? kv_heads() : problem_.heads.heads;
  int64_t copies = 0;
  for (int m = 0; m < inner; ++m) {
    if (m == mine) continue;
    const int64_t heads = heads_at(kind, inner, m);
    form.messages += heads > 0 ? 1 : 0;
    form.bytes_sent += wire(kind, slots_, heads);
    form.bytes_received += wire(kind, slots_, heads_at(kind, inner, mine));
    copies += copy(kind, slots_, heads, all);
  }
  return copies;
}

/// The reverse: n · heads_j to each other member, n · heads_m from each; messages are counted by
/// the caller. With `adds`, what comes is added.
int64_t Forms::to_tokens(ClosedForm& form, int inner, ArrayKind kind, bool adds) const {
  const int mine = rank_ % inner;
  const int64_t all = kind == ArrayKind::d_kv ? kv_heads() : problem_.heads.heads;
  const int64_t own_heads = heads_at(kind, inner, mine);
  int64_t copies = 0;
  for (int m = 0; m < inner; ++m) {
    if (m == mine) continue;
    const int64_t heads = heads_at(kind, inner, m);
    form.bytes_sent += wire(kind, slots_, own_heads);
    form.bytes_received += wire(kind, slots_, heads);
    copies += copy(kind, slots_, own_heads, own_heads) +
              (adds ? wire(kind, slots_, heads) : copy(kind, slots_, heads, all));
  }
  return copies;
}

/// Whether the rank's group has a token, and whether it sees a key of the other one of two groups.
std::pair<bool, bool> Forms::group_sees(int inner) const {
  const int first = rank_ - rank_ % inner, cp = problem_.cp();
  bool tokens = false, other_group = false;
  for (int r = first; r < first + inner; ++r) {
    tokens = tokens || !problem_.layout->shard(r).fragments.empty();
    for (int p = 0; cp / inner == 2 && p < cp; ++p)
      other_group = other_group || (p / inner != rank_ / inner && needed(r, p) > 0);
  }
  return {tokens, other_group};
}

/// Heads are exchanged among `inner` ranks, around a ring of cp / inner blocks of their rows.
ClosedForm Forms::all_to_all(int inner) const {
  const int mine = rank_ % inner, outer = problem_.cp() / inner;
  const auto [tokens, sees] = group_sees(inner);
  const int64_t rows = inner * slots_;
  const int64_t q = heads_at(ArrayKind::q, inner, mine), kv = heads_at(ArrayKind::kv, inner, mine);
  ClosedForm form = ring_of(outer, rows, kv, true, sees);
  form.pairs = group_pairs(rank_ - mine, inner, q);
  if (inner == 1 || slots_ == 0) return form;

  int64_t kv_heads_of_all = 0;
  for (int m = 0; m < inner; ++m) kv_heads_of_all += heads_at(ArrayKind::kv, inner, m);
  const bool replicated = kv_heads_of_all > kv_heads();
  int64_t before = 0, ring = 0, after = 0;  // copies of exchanges that are not under way together
  int64_t arrays = stored(ArrayKind::out, rows, q) + stored(ArrayKind::stats, rows, q);
  const int64_t inputs = stored(ArrayKind::q, rows, q) + stored(ArrayKind::kv, rows, kv);
  if (forward_) {
    before = to_heads(form, inner, ArrayKind::q) + to_heads(form, inner, ArrayKind::kv);
    after = to_tokens(form, inner, ArrayKind::out, false);
    arrays += inputs;
  } else {
    before = to_heads(form, inner, ArrayKind::d_out);
    if (outer > 1 && kv > 0) ring = hop_copies(rows, rows, kv);
    after = to_tokens(form, inner, ArrayKind::d_q, false) +
            to_tokens(form, inner, ArrayKind::d_kv, replicated);
    arrays += stored(ArrayKind::d_out, rows, q) + stored(ArrayKind::d_q, rows, q) +
              stored(ArrayKind::d_kv, rows, kv) + (tokens ? inputs : 0);
  }
  if (q > 0) form.messages += inner - 1;  // back to tokens, one to each
  // ring_of has counted the ring's copies already.
  form.transient_bytes += arrays + std::max({before, ring, after}) - ring;
  return form;
}

/// phi (cp-1) k in place of (cp-1) k, phi being the share of the rows that is seen.
ClosedForm Forms::group_cast() const {
  ClosedForm form;
  form.pairs = own_pairs();
  int64_t largest[2] = {0, 0};  // rows in each of the two storages that take turns
  int64_t turn = 0, copies = 0;
  for (int i = 1; i < problem_.cp(); ++i) {
    const int to = (rank_ + i) % problem_.cp(), from = (rank_ - i + problem_.cp()) % problem_.cp();
    const int64_t sent = needed(to, rank_), received = needed(rank_, from);
    form.messages += sent > 0 ? 1 : 0;
    form.bytes_sent += wire(ArrayKind::kv, sent, kv_heads());
    form.bytes_received += wire(ArrayKind::kv, received, kv_heads());
    if (received > 0) {
      int64_t& rows = largest[turn++ % 2];
      rows = std::max(rows, received);
    }
    if (forward_) continue;
    form.messages += received > 0 ? 1 : 0;
    form.bytes_sent += wire(ArrayKind::d_kv, received, kv_heads());
    form.bytes_received += wire(ArrayKind::d_kv, sent, kv_heads());
    copies = std::max(copies, hop_copies(received, sent, kv_heads()));
  }
  for (const int64_t rows : largest) {
    form.transient_bytes += stored(ArrayKind::kv, rows, kv_heads());
    if (!forward_) form.transient_bytes += stored(ArrayKind::d_kv, rows, kv_heads());
  }
  form.transient_bytes += copies;
  return form;
}

/// As group-cast, all at once and with the ranks before and after only.
ClosedForm Forms::halo() const {
  ClosedForm form;
  form.pairs = own_pairs();
  const int cp = problem_.cp();
  std::vector<int> neighbours;
  if (cp > 1) neighbours.push_back((rank_ + cp - 1) % cp);
  if (cp > 2) neighbours.push_back((rank_ + 1) % cp);
  int64_t sent = 0, received = 0;
  for (const int other : neighbours) {
    const int64_t there = needed(other, rank_), here = needed(rank_, other);
    sent += there;
    received += here;
    form.messages += (forward_ ? there : here) > 0 ? 1 : 0;
  }
  form.transient_bytes = stored(ArrayKind::kv, received, kv_heads());
  form.bytes_sent = wire(ArrayKind::kv, sent, kv_heads());
  form.bytes_received = wire(ArrayKind::kv, received, kv_heads());
  if (forward_) return form;
  form.bytes_sent = wire(ArrayKind::d_kv, received, kv_heads());
  form.bytes_received = wire(ArrayKind::d_kv, sent, kv_heads());
  form.transient_bytes +=
      stored(ArrayKind::d_kv, received, kv_heads()) + hop_copies(received, sent, kv_heads());
  return form;
}

/// Real tokens only: t of this rank, T of all.
ClosedForm Forms::canonical() const {
  ClosedForm form;
  form.pairs = own_pairs();
  int64_t own = 0, all = 0;
  for (int r = 0; r < problem_.cp(); ++r)
    for (const Fragment& f : problem_.layout->shard(r).fragments) {
      all += f.length;
      own += r == rank_ ? f.length : 0;
    }
  const auto gather = [&](std::initializer_list<ArrayKind> kinds) {
    form.messages += own > 0 ? cp_ - 1 : 0;
    for (const ArrayKind kind : kinds) {
      const int64_t heads = kind == ArrayKind::kv ? kv_heads() : problem_.heads.heads;
      form.bytes_sent += (cp_ - 1) * wire(kind, own, heads);
      form.bytes_received += wire(kind, all - own, heads);
      form.transient_bytes += stored(kind, all, heads);
    }
  };
  gather({ArrayKind::kv});
  if (!forward_) gather({ArrayKind::q, ArrayKind::d_out, ArrayKind::stats});
  return form;
}

}  // namespace

std::optional<ClosedForm> closed_form(const std::string& schedule, const AttentionProblem& problem,
                                      const ElementTypes& types, int rank, Pass pass) {
  const Forms forms(problem, types, rank, pass);
  if (schedule == "ring") return forms.ring(true);
  if (schedule == "ring-forward") return forms.ring(false);
  if (schedule == "all-gather") return forms.all_gather(problem.heads.kv_heads);
  if (schedule == "all-gather-strided") return forms.all_gather(problem.options.heads_at_once);
  if (schedule == "all-to-all") return forms.all_to_all(problem.cp());
  if (schedule == "all-to-all-ring") return forms.all_to_all(inner_ranks(problem));
  if (schedule == "group-cast") return forms.group_cast();
  if (schedule == "halo") return forms.halo();
  if (schedule == "canonical") return forms.canonical();
  return std::nullopt;
}

std::optional<int64_t> visible_pairs_of(const AttentionProblem& problem, int rank) {
  const Layout& layout = *problem.layout;
  const auto all = equal_sequences(layout);
  if (!all) return std::nullopt;
  if (all->count == 0) return 0;
  const int64_t cp = layout.cp(), r = rank;
  const auto chunks = [&](int64_t length, int64_t first, int64_t second) {
    return range_pairs(first * length, (first + 1) * length, *all, problem.mask) +
           range_pairs(second * length, (second + 1) * length, *all, problem.mask);
  };
  if (layout.name == "contiguous")
    return range_pairs(r * (layout.padded_slots / cp), (r + 1) * (layout.padded_slots / cp), *all,
                       problem.mask);
  if (layout.name == "zigzag") return chunks(layout.padded_slots / (2 * cp), r, 2 * cp - 1 - r);
  if (layout.name == "dual-chunk-swap")  // within the first sequence
    return all->count * chunks(all->length / (2 * cp), r, 2 * cp - 1 - r);
  if (striped_by_one(layout) && all->length % cp == 0)
    return all->count * striped_pairs(r, cp, all->length, problem.mask);
  return std::nullopt;
}

std::optional<double> needed_share(const AttentionProblem& problem) {
  const Layout& layout = *problem.layout;
  const auto all = equal_sequences(layout);
  if (!all || all->count != 1 || problem.mask != MaskRule(MaskKind::causal) || layout.cp() == 1 ||
      all->length % layout.cp() != 0)
    return std::nullopt;
  if (layout.name == "contiguous") return 0.5;
  if (layout.name == "dual-chunk-swap") return 0.75;
  if (striped_by_one(layout)) return 1 - layout.cp() / (2.0 * static_cast<double>(all->length));
  return std::nullopt;
}

}  // namespace gyre

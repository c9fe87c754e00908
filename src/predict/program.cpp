#include "predict/program.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <set>

#include "attention/kernels/ragged_batch.hpp"
#include "attention/kernels/reversed_rows.hpp"
#include "attention/row_set.hpp"
#include "core/error.hpp"
#include "predict/op_writer.hpp"

namespace gyre {

/// Compiles the steps of one rank.
class ProgramWriter : OpWriter {
 public:
  ProgramWriter(const Programs& programs, const RankPlan& plan, const std::string& schedule)
      : OpWriter(programs, plan.rank, schedule), plan_(plan), written_(plan.arrays.size()) {}

  CompiledRank write() {
    const std::vector<Step>& steps = plan_.steps(p_.pass_);
    for (const Step& step : steps) {
      std::visit([this](const auto& s) { walk(s); }, step);
      while (&step == &steps.back() && !deferred_.empty()) clear_deferred(*deferred_.begin());
      end_step(std::holds_alternative<step::Wait>(step));
    }
    return end();
  }

 private:
  void walk(const step::Exchange& e) {
    for (const auto* messages : {&e.sends, &e.recvs})
      for (const Message& m : *messages)
        for (const Slice& slice : m.slices) {
          clear_deferred(slice.array);
          make_delta_before(slice.array);
        }
    Open open = new_exchange(e.id);
    int64_t packed = copies_of(e, plan_, p_.heads_, p_.types_).sent;
    for (const Message& m : e.sends)
      for (const Slice& slice : m.slices)
        if (m.peer == plan_.rank) packed += bytes(slice);
    copy(2 * packed);
    if (e.transport == Transport::all_gather || e.transport == Transport::reduce_scatter)
      join_group(e, open);
    else
      send_and_receive(e, open);
    start(open);
  }

  void send_and_receive(const step::Exchange& e, Open& open) {
    for (size_t i = 0; i < e.sends.size(); ++i)
      if (const Message& m = e.sends[i]; m.peer != plan_.rank)
        send(m.peer, bytes(m), static_cast<int>(i), open);
    for (const Message& m : e.recvs) {
      write_rows(m.slices);
      if (m.peer == plan_.rank) continue;
      receive(m.peer, bytes(m), open);
      for (const Slice& slice : m.slices)
        if (slice.add || !as_it_lies(slice) || e.transport == Transport::all_to_all)
          open.unpacked += (slice.add ? 3 : 2) * bytes(slice);
    }
  }

  /// Adds a library collective, in which every peer sends and receives the same number of bytes.
  void join_group(const step::Exchange& e, Open& open) {
    for (const Message& m : e.recvs) write_rows(m.slices);
    const auto ranks = static_cast<int>(e.group.size());
    if (e.group.front() % ranks != 0 || e.group.back() - e.group.front() != ranks - 1)
      throw_runtime("{}: an operation of ranks {} to {}, which are no group of {} neighbours",
                    place(), e.group.front(), e.group.back(), ranks);
    join(e.group.front(), ranks, bytes(e.sends.front()), open);
    const int64_t received = copies_of(e, plan_, p_.heads_, p_.types_).received;
    open.unpacked += (e.transport == Transport::reduce_scatter ? 3 : 2) * received;
  }

  void walk(const step::Wait& w) { copy(wait(w.id).unpacked); }

  void walk(const step::Compute& c) {
    const HeadRange all = plan_.arrays[c.q].heads;
    ModelledCall call{.pass = p_.pass_,
                      .type = p_.types_.activations,
                      .query_heads = query_heads_of(all, c.kv_heads, p_.heads_).count,
                      .head_dim = p_.heads_.head_dim,
                      .value_dim = p_.heads_.value_dim(),
                      .rectangles = c.rectangles,
                      .d_q = c.d_q >= 0,
                      .d_kv = c.d_kv >= 0};
    if (library_) {
      prepare_batches(c);
      overwrite(c, query_heads_of(all, c.kv_heads, p_.heads_));
      call.merged = merged_by(c, call.query_heads);
      call.rectangles = batches_.entries;
    }
    const ModelledTime time = p_.machine_.kernel.time(call);
    const double moving = bytes_moved(c, call.query_heads) / p_.machine_.rate_of_rows();
    compute(std::max(time.seconds, moving), time.extrapolated);
  }
  /// Bytes that a call reads and writes at least: each row of its rectangles once. One query of a
  /// long document, as in decoding, takes the time that its keys take to be read.
  double bytes_moved(const step::Compute& c, int64_t query_heads) const {
    int64_t queries = 0, keys = 0;  // rectangles may share rows
    for (const Rectangle& r : c.rectangles) queries += r.q_length, keys += r.k_length;
    int64_t bytes = 0;
    const auto add = [&](int array, int64_t rows, int64_t heads) {
      if (array < 0) return;
      PlanArray touched = plan_.arrays[array];
      touched.rows = {{0, LocalToken(0), std::min(rows, touched.tokens())}};
      touched.heads = {0, heads};
      bytes += stored_bytes(touched, p_.heads_, p_.types_);
    };
    for (const int array : {c.q, c.stats, c.out, c.d_out, c.d_q}) add(array, queries, query_heads);
    for (const int array : {c.kv, c.d_kv}) add(array, keys, c.kv_heads.count);
    return static_cast<double>(bytes);
  }
  /// The batches that cuda_ragged_kernel.hpp makes of a call.
  struct CallBatches {
    std::vector<Rectangle> rectangles;  ///< rectangles of the call
    bool fixed_tiles = false;
    int64_t longest = 0;  ///< rows of the longest array of the call
    RaggedPlan plan;
    std::vector<Rectangle> entries;  ///< rectangles in no batch, then entries of all batches
    int64_t reversed_q = 0, reversed_k = 0;  ///< rows that are copied in reverse order
    std::vector<bool> overwrites_q, overwrites_k;
  };
  /// Plans the batches of `c`, unless the previous call had the same rectangles and sizes.
  void prepare_batches(const step::Compute& c) {
    const int64_t longest = std::max(plan_.arrays[c.q].tokens(), plan_.arrays[c.kv].tokens());
    CallBatches& b = batches_;
    if (b.rectangles == c.rectangles && b.fixed_tiles == c.fixed_tiles && b.longest == longest)
      return;
    b = {};
    b.rectangles = c.rectangles;
    b.fixed_tiles = c.fixed_tiles;
    b.longest = longest;
    b.plan = plan_of_call(c.rectangles, c.fixed_tiles, longest);
    const ReversedRows reversed = reversed_rows(b.plan.inverse);
    b.reversed_q = reversed.q_rows;
    b.reversed_k = reversed.k_rows;
    b.entries = b.plan.others;
    b.entries.insert(b.entries.end(), reversed.rectangles.begin(), reversed.rectangles.end());
    for (const RaggedBatch& batch : b.plan.batches) {
      const std::vector<Rectangle> of_batch = rectangles_of(batch);
      b.entries.insert(b.entries.end(), of_batch.begin(), of_batch.end());
    }
    b.overwrites_q = overwriting_batches(b.plan.batches, RaggedRows::q);
    b.overwrites_k = overwriting_batches(b.plan.batches, RaggedRows::k);
  }
  /// Number of elements that the call adds to results of earlier calls or batches. Elements that it
  /// copies in reverse order count as much.
  int64_t merged_by(const step::Compute& c, int64_t query_heads) {
    const bool forward = p_.pass_ == Pass::forward;
    const int64_t dim = p_.heads_.head_dim, value_dim = p_.heads_.value_dim();
    // Queries, what is added to out or dQ, and backward dO; keys, values, and backward dK and dV.
    int64_t elements =
        batches_.reversed_q * query_heads * (forward ? dim + value_dim : 2 * dim + value_dim) +
        batches_.reversed_k * c.kv_heads.count * (forward ? 1 : 2) * (dim + value_dim);
    if (const int of_queries = forward ? c.out : c.d_q; of_queries >= 0)
      elements += merged_rows(batches_.overwrites_q, written(of_queries), true) * query_heads *
                  (forward ? value_dim : dim);
    if (c.d_kv >= 0)
      elements += merged_rows(batches_.overwrites_k, written(c.d_kv), false) * c.kv_heads.count *
                  (dim + value_dim);
    return elements;
  }
  /// Marks the query rows, or key rows, of the call as written. Returns how many are merged with
  /// earlier results.
  int64_t merged_rows(const std::vector<bool>& overwrites, RowSet& written, bool queries) const {
    const RaggedPlan& plan = batches_.plan;
    int64_t merged = 0;
    for (size_t i = 0; i < overwrites.size(); ++i)
      for (const RaggedEntry& e : plan.batches[i].entries) {
        const int64_t begin = queries ? e.q_begin : e.k_begin;
        const int64_t length = queries ? e.q_length : e.k_length;
        const int64_t earlier = written.add(begin, begin + length);
        merged += overwrites[i] ? earlier : length;
      }
    for (const auto* rectangles :
         {&plan.inverse, &plan.others})  // merged apart, or by their kernel
      for (const Rectangle& r : *rectangles)
        queries ? written.add(r.q_begin, r.q_end()) : written.add(r.k_begin, r.k_end());
    return merged;
  }
  /// Marks the rows of received gradients as written; a later call adds to them.
  void write_rows(const std::vector<Slice>& slices) {
    for (const Slice& slice : slices)
      if (array(slice).kind == ArrayKind::d_kv)
        written(slice.array).add(slice.row, slice.row + slice.rows);
  }
  RowSet& written(int array) { return written_[array]; }
  void walk(const step::Clear& c) {
    make_delta_before(c.array);
    // An array that used this storage before is dead: its clear is dropped.
    std::erase_if(deferred_, [&](int other) { return shares_storage(other, c.array); });
    deferred_.insert(c.array);
    if (!library_) clear_deferred(c.array);
  }
  void walk(const step::Delta& d) {
    make_delta();
    delta_ = d;
    if (!library_) make_delta();
  }
  /// As in execute.cpp, the first call of a library overwrites its results, which then need no
  /// clear. A backward call computes delta inside if its batches take all rectangles.
  void overwrite(const step::Compute& c, HeadRange query_heads) {
    if (p_.pass_ == Pass::forward) return replace_clears({c.out, c.stats}, query_heads, c, true);
    if (!batches_.plan.others.empty() || !batches_.plan.inverse.empty()) make_delta();
    if (c.d_q >= 0) replace_clears({c.d_q}, query_heads, c, true);
    if (c.d_kv >= 0) replace_clears({c.d_kv}, c.kv_heads, c, false);
  }
  /// The call overwrites these arrays; it clears only the rows that it does not write.
  void replace_clears(std::initializer_list<int> arrays, HeadRange heads, const step::Compute& c,
                      bool queries) {
    const bool overwrites = std::all_of(arrays.begin(), arrays.end(), [&](int array) {
      return deferred_.contains(array) && plan_.arrays[array].heads == heads;
    });
    for (const int array : arrays) {
      if (!overwrites) {
        clear_deferred(array);
        continue;
      }
      deferred_.erase(array);
      const RowSet rows = queries ? queries_of(c.rectangles) : keys_of(c.rectangles);
      PlanArray rest = plan_.arrays[array];
      rest.rows = {{0, LocalToken(0), rest.tokens() - rows.count()}};
      pass(stored_bytes(rest, p_.heads_, p_.types_));
    }
  }
  void clear_deferred(int array) {
    if (deferred_.erase(array) > 0) pass_over({array});
  }
  void make_delta() {
    if (delta_) pass_over({delta_->out, delta_->d_out});
    delta_.reset();
  }
  void make_delta_before(int array) {
    if (!delta_) return;
    for (const int part : {delta_->out, delta_->d_out, delta_->stats})
      if (shares_storage(part, array)) return make_delta();
  }
  bool shares_storage(int a, int b) const {
    return plan_.arrays[a].storage == plan_.arrays[b].storage;
  }
  void walk(const step::Merge& m) {
    for (const step::Merge::Partial& partial : m.partials)
      for (const int array : {partial.out, partial.stats}) clear_deferred(array);
    for (const int array : {m.out, m.stats}) clear_deferred(array);
    // Outputs: rescaling reads and writes one, and each sum reads two and writes one.
    // Log-sum-exps: a copy keeps L_0, each sum reads two and writes one, each weight reads two.
    const auto partials = std::ssize(m.partials);
    const int64_t lse = stored(m.stats) / 2;  // the other plane is delta
    pass((2 + 3 * partials) * stored(m.out) + (2 + 3 * partials + 2 * (1 + partials)) * lse);
  }
  void walk(const step::Finish& /*finish*/) {}
  void walk(const step::SinkGradient& /*gradient*/) {}

  int64_t stored(int index) const {
    return stored_bytes(plan_.arrays[index], p_.heads_, p_.types_);
  }
  void pass_over(std::initializer_list<int> arrays) {
    int64_t size = 0;
    for (const int index : arrays) size += stored(index);
    pass(size);
  }
  const PlanArray& array(const Slice& slice) const { return plan_.arrays[slice.array]; }
  int64_t bytes(const Slice& slice) const {
    return wire_bytes(array(slice).kind, slice, p_.heads_, p_.types_);
  }
  bool as_it_lies(const Slice& slice) const {
    return travels_as_it_lies(array(slice), slice, p_.heads_, p_.types_);
  }
  int64_t bytes(const Message& m) const {
    int64_t sum = 0;
    for (const Slice& slice : m.slices) sum += bytes(slice);
    return sum;
  }

  const RankPlan& plan_;
  std::vector<RowSet> written_;  ///< [array] rows written so far
  CallBatches batches_;
  const bool library_ = p_.machine_.kernel.merges();
  std::set<int> deferred_;            ///< arrays to be cleared before their next use
  std::optional<step::Delta> delta_;  ///< row sums that no pass over the arrays has computed
};

namespace {

uint64_t hash_of(const BlockTable::Block& block) {
  uint64_t hash = block.steps;
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 29U;
  };
  for (const Op& op : block.ops) {
    mix(static_cast<uint64_t>(op.kind) << 32U | static_cast<uint32_t>(op.hop));
    mix(std::bit_cast<uint64_t>(op.seconds));
    mix(op.bytes);
  }
  return hash;
}

}  // namespace

Programs::Programs(Pass pass, const HeadShape& heads, const ElementTypes& types,
                   const MachineModel& machine, int ranks, GroupPlace place)
    : pass_(pass), heads_(heads), types_(types), machine_(machine), ranks_(ranks), place_(place) {
  GYRE_CHECK(machine.links.size() <= max_tiers, "{} tiers", machine.links.size());
}

CompiledRank Programs::compile(const RankPlan& plan, const std::string& schedule) const {
  return ProgramWriter(*this, plan, schedule).write();
}

void Programs::add(const CompiledRank& rank) {
  std::vector<uint32_t> known;
  for (uint32_t i = 0; i < rank.blocks.size(); ++i)
    known.push_back(blocks_.index_of(rank.blocks.at(i)));
  RankProgram& program = programs_.emplace_back(rank.program);
  for (RankProgram::Part& part : program.parts) part.block = known[part.block];
  costs_.push_back(rank.cost);
}

uint32_t BlockTable::index_of(const Block& block) {
  const uint64_t hash = hash_of(block);
  const auto [begin, end] = by_hash_.equal_range(hash);
  for (auto found = begin; found != end; ++found)
    if (blocks_[found->second] == block) return found->second;
  const auto index = static_cast<uint32_t>(blocks_.size());
  blocks_.push_back(block);
  by_hash_.emplace(hash, index);
  return index;
}

}  // namespace gyre

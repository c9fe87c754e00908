#include "predict/program.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "attention/kernels/ragged_batch.hpp"
#include "attention/kernels/reversed_rows.hpp"
#include "attention/row_set.hpp"
#include "core/error.hpp"

namespace gyre {

/// Compiles the steps of one rank, block by block.
class ProgramWriter {
 public:
  ProgramWriter(const Programs& programs, const RankPlan& plan, const std::string& schedule)
      : p_(programs), plan_(plan), schedule_(schedule), written_(plan.arrays.size()) {}

  CompiledRank write() {
    for (const Step& step : plan_.steps(p_.pass_)) {
      std::visit([this](const auto& s) { walk(s); }, step);
      ++step_;
      if (std::holds_alternative<step::Wait>(step)) end_block();
    }
    end_block();
    if (!open_.empty())
      throw_runtime("{} never waits for exchange #{} of step {}", place(), open_.front().id,
                    open_.front().step);
    return std::move(compiled_);
  }

 private:
  /// An exchange in flight.
  struct Open {
    int id = 0, step = 0;
    int16_t slot = 0;
    int64_t unpacked = 0;  ///< bytes that unpacking and adding read and write
    /// [tier] seconds of transfers not yet overlapped by a kernel: the larger of sending and
    /// receiving.
    std::array<double, max_tiers> beside = {};
  };

  void walk(const step::Exchange& e) {
    Open open{e.id, step_, free_slot(), 0, {}};
    int64_t packed = copies_of(e, plan_, p_.heads_, p_.types_).sent;
    for (const Message& m : e.sends)
      for (const Slice& slice : m.slices)
        if (m.peer == plan_.rank) packed += bytes(slice);
    copy(2 * packed);
    if (e.transport == Transport::all_gather || e.transport == Transport::reduce_scatter)
      join(e, open);
    else
      send_and_receive(e, open);
    open_.push_back(open);
  }

  void send_and_receive(const step::Exchange& e, Open& open) {
    std::array<double, max_tiers> receiving = {};
    for (size_t i = 0; i < e.sends.size(); ++i) {
      if (e.sends[i].peer == plan_.rank) continue;
      Op& op = message(OpKind::send, e.sends[i], open);
      op.message = static_cast<int32_t>(i);
      op.seconds = link_seconds(op.tier, op.bytes);
      open.beside.at(op.tier) += op.seconds;
      compiled_.cost.bytes_sent.at(op.tier) += op.bytes;
    }
    for (const Message& m : e.recvs) {
      write_rows(m.slices);
      if (m.peer == plan_.rank) continue;
      const Op& op = message(OpKind::receive, m, open);
      receiving.at(op.tier) += link_seconds(op.tier, op.bytes);
      for (const Slice& slice : m.slices)
        if (slice.add || !as_it_lies(slice) || e.transport == Transport::all_to_all)
          open.unpacked += (slice.add ? 3 : 2) * bytes(slice);
    }
    for (size_t tier = 0; tier < max_tiers; ++tier)
      open.beside.at(tier) = std::max(open.beside.at(tier), receiving.at(tier));
  }

  /// Adds a library collective, in which every peer sends and receives the same number of bytes.
  void join(const step::Exchange& e, Open& open) {
    for (const Message& m : e.recvs) write_rows(m.slices);
    const auto ranks = static_cast<int>(e.group.size());
    if (e.group.front() % ranks != 0 || e.group.back() - e.group.front() != ranks - 1)
      throw_runtime("{}: an operation of ranks {} to {}, which are no group of {} neighbours",
                    place(), e.group.front(), e.group.back(), ranks);
    Op op;
    op.kind = OpKind::join;
    op.exchange = open.slot;
    op.group = ranks;
    for (const Slice& slice : e.sends.front().slices) op.bytes += bytes(slice);
    if (const std::vector<LinkTier>& links = p_.machine_.links; links.empty()) {
      compiled_.cost.bytes_sent[0] += (ranks - 1) * op.bytes;
    } else {
      const auto [first, stride] = p_.place_;
      const std::vector<TierSpread> spread =
          spread_of(links, first + e.group.front() * stride, stride, ranks);
      const CollectiveTime time = collective_time(links, spread, ranks, op.bytes);
      op.tier = static_cast<int16_t>(spread.size() - 1);
      op.seconds = time.seconds;
      op.algorithm = time.algorithm;
      compiled_.cost.algorithms.insert(time.algorithm);
      for (size_t tier = 0; tier < spread.size(); ++tier) {
        open.beside.at(tier) += time.busy.at(tier);
        compiled_.cost.bytes_sent.at(tier) += time.bytes.at(tier);
      }
    }
    const int64_t received = copies_of(e, plan_, p_.heads_, p_.types_).received;
    open.unpacked += (e.transport == Transport::reduce_scatter ? 3 : 2) * received;
    add(op);
  }

  void walk(const step::Wait& w) {
    const auto found = std::ranges::find(open_, w.id, &Open::id);
    if (found == open_.end())
      throw_runtime("{} waits for exchange #{}, which is not under way", place(), w.id);
    Op op;
    op.kind = OpKind::wait;
    op.exchange = found->slot;
    add(op);
    copy(found->unpacked);
    open_.erase(found);
  }

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
    if (p_.machine_.kernel.merges()) {
      prepare_batches(c);
      call.merged = merged_by(c, call.query_heads);
      call.rectangles = batches_.entries;
    }
    const ModelledTime time = p_.machine_.kernel.time(call);
    double slowed = 0;
    for (Open& open : open_)
      for (size_t tier = 0; tier < p_.machine_.links.size(); ++tier) {
        const double together = std::min(open.beside.at(tier), time.seconds);
        open.beside.at(tier) -= together;
        slowed += p_.machine_.links[tier].kernel_slowdown * together;
      }
    compiled_.cost.kernel += time.seconds;
    compiled_.cost.extrapolated += time.extrapolated;
    spend(SpanKind::compute, time.seconds + slowed, slowed);
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
  void walk(const step::Clear& c) { pass_over({c.array}); }
  void walk(const step::Delta& d) { pass_over({d.out, d.d_out}); }
  void walk(const step::Merge& m) {
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
  void pass(int64_t moved) {
    spend(SpanKind::pass, static_cast<double>(moved) / p_.machine_.copy_bytes_per_s);
  }

  /// `moved`: bytes read plus bytes written.
  void copy(int64_t moved) {
    spend(SpanKind::copy, static_cast<double>(moved) / p_.machine_.copy_bytes_per_s);
  }
  void spend(SpanKind what, double seconds, double slowed = 0) {
    if (!(seconds > 0)) return;
    Op op;
    op.spends = what;
    op.seconds = seconds;
    op.slowed = slowed;
    add(op);
  }
  Op& message(OpKind kind, const Message& m, Open& open) {
    if (m.peer < 0 || m.peer >= p_.ranks_)
      throw_runtime("{} exchanges with rank {} of {}", place(), m.peer, p_.ranks_);
    Op op;
    op.kind = kind;
    op.exchange = open.slot;
    op.hop = (m.peer - plan_.rank + p_.ranks_) % p_.ranks_;
    for (const Slice& slice : m.slices) op.bytes += bytes(slice);
    if (!p_.machine_.links.empty()) op.tier = tier_between(plan_.rank, m.peer);
    return add(op);
  }
  int16_t tier_between(int a, int b) const {
    const auto [first, stride] = p_.place_;
    return static_cast<int16_t>(p_.machine_.tier_between(first + a * stride, first + b * stride));
  }
  double link_seconds(int tier, int64_t size) const {
    if (p_.machine_.links.empty()) return 0;
    return p_.machine_.links[tier].seconds(size);
  }
  Op& add(Op op) {
    op.step = step_ - block_begin_;
    block_.ops.push_back(op);
    return block_.ops.back();
  }

  void end_block() {
    block_.steps = step_ - block_begin_;
    block_begin_ = step_;
    if (block_.steps == 0) return;
    const uint32_t index = compiled_.blocks.index_of(block_);
    block_.ops.clear();
    std::vector<RankProgram::Part>& parts = compiled_.program.parts;
    if (!parts.empty() && parts.back().block == index)
      ++parts.back().times;
    else
      parts.push_back({index, 1});
  }

  int16_t free_slot() const {
    int16_t slot = 0;
    const auto taken = [&] { return std::ranges::find(open_, slot, &Open::slot) != open_.end(); };
    while (taken()) ++slot;
    return slot;
  }
  const PlanArray& array(const Slice& slice) const { return plan_.arrays[slice.array]; }
  int64_t bytes(const Slice& slice) const {
    return wire_bytes(array(slice).kind, slice, p_.heads_, p_.types_);
  }
  bool as_it_lies(const Slice& slice) const {
    return travels_as_it_lies(array(slice), slice, p_.heads_, p_.types_);
  }
  /// Position in the plan, for error messages.
  std::string place() const {
    return fmt::format("schedule {}, {}: rank {} at step {}", schedule_, name_of(p_.pass_),
                       plan_.rank, step_);
  }

  const Programs& p_;
  const RankPlan& plan_;
  const std::string& schedule_;
  CompiledRank compiled_;
  BlockTable::Block block_;
  int step_ = 0, block_begin_ = 0;
  std::vector<Open> open_;
  std::vector<RowSet> written_;  ///< [array] rows written so far
  CallBatches batches_;
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

#include "predict/op_writer.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace gyre {

void OpWriter::end_step(bool is_wait) {
  ++step_;
  if (is_wait) end_block();
}

CompiledRank OpWriter::end() {
  end_block();
  if (!open_.empty())
    throw_runtime("{} never waits for exchange #{} of step {}", place(), open_.front().id,
                  open_.front().step);
  return std::move(compiled_);
}

OpWriter::Open OpWriter::new_exchange(int id) const {
  Open open{.id = id, .step = step_};
  const auto taken = [&] {
    return std::ranges::find(open_, open.slot, &Open::slot) != open_.end();
  };
  while (taken()) ++open.slot;
  return open;
}

void OpWriter::send(int peer, int64_t bytes, int index, Open& open) {
  Op& op = message(OpKind::send, peer, bytes, open);
  op.message = index;
  op.seconds = link_seconds(op);
  open.sending.at(op.tier) += op.seconds;
  compiled_.cost.bytes_sent.at(op.tier) += bytes;
}

void OpWriter::receive(int peer, int64_t bytes, Open& open) {
  const Op& op = message(OpKind::receive, peer, bytes, open);
  open.receiving.at(op.tier) += link_seconds(op);
}

void OpWriter::join(int first, int ranks, int64_t bytes, Open& open) {
  Op op;
  op.kind = OpKind::join;
  op.exchange = open.slot;
  op.group = ranks;
  op.bytes = bytes;
  if (const std::vector<LinkTier>& links = machine().links; links.empty()) {
    compiled_.cost.bytes_sent[0] += (ranks - 1) * bytes;
  } else {
    const auto [origin, stride] = p_.place_;
    const std::vector<TierSpread> spread = spread_of(links, origin + first * stride, stride, ranks);
    const CollectiveTime time = collective_time(links, spread, ranks, bytes);
    op.tier = static_cast<int16_t>(spread.size() - 1);
    op.seconds = time.seconds;
    op.algorithm = time.algorithm;
    compiled_.cost.algorithms.insert(time.algorithm);
    for (size_t tier = 0; tier < spread.size(); ++tier) {
      open.sending.at(tier) += time.busy.at(tier);
      compiled_.cost.bytes_sent.at(tier) += time.bytes.at(tier);
    }
  }
  add(op);
}

OpWriter::Open OpWriter::wait(int id) {
  const auto found = std::ranges::find(open_, id, &Open::id);
  if (found == open_.end())
    throw_runtime("{} waits for exchange #{}, which is not under way", place(), id);
  const Open open = *found;
  open_.erase(found);
  Op op;
  op.kind = OpKind::wait;
  op.exchange = open.slot;
  add(op);
  return open;
}

void OpWriter::compute(double seconds, double extrapolated) {
  double slowed = 0;
  for (Open& open : open_)
    for (size_t tier = 0; tier < machine().links.size(); ++tier) {
      const double beside = std::max(open.sending.at(tier), open.receiving.at(tier));
      const double together = std::min(beside, seconds);
      open.sending.at(tier) = open.receiving.at(tier) = beside - together;
      slowed += machine().links[tier].kernel_slowdown * together;
    }
  compiled_.cost.kernel += seconds;
  compiled_.cost.extrapolated += extrapolated;
  spend(SpanKind::compute, seconds + slowed, slowed);
}

void OpWriter::spend(SpanKind what, double seconds, double slowed) {
  if (!(seconds > 0)) return;
  Op op;
  op.spends = what;
  op.seconds = seconds;
  op.slowed = slowed;
  add(op);
}

std::string OpWriter::place() const {
  return fmt::format("schedule {}, {}: rank {} at step {}", schedule_, name_of(p_.pass_), rank_,
                     step_);
}

Op& OpWriter::message(OpKind kind, int peer, int64_t bytes, const Open& open) {
  if (peer < 0 || peer >= p_.ranks_)
    throw_runtime("{} exchanges with rank {} of {}", place(), peer, p_.ranks_);
  Op op;
  op.kind = kind;
  op.exchange = open.slot;
  op.hop = (peer - rank_ + p_.ranks_) % p_.ranks_;
  op.bytes = bytes;
  const auto [first, stride] = p_.place_;
  if (!machine().links.empty())
    op.tier =
        static_cast<int16_t>(machine().tier_between(first + rank_ * stride, first + peer * stride));
  return add(op);
}

void OpWriter::end_block() {
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

}  // namespace gyre

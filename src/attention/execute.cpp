#include "attention/execute.hpp"

#include <fmt/format.h>

#include <array>
#include <map>

#include "runtime/clock.hpp"

namespace gyre {
namespace {

/// Walks one rank's steps; one method a kind of step.
class Forward {
 public:
  Forward(const HeadShape& shape, MatrixView<const float> queries, std::span<const float> own,
          KvSlots& slots, BlockKernel& kernel, Communicator& group, Stream& stream,
          AttentionState& state)
      : shape_(shape),
        queries_(queries),
        own_(own),
        slots_(slots),
        kernel_(kernel),
        group_(group),
        stream_(stream),
        state_(state) {}

  void operator()(const step::Exchange& s) {
    const std::array sends = {SendSlice{s.to, std::as_bytes(block(s.send_slot, s.send_tokens))}};
    const std::array recvs = {
        RecvSlice{s.from, std::as_writable_bytes(slots_.block(s.recv_slot, s.recv_tokens))}};
    tokens_in_[s.recv_slot] = s.recv_tokens;
    pending_[s.id] = group_.exchange(sends, recvs, stream_, fmt::format("KV exchange {}", s.id));
  }

  void operator()(const step::Wait& s) {
    const Stopwatch watch;
    pending_.at(s.id)->wait();
    pending_.erase(s.id);
    times_.wait += watch.seconds();
  }

  void operator()(const step::Compute& s) {
    const Stopwatch watch;
    const int64_t width = shape_.kv_heads * shape_.head_dim;
    const int64_t tokens = s.slot == 0 ? queries_.rows : tokens_in_.at(s.slot);
    const std::span<const float> kv = block(s.slot, tokens);
    const KvBlock keys_values{{kv.data(), tokens, width},
                              {kv.data() + tokens * width, tokens, width}};
    kernel_.forward(shape_, queries_, keys_values, s.rectangles, state_, [this] {
      for (auto& [id, work] : pending_) work->test();
    });
    times_.compute += watch.seconds();
  }

  const ExecutionTimes& times() const { return times_; }

 private:
  std::span<const float> block(int slot, int64_t tokens) {
    return slot == 0 ? own_ : slots_.block(slot, tokens);
  }

  const HeadShape& shape_;
  MatrixView<const float> queries_;
  std::span<const float> own_;
  KvSlots& slots_;
  BlockKernel& kernel_;
  Communicator& group_;
  Stream& stream_;
  AttentionState& state_;
  std::map<int, WorkPtr> pending_;
  std::map<int, int64_t> tokens_in_;
  ExecutionTimes times_;
};

}  // namespace

KvSlots::KvSlots(const RankPlan& plan, int64_t width) : width_(width) {
  for (size_t i = 1; i < plan.slot_tokens.size(); ++i)
    slots_.emplace_back(2 * plan.slot_tokens[i] * width);
}

std::span<float> KvSlots::block(int slot, int64_t tokens) {
  GYRE_CHECK(slot >= 1 && slot <= std::ssize(slots_), "KV slot {} of {}", slot, slots_.size());
  return slots_[static_cast<size_t>(slot) - 1].span().first(
      static_cast<size_t>(2 * tokens * width_));
}

ExecutionTimes execute_forward(const RankPlan& plan, const HeadShape& shape,
                               MatrixView<const float> queries, std::span<const float> own_block,
                               KvSlots& slots, BlockKernel& kernel, Communicator& group,
                               Stream& stream, AttentionState& state) {
  GYRE_CHECK(std::ssize(own_block) == 2 * queries.rows * shape.kv_heads * shape.head_dim,
             "own KV block of {} elements for {} tokens", own_block.size(), queries.rows);
  kernel.reset(state);
  Forward forward(shape, queries, own_block, slots, kernel, group, stream, state);
  for (const Step& s : plan.steps) std::visit(forward, s);
  return forward.times();
}

}  // namespace gyre

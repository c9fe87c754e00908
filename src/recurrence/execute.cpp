#include "recurrence/execute.hpp"

#include "runtime/clock.hpp"

namespace gyre {

using namespace state_step;

RecurrenceExecutor::RecurrenceExecutor(const StatePlan& plan, const Layout& layout,
                                       Communicator& group, RecurrenceKernel& kernel)
    : plan_(plan), group_(group), kernel_(kernel), stream_(kernel.stream()) {
  const MemorySpace space = stream_.space();
  RecurrenceShape layer = kernel.shape();
  layer.key_heads *= plan.head_ranks();
  layer.value_heads *= plan.head_ranks();
  const int64_t slots = layout.shard(plan.rank).slots;
  data_ = new_arrays(layer, plan.type, slots, space, arrays_);
  if (!plan.rank_tokens.empty())
    heads_ = std::make_unique<HeadTransfer>(plan, layout, layer, stream_);
  if (layer.convolution > 0)
    convolution_ = std::make_unique<ConvolutionStage>(plan, layer,
                                                      heads_ ? heads_->gathered() : data_, kernel);
  for (const StateKind kind : plan.buffers) buffers_.emplace_back(elements_of(kind, layer), space);
  overwrite(std::byte{0});
  kernel_.between_heads([this] {
    for (auto& [id, pending] : pending_) pending.work->test();
  });
}

void RecurrenceExecutor::overwrite(std::byte value) {
  for (int a = static_cast<int>(first_result); a < recurrence_arrays; ++a) {
    const MatrixRef& matrix = data_.arrays[a];
    if (!matrix.empty())
      stream_.fill(matrix.data, value, matrix.rows * matrix.cols * size_of(matrix.type));
  }
  if (heads_) heads_->overwrite(value);
  for (Buffer<float>& one : buffers_) fill(one.span(), value);
  if (convolution_) convolution_->overwrite(value);
}

TokenRun RecurrenceExecutor::run_of(int part) const {
  return {plan_.parts.at(part).row, plan_.parts.at(part).tokens};
}

RecurrenceTimes RecurrenceExecutor::run(Pass pass, RunSteps what) {
  RecurrenceTimes times;
  for (const StateStep& any : plan_.steps(pass)) {
    const bool waits = std::holds_alternative<Wait>(any);
    const bool communicates =
        waits || std::holds_alternative<Exchange>(any) || std::holds_alternative<HeadExchange>(any);
    if (what == (communicates ? RunSteps::compute_only : RunSteps::messages_only)) continue;
    const Stopwatch watch;
    std::visit([&](const auto& s) { step(s, pass); }, any);
    if (waits) times.wait += watch.seconds();
    if (!communicates) times.compute += watch.seconds();
  }
  for (const WorkPtr& work : in_stream_) work->wait();
  in_stream_.clear();
  stream_.synchronize();
  return times;
}

void RecurrenceExecutor::step(const Summarize& s, Pass) {
  if (s.part < 0) {
    kernel_.identity(buffer(s.map), buffer(s.state));
    return;
  }
  kernel_.summarize(computed(), run_of(s.part), buffer(s.begins ? -1 : s.map), buffer(s.state));
  if (s.begins) fill(buffer(s.map), std::byte{0});
}

void RecurrenceExecutor::step(const SummarizeBack& s, Pass) {
  if (s.part < 0)
    fill(buffer(s.state), std::byte{0});
  else
    kernel_.summarize_back(computed(), run_of(s.part), buffer(s.state));
}

void RecurrenceExecutor::step(const Exchange& s, Pass pass) {
  Pending& pending = pending_[s.id];
  pending.step = &s;
  if (s.all_gather) {
    int64_t elements = 0;
    for (const int index : s.sends.front().buffers) elements += buffers_[index].size();
    pending.sent = Buffer<float>(elements, stream_.space());
    pending.received = Buffer<float>(elements * std::ssize(s.recvs), stream_.space());
    std::span<float> to = pending.sent.span();
    for (const int index : s.sends.front().buffers) {
      copy(buffer(index), to);
      to = to.subspan(buffers_[index].size());
    }
    pending.work =
        group_.all_gather(std::as_bytes(pending.sent.span()),
                          std::as_writable_bytes(pending.received.span()), stream_, s.what);
    return;
  }
  if (s.all_reduce) {
    const std::span<float> sum = convolution_->weight_gradients();
    pending.work =
        group_.all_reduce(sum.data(), std::ssize(sum), DType::f32, ReduceOp::sum, stream_, s.what);
    return;
  }
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  for (const StateMessage& m : s.sends) {
    for (const int index : m.buffers) sends.push_back({m.peer, std::as_bytes(buffer(index))});
    if (!m.pieces.empty()) convolution_->add_sends(m, pass, sends);
  }
  for (const StateMessage& m : s.recvs) {
    for (const int index : m.buffers)
      recvs.push_back({m.peer, std::as_writable_bytes(buffer(index))});
    if (!m.pieces.empty()) convolution_->add_recvs(m, pass, recvs);
  }
  pending.work = group_.exchange(sends, recvs, stream_, s.what);
}

void RecurrenceExecutor::step(const Wait& s, Pass) {
  Pending& pending = pending_.at(s.id);
  pending.work->wait_on_stream();
  if (pending.heads != nullptr) {
    heads_->finish(*pending.heads, data_);
  } else if (pending.step->all_gather) {
    std::span<const float> from = pending.received.span();
    for (const StateMessage& m : pending.step->recvs)
      for (const int index : m.buffers) {
        const std::span<float> to = buffer(index);
        if (m.peer != plan_.rank) copy(from.first(to.size()), to);
        from = from.subspan(to.size());
      }
  }
  if (stream_.space() == MemorySpace::device) in_stream_.push_back(std::move(pending.work));
  pending_.erase(s.id);
}

void RecurrenceExecutor::step(const Compose& s, Pass pass) {
  const std::span<float> into = buffer(s.into);
  copy(buffer(s.start < 0 ? s.terms.front().state : s.start), into);
  for (size_t i = s.start < 0 ? 1 : 0; i < s.terms.size(); ++i)
    kernel_.apply(buffer(s.terms[i].map), buffer(s.terms[i].state), pass == Pass::backward, into);
}

void RecurrenceExecutor::step(const Join& s, Pass pass) {
  kernel_.join({buffer(s.first.map), buffer(s.first.state)},
               {buffer(s.second.map), buffer(s.second.state)}, pass == Pass::backward,
               buffer(s.into.map), buffer(s.into.state));
}

void RecurrenceExecutor::step(const HeadExchange& s, Pass) {
  Pending& pending = pending_[s.id];
  pending.heads = &s;
  pending.work = heads_->start(s, data_, group_);
}

void RecurrenceExecutor::step(const Run& s, Pass pass) {
  RunStates states;
  states.before = buffer(s.before);
  states.behind = buffer(s.behind);
  states.d_behind = buffer(s.d_behind);
  states.d_before = buffer(s.d_before);
  if (pass == Pass::forward)
    kernel_.forward(computed(), run_of(s.part), states);
  else
    kernel_.backward(computed(), run_of(s.part), states);
}

void RecurrenceExecutor::step(const Convolve& s, Pass) {
  convolution_->convolve(s.parts);
}

void RecurrenceExecutor::step(const ConvolveSlopes&, Pass) {
  convolution_->slopes();
}

void RecurrenceExecutor::step(const ConvolveBack& s, Pass) {
  convolution_->backward(s.parts);
}

}  // namespace gyre

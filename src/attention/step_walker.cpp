#include "attention/step_walker.hpp"

#include "runtime/profile_range.hpp"

namespace gyre {

AttentionExecutor::Walker::Part AttentionExecutor::Walker::part_of(SpanKind kind) {
  if (kind == SpanKind::compute) return &ExecutionTimes::compute;
  return kind == SpanKind::wait ? &ExecutionTimes::wait : &ExecutionTimes::copy;
}

void AttentionExecutor::Walker::lap(SpanKind kind, const char* name, const step::Exchange* exchange,
                                    const step::Compute* compute) {
  laps_.push_back({kind, name, exchange, compute, step_, executor_.stream_.mark()});
}

template <class Body>
void AttentionExecutor::Walker::local(const char* name, SpanKind kind, Body body,
                                      const step::Compute* compute) {
  if (what_ == Execute::communication_only) return;
  const ProfileRange range(name);
  body();
  lap(kind, name, nullptr, compute);
}

void AttentionExecutor::Walker::operator()(const step::Exchange& s) {
  if (what_ == Execute::compute_only) return;
  const ProfileRange range(s.what.c_str());
  for (const auto* messages : {&s.sends, &s.recvs})
    for (const Message& m : *messages)
      for (const Slice& slice : m.slices) {
        executor_.clear_deferred(slice.array);
        executor_.make_delta_before(slice.array);
      }
  executor_.post(s, step_);
  lap(SpanKind::copy, "pack ", &s);
}

void AttentionExecutor::Walker::operator()(const step::Wait& s) {
  if (what_ == Execute::compute_only) return;
  const ProfileRange range("wait");
  const step::Exchange* const exchange = executor_.pending_.at(s.id).exchange;
  executor_.complete(s.id);
  lap(SpanKind::wait, "wait ", exchange);
  executor_.unpack(s.id);
  lap(SpanKind::copy, "unpack ", exchange);
}

void AttentionExecutor::Walker::operator()(const step::Clear& s) {
  local("clear", SpanKind::pass, [&] { executor_.clear(s.array); });
}

void AttentionExecutor::Walker::operator()(const step::Compute& s) {
  const auto attend = [&] {
    executor_.compute(s, pass_);
    executor_.progress();  // on a device the host is free once the kernel is submitted
  };
  local("attention", SpanKind::compute, attend, &s);
}

void AttentionExecutor::Walker::operator()(const step::Merge& s) {
  local("merge", SpanKind::pass, [&] { executor_.merge(s); });
}

void AttentionExecutor::Walker::operator()(const step::Finish& s) {
  local("sinks", SpanKind::pass, [&] {
    for (const int index : {s.out, s.stats}) executor_.clear_deferred(index);
    executor_.finish(s);
  });
}

void AttentionExecutor::Walker::operator()(const step::Delta& s) {
  local("delta", SpanKind::pass, [&] { executor_.delta(s); });
}

void AttentionExecutor::Walker::operator()(const step::SinkGradient& s) {
  local("gradient of the sinks", SpanKind::pass, [&] { executor_.sink_gradient(s); });
}

void AttentionExecutor::Walker::finish() {
  step_ = -1;  // the last lap belongs to no step
  if (executor_.deferred_clears_.empty()) return;
  while (!executor_.deferred_clears_.empty())
    executor_.clear_deferred(*executor_.deferred_clears_.begin());
  lap(SpanKind::pass, "clear");
}

std::string AttentionExecutor::Walker::name_of_lap(const Lap& lap) const {
  if (lap.compute != nullptr) return name_of_keys(executor_.plan_, *lap.compute);
  return lap.exchange != nullptr ? lap.name + lap.exchange->what : lap.name;
}

ExecutionTimes AttentionExecutor::Walker::times(const Mark& end, Trace* trace) const {
  ExecutionTimes times;
  double last = begin_->seconds();
  times.total = end.seconds() - last;
  for (const Lap& lap : laps_) {
    const double now = lap.end->seconds();
    times.*part_of(lap.kind) += now - last;
    if (trace != nullptr)
      trace->add(
          {TraceLane::compute, name_of_lap(lap), last, now, lap.kind, lap.step, name_of(pass_)});
    last = now;
  }
  return times;
}

}  // namespace gyre

#include "attention/step_walker.hpp"

#include "runtime/profile_range.hpp"

namespace gyre {

void AttentionExecutor::Walker::lap(Part part, const char* name) {
  laps_.push_back({part, name, executor_.stream_.mark()});
}

template <class Body>
void AttentionExecutor::Walker::local(const char* name, Part part, Body body) {
  if (what_ == Execute::communication_only) return;
  const ProfileRange range(name);
  body();
  lap(part, part == &ExecutionTimes::compute ? name : nullptr);
}

void AttentionExecutor::Walker::operator()(const step::Exchange& s) {
  if (what_ == Execute::compute_only) return;
  const ProfileRange range(s.what.c_str());
  for (const auto* messages : {&s.sends, &s.recvs})
    for (const Message& m : *messages)
      for (const Slice& slice : m.slices) executor_.clear_deferred(slice.array);
  executor_.post(s);
  lap(&ExecutionTimes::copy);
}

void AttentionExecutor::Walker::operator()(const step::Wait& s) {
  if (what_ == Execute::compute_only) return;
  const ProfileRange range("wait");
  executor_.complete(s.id);
  lap(&ExecutionTimes::wait, "wait");
  executor_.unpack(s.id);
  lap(&ExecutionTimes::copy);
}

void AttentionExecutor::Walker::operator()(const step::Clear& s) {
  local("clear", &ExecutionTimes::copy, [&] { executor_.clear(s.array); });
}

void AttentionExecutor::Walker::operator()(const step::Compute& s) {
  local("attention", &ExecutionTimes::compute, [&] {
    executor_.compute(s, pass_);
    executor_.progress();  // on a device the kernel is only submitted by now
  });
}

void AttentionExecutor::Walker::operator()(const step::Finish& s) {
  local("sinks", &ExecutionTimes::copy, [&] {
    for (const int index : {s.out, s.stats}) executor_.clear_deferred(index);
    executor_.finish(s);
  });
}

void AttentionExecutor::Walker::operator()(const step::Delta& s) {
  local("delta", &ExecutionTimes::copy, [&] { executor_.delta(s); });
}

void AttentionExecutor::Walker::operator()(const step::SinkGradient& s) {
  local("gradient of the sinks", &ExecutionTimes::copy, [&] { executor_.sink_gradient(s); });
}

void AttentionExecutor::Walker::finish() {
  if (executor_.deferred_clears_.empty()) return;
  while (!executor_.deferred_clears_.empty())
    executor_.clear_deferred(*executor_.deferred_clears_.begin());
  lap(&ExecutionTimes::copy);
}

ExecutionTimes AttentionExecutor::Walker::times(const Mark& end, Trace* trace) const {
  ExecutionTimes times;
  double last = begin_->seconds();
  times.total = end.seconds() - last;
  for (const Lap& lap : laps_) {
    const double now = lap.end->seconds();
    times.*lap.part += now - last;
    if (trace != nullptr && lap.name != nullptr)
      trace->add(TraceLane::compute, lap.name, last, now);
    last = now;
  }
  return times;
}

}  // namespace gyre

#pragma once
// Walks the steps of a plan for AttentionExecutor and measures the time of each step.

#include <vector>

#include "attention/execute.hpp"

namespace gyre {

/// Executes steps and times them in laps, one or two per step. A lap begins where the previous one
/// ends, so that one mark per lap is enough.
class AttentionExecutor::Walker {
 public:
  Walker(AttentionExecutor& executor, Pass pass, Execute what)
      : executor_(executor), pass_(pass), what_(what), begin_(executor.stream_.mark()) {}

  void walk(const Step& s) {
    ++step_;
    std::visit(*this, s);
  }
  void operator()(const step::Exchange& s);
  void operator()(const step::Wait& s);
  void operator()(const step::Clear& s);
  void operator()(const step::Compute& s);
  void operator()(const step::Merge& s);
  void operator()(const step::Finish& s);
  void operator()(const step::Delta& s);
  void operator()(const step::SinkGradient& s);

  /// Call it after the last step: carries out the clears that are still deferred.
  void finish();

  /// Returns the times; call it when all work is done. `end`: the mark after the last lap. Adds the
  /// laps to the trace, if there is one.
  ExecutionTimes times(const Mark& end, Trace* trace) const;

 private:
  using Part = double ExecutionTimes::*;
  /// A timed part of a step. Traces label it by the keys' owner, or by `name` and the exchange.
  struct Lap {
    SpanKind kind;
    const char* name;
    const step::Exchange* exchange;
    const step::Compute* compute;
    int step;
    MarkPtr end;
  };
  static Part part_of(SpanKind kind);
  std::string name_of_lap(const Lap& lap) const;
  void lap(SpanKind kind, const char* name, const step::Exchange* exchange = nullptr,
           const step::Compute* compute = nullptr);
  /// Runs and times a step without communication.
  template <class Body>
  void local(const char* name, SpanKind kind, Body body, const step::Compute* compute = nullptr);

  AttentionExecutor& executor_;
  Pass pass_;
  Execute what_;
  int step_ = -1;  ///< index of the current step
  MarkPtr begin_;
  std::vector<Lap> laps_;
};

}  // namespace gyre

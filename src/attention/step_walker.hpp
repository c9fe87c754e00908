#pragma once
// The walk of an AttentionExecutor over the steps of its plan, with the time that each step takes.

#include <vector>

#include "attention/execute.hpp"

namespace gyre {

/// Executes steps and times them in laps, one or two for each step. A lap begins where the one
/// before it ends, so that one mark for each lap is enough.
class AttentionExecutor::Walker {
 public:
  Walker(AttentionExecutor& executor, Pass pass, Execute what)
      : executor_(executor), pass_(pass), what_(what), begin_(executor.stream_.mark()) {}

  /// The next step of the list.
  void walk(const Step& s) {
    ++step_;
    std::visit(*this, s);
  }
  void operator()(const step::Exchange& s);
  void operator()(const step::Wait& s);
  void operator()(const step::Clear& s);
  void operator()(const step::Compute& s);
  void operator()(const step::Finish& s);
  void operator()(const step::Delta& s);
  void operator()(const step::SinkGradient& s);

  /// After the last step: carries out the clears that are still deferred.
  void finish();

  /// The times, once everything is done; `end`: the mark behind the last lap. Adds the laps to the
  /// trace, if there is one.
  ExecutionTimes times(const Mark& end, Trace* trace) const;

 private:
  using Part = double ExecutionTimes::*;
  /// In the trace its name is `name`, or that of the keys, and then that of the exchange.
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
  /// A step without communication.
  template <class Body>
  void local(const char* name, SpanKind kind, Body body, const step::Compute* compute = nullptr);

  AttentionExecutor& executor_;
  Pass pass_;
  Execute what_;
  int step_ = -1;  ///< index of the present step
  MarkPtr begin_;
  std::vector<Lap> laps_;
};

}  // namespace gyre

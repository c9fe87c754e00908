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

  void operator()(const step::Exchange& s);
  void operator()(const step::Wait& s);
  void operator()(const step::Clear& s);
  void operator()(const step::Compute& s);
  void operator()(const step::Finish& s);
  void operator()(const step::Delta& s);
  void operator()(const step::SinkGradient& s);

  /// After the last step: carries out the clears that are still deferred.
  void finish();

  /// The times, once everything is done; `end`: the mark behind the last lap. Adds the spans of
  /// compute and of waiting to the trace, if there is one.
  ExecutionTimes times(const Mark& end, Trace* trace) const;

 private:
  using Part = double ExecutionTimes::*;
  struct Lap {
    Part part;
    const char* name;  ///< in the trace; null: not drawn
    MarkPtr end;
  };
  void lap(Part part, const char* name = nullptr);
  /// A step without communication.
  template <class Body>
  void local(const char* name, Part part, Body body);

  AttentionExecutor& executor_;
  Pass pass_;
  Execute what_;
  MarkPtr begin_;
  std::vector<Lap> laps_;
};

}  // namespace gyre

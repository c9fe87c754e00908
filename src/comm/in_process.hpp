#pragma once
// A group whose ranks all live in this process: what replays a plan of several ranks.
//
//     RanksInProcess ranks(2);
//     ranks.run([&](int rank) { ... ranks.of(rank).exchange(...)->wait(); ... });
//
// Every rank has a thread, but one thread runs at a time, so that ranks may share kernels, streams
// and counters. A rank keeps its turn until it waits for a rank that has not submitted its part of
// the operation yet:
//
//     rank 0   submits, waits, passes its turn on                           goes on
//     rank 1                                      submits, the data move, goes on to its end
//
// The last rank to submit its part of a message or of a collective moves the data, from the
// senders' buffers straight to the receivers'. So a sender waits, too, and a buffer that it changes
// before that arrives changed. Reductions add the terms in the order of ranks,
// ((x_0 + x_1) + x_2) + ..., each sum rounded to the type. An MPI library may choose another order.

#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

class RanksInProcess {
 public:
  explicit RanksInProcess(int size);
  ~RanksInProcess();
  int size() const { return static_cast<int>(ranks_.size()); }
  /// Communicator of a rank, in host memory. Only that rank's thread may communicate with it.
  Communicator& of(int rank) { return *ranks_.at(rank); }
  /// Calls body(rank) for every rank, and returns when all calls have returned. If some throw, it
  /// throws the first error. After an AgreedError, which all ranks throw, the ranks can be used
  /// again. After any other error they cannot, and the others end where they wait next.
  /// Throws a runtime error if all ranks wait for each other, or if a thread cannot be started.
  void run(const std::function<void(int rank)>& body);

 private:
  class Turns;
  class Rank;
  class Operation;
  struct Group;
  std::unique_ptr<Turns> turns_;
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

}  // namespace gyre

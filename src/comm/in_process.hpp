#pragma once
// A group whose ranks all live in this process: what replays a plan of several ranks.
//
//     RanksInProcess ranks(2);
//     ranks.run([&](int rank) { ... ranks.of(rank).exchange(...)->wait(); ... });
//
// Every rank has a thread, but one thread runs at a time, so that ranks may share kernels, streams
// and counters. A rank keeps its turn until it waits for a message that nobody has sent yet:
//
//     rank 0   posts, waits, passes its turn on                       finds 1's message, ends
//     rank 1                                    posts, waits,
//                                               finds 0's message, ends
//
// Messages are copied when they are posted. Reductions add the terms in the order of ranks,
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
  /// Calls body(rank) for every rank, and returns when all calls have returned. If one throws, the
  /// others end where they wait next, its error is rethrown, and the ranks cannot be used again.
  /// Throws a runtime error if all ranks wait for messages that nobody has sent.
  void run(const std::function<void(int rank)>& body);

 private:
  class Turns;
  class Rank;
  class Receipt;
  struct Group;
  std::unique_ptr<Turns> turns_;
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

}  // namespace gyre

#pragma once
// Marks work that a rank does alone (see agree.hpp) and that must not communicate.

namespace gyre {

/// During its lifetime, this thread runs the `local` of run_agreed or the `work` of run_on_root. If
/// this rank failed before an operation of a Communicator of several ranks, the others would wait
/// for ever. Communicator therefore refuses such operations, whether or not anything fails.
class LocalWork {
 public:
  LocalWork() { ++depth(); }
  ~LocalWork() { --depth(); }
  LocalWork(const LocalWork&) = delete;
  LocalWork& operator=(const LocalWork&) = delete;
  static bool under_way() { return depth() > 0; }

 private:
  static int& depth() {
    thread_local int depth = 0;
    return depth;
  }
};

}  // namespace gyre

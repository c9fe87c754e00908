#pragma once
// Work of one rank between two agreements, which must not communicate.

#include <utility>

namespace gyre {

/// For its lifetime this thread does the `local` of run_agreed, or the `work` of run_on_root. An
/// operation of a Communicator of several ranks would leave the others waiting when this rank fails
/// before it: Communicator refuses it, whether anything fails or not.
class LocalWork {
 public:
  LocalWork() { ++depth(); }
  ~LocalWork() { --depth(); }
  LocalWork(const LocalWork&) = delete;
  LocalWork& operator=(const LocalWork&) = delete;
  static bool under_way() { return depth() > 0; }

  /// Inside of it, groups communicate that agree with each other, when all are done: a rank that
  /// fails outside of its group's agreement leaves that group waiting.
  class Groups {
   public:
    Groups() : outside_(std::exchange(depth(), 0)) {}
    ~Groups() { depth() = outside_; }
    Groups(const Groups&) = delete;
    Groups& operator=(const Groups&) = delete;

   private:
    int outside_;
  };

 private:
  static int& depth() {
    thread_local int depth = 0;
    return depth;
  }
};

}  // namespace gyre

#pragma once
// What a suite measures: one case is one row of a table for each of its passes. As nccl-tests'
// testColl, a case is a table of functions, and everything around them is common: harness/suite.hpp.

#include <cstdint>
#include <optional>
#include <string>

#include "attention/plan.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Messages and bytes that a rank sends.
struct SentTraffic {
  int64_t messages = 0;
  int64_t bytes = 0;
  SentTraffic& operator+=(const SentTraffic& other) {
    messages += other.messages;
    bytes += other.bytes;
    return *this;
  }
  friend SentTraffic operator+(SentTraffic a, const SentTraffic& b) { return a += b; }
  friend SentTraffic operator-(const SentTraffic& a, const SentTraffic& b) {
    return {a.messages - b.messages, a.bytes - b.bytes};
  }
};

/// A case that is made: planned, allocated, filled. All functions are collective.
class Case {
 public:
  Case() = default;
  virtual ~Case() = default;
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  /// "ring, dual-chunk-swap, 4096 tokens, fwd": the step of the run, and the beginning of the names
  /// of checks.
  virtual std::string label(Pass pass) const = 0;
  /// What messages call a run.
  virtual const char* run_word() const { return "iteration"; }
  /// Called before the first run of a pass.
  virtual void begin(Pass) {}
  /// Brings the arrays into the state that a run of `pass` needs; poisoned: all but the inputs hold
  /// NaN before. Not timed.
  virtual void prepare(Pass pass, bool poisoned) = 0;
  /// Runs `pass` once. All of its work is done on return.
  virtual void run(Pass pass) = 0;
  /// Called before the first timed run: what the case notes of runs is of timed ones from here on.
  virtual void start_timing(Pass) {}
  /// Runs parts of the pass alone (its kernels, its messages) and times them by itself. After a run,
  /// whose results are lost, or `ahead` of the last one, for which nothing is prepared.
  virtual void run_parts(Pass, [[maybe_unused]] bool ahead) {}
  /// False: the thread sleeps instead of computing (emulation), and leaves no results.
  virtual bool computes() const { return true; }
  /// Everything that this rank has sent so far.
  virtual SentTraffic sent() const = 0;
  /// What a run must send, by closed form; nothing if that depends on the data.
  virtual std::optional<SentTraffic> expected(Pass) const { return {}; }
  /// Name of the check that compares the two.
  virtual std::string counters(Pass pass) const { return label(pass) + ": counters"; }
  /// Checksum of this rank's results of the last run; nothing where they are not compared bit by
  /// bit: there are none, or they are on a GPU. The same answer on all ranks.
  virtual std::optional<uint64_t> checksum(Pass pass) = 0;
  /// Compares the results of the last run with answers or with the definition.
  virtual void verify(Pass pass, Verification& checks) = 0;
};

}  // namespace gyre

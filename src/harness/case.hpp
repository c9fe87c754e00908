#pragma once
// The interface that a suite measures (harness/suite.hpp). A case gives one row of a table for each
// of its passes. Like testColl of nccl-tests, it is a table of functions; the suite does all else.

#include <cstdint>
#include <optional>
#include <string>

#include "core/pass.hpp"
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
  friend bool operator==(const SentTraffic&, const SentTraffic&) = default;
};

/// A case that is planned, allocated and filled. All functions are collective.
class Case {
 public:
  Case() = default;
  virtual ~Case() = default;
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  /// "ring, dual-chunk-swap, 4096 tokens, fwd": names the step of the run and prefixes the names of
  /// checks.
  virtual std::string label(Pass pass) const = 0;
  /// The word for a run in messages.
  virtual const char* run_word() const { return "iteration"; }
  /// Called before the first run of a pass.
  virtual void begin(Pass) {}
  /// Brings the arrays into the state that a run of `pass` needs. If poisoned, fills all but the
  /// inputs with NaN first; a case without such arrays may ignore it. Not timed.
  virtual void prepare(Pass pass, bool poisoned) = 0;
  /// Runs `pass` once. All of its work is done on return.
  virtual void run(Pass pass) = 0;
  /// Called before the first timed run. From here on the case records measurements of timed runs.
  virtual void start_timing(Pass) {}
  /// Runs parts of the pass alone (its kernels, its messages) and times them itself. Called after a
  /// run, whose results it may destroy, or with `ahead` before prepare() of the last run.
  virtual void run_parts(Pass, [[maybe_unused]] bool ahead) {}
  /// Returns false if the thread that measures sleeps, in an emulation or while other threads
  /// compute: its CPU time then says nothing about a disturbed run.
  virtual bool computes() const { return true; }
  /// Total traffic that this rank has sent so far.
  virtual SentTraffic sent() const = 0;
  /// Closed form of the traffic that a run must send; empty if it depends on the data.
  virtual std::optional<SentTraffic> expected(Pass) const { return {}; }
  /// Name of the check that compares sent and expected traffic.
  virtual std::string counters(Pass pass) const { return label(pass) + ": counters"; }
  /// Checksum of results of the last run on this rank; empty if they are not compared bitwise. All
  /// ranks agree on whether it is empty.
  virtual std::optional<uint64_t> checksum(Pass pass) = 0;
  /// Compares the results of the last run with answers or with the definition.
  virtual void verify(Pass pass, Verification& checks) = 0;
};

}  // namespace gyre

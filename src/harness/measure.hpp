#pragma once
// One measurement: warm-up, a run with poisoned arrays and checked messages, timed runs,
// verification.
//
//     for each of the warm-up runs:           if results are verified, the last one starts with NaN
//       prepare, run, parts                   in the arrays, and its messages are checked
//     until the median is known:
//       prepare, barrier, run (timed), parts  a verified run starts with NaN; the last one follows
//                                             its parts, so its results stay
//     compare the checksum of every timed run with that of the checked run
//     verify the results of the last run or of every run (--check last, all), and without checksums
//     (GPUs) also those of the checked run

#include <string>

#include "harness/backend.hpp"
#include "harness/case.hpp"
#include "report/repeat.hpp"

namespace gyre {

struct MeasureOptions {
  RepeatOptions repeats;
  int warmup = 1;              ///< runs before the timed ones; at least 1 if results are verified
  std::string check = "last";  ///< none, last, all
  double tol_scale = 1;
  bool verifies() const { return check != "none"; }
};

struct Measured {
  Timing timing;
  double last_ms = 0;     ///< of the last run, on this rank
  SentTraffic sent;       ///< by this rank in the last run
  Verification checks{};  ///< merged over all ranks; empty without verification
};

/// Measures a pass of a case. Messages of `backend` are checked outside of timed runs. Collective
/// over `world`, all ranks in host memory.
Measured measure(Case& of, Pass pass, const MeasureOptions& options, Communicator& world,
                 Backend& backend);

}  // namespace gyre

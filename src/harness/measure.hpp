#pragma once
// One measurement: warm-up, a run with poisoned arrays and checked messages, timed runs,
// verification.
//
//     for each of the warm-up runs:           the last one, if results are verified: arrays hold NaN
//       prepare, run, parts                   before, and messages are checked
//     until the median is known:
//       prepare, barrier, run (timed), parts  the last run comes after its parts: its results stay
//     compare the checksum of every timed run with that of the checked run
//     verify the results of the last run, or of every run (--check last, all); without checksums
//     (GPUs), those of the checked run, too

#include <string>

#include "harness/backend.hpp"
#include "harness/case.hpp"
#include "report/repeat.hpp"

namespace gyre {

/// How cases are measured.
struct MeasureOptions {
  RepeatOptions repeats;
  int warmup = 1;  ///< runs before the timed ones; where results are verified, 1 at least
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

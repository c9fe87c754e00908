#pragma once
// A kernel that sleeps for the time given by a model and computes nothing.
//
// Sleeping ranks leave their cores to others: 64 of them run on two cores as if each had a core or
// a GPU of its own, with real messages, real waiting and the executor's own steps. The arrays keep
// arbitrary contents.
//
// A call that begins at time b with duration t ends at b + t:
//
//     b ---- sleep, slice by slice ---- | ---- | -- b + t -- end
//                                  progress()        debt
//
// Between two slices it calls progress(), so that messages advance as they do between the tiles of
// a real kernel. A slice lasts at most `slice_s`, and at most until next_event(), when an emulated
// network wants to send (comm/emulated.hpp).
//
// A call ends late because a sleep ends late, most of all when other ranks hold the cores, and
// because progress() may copy a message. The delay is a debt that the rank's next call repays, so
// that the total of a pass is right:
//
//     debt = max(0, end - (b + t) - time from that end to the next call)
//     the next call ends at its begin + its t - debt, but not before its begin
//
// The time between the two calls is subtracted because the rank may have waited for a message in
// it, and a waiting rank loses nothing by a late end. Time spent copying messages is subtracted
// too, so that the repayment may be too small but never too large.

#include <functional>
#include <memory>
#include <string_view>

#include "attention/kernels/block_kernel.hpp"
#include "attention/plan.hpp"

namespace gyre {

/// The parameters of a kernel call that determine its time.
struct KernelCall {
  Pass pass = Pass::forward;
  const BlockInput& input;
  bool d_q = false, d_kv = false;  ///< backward: the gradients that are computed
  int64_t merged = 0;  ///< elements of results that the call adds to without overwriting
};

/// Returns the seconds that a call of the emulated kernel takes.
using KernelTime = std::function<double(const KernelCall&)>;

/// FLOPs of a call: flops_of_pair for each of its visible pairs and query heads.
double flops_of(const KernelCall& call);

/// Parses the value of --emulate-compute, e.g. "tflops=0.1,launch=10us": the rate in 10^12 FLOP/s
/// and the time of a call that computes nothing (default 0). A call without rectangles takes no
/// time. A usage error names the key, the value and what is allowed.
KernelTime parse_kernel_time(std::string_view text);

/// How an emulated kernel sleeps. Times are those of the clock of monotonic_seconds().
struct KernelSleep {
  double slice_s = 200e-6;
  /// When communication next needs a call of progress(); empty: unknown.
  std::function<double()> next_event = {};
  /// Replacements for tests; empty: the real functions.
  std::function<double()> now = {};
  std::function<void(double)> sleep_until = {};
};

/// Makes an emulated kernel. Its calls may overwrite outputs, so that clearing takes no time.
std::unique_ptr<BlockKernel> make_emulated_kernel(KernelTime time, KernelSleep sleep = {});

}  // namespace gyre

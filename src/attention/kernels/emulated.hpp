#pragma once
// A kernel that takes the time that a model says, asleep, and computes nothing.
//
// Ranks that sleep leave their cores to others: 64 of them run on two cores as if each had a core
// or a GPU of its own, with real messages, real waiting and the executor's own steps. The results
// are those that the arrays happened to hold.
//
// A call that begins at b and takes t ends at b + t:
//
//     b ---- sleep, slice by slice ---- | ---- | -- b + t -- end
//                                  progress()        debt
//
// Between two slices it calls progress(), so that messages advance as they do between the tiles of
// a real kernel. A slice lasts `slice_s`, or less: until next_event(), which is when an emulated
// network wants to send (comm/emulated.hpp).
//
// It ends late: a sleep ends late, and longest when other ranks hold the cores; progress() may copy
// a message. What it is late by is a debt. The next call of the rank repays it, so that the sum of
// a pass is right:
//
//     debt = max(0, end - (b + t) - time from that end to the next call)
//     the next call ends at its begin + its t - debt, at the earliest at once
//
// The time between the two calls is subtracted because the rank may have waited in it for a
// message, and a rank that waits anyway loses nothing by coming late. What it spent copying
// messages is subtracted too: less is repaid then than could be, never more.

#include <functional>
#include <memory>
#include <string_view>

#include "attention/kernels/block_kernel.hpp"
#include "attention/plan.hpp"

namespace gyre {

/// A call of a kernel, as far as its time depends on it.
struct KernelCall {
  Pass pass = Pass::forward;
  const BlockInput& input;
  bool d_q = false, d_kv = false;  ///< backward: the gradients that are computed
  int64_t merged = 0;  ///< elements of results that the call adds to, and does not overwrite
};

/// Seconds of a call of the kernel that is emulated.
using KernelTime = std::function<double(const KernelCall&)>;

/// FLOPs of a call: 2 · head_dim for each visible pair, query head and product; two products
/// forward; backward two, one more for dQ, and two more for dK and dV.
double flops_of(const KernelCall& call);

/// Reads what --emulate-compute says: "tflops=0.1,launch=10us", a rate in 10^12 FLOP/s and the time
/// of a call that computes nothing (0 when not given). A call without rectangles takes no time. A
/// usage error names key, value and what is allowed.
KernelTime parse_kernel_time(std::string_view text);

/// How an emulated kernel sleeps. Times are of the clock of monotonic_seconds().
struct KernelSleep {
  double slice_s = 200e-6;
  /// When communication next needs a call of progress(); empty: not known.
  std::function<double()> next_event = {};
  /// Of tests; empty: the real ones.
  std::function<double()> now = {};
  std::function<void(double)> sleep_until = {};
};

/// The kernel. Its calls may overwrite outputs, so that clearing them takes no time.
std::unique_ptr<BlockKernel> make_emulated_kernel(KernelTime time, KernelSleep sleep = {});

}  // namespace gyre

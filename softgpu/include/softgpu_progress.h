#pragma once
// What the rest of a program must do for the software GPU, and may ask it.

#include <cstdint>

namespace softgpu {

/// Moves on what other processes wait for: communication in streams, and what comes before it. A
/// GPU does so by itself; here, whoever waits for other processes calls this while it waits.
void progress();

/// For tests: what would end the program, outside of kernels, throws std::runtime_error. Returns
/// the old setting.
bool throw_errors(bool on);

/// What orders of threads are drawn from: GYRE_SOFTGPU_SEED, or another number in every process.
uint64_t seed();

/// Whether this is in a block of ncclMemAlloc.
bool is_nccl_memory(const void* pointer);

/// How often this process has waited for a stream, an event or the device so far.
int64_t host_waits();
/// How often it has given something to a stream: a launch, a copy, a record or a wait of an event,
/// a group of NCCL's operations, a graph.
int64_t host_submissions();

}  // namespace softgpu

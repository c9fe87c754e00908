#pragma once

namespace gyre {

/// Sleeps until `time` on the clock of monotonic_seconds(); does nothing when it has passed. By
/// default Linux lets a sleep end up to 50 us late, so that timers coincide; from the first call
/// on it no longer does so for the calling thread.
void sleep_until(double time);

}  // namespace gyre

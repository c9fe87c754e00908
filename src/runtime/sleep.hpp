#pragma once

namespace gyre {

/// Sleeps until `time` on the clock of monotonic_seconds(); returns at once if it has passed. By
/// default, Linux may end a sleep up to 50 us late to coalesce timers; the first call disables this
/// for the calling thread.
void sleep_until(double time);

}  // namespace gyre

#pragma once
// Distribution of independent tasks over the threads of one rank.

#include <algorithm>
#include <cstdint>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace gyre {

/// Calls body(task, thread) for every task in [0, count), in order within a thread; thread 0 is the
/// caller. Throws the exception of the first failed task: with several threads, after all tasks.
template <class Body>
void for_each_task(int threads, int64_t count, Body body) {
#ifdef _OPENMP
  if (threads > 1 && count > 1) {
    std::exception_ptr error;
    int64_t failed = count;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < count; ++task) {
      try {
        body(task, omp_get_thread_num());
      } catch (...) {
#pragma omp critical(gyre_for_each_task)
        if (task < failed) {
          failed = task;
          error = std::current_exception();
        }
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#else
  (void)threads;
#endif
  for (int64_t task = 0; task < count; ++task) body(task, 0);
}

/// Minimum work, in nanoseconds, of a loop that is distributed over threads, and of one of its
/// tasks. Waking and joining threads costs several microseconds, and on a busy machine a scheduling
/// quantum. Only tests change these limits.
struct SharingLimits {
  double of_loop = 100e3;
  double of_task = 20e3;
};
inline SharingLimits sharing_limits;

/// Items per task if an item takes about `nanoseconds`; all items if the loop is not distributed.
inline int64_t items_of_task(int64_t count, double nanoseconds) {
  const auto all = std::max<int64_t>(1, count);
  const double work = static_cast<double>(all) * nanoseconds;
  if (work < sharing_limits.of_loop || work <= sharing_limits.of_task) return all;
  return std::max<int64_t>(1, static_cast<int64_t>(sharing_limits.of_task / nanoseconds));
}

/// Calls body(begin, end, thread) for parts of [0, count); an item takes about `nanoseconds` (> 0).
/// Otherwise as for_each_task.
template <class Body>
void for_each_part(int threads, int64_t count, double nanoseconds, Body body) {
  const int64_t share = items_of_task(count, nanoseconds);
  for_each_task(threads, (count + share - 1) / share, [&](int64_t task, int thread) {
    body(task * share, std::min(count, (task + 1) * share), thread);
  });
}

}  // namespace gyre

#pragma once
// Sharing independent tasks among the threads of one rank.

#include <cstdint>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace gyre {

/// Calls body(task, thread) for every task in [0, count), in order within a thread; thread 0 is the
/// caller. An exception of a task is thrown again when all have run.
template <class Body>
void for_each_task(int threads, int64_t count, Body body) {
#ifdef _OPENMP
  if (threads > 1 && count > 1) {
    std::exception_ptr error;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < count; ++task) {
      try {
        body(task, omp_get_thread_num());
      } catch (...) {
#pragma omp critical(gyre_for_each_task)
        error = std::current_exception();
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

}  // namespace gyre

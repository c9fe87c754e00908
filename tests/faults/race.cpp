// race right|wrong: a loop of tasks that share nothing, and one whose tasks share a sum. The first
// must pass ThreadSanitizer, the second must not: else it says nothing about the programs.

#include <cstdio>
#include <cstring>
#include <vector>

#include "runtime/parallel.hpp"

int main(int argc, char** argv) {
  const bool wrong = argc > 1 && std::strcmp(argv[1], "wrong") == 0;
  std::vector<long> parts(64, 0);
  long sum = 0;
  for (int repetition = 0; repetition < 20; ++repetition) {
    gyre::for_each_task(2, 64, [&](int64_t task, int) {
      for (long i = 0; i < 20000; ++i) {
        parts[task] += i;
        if (wrong) sum += i;
      }
    });
    for (const long part : parts) sum += part;  // after the barrier at the loop's end
  }
  std::printf("%ld\n", sum);
  return 0;
}

// Races for shared memory. Two threads of a block touch the same bytes, one of them writes, and no
// barrier is between them: what the reader finds, or what stays, depends on who comes first. The
// order of fibers may hide that; here it is found in any order.
//
//     thread 0                  thread 1               thread 40 (of another warp)
//     s[0] = x
//     ---------- barrier of the block: a new interval ----------
//     read s[0]                 read s[0]
//     -- function of the warp --
//                               s[0] = y               s[0] = z    found: no barrier behind the
//                               reads
//
// For every two bytes stands what was last read and written, in which interval, by whom, and after
// how many functions of their warp. Atomic operations are writes that do not race with each other.

#include <link.h>

#include <vector>

#include "softgpu.hpp"

namespace softgpu {
namespace {

constexpr size_t cell_bytes = 2;  // threads write bf16 side by side

int warp_of(int thread) {
  return thread / 32;
}

/// What threads did with a cell in one interval.
struct Deeds {
  uint64_t interval = 0;
  uint64_t syncs = 0;    // of the last thread's warp then
  int thread = 0;        // the last one
  bool several = false;  // threads of its warp, since its last function
  bool several_warps = false;

  void add(const Turn& now) {
    const bool first = interval != now.interval;
    const bool same_warp = !first && warp_of(thread) == warp_of(now.thread);
    several_warps = !first && (several_warps || !same_warp);
    several = same_warp && syncs == now.syncs && (several || thread != now.thread);
    interval = now.interval;
    syncs = now.syncs;
    thread = now.thread;
  }
  /// Whether all of it is behind the thread of this turn.
  bool are_behind(const Turn& now) const {
    if (interval != now.interval) return true;
    if (several_warps || warp_of(thread) != warp_of(now.thread)) return false;
    return syncs < now.syncs || (!several && thread == now.thread);
  }
};

struct Cell {
  Deeds reads, writes, atomics;
};

/// Returns a thread with which an access races, or -1.
int note(Cell& cell, Access access, const Turn& now) {
  if (!cell.writes.are_behind(now)) return cell.writes.thread;
  if (access != Access::atomic && !cell.atomics.are_behind(now)) return cell.atomics.thread;
  if (access != Access::read && !cell.reads.are_behind(now)) return cell.reads.thread;
  (access == Access::read    ? cell.reads
   : access == Access::write ? cell.writes
                             : cell.atomics)
      .add(now);
  return -1;
}

bool watching = false;
std::vector<Cell> of_dynamic, of_fixed;

}  // namespace

void watch_shared_memory() {
  watching = true;
}
bool watches_shared_memory() {
  return watching;
}

SharedRange fixed_shared_memory() {
  SharedRange found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        for (int i = 0; i < info->dlpi_phnum; ++i)
          if (info->dlpi_phdr[i].p_type == PT_TLS)
            *static_cast<SharedRange*>(to) = {static_cast<const std::byte*>(info->dlpi_tls_data),
                                              info->dlpi_phdr[i].p_memsz};
        return 1;  // the program comes first
      },
      &found);
  return found;
}

int note_access(bool is_dynamic, size_t offset, size_t bytes, Access access, const Turn& now) {
  std::vector<Cell>& cells = is_dynamic ? of_dynamic : of_fixed;
  const size_t first = offset / cell_bytes, last = (offset + bytes - 1) / cell_bytes;
  if (cells.size() <= last) cells.resize(last + 1);
  for (size_t i = first; i <= last; ++i)
    if (const int other = note(cells[i], access, now); other >= 0) return other;
  return -1;
}

}  // namespace softgpu

// Races for shared memory. Two threads of a block touch the same bytes, one of them writes, and no
// barrier is between them: what the reader finds, or what stays, depends on who comes first. The
// order of fibers may hide that; here it is found in any order.
//
//     thread 0                  thread 1               thread 40 (of another warp)
//     s[0] = x
//     ---------- barrier of the block: a new interval ----------
//     read s[0]                 read s[0]
//     -- function of the warp --
//                               s[0] = y               s[0] = z    found: no barrier behind the reads
//
// For every two bytes stands what was last read and written, in which interval, by whom, and after
// how many functions of their warp. Atomic operations are not watched.

#include <link.h>

#include <vector>

#include "softgpu.hpp"

namespace softgpu {
namespace {

constexpr size_t cell_bytes = 2;  // threads write bf16 side by side

struct Cell {
  uint64_t write_interval = 0, write_syncs = 0;
  uint64_t read_interval = 0, read_syncs = 0;
  int writer = 0, reader = 0;
  bool several_readers = false;  // of the warp, since its last function
  bool several_warps = false;    // have readers
};

int warp_of(int thread) {
  return thread / 32;
}
/// Whether what `thread` did is behind it for the thread of this turn, in one interval.
bool is_ordered(int thread, uint64_t syncs, const Turn& now) {
  return thread == now.thread || (warp_of(thread) == warp_of(now.thread) && syncs < now.syncs);
}

/// Returns the thread with which a read races, or -1.
int read(Cell& cell, const Turn& now) {
  if (cell.write_interval == now.interval && !is_ordered(cell.writer, cell.write_syncs, now))
    return cell.writer;
  const bool first = cell.read_interval != now.interval;
  const bool same_warp = !first && warp_of(cell.reader) == warp_of(now.thread);
  cell.several_warps = !first && (cell.several_warps || !same_warp);
  cell.several_readers = same_warp && cell.read_syncs == now.syncs &&
                         (cell.several_readers || cell.reader != now.thread);
  cell.read_interval = now.interval;
  cell.read_syncs = now.syncs;
  cell.reader = now.thread;
  return -1;
}

int write(Cell& cell, const Turn& now) {
  if (cell.write_interval == now.interval && !is_ordered(cell.writer, cell.write_syncs, now))
    return cell.writer;
  if (cell.read_interval == now.interval) {
    const bool of_the_warp = warp_of(cell.reader) == warp_of(now.thread);
    if (cell.several_warps || !of_the_warp) return cell.reader;
    if (cell.read_syncs == now.syncs && (cell.several_readers || cell.reader != now.thread))
      return cell.reader;
  }
  cell.write_interval = now.interval;
  cell.write_syncs = now.syncs;
  cell.writer = now.thread;
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

int note_access(bool is_dynamic, size_t offset, size_t bytes, bool writes, const Turn& now) {
  std::vector<Cell>& cells = is_dynamic ? of_dynamic : of_fixed;
  const size_t first = offset / cell_bytes, last = (offset + bytes - 1) / cell_bytes;
  if (cells.size() <= last) cells.resize(last + 1);
  for (size_t i = first; i <= last; ++i)
    if (const int other = writes ? write(cells[i], now) : read(cells[i], now); other >= 0)
      return other;
  return -1;
}

}  // namespace softgpu

// Selection of the largest logits of rows: a block keeps the candidates of a part of a row above a
// rising threshold (`bar`). Another block merges the lists of the row's parts in the same way and
// sorts the result.
//
// Candidates are distinct integers in the order of list entries (entry_of). The set of the largest
// is therefore unique, in whatever order threads append theirs.

#include "logprobs/rows/cuda_row_lanes.cuh"
#include "logprobs/rows/cuda_row_launch.hpp"

namespace gyre::rows {
namespace {

constexpr int select_threads = 128;
constexpr int64_t select_columns = 32768;  // columns per part
constexpr int64_t run_columns = 2048;      // columns offered between two calls of make_room()
constexpr int64_t max_shared_entries = 12288;

/// Shared memory of a block, besides the candidates.
struct SelectionRoom {
  int kept, moved, scratch[block_warps];
};

/// Candidates of a block. All members except `rejected_` are equal on all threads.
class Selector {
 public:
  __device__ Selector(uint64_t* entries, int64_t length, SelectionRoom& room)
      : entries_(entries), length_(length), room_(room) {
    if (threadIdx.x == 0) room_.kept = 0;
    __syncthreads();
  }

  /// Called per thread: offers the values of columns column + i whose bit i in `valid` is set.
  template <int count>
  __device__ void offer(const float (&z)[count], int64_t column, unsigned valid) {
    unsigned taken = 0;
    unrolled<count>([&](int i) { taken |= (z[i] < bar_value_ ? 0U : 1U) << i; });
    taken &= valid;
    if (taken == 0) return;
    unrolled<count>([&](int i) {
      if ((taken >> i & 1U) != 0 && !wanted(entry_of(z[i], column + i))) taken ^= 1U << i;
    });
    if (taken == 0) return;
    int at = atomicAdd(&room_.kept, __popc(taken));
    unrolled<count>([&](int i) {
      if ((taken >> i & 1U) != 0) entries_[at++] = entry_of(z[i], column + i);
    });
  }
  __device__ void offer(uint64_t entry) {
    if (entry != 0 && wanted(entry)) entries_[atomicAdd(&room_.kept, 1)] = entry;
  }

  /// Called by all threads after their offers: makes room for another run_columns columns.
  __device__ void make_room() { prune(2 * length_ + 64, length_ + length_ / 4 + 8); }
  /// Called by all threads: keeps the `length` largest (or all, if fewer), returns their number.
  __device__ int finish() {
    prune(length_, length_);
    return room_.kept;
  }

  /// Call after finish(). Returns to all threads how many offered values have the order `last`, the
  /// result of last_order().
  __device__ int count_of_last(uint32_t last) {
    int mine = last == bar_order_ ? rejected_ : 0;
    for (int i = static_cast<int>(threadIdx.x); i < room_.kept; i += select_threads)
      mine += order_of_entry(entries_[i]) == last ? 1 : 0;
    return block_sum(mine, room_.scratch) + (last == bar_order_ ? dropped_ : 0);
  }
  /// Order (order_of) of the smallest kept entry; that of -inf if fewer than `length` are kept.
  __device__ uint32_t last_order() {
    if (room_.kept < length_) return order_of(minus_infinity);
    uint32_t least = ~0U;
    for (int i = static_cast<int>(threadIdx.x); i < room_.kept; i += select_threads)
      least = min(least, order_of_entry(entries_[i]));
    return ~block_max_of(~least);
  }

 private:
  __device__ bool wanted(uint64_t entry) {
    if (entry >= bar_) return true;
    rejected_ += order_of_entry(entry) == bar_order_ ? 1 : 0;
    return false;
  }
  __device__ uint32_t block_max_of(uint32_t mine) {
    mine = __reduce_max_sync(all_lanes, mine);
    __syncthreads();
    if (threadIdx.x % warp_lanes == 0)
      room_.scratch[threadIdx.x / warp_lanes] = static_cast<int>(mine);
    __syncthreads();
    for (int w = 0; w < select_threads / warp_lanes; ++w)
      mine = max(mine, static_cast<uint32_t>(room_.scratch[w]));
    return mine;
  }
  __device__ int count_from(uint64_t bar) {
    int mine = 0;
    for (int i = static_cast<int>(threadIdx.x); i < room_.kept; i += select_threads)
      mine += entries_[i] >= bar ? 1 : 0;
    return block_sum(mine, room_.scratch);
  }

  /// If more than `limit` candidates are kept, raises the bar until `length` to `most` remain.
  __device__ void prune(int64_t limit, int64_t most) {
    __syncthreads();
    const int kept = room_.kept;
    __syncthreads();  // all threads read `kept` before the next offer
    if (kept <= limit) return;
    // At least `length` entries are >= `low`, fewer are >= `high`.
    uint64_t low = bar_, high = ~uint64_t{0};
    int64_t above_low = kept;
    while (above_low > most && high - low > 1) {
      const uint64_t middle = low + (high - low) / 2;
      const int above = count_from(middle);
      if (above >= length_)
        low = middle, above_low = above;
      else
        high = middle;
    }
    drop_below(low);
  }

  __device__ void drop_below(uint64_t bar) {
    const int before = room_.kept;
    const uint32_t order = order_of_entry(bar);
    __syncthreads();
    if (threadIdx.x == 0) room_.kept = 0;
    int ties = 0;
    // An iteration writes only to places of entries that have been read.
    for (int first = 0; first < before; first += select_threads) {
      const int at = first + static_cast<int>(threadIdx.x);
      const uint64_t entry = at < before ? entries_[at] : 0;
      __syncthreads();
      if (entry >= bar) entries_[atomicAdd(&room_.kept, 1)] = entry;
      ties += entry != 0 && entry < bar && order_of_entry(entry) == order ? 1 : 0;
      __syncthreads();
    }
    const int dropped = block_sum(ties, room_.scratch);
    if (order != bar_order_) dropped_ = rejected_ = 0;
    dropped_ += dropped;
    bar_ = bar;
    bar_order_ = order;
    const float value = value_of_order(order);
    bar_value_ = value == value ? value : std::numeric_limits<float>::infinity();
  }

  uint64_t* entries_;
  int64_t length_;
  SelectionRoom& room_;
  uint64_t bar_ = entry_of(minus_infinity, 0) + 1;  // smaller entries are no candidates
  uint32_t bar_order_ = order_of(minus_infinity);
  float bar_value_ = minus_infinity;
  int rejected_ = 0;  // per thread: values equal to the bar's that were not taken
  int dropped_ = 0;   // per block: values equal to the bar's that were taken and then dropped
};

// The next run, in flight, takes 8 registers per thread (16 for f32); the bound avoids spilling.
template <class T, bool summed, bool weighted>
__global__ void __launch_bounds__(select_threads, lanes_of<T> == 8 ? 10 : 8)
    select_in_parts(const T* logits, int64_t stride, RowScale scale, SelectionShape shape,
                    SelectionTask task) {
  constexpr int lanes = lanes_of<T>;
  __shared__ SelectionRoom room;
  const PartOfRow mine(shape.parts, shape.columns, select_columns);
  const int64_t block = blockIdx.x;
  uint64_t* entries = shape.part_spills ? task.part_room + block * shape.part_capacity
                                        : reinterpret_cast<uint64_t*>(dynamic_shared());
  Selector selector(entries, shape.part_length, room);
  ThreadSums<weighted> sums{base_2(scale[mine.row])};
  const T* row = logits + mine.row * stride;
  const Grid<lanes> grid(mine.begin, mine.end, row);
  constexpr int vectors = run_columns / (select_threads * lanes);
  const auto column_of_vector = [](int64_t run, int k) {
    return run + (k * select_threads + static_cast<int64_t>(threadIdx.x)) * lanes;
  };
  Asked<T, lanes, vectors> next{row, {}};
  const auto ask = [&](int64_t run) {
    unrolled<vectors>([&](int k) {
      const int64_t at = column_of_vector(run, k);
      next.ask(k, at, grid.whole(at));
    });
  };
  ask(grid.first);
  for (int64_t run = grid.first; run < grid.end; run += run_columns) {
    const Asked<T, lanes, vectors> here = next;
    ask(run + run_columns);  // loads the next run while this one is offered
    unrolled<vectors>([&](int k) {
      const int64_t at = column_of_vector(run, k);
      const bool whole = grid.whole(at);
      const Lanes<lanes> values = whole ? here.get(k) : grid.elements(row, at);
      if (summed) sums.add(values.x);
      selector.offer(values.x, at, whole ? ~0U : grid.valid(at));
    });
    selector.make_room();
  }
  const int kept = selector.finish();
  const int last = selector.count_of_last(selector.last_order());
  uint64_t* list = task.lists + block * shape.part_length;
  for (int64_t i = threadIdx.x; i < shape.part_length; i += select_threads)
    list[i] = i < kept ? entries[i] : 0;
  if (threadIdx.x == 0) task.lasts[block] = last;
  if (summed) {
    const PartSums part = block_sums(sums);
    if (threadIdx.x == 0) task.sums[block] = part;
  }
}

/// Sorts `count` entries, a power of two, in descending order.
__device__ void sort_entries(uint64_t* entries, int64_t count) {
  for (int64_t size = 2; size <= count; size *= 2)
    for (int64_t distance = size / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int64_t i = threadIdx.x; i < count / 2; i += select_threads) {
        const int64_t a = i / distance * 2 * distance + i % distance, b = a + distance;
        const uint64_t first = entries[a], second = entries[b];
        const bool descending = (a & size) == 0;
        if ((first < second) == descending) entries[a] = second, entries[b] = first;
      }
    }
  __syncthreads();
}

/// Counts the row's elements with this order. A part's list holds all those of the part, unless
/// they equal the list's last entry; then `lasts` has their number.
__device__ int count_in_row(const uint64_t* lists, const int32_t* lasts,
                            const SelectionShape& shape, uint32_t order, int* scratch) {
  int count = 0;
  for (int64_t p = 0; p < shape.parts; ++p) {
    const uint64_t* list = lists + p * shape.part_length;
    int ties = 0, larger_ones = 0, filled = 0;
    for (int64_t i = threadIdx.x; i < shape.part_length; i += select_threads) {
      ties += order_of_entry(list[i]) == order ? 1 : 0;
      larger_ones += order_of_entry(list[i]) > order ? 1 : 0;
      filled += list[i] != 0 ? 1 : 0;
    }
    ties = block_sum(ties, scratch);
    larger_ones = block_sum(larger_ones, scratch);
    filled = block_sum(filled, scratch);
    const bool short_list = filled < shape.part_length;
    const bool is_last =
        short_list ? order == order_of(minus_infinity) : ties > 0 && ties + larger_ones == filled;
    count += is_last ? lasts[p] : ties;
  }
  return count;
}

/// The first warp fills ids [begin, end) with the columns of the row's -inf, in order, then -1.
template <class T>
__device__ void put_infinite(const T* row, int64_t columns, int32_t* ids, int64_t begin,
                             int64_t end) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane >= warp_lanes) return;
  for (int64_t first = 0; first < columns && begin < end; first += warp_lanes) {
    const int64_t column = first + lane;
    const bool found = column < columns && to_float(row[column]) == minus_infinity;
    const unsigned all = __ballot_sync(all_lanes, found);
    const int64_t at = begin + __popc(all & ((1U << lane) - 1));
    if (found && at < end) ids[at] = static_cast<int32_t>(column);
    begin += __popc(all);
  }
  for (int64_t i = begin + lane; i < end; i += warp_lanes) ids[i] = -1;
}

template <class T>
__global__ void __launch_bounds__(select_threads)
    merge_selections(const T* logits, int64_t stride, RowScale scale, bool weighted,
                     SelectionShape shape, SelectionTask task) {
  __shared__ SelectionRoom room;
  const int64_t row = blockIdx.x;
  uint64_t* entries = shape.merge_spills ? task.merge_room + row * shape.merge_capacity
                                         : reinterpret_cast<uint64_t*>(dynamic_shared());
  Selector selector(entries, shape.length, room);
  const uint64_t* lists = task.lists + row * shape.parts * shape.part_length;
  const int64_t count = shape.parts * shape.part_length;
  for (int64_t run = 0; run < count; run += run_columns) {
    const int64_t end = min(count, run + run_columns);
    for (int64_t i = run + threadIdx.x; i < end; i += select_threads) selector.offer(lists[i]);
    selector.make_room();
  }
  const int kept = selector.finish();
  const uint32_t last = selector.last_order();
  int64_t sorted = 1;
  while (sorted < kept) sorted *= 2;
  for (int64_t i = kept + threadIdx.x; i < sorted; i += select_threads) entries[i] = 0;
  sort_entries(entries, sorted);
  for (int64_t i = threadIdx.x; i < shape.length; i += select_threads)
    task.values[row * shape.length + i] =
        i < kept ? value_of_order(order_of_entry(entries[i])) : minus_infinity;
  if (task.ids != nullptr) {
    int32_t* ids = task.ids + row * shape.length;
    for (int64_t i = threadIdx.x; i < kept; i += select_threads)
      ids[i] = column_of_entry(entries[i]);
    put_infinite(logits + row * stride, shape.columns, ids, kept, shape.length);
  }
  const int times = count_in_row(lists, task.lasts + row * shape.parts, shape, last, room.scratch);
  if (threadIdx.x == 0 && task.last != nullptr) task.last[row] = last == ~0U ? 0 : times;
  if (threadIdx.x == 0 && task.partials != nullptr) {
    PartSums total;
    const float factor = base_2(scale[row]);
    for (int64_t p = 0; p < shape.parts; ++p) total.add(task.sums[row * shape.parts + p], factor);
    task.partials[row] = partials_of(total, weighted);
  }
}

/// Capacity of a block's list of candidates: those kept, and another run.
int64_t capacity_for(int64_t length) {
  return 2 * length + 64 + run_columns;
}

}  // namespace

SelectionShape selection_shape(int64_t columns, int64_t length) {
  SelectionShape shape;
  shape.length = length;
  shape.columns = columns;
  shape.parts = parts_of(columns, select_columns);
  shape.part_length = std::min(length, select_columns);
  shape.part_capacity = capacity_for(shape.part_length);
  shape.merge_capacity = capacity_for(length);
  shape.part_spills = shape.part_capacity > max_shared_entries;
  shape.merge_spills = shape.merge_capacity > max_shared_entries;
  return shape;
}

void launch_selection(CUstream_st* stream, ConstMatrixRef logits, const RowScan& scan,
                      const SelectionShape& shape, const SelectionTask& task) {
  const auto shared = [](int64_t entries, bool spills) {
    return spills ? 0 : entries * sizeof(uint64_t);
  };
  with_elements(logits, [&](auto z) {
    using T = typename decltype(z)::Type;
    auto select = select_in_parts<T, false, false>;
    if (task.partials != nullptr)
      select = scan.weighted ? select_in_parts<T, true, true> : select_in_parts<T, true, false>;
    launch({blocks_of(logits.rows * shape.parts), select_threads, stream,
            shared(shape.part_capacity, shape.part_spills)},
           select, z.view.data, z.view.stride, scan.scale, shape, task);
    launch({blocks_of(logits.rows), select_threads, stream,
            shared(shape.merge_capacity, shape.merge_spills)},
           merge_selections<T>, z.view.data, z.view.stride, scan.scale, scan.weighted, shape, task);
  });
}

}  // namespace gyre::rows

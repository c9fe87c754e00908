// The threads of a block as fibers of one thread of the host.
//
//     for each block
//       until all threads have returned
//         for each warp                        forward, backward, or in an order that is drawn
//           until none of its lanes can go on
//             for each lane                    likewise
//               run it until it meets a barrier, or returns
//
// A thread that comes last to a barrier lets the others go and goes on itself.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "softgpu.hpp"

namespace softgpu {

Position* running = nullptr;

namespace {

bool throwing = false;
SharedRange dynamic_memory;  // of the block that runs
const SharedRange fixed_memory = fixed_shared_memory();

namespace context = boost::context;
constexpr size_t stack_bytes = 128 * 1024;
constexpr size_t slot_bytes = 64;
constexpr int lanes_of_warp = 32;
constexpr int most_threads = 1024;

/// Stacks are used again and again; boost::context must not free them.
struct KeptStack {
  using traits_type = context::stack_traits;
  context::stack_context kept;
  context::stack_context allocate() { return kept; }
  void deallocate(context::stack_context&) {}
};

enum class Waiting : char { nothing, warp, block, ended };

/// An asynchronous copy that has not landed.
struct AsyncCopy {
  void* to;
  const void* from;
  int bytes, group;
};

struct Thread {
  Position position{};  // first: `running` points to it
  context::fiber fiber, scheduler;
  std::vector<AsyncCopy> copies;
  int groups = 0;  // of copies, committed
};

/// Who has which turn in a launch.
struct Turns {
  std::array<int, lanes_of_warp> lanes;
  std::vector<size_t> warps;
  bool backward = false;  // blocks
  unsigned first = 0;     // block of a launch

  Turns(const LaunchShape& shape, LaneOrder order)
      : warps((size_t{shape.block.x} * shape.block.y * shape.block.z + lanes_of_warp - 1) /
              lanes_of_warp) {
    static std::mt19937_64 random(seed());
    std::iota(lanes.begin(), lanes.end(), 0);
    std::iota(warps.begin(), warps.end(), size_t{0});
    if (order == LaneOrder::forward) return;
    if (order == LaneOrder::reverse) {
      std::reverse(lanes.begin(), lanes.end());
      std::reverse(warps.begin(), warps.end());
      backward = true;
      return;
    }
    std::shuffle(lanes.begin(), lanes.end(), random);
    std::shuffle(warps.begin(), warps.end(), random);
    backward = random() % 2 == 0;
    first = static_cast<unsigned>(random() % most_threads);
  }
  unsigned block(unsigned turn, unsigned count) const {
    const unsigned at = (turn + first) % count;
    return backward ? count - 1 - at : at;
  }
};

struct Warp {
  int lanes = 0, live = 0, arrived = 0;
  int runnable = 0;
  int parity = 0;
  uint64_t syncs = 0;  // exchanges so far
  size_t bytes = 0;    // of the exchange under way
  std::string_view call;
  Waiting waiting[lanes_of_warp];
  alignas(64) std::byte slots[2][lanes_of_warp * slot_bytes];
};

std::string text_of(const dim3& shape) {
  return std::to_string(shape.x) + " x " + std::to_string(shape.y) + " x " +
         std::to_string(shape.z);
}

/// One block at a time.
class Block {
 public:
  void run(const LaunchShape& shape, uint3 index, const std::function<void()>& body,
           const Turns& turns);
  void* shared() { return shared_; }
  bool behind_shared(const void* address) const {
    return shared_memory_.end() <= address && address < shared_memory_.end() + 4096;
  }

  void barrier() {
    wait(Waiting::block);
    if (++arrived_ == live_) release_block();
    yield();
  }
  int count(int predicate) {
    count_[parity_] += predicate != 0;
    const int slot = parity_;
    barrier();
    return count_[slot];
  }
  Exchange exchange(const void* mine, size_t bytes, std::string_view call) {
    Warp& warp = warps_[warp_];
    std::byte* slots = warp.slots[warp.parity];
    if (warp.arrived > 0 && (bytes != warp.bytes || call != warp.call))
      die(launch_text() + ": lanes of a warp meet at different warp functions: " +
          function_text(warp.call, warp.bytes) + " and " + function_text(call, bytes));
    warp.bytes = bytes;
    warp.call = call;
    if (bytes > 0) std::memcpy(slots + static_cast<size_t>(lane_) * slot_bytes, mine, bytes);
    wait(Waiting::warp);
    if (++warp.arrived == warp.live) release_warp(warp);
    yield();
    return {slots};
  }

  void copy_async(const AsyncCopy& copy) {
    check_alignment(copy.to, 16);
    if (copy.bytes > 0) check_alignment(copy.from, 16);
    std::memset(copy.to, 0xff, 16);  // NaN
    if (watches_shared_memory()) touch_memory(copy.to, 16, Access::write);
    Thread& me = *reinterpret_cast<Thread*>(running);
    me.copies.push_back({copy.to, copy.from, copy.bytes, me.groups});
  }
  static void commit_copies() { ++reinterpret_cast<Thread*>(running)->groups; }
  static void wait_copies(int groups) {
    Thread& me = *reinterpret_cast<Thread*>(running);
    const auto waiting =
        std::find_if(me.copies.begin(), me.copies.end(),
                     [&](const AsyncCopy& copy) { return copy.group >= me.groups - groups; });
    std::for_each(me.copies.begin(), waiting, [](const AsyncCopy& copy) {
      std::memset(copy.to, 0, 16);
      std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
      if (watches_shared_memory()) touch_memory(copy.to, 16, Access::write);
    });
    me.copies.erase(me.copies.begin(), waiting);
  }

  /// Of shared memory.
  void touch(const void* address, size_t bytes, Access access) {
    const Turn now{interval_, warps_[warp_].syncs, static_cast<int>(warp_) * lanes_of_warp + lane_};
    const bool is_dynamic = dynamic_memory.has(address);
    const size_t offset = (is_dynamic ? dynamic_memory : fixed_memory).offset(address);
    const int other = note_access(is_dynamic, offset, bytes, access, now);
    if (other >= 0)
      die(launch_text() + ": threads " + std::to_string(other) + " and " +
          std::to_string(now.thread) +
          " touch the same shared memory with no barrier between, and " +
          (access == Access::read ? "the first writes" : "the second writes"));
  }

  /// "a launch of 4 x 1 x 1 blocks of 256 x 1 x 1 threads, block (3, 0, 0)"
  std::string launch_text() const {
    return "a launch of " + text_of(shape_.grid) + " blocks of " + text_of(shape_.block) +
           " threads, block (" + std::to_string(index_.x) + ", " + std::to_string(index_.y) + ", " +
           std::to_string(index_.z) + ")";
  }
  void describe(char* text, size_t bytes) const {
    const uint3& t = running->thread;
    std::snprintf(text, bytes,
                  "a launch of %u x %u x %u blocks of %u x %u x %u threads, block (%u, %u, %u), "
                  "thread (%u, %u, %u),",
                  shape_.grid.x, shape_.grid.y, shape_.grid.z, shape_.block.x, shape_.block.y,
                  shape_.block.z, index_.x, index_.y, index_.z, t.x, t.y, t.z);
  }

 private:
  void prepare(const LaunchShape& shape, uint3 index, const std::function<void()>& body);
  void start_fiber(size_t i);
  bool run_warp(size_t w, const Turns& turns);
  static std::string function_text(std::string_view call, size_t bytes) {
    return std::string(call) + (bytes == 0 ? "" : " of " + std::to_string(bytes) + " bytes");
  }
  void run_body() {
    try {
      (*body_)();
    } catch (const context::detail::forced_unwind&) {
      throw;
    } catch (const std::exception& error) {
      die(launch_text() + ": an exception left the kernel: " + error.what());
    }
  }
  [[noreturn]] void die_of_deadlock() const;

  void wait(Waiting what) {
    Warp& warp = warps_[warp_];
    warp.waiting[lane_] = what;
    --warp.runnable;
  }
  void yield() {
    if (warps_[warp_].waiting[lane_] == Waiting::nothing) return;
    Thread& me = *reinterpret_cast<Thread*>(running);
    me.scheduler = std::move(me.scheduler).resume();
  }
  void release(Warp& warp, Waiting what) {
    for (int i = 0; i < warp.lanes; ++i)
      if (warp.waiting[i] == what) {
        warp.waiting[i] = Waiting::nothing;
        ++warp.runnable;
      }
  }
  void release_block() {
    for (Warp& warp : warps_) release(warp, Waiting::block);
    arrived_ = 0;
    ++interval_;
    parity_ ^= 1;
    count_[parity_] = 0;
  }
  void release_warp(Warp& warp) {
    release(warp, Waiting::warp);
    warp.arrived = 0;
    ++warp.syncs;
    warp.parity ^= 1;
  }
  void end_thread() {
    wait(Waiting::ended);
    if (--live_ > 0 && arrived_ == live_) release_block();
    Warp& warp = warps_[warp_];
    if (--warp.live > 0 && warp.arrived == warp.live) release_warp(warp);
  }

  LaunchShape shape_;
  uint3 index_{};
  const std::function<void()>* body_ = nullptr;
  std::vector<Thread> threads_{most_threads};
  std::vector<GuardedMemory> stacks_;
  std::vector<Warp> warps_;
  GuardedMemory shared_memory_{shared_bytes_of_block, true};
  std::byte* shared_ = nullptr;
  size_t warp_ = 0;  // of the thread that runs
  int lane_ = 0;
  int live_ = 0, arrived_ = 0, parity_ = 0;
  int count_[2] = {0, 0};
  uint64_t interval_ = 0;  // between two barriers, counted over all blocks
};

void Block::start_fiber(size_t i) {
  const GuardedMemory& memory = stacks_.emplace_back(stack_bytes, false);
  context::stack_context stack;
  stack.size = stack_bytes;
  stack.sp = memory.end();
  Thread& thread = threads_[i];
  thread.fiber =
      context::fiber(std::allocator_arg, context::preallocated(stack.sp, stack.size, stack),
                     KeptStack{stack}, [this, &thread](context::fiber&& scheduler) {
                       thread.scheduler = std::move(scheduler);
                       while (true) {  // one turn for each block
                         run_body();
                         end_thread();
                         yield();
                       }
                       return std::move(thread.scheduler);
                     });
}

void Block::prepare(const LaunchShape& shape, uint3 index, const std::function<void()>& body) {
  shape_ = shape;
  index_ = index;
  body_ = &body;
  const size_t count = size_t{shape.block.x} * shape.block.y * shape.block.z;
  while (stacks_.size() < count) start_fiber(stacks_.size());
  warps_.resize((count + lanes_of_warp - 1) / lanes_of_warp);
  for (size_t w = 0; w < warps_.size(); ++w) {
    Warp& warp = warps_[w];
    warp.lanes = static_cast<int>(std::min<size_t>(lanes_of_warp, count - w * lanes_of_warp));
    warp.live = warp.runnable = warp.lanes;
    warp.arrived = warp.parity = 0;
    warp.syncs = 0;
    std::fill(warp.waiting, warp.waiting + lanes_of_warp, Waiting::nothing);
    if (warp.lanes < lanes_of_warp) std::memset(warp.slots, 0xff, sizeof(warp.slots));
  }
  shared_ = shared_memory_.end() - (shape.shared_bytes + 15) / 16 * 16;
  std::memset(shared_, 0xff, static_cast<size_t>(shared_memory_.end() - shared_));  // NaN
  dynamic_memory = {shared_, static_cast<size_t>(shared_memory_.end() - shared_)};
  ++interval_;
  live_ = static_cast<int>(count);
  arrived_ = parity_ = count_[0] = count_[1] = 0;
  uint3 at{0, 0, 0};
  for (size_t i = 0; i < count; ++i) {
    threads_[i].position = {at, index, shape.block, shape.grid, static_cast<int>(i % 32)};
    threads_[i].copies.clear();
    threads_[i].groups = 0;
    if (++at.x == shape.block.x) {
      at.x = 0;
      if (++at.y == shape.block.y) {
        at.y = 0;
        ++at.z;
      }
    }
  }
}

/// Whether any lane could go on.
bool Block::run_warp(size_t w, const Turns& turns) {
  Warp& warp = warps_[w];
  if (warp.runnable == 0) return false;
  while (warp.runnable > 0)
    for (const int lane : turns.lanes) {
      if (lane >= warp.lanes || warp.waiting[lane] != Waiting::nothing) continue;
      Thread& thread = threads_[w * lanes_of_warp + static_cast<size_t>(lane)];
      running = &thread.position;
      warp_ = w;
      lane_ = lane;
      thread.fiber = std::move(thread.fiber).resume();
    }
  return true;
}

void Block::run(const LaunchShape& shape, uint3 index, const std::function<void()>& body,
                const Turns& turns) {
  prepare(shape, index, body);
  while (live_ > 0) {
    bool moved = false;
    for (const size_t w : turns.warps) moved |= run_warp(w, turns);
    if (!moved) die_of_deadlock();
  }
  running = nullptr;
}

void Block::die_of_deadlock() const {
  std::string text = launch_text() + ": its threads wait for each other at different barriers: " +
                     std::to_string(arrived_) + " of " + std::to_string(live_) +
                     " at a barrier of the block";
  for (size_t w = 0; w < warps_.size(); ++w)
    if (warps_[w].arrived > 0) {
      text += ", " + std::to_string(warps_[w].arrived) + " of " + std::to_string(warps_[w].live) +
              " lanes of warp " + std::to_string(w) + " at a warp function";
      break;
    }
  die(text);
}

Block& block() {
  static Block& only = *new Block;  // never destroyed: its fibers would have to be unwound
  return only;
}

}  // namespace

bool throw_errors(bool on) {
  return std::exchange(throwing, on);
}

void die(const std::string& why) {
  if (throwing && running == nullptr) throw std::runtime_error(why);
  std::fprintf(stderr, "software GPU: %s (GYRE_SOFTGPU_SEED=%llu)\n", why.c_str(),
               static_cast<unsigned long long>(seed()));
  // A program's SIGABRT handler may leave the rest to a thread, which a forked process has not.
  if (getpid() != owning_process()) _exit(3);
  std::abort();
}

void describe_running(char* text, size_t bytes) {
  *text = '\0';
  if (running != nullptr) block().describe(text, bytes);
}
bool behind_shared_memory(const void* address) {
  return running != nullptr && block().behind_shared(address);
}

void* dynamic_shared_memory() {
  return block().shared();
}
void block_barrier() {
  block().barrier();
}
int block_count(int predicate) {
  return block().count(predicate);
}
Exchange warp_exchange(const void* mine, size_t bytes, const char* call) {
  return block().exchange(mine, bytes, call);
}
void copy_async(void* shared, const void* from, int bytes) {
  block().copy_async({shared, from, bytes, 0});
}
void commit_copies() {
  Block::commit_copies();
}
void wait_copies(int groups) {
  Block::wait_copies(groups);
}
void touch_memory(const void* address, size_t bytes, Access access) {
  if (running != nullptr && (dynamic_memory.has(address) || fixed_memory.has(address)))
    block().touch(address, bytes, access);
}
uint64_t seed() {
  static const uint64_t drawn = [] {
    const char* text = std::getenv("GYRE_SOFTGPU_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
  }();
  return drawn;
}
void require_full_warp(unsigned mask) {
  if (mask != 0xffffffffU)
    die(block().launch_text() + ": a warp function on some of the lanes; this device knows all 32");
}

void run_grid(const LaunchShape& shape, const std::function<void()>& body, LaneOrder order) {
  const Turns turns(shape, order);
  const dim3& grid = shape.grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x)
        block().run(shape, {turns.block(x, grid.x), turns.block(y, grid.y), turns.block(z, grid.z)},
                    body, turns);
}

}  // namespace softgpu

// The threads of a block as fibers of one thread of the host.
//
//     for each block
//       until all threads have returned
//         for each warp                        forward, or backward
//           until none of its lanes can go on
//             for each lane                    forward, or backward
//               run it until it meets a barrier, or returns
//
// A thread that comes last to a barrier lets the others go and goes on itself.

#include <unistd.h>

#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "softgpu.hpp"

namespace softgpu {

Position* running = nullptr;

namespace {

bool throwing = false;

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

struct Thread {
  Position position{};  // first: `running` points to it
  context::fiber fiber, scheduler;
};

struct Warp {
  int lanes = 0, live = 0, arrived = 0;
  int runnable = 0;
  int parity = 0;
  size_t bytes = 0;  // of the exchange under way
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
           LaneOrder order);
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
  Exchange exchange(const void* mine, size_t bytes) {
    Warp& warp = warps_[warp_];
    std::byte* slots = warp.slots[warp.parity];
    if (warp.arrived > 0 && bytes != warp.bytes)
      die(launch_text() + ": lanes of a warp meet at different warp functions");
    warp.bytes = bytes;
    if (bytes > 0) std::memcpy(slots + static_cast<size_t>(lane_) * slot_bytes, mine, bytes);
    wait(Waiting::warp);
    if (++warp.arrived == warp.live) release_warp(warp);
    yield();
    return {slots};
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
  bool run_warp(size_t w, LaneOrder order);
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
    parity_ ^= 1;
    count_[parity_] = 0;
  }
  void release_warp(Warp& warp) {
    release(warp, Waiting::warp);
    warp.arrived = 0;
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
    std::fill(warp.waiting, warp.waiting + lanes_of_warp, Waiting::nothing);
    if (warp.lanes < lanes_of_warp) std::memset(warp.slots, 0xff, sizeof(warp.slots));
  }
  shared_ = shared_memory_.end() - (shape.shared_bytes + 15) / 16 * 16;
  std::memset(shared_, 0xff, static_cast<size_t>(shared_memory_.end() - shared_));  // NaN
  live_ = static_cast<int>(count);
  arrived_ = parity_ = count_[0] = count_[1] = 0;
  uint3 at{0, 0, 0};
  for (size_t i = 0; i < count; ++i) {
    threads_[i].position = {at, index, shape.block, shape.grid, static_cast<int>(i % 32)};
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
bool Block::run_warp(size_t w, LaneOrder order) {
  Warp& warp = warps_[w];
  if (warp.runnable == 0) return false;
  while (warp.runnable > 0)
    for (int turn = 0; turn < warp.lanes; ++turn) {
      const int lane = order == LaneOrder::forward ? turn : warp.lanes - 1 - turn;
      if (warp.waiting[lane] != Waiting::nothing) continue;
      Thread& thread = threads_[w * lanes_of_warp + static_cast<size_t>(lane)];
      running = &thread.position;
      warp_ = w;
      lane_ = lane;
      thread.fiber = std::move(thread.fiber).resume();
    }
  return true;
}

void Block::run(const LaunchShape& shape, uint3 index, const std::function<void()>& body,
                LaneOrder order) {
  prepare(shape, index, body);
  while (live_ > 0) {
    bool moved = false;
    for (size_t turn = 0; turn < warps_.size(); ++turn)
      moved |= run_warp(order == LaneOrder::forward ? turn : warps_.size() - 1 - turn, order);
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
  std::fprintf(stderr, "software GPU: %s\n", why.c_str());
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
Exchange warp_exchange(const void* mine, size_t bytes) {
  return block().exchange(mine, bytes);
}
void require_full_warp(unsigned mask) {
  if (mask != 0xffffffffU)
    die(block().launch_text() + ": a warp function on some of the lanes; this device knows all 32");
}

void run_grid(const LaunchShape& shape, const std::function<void()>& body, LaneOrder order) {
  const auto in_turn = [order](unsigned i, unsigned count) {
    return order == LaneOrder::reverse ? count - 1 - i : i;
  };
  const dim3& grid = shape.grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x)
        block().run(shape, {in_turn(x, grid.x), in_turn(y, grid.y), in_turn(z, grid.z)}, body,
                    order);
}

}  // namespace softgpu

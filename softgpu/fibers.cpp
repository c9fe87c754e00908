// The threads of a block as fibers.

#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "softgpu.hpp"

namespace softgpu {
namespace {

namespace context = boost::context;
constexpr size_t stack_bytes = 128 * 1024;
constexpr size_t slot_bytes = 64;
constexpr int lanes_of_warp = 32;

/// Stacks are used again and again; boost::context must not free them.
struct KeptStack {
  using traits_type = context::stack_traits;
  context::stack_context kept;
  context::stack_context allocate() { return kept; }
  void deallocate(context::stack_context&) {}
};

enum class Waiting { nothing, warp, block, ended };

struct Warp {
  int live = 0, arrived = 0;
  int parity = 0;
  alignas(64) std::byte slots[2][lanes_of_warp * slot_bytes];
};

struct Thread {
  Position position{};
  Warp* warp = nullptr;
  Waiting waiting = Waiting::nothing;
  context::fiber fiber, scheduler;
};

/// One block at a time, on one thread of the host.
class Block {
 public:
  void run(const LaunchShape& shape, uint3 index, const std::function<void()>& body,
           LaneOrder order);
  Thread& current() { return *current_; }
  void* shared() { return shared_.data(); }

  void barrier() {
    current_->waiting = Waiting::block;
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
    Warp& warp = *current_->warp;
    std::byte* slots = warp.slots[warp.parity];
    if (bytes > 0)
      std::memcpy(slots + static_cast<size_t>(lane()) * slot_bytes, mine, bytes);
    current_->waiting = Waiting::warp;
    if (++warp.arrived == warp.live) release_warp(warp);
    yield();
    return {slots};
  }

 private:
  void prepare(const LaunchShape& shape, uint3 index, const std::function<void()>& body);
  void yield() {
    Thread& me = *current_;
    if (me.waiting == Waiting::nothing) return;  // the last to arrive goes on
    me.scheduler = std::move(me.scheduler).resume();
  }
  void release_block() {
    for (auto& thread : threads_)
      if (thread->waiting == Waiting::block) thread->waiting = Waiting::nothing;
    arrived_ = 0;
    parity_ ^= 1;
    count_[parity_] = 0;
  }
  void release_warp(Warp& warp) {
    for (auto& thread : threads_)
      if (thread->warp == &warp && thread->waiting == Waiting::warp)
        thread->waiting = Waiting::nothing;
    warp.arrived = 0;
    warp.parity ^= 1;
  }
  void end(Thread& thread) {
    thread.waiting = Waiting::ended;
    if (--live_ > 0 && arrived_ == live_) release_block();
    Warp& warp = *thread.warp;
    if (--warp.live > 0 && warp.arrived == warp.live) release_warp(warp);
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<std::unique_ptr<Warp>> warps_;
  std::vector<std::unique_ptr<std::byte[]>> stacks_;
  std::vector<std::byte> shared_;
  std::vector<size_t> order_;
  Thread* current_ = nullptr;
  int live_ = 0, arrived_ = 0, parity_ = 0;
  int count_[2] = {0, 0};
};

void Block::prepare(const LaunchShape& shape, uint3 index, const std::function<void()>& body) {
  const size_t count = size_t{shape.block.x} * shape.block.y * shape.block.z;
  while (stacks_.size() < count) stacks_.push_back(std::make_unique<std::byte[]>(stack_bytes));
  threads_.resize(count);
  warps_.resize((count + lanes_of_warp - 1) / lanes_of_warp);
  for (auto& warp : warps_) {
    if (!warp) warp = std::make_unique<Warp>();
    warp->live = warp->arrived = warp->parity = 0;
  }
  shared_.assign(shape.shared_bytes, std::byte{0xff});  // NaN
  live_ = static_cast<int>(count);
  arrived_ = parity_ = count_[0] = count_[1] = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!threads_[i]) threads_[i] = std::make_unique<Thread>();
    Thread& thread = *threads_[i];
    const auto x = static_cast<unsigned>(i % shape.block.x);
    const auto y = static_cast<unsigned>(i / shape.block.x % shape.block.y);
    const auto z = static_cast<unsigned>(i / shape.block.x / shape.block.y);
    thread.position = {{x, y, z}, index, shape.block, shape.grid};
    thread.warp = warps_[i / lanes_of_warp].get();
    ++thread.warp->live;
    thread.waiting = Waiting::nothing;
    context::stack_context stack;
    stack.size = stack_bytes;
    stack.sp = stacks_[i].get() + stack_bytes;
    thread.fiber = context::fiber(
        std::allocator_arg, context::preallocated(stack.sp, stack.size, stack), KeptStack{stack},
        [this, &thread, &body](context::fiber&& scheduler) {
          thread.scheduler = std::move(scheduler);
          body();
          end(thread);
          return std::move(thread.scheduler);
        });
  }
}

void Block::run(const LaunchShape& shape, uint3 index, const std::function<void()>& body,
                LaneOrder order) {
  prepare(shape, index, body);
  order_.resize(threads_.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  if (order == LaneOrder::reverse) std::reverse(order_.begin(), order_.end());
  while (live_ > 0) {
    bool moved = false;
    for (const size_t i : order_) {
      Thread& thread = *threads_[i];
      if (thread.waiting != Waiting::nothing) continue;
      moved = true;
      current_ = &thread;
      thread.fiber = std::move(thread.fiber).resume();
    }
    if (!moved) die("threads of a block wait for each other at different barriers");
  }
  current_ = nullptr;
}

thread_local Block the_block;

}  // namespace

void die(const std::string& why) {
  std::fprintf(stderr, "software GPU: %s\n", why.c_str());
  std::abort();
}

const Position& here() {
  return the_block.current().position;
}
void* dynamic_shared_memory() {
  return the_block.shared();
}
void block_barrier() {
  the_block.barrier();
}
int block_count(int predicate) {
  return the_block.count(predicate);
}
Exchange warp_exchange(const void* mine, size_t bytes) {
  return the_block.exchange(mine, bytes);
}
void require_full_warp(unsigned mask) {
  if (mask != 0xffffffffU) die("a warp function on some of the lanes; this device knows all 32");
}

void run_grid(const LaunchShape& shape, const std::function<void()>& body, LaneOrder order) {
  for (unsigned z = 0; z < shape.grid.z; ++z)
    for (unsigned y = 0; y < shape.grid.y; ++y)
      for (unsigned x = 0; x < shape.grid.x; ++x) {
        const bool back = order == LaneOrder::reverse;
        the_block.run(shape, {back ? shape.grid.x - 1 - x : x, y, z}, body, order);
      }
}

}  // namespace softgpu

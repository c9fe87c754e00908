// Device and pinned memory: pools, what they count, and what is poisoned.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "core/error.hpp"
#include "gpu_test.hpp"
#include "runtime/cuda_memory.hpp"
#include "runtime/cuda_memory_pool.hpp"

namespace gyre {
namespace GYRE_FILE {

class Memory : public test::GpuTest {
 protected:
  void TearDown() override { poison_new_buffers(false); }
};

/// Memory of 4096 bytes.
class SmallSource final : public MemorySource {
 public:
  void* allocate(size_t bytes) override {
    if (used_ + bytes > 4096) return nullptr;
    used_ += bytes;
    std::vector<char> block(bytes);
    void* address = block.data();
    blocks_[address] = std::move(block);
    return address;
  }
  void release(void* block) noexcept override {
    used_ -= blocks_[block].size();
    blocks_.erase(block);
  }
  void fail(size_t bytes) override { throw_runtime("full: {}", bytes); }
  size_t used() const { return used_; }

 private:
  size_t used_ = 0;
  std::map<void*, std::vector<char>> blocks_;
};

/// A library that has one block.
struct OneBlock {
  static inline char block = 0;
  static inline bool given = false;
  static void* allocate(size_t /*bytes*/) { return std::exchange(given, true) ? nullptr : &block; }
  static void release(void* returned) {
    EXPECT_EQ(returned, &block);
    given = false;
  }
};

TEST(Pool, BlocksComeFromALibraryAndGoBackThere) {
  SmallSource usual;
  LibrarySource source(usual);
  MemoryPool pool(source, true);
  void* before = pool.take(1000, 0);
  pool.give(pool.take(1000, 0));
  source.use({OneBlock::allocate, OneBlock::release});
  pool.replace_blocks();
  EXPECT_EQ(usual.used(), 1024U);
  pool.give(before);
  EXPECT_EQ(usual.used(), 0U);
  void* block = pool.take(1000, 0);
  EXPECT_EQ(block, &OneBlock::block);
  EXPECT_THROW(pool.take(1, 0), Error);  // the library is full
  pool.give(block);
  EXPECT_EQ(pool.free_bytes(0), 1024U);
  pool.replace_blocks();
  EXPECT_FALSE(OneBlock::given);
  EXPECT_EQ(usual.used(), 0U);
}

TEST(Pool, AFullSourceGetsTheFreeBlocksBack) {
  SmallSource source;
  MemoryPool pool(source, true);
  void* held = pool.take(1000, 0);
  pool.give(pool.take(2000, 0));
  EXPECT_EQ(source.used(), 1024U + 2048U);
  EXPECT_EQ(pool.free_bytes(0), 2048U);
  void* large = pool.take(2900, 0);  // 1024 + 2048 + 3072 are more than there is
  EXPECT_EQ(source.used(), 1024U + 3072U);
  EXPECT_EQ(pool.free_bytes(0), 0U);
  try {
    pool.take(513, 0);
    ADD_FAILURE() << "more than there is";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "full: 513");
  }
  pool.give(held);
  pool.give(large);
  EXPECT_EQ(pool.take(2900, 0), large);
  EXPECT_EQ(pool.take(1000, 0), held);
  pool.give(held);
  pool.give(large);
}

TEST(Pool, BlocksOfAnotherDeviceAreNotHandedOut) {
  SmallSource source;
  MemoryPool pool(source, true);
  void* first = pool.take(1000, 0);
  pool.give(first);
  void* other = pool.take(1000, 1);
  EXPECT_NE(other, first);
  pool.give(other);
  EXPECT_EQ(pool.free_bytes(0), 1024U);
  EXPECT_EQ(pool.free_bytes(1), 1024U);
}

TEST(Pool, SwitchedOffItKeepsNothing) {
  SmallSource source;
  MemoryPool pool(source, false);
  void* block = pool.take(1001, 0);
  EXPECT_EQ(source.used(), 1001U);
  pool.give(block);
  EXPECT_EQ(source.used(), 0U);
}

TEST(Pool, BlocksAreAtMostAnEighthLargerThanAsked) {
  EXPECT_EQ(pool_block_bytes(1), 512U);
  EXPECT_EQ(pool_block_bytes(512), 512U);
  EXPECT_EQ(pool_block_bytes(513), 576U);
  EXPECT_EQ(pool_block_bytes(1024), 1024U);
  EXPECT_EQ(pool_block_bytes(1025), 1152U);
  for (size_t bytes = 513; bytes < (size_t{1} << 40); bytes += bytes / 7 + 1) {
    EXPECT_GE(pool_block_bytes(bytes), bytes);
    EXPECT_LE(pool_block_bytes(bytes), bytes + bytes / 8 + 1) << bytes;
    EXPECT_EQ(pool_block_bytes(pool_block_bytes(bytes)), pool_block_bytes(bytes)) << bytes;
    EXPECT_EQ(pool_block_bytes(bytes) % 64, 0U) << bytes;
  }
}

bool pools_are_off() {
  const char* setting = std::getenv("GYRE_MEMORY_POOL");
  return setting != nullptr && std::string(setting) == "off";
}

TEST_F(Memory, WhatIsGivenBackIsHandedOutAgain) {
  if (pools_are_off()) GTEST_SKIP() << "the pools are off";
  for (const MemorySpace space : {MemorySpace::device, MemorySpace::pinned}) {
    const void* first = nullptr;
    {
      Buffer<float> buffer(1000, space);
      first = buffer.data();
      EXPECT_NE(Buffer<float>(1000, space).data(), first) << "the first is still in use";
    }
    const Buffer<float> other(100000, space);
    EXPECT_NE(other.data(), first) << "of another class";
    const Buffer<float> again(990, space);
    EXPECT_EQ(again.data(), first) << "the last one given back";
  }
}

TEST_F(Memory, TheDeviceAndTheHostHaveSeparatePools) {
  if (pools_are_off()) GTEST_SKIP() << "the pools are off";
  const void* device = Buffer<float>(1000, MemorySpace::device).data();
  EXPECT_NE(Buffer<float>(1000, MemorySpace::pinned).data(), device);
}

TEST_F(Memory, BuffersAreCountedAndFreeBlocksAreNot) {
  const MemoryUse before = memory_use();
  const int64_t available = cuda_memory_available();
  // Drivers hand memory out in slabs of 2 MiB, and may keep some: many slabs, and a few of slack.
  constexpr int64_t on_device = 64 << 20, on_host = 1 << 20, slack = 4 << 20;
  {
    const Buffer<std::byte> a(on_device, MemorySpace::device), b(on_host, MemorySpace::pinned);
    EXPECT_EQ(memory_use().current_bytes - before.current_bytes, on_device + on_host);
    EXPECT_LE(cuda_memory_available(), available - on_device / 2);
  }
  EXPECT_EQ(memory_use().current_bytes, before.current_bytes);
  EXPECT_GE(cuda_memory_available(), available - slack);
}

TEST_F(Memory, NewBuffersAreNanWhenTheyAreToBe) {
  {
    Buffer<float> used(300, MemorySpace::device);
    stream().fill(used.data(), std::byte{0}, 300 * sizeof(float));
    stream().synchronize();
  }
  EXPECT_FALSE(poison_new_buffers(true));
  const Buffer<float> floats(300, MemorySpace::device), pinned(10, MemorySpace::pinned);
  const Buffer<int32_t> integers(300, MemorySpace::device);
  const std::vector<float> values = to_host(floats);
  EXPECT_EQ(std::count_if(values.begin(), values.end(), [](float x) { return std::isnan(x); }),
            300);
  EXPECT_EQ(to_host(integers), std::vector<int32_t>(300, -1));
  EXPECT_TRUE(std::isnan(pinned[9]));
}

TEST_F(Memory, CopiesGoBetweenAnyTwoPlaces) {
  Buffer<int32_t> pinned(100, MemorySpace::pinned), a(100, MemorySpace::device),
      b(100, MemorySpace::device);
  for (int32_t i = 0; i < 100; ++i) pinned[i] = 3 * i;
  stream().copy(a.data(), pinned.data(), 400);
  stream().copy(b.data() + 1, a.data(), 396);
  stream().fill(b.data(), std::byte{7}, 4);
  stream().copy(pinned.data(), b.data(), 400);
  stream().synchronize();
  EXPECT_EQ(pinned[0], 0x07070707);
  for (int32_t i = 1; i < 100; ++i) EXPECT_EQ(pinned[i], 3 * (i - 1));
}

}  // namespace GYRE_FILE
}  // namespace gyre

#include <unordered_set>
#include <utility>

#include "comm/nccl.hpp"
#include "comm/nccl_channel.hpp"
#include "runtime/cuda_memory.hpp"

namespace gyre {
namespace {

[[maybe_unused]] bool library_is(int least) {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess && version >= least;
}

/// Blocks allocated by ncclMemAlloc.
[[maybe_unused]] std::unordered_set<const void*>& blocks() {
  static auto& all = *new std::unordered_set<const void*>;
  return all;
}

}  // namespace

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)

bool use_nccl_memory() {
  if (!library_is(NCCL_VERSION(2, 19, 0))) return false;
  const auto allocate = [](size_t bytes) -> void* {
    void* block = nullptr;
    if (ncclMemAlloc(&block, bytes) == ncclSuccess) {
      blocks().insert(block);
      return block;
    }
    (void)cudaGetLastError();
    return nullptr;
  };
  const auto release = [](void* block) {
    blocks().erase(block);
    (void)ncclMemFree(block);
  };
  use_device_memory_of({allocate, release});
  return true;
}

#else

bool use_nccl_memory() {
  return false;
}

#endif

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
namespace {

class Window {
 public:
  Window(std::shared_ptr<Channel> channel, std::span<std::byte> memory)
      : channel_(std::move(channel)) {
    const ncclResult_t result = ncclCommWindowRegister(channel_->comm, memory.data(), memory.size(),
                                                       &handle_, NCCL_WIN_COLL_SYMMETRIC);
    made_ =
        channel_->settled(result, "ncclCommWindowRegister") == ncclSuccess && handle_ != nullptr;
  }
  ~Window() {
    if (made_ && channel_->comm != nullptr) (void)ncclCommWindowDeregister(channel_->comm, handle_);
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  bool made() const { return made_; }

 private:
  std::shared_ptr<Channel> channel_;
  ncclWindow_t handle_ = nullptr;
  bool made_ = false;
};

}  // namespace

std::shared_ptr<void> register_nccl_window(const std::shared_ptr<Channel>& channel,
                                           std::span<std::byte> memory,
                                           const std::function<int64_t(int64_t)>& least) {
  channel->require_usable("a window");
  const bool can = library_is(NCCL_VERSION(2, 27, 0)) && blocks().contains(memory.data());
  const int64_t bytes = can ? std::ssize(memory) : 0;
  const int64_t fewest = least(bytes), most = -least(-bytes);
  if (fewest == 0 || fewest != most) return nullptr;
  auto window = std::make_shared<Window>(channel, memory);
  return least(window->made() ? 1 : 0) == 1 ? window : nullptr;
}

#else

std::shared_ptr<void> register_nccl_window(const std::shared_ptr<Channel>& /*channel*/,
                                           std::span<std::byte> /*memory*/,
                                           const std::function<int64_t(int64_t)>& /*least*/) {
  return nullptr;
}

#endif

}  // namespace gyre

// Memory of the software GPU that bites. Every allocation is a mapping of its own inside one
// reserved range of addresses, placed so that it ends where an inaccessible page begins:
//
//     | slack, 0xff | the allocation, 0xff at first | inaccessible page |
//
// Outside of kernels and copies all of it is inaccessible. A DeviceAccess does not open it: the
// first touch of an allocation meanwhile is a fault, which opens that allocation, and the end of
// the DeviceAccess closes what was opened. The cost is thus that of what is used.

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "softgpu.hpp"

namespace softgpu {
namespace {

constexpr size_t page = 4096;
constexpr size_t huge_page = size_t{2} << 20;
constexpr size_t alignment = 16;  // less than CUDA's 256, so that the end is near the guard
constexpr int filling = 0xff;     // NaN

size_t round_up(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

struct Allocation {
  std::byte* mapped = nullptr;
  size_t mapped_bytes = 0;  // without the page behind
  std::byte* data = nullptr;
  size_t bytes = 0;
  bool open = false;
  Allocation* next_open = nullptr;
};

class Arena {
 public:
  Arena() {
    void* at =
        mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) die("no address space for device memory");
    begin_ = cursor_ = static_cast<std::byte*>(at);
  }

  bool has(const void* address) const { return begin_ <= address && address < begin_ + reserved; }
  size_t used() const { return used_; }

  /// The allocation whose mapping, or the page behind it, holds the address.
  Allocation* find(const void* address) {
    auto* at = static_cast<std::byte*>(const_cast<void*>(address));
    const auto next = allocations_.upper_bound(at);
    if (next == allocations_.begin()) return nullptr;
    Allocation& found = std::prev(next)->second;
    return at < found.mapped + found.mapped_bytes + page ? &found : nullptr;
  }

  void* allocate(size_t bytes) {
    Allocation a;
    a.bytes = bytes;
    // In huge pages, where there are any, to open and to close takes a hundredth of the time.
    const size_t unit = bytes < huge_page ? page : huge_page;
    a.mapped_bytes = round_up(bytes, unit);
    a.mapped = gap(a.mapped_bytes + page, unit);
    if (a.mapped == nullptr || mprotect(a.mapped, a.mapped_bytes, PROT_READ | PROT_WRITE) != 0)
      return nullptr;
    if (unit == huge_page) madvise(a.mapped, a.mapped_bytes, MADV_HUGEPAGE);
    std::memset(a.mapped, filling, a.mapped_bytes);
    mprotect(a.mapped, a.mapped_bytes, PROT_NONE);
    a.data = a.mapped + a.mapped_bytes - round_up(bytes, alignment);
    cursor_ = a.mapped + a.mapped_bytes + page;
    used_ += bytes;
    return allocations_.emplace(a.mapped, a).first->second.data;
  }

  bool release(void* pointer) {
    Allocation* a = find(pointer);
    if (a == nullptr || a->data != pointer) return false;
    if (!a->open) mprotect(a->mapped, a->mapped_bytes, PROT_READ);
    require_filling(a->mapped, a->data, "before");
    require_filling(a->data + a->bytes, a->mapped + a->mapped_bytes, "behind");
    if (a->open) forget(a);
    // The addresses stay out of reach until the whole range has been used once.
    mmap(a->mapped, a->mapped_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    used_ -= a->bytes;
    allocations_.erase(a->mapped);
    return true;
  }

  bool open(Allocation* a) {
    if (a->open || mprotect(a->mapped, a->mapped_bytes, PROT_READ | PROT_WRITE) != 0) return false;
    a->open = true;
    a->next_open = first_open_;
    first_open_ = a;
    return true;
  }
  void close_all() {
    for (; first_open_ != nullptr; first_open_ = first_open_->next_open) {
      mprotect(first_open_->mapped, first_open_->mapped_bytes, PROT_NONE);
      first_open_->open = false;
    }
  }

 private:
  static constexpr size_t reserved = size_t{256} << 30;

  static std::byte* aligned(std::byte* at, size_t unit) {
    return at + (unit - reinterpret_cast<uintptr_t>(at) % unit) % unit;
  }
  /// The next gap of `bytes` bytes, at a multiple of `unit`, behind the last allocation.
  std::byte* gap(size_t bytes, size_t unit) const {
    std::byte* free = cursor_;
    for (int round = 0; round < 2; ++round, free = begin_)
      for (auto next = allocations_.lower_bound(free);; ++next) {
        std::byte* at = aligned(free, unit);
        if (at + bytes > begin_ + reserved) break;
        if (next == allocations_.end() || at + bytes <= next->second.mapped) return at;
        free = next->second.mapped + next->second.mapped_bytes + page;
      }
    return nullptr;
  }
  static void require_filling(const std::byte* from, const std::byte* to, const char* where) {
    if (!std::all_of(from, to, [](std::byte b) { return b == std::byte{filling}; }))
      die(std::string("something has been written right ") + where + " an allocation");
  }
  void forget(Allocation* a) {
    for (Allocation** at = &first_open_; *at != nullptr; at = &(*at)->next_open)
      if (*at == a) {
        *at = a->next_open;
        return;
      }
  }

  std::byte* begin_ = nullptr;
  std::byte* cursor_ = nullptr;
  std::map<std::byte*, Allocation> allocations_;  // by where they are mapped
  Allocation* first_open_ = nullptr;
  size_t used_ = 0;
};

pid_t owner = 0;             // the process of the arena
Arena* the_arena = nullptr;  // never destroyed: buffers of static storage are released late
int accesses = 0;
struct sigaction handler_before {};
int (*set_action)(int, const struct sigaction*, struct sigaction*) = sigaction;

/// Where an address outside of all allocations lies, in words.
void report(const void* address) {
  char running[200] = "", text[500];
  describe_running(running, sizeof(running));
  const Allocation* near = the_arena->has(address) ? the_arena->find(address) : nullptr;
  if (accesses == 0 && the_arena->has(address))
    std::snprintf(text, sizeof(text), "software GPU: the host touched device memory at %p (%s)\n",
                  address, near != nullptr ? "an allocation" : "released, or never allocated");
  else if (near != nullptr)
    std::snprintf(text, sizeof(text),
                  "software GPU: %s touched %p, %td bytes behind an allocation of %zu bytes\n",
                  *running != '\0' ? running : "a copy", address,
                  static_cast<const std::byte*>(address) - (near->data + near->bytes), near->bytes);
  else if (the_arena->has(address))
    std::snprintf(text, sizeof(text), "software GPU: %s touched %p, released or never allocated\n",
                  *running != '\0' ? running : "a copy", address);
  else if (behind_shared_memory(address))
    std::snprintf(text, sizeof(text), "software GPU: %s touched what is behind its shared memory\n",
                  running);
  else
    std::snprintf(text, sizeof(text), "software GPU: %s touched %p, which is not its memory\n",
                  running, address);
  (void)!write(STDERR_FILENO, text, std::strlen(text));
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const void* address = info->si_addr;
  const int error = errno;
  if (accesses > 0 && the_arena->has(address)) {
    Allocation* a = the_arena->find(address);
    if (a != nullptr && address < a->mapped + a->mapped_bytes && the_arena->open(a)) {
      errno = error;
      return;
    }
  }
  char running[2] = "";
  describe_running(running, sizeof(running));
  const bool ours = the_arena->has(address) || *running != '\0';
  if (ours) report(address);
  if (!ours && (handler_before.sa_flags & SA_SIGINFO) != 0) {
    handler_before.sa_sigaction(signal, info, context);
    return;
  }
  struct sigaction plain {};
  plain.sa_handler =
      ours || handler_before.sa_handler == SIG_IGN ? SIG_DFL : handler_before.sa_handler;
  set_action(signal, &plain, nullptr);  // the instruction is tried again, and meets that handler
}

void set_handler() {
  static std::byte stack[64 * 1024];  // the fault may be that a fiber's stack is full
  stack_t old{};
  if (sigaltstack(nullptr, &old) == 0 && (old.ss_flags & SS_DISABLE) != 0) {
    stack_t mine{};
    mine.ss_sp = stack;
    mine.ss_size = sizeof(stack);
    sigaltstack(&mine, nullptr);
  }
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  // UCX puts a sigaction of its own before the C library's, which does nothing for this signal.
  if (void* c_library = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD); c_library != nullptr)
    set_action = reinterpret_cast<decltype(set_action)>(dlsym(c_library, "sigaction"));
  set_action(SIGSEGV, &action, &handler_before);
}

Arena& arena() {
  if (the_arena == nullptr) {
    the_arena = new Arena;
    owner = getpid();
    set_handler();
  }
  return *the_arena;
}

std::map<std::byte*, size_t>& pinned() {
  static auto& all = *new std::map<std::byte*, size_t>;
  return all;
}

}  // namespace

pid_t owning_process() {
  return the_arena == nullptr ? getpid() : owner;
}

DeviceAccess::DeviceAccess() {
  ++accesses;
}
DeviceAccess::~DeviceAccess() {
  if (--accesses == 0) arena().close_all();
}

void* allocate_device(size_t bytes) {
  return arena().used() + bytes > memory_bytes ? nullptr : arena().allocate(bytes);
}
bool release_device(void* pointer) {
  return arena().release(pointer);
}
size_t used_device_bytes() {
  return arena().used();
}

void* allocate_pinned(size_t bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(page, round_up(bytes, page)));
  if (memory != nullptr) pinned()[memory] = bytes;
  return memory;
}
bool release_pinned(void* pointer) {
  const auto found = pinned().find(static_cast<std::byte*>(pointer));
  if (found == pinned().end()) return false;
  if (in_use(found->first, found->first + found->second))
    die("pinned memory is released before the copies from or to it are done");
  std::free(pointer);
  pinned().erase(found);
  return true;
}

namespace {
/// The pinned block that holds an address.
std::pair<std::byte*, size_t> pinned_block(const void* pointer) {
  auto* at = static_cast<std::byte*>(const_cast<void*>(pointer));
  const auto next = pinned().upper_bound(at);
  if (next == pinned().begin()) return {nullptr, 0};
  const auto& [begin, bytes] = *std::prev(next);
  return at < begin + bytes ? std::pair(begin, bytes) : std::pair<std::byte*, size_t>(nullptr, 0);
}
}  // namespace

Place place_of(const void* pointer) {
  if (arena().has(pointer)) return Place::device;
  return pinned_block(pointer).first != nullptr ? Place::pinned : Place::pageable;
}

bool is_inside(const void* pointer, size_t bytes) {
  const auto* at = static_cast<const std::byte*>(pointer);
  if (arena().has(pointer)) {
    const Allocation* a = arena().find(pointer);
    return a != nullptr && a->data <= at && at + bytes <= a->data + a->bytes;
  }
  const auto [begin, size] = pinned_block(pointer);
  return begin == nullptr || at + bytes <= begin + size;
}

GuardedMemory::GuardedMemory(size_t bytes, bool guard_behind) {
  const size_t inner = round_up(bytes, page);
  void* at = mmap(nullptr, inner + page, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) die("no memory for shared memory and stacks");
  begin_ = static_cast<std::byte*>(at) + (guard_behind ? 0 : page);
  end_ = begin_ + inner;
  mprotect(guard_behind ? end_ : begin_ - page, page, PROT_NONE);
}

}  // namespace softgpu

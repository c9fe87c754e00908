// What -fsanitize=thread calls before each access to memory, without the sanitizer: kernels that
// are compiled with it tell the software GPU what they touch (races.cpp).

#include <cuda_runtime.h>

using softgpu::Access;
using softgpu::touch_memory;

// NOLINTBEGIN: the names are the compiler's
#define GYRE_ACCESS(size)                                  \
  void __tsan_read##size(const void* address) {            \
    touch_memory(address, size, Access::read);             \
  }                                                        \
  void __tsan_write##size(const void* address) {           \
    touch_memory(address, size, Access::write);            \
  }                                                        \
  void __tsan_unaligned_read##size(const void* address) {  \
    touch_memory(address, size, Access::read);             \
  }                                                        \
  void __tsan_unaligned_write##size(const void* address) { \
    touch_memory(address, size, Access::write);            \
  }

// Of the host's code in the same sources.
#define GYRE_ATOMIC(bits)                                                                      \
  using Word##bits = uint##bits##_t;                                                           \
  Word##bits __tsan_atomic##bits##_load(const volatile Word##bits* at, int) {                  \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                              \
  }                                                                                            \
  void __tsan_atomic##bits##_store(volatile Word##bits* at, Word##bits x, int) {               \
    __atomic_store_n(at, x, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                            \
  Word##bits __tsan_atomic##bits##_exchange(volatile Word##bits* at, Word##bits x, int) {      \
    return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST);                                       \
  }                                                                                            \
  Word##bits __tsan_atomic##bits##_fetch_add(volatile Word##bits* at, Word##bits x, int) {     \
    return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);                                        \
  }                                                                                            \
  Word##bits __tsan_atomic##bits##_fetch_sub(volatile Word##bits* at, Word##bits x, int) {     \
    return __atomic_fetch_sub(at, x, __ATOMIC_SEQ_CST);                                        \
  }                                                                                            \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile Word##bits* at, Word##bits* old,  \
                                                    Word##bits x, int, int) {                  \
    return __atomic_compare_exchange_n(at, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

extern "C" {
GYRE_ATOMIC(8)
GYRE_ATOMIC(32)
GYRE_ATOMIC(64)
GYRE_ACCESS(1)
GYRE_ACCESS(2)
GYRE_ACCESS(4)
GYRE_ACCESS(8)
GYRE_ACCESS(16)
void __tsan_read_range(const void* address, size_t bytes) {
  touch_memory(address, bytes, Access::read);
}
void __tsan_write_range(const void* address, size_t bytes) {
  touch_memory(address, bytes, Access::write);
}
void __tsan_init() {
  softgpu::watch_shared_memory();
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
}
// NOLINTEND

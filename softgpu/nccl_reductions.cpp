// Types of elements, and reductions of them.

#include <algorithm>
#include <cstring>

#include "core/bf16.hpp"
#include "nccl_internal.hpp"

namespace softgpu {
namespace {

template <class T, class Compute>
void reduce(std::byte* to, const std::byte* from, size_t count, Compute compute) {
  for (size_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, to + i * sizeof(T), sizeof(T));
    std::memcpy(&b, from + i * sizeof(T), sizeof(T));
    a = compute(a, b);
    std::memcpy(to + i * sizeof(T), &a, sizeof(T));
  }
}
template <class T>
T reduced(T a, T b, int op) {
  switch (op) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}
}  // namespace

std::string name_of(int type) {
  switch (static_cast<ncclDataType_t>(type)) {
    case ncclInt8:
      return "int8";
    case ncclUint8:
      return "uint8";
    case ncclInt32:
      return "int32";
    case ncclUint32:
      return "uint32";
    case ncclInt64:
      return "int64";
    case ncclUint64:
      return "uint64";
    case ncclFloat32:
      return "float32";
    case ncclFloat64:
      return "float64";
    case ncclBfloat16:
      return "bfloat16";
  }
  return "type " + std::to_string(type);
}

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
  }
  return 0;
}

void reduce(std::byte* to, const std::byte* from, const Description& d) {
  const auto plain = [&](auto a, auto b) { return reduced(a, b, d.op); };
  switch (static_cast<ncclDataType_t>(d.type)) {
    case ncclInt8:
      return reduce<int8_t>(to, from, d.count, plain);
    case ncclUint8:
      return reduce<uint8_t>(to, from, d.count, plain);
    case ncclInt32:
      return reduce<int32_t>(to, from, d.count, plain);
    case ncclUint32:
      return reduce<uint32_t>(to, from, d.count, plain);
    case ncclInt64:
      return reduce<int64_t>(to, from, d.count, plain);
    case ncclUint64:
      return reduce<uint64_t>(to, from, d.count, plain);
    case ncclFloat32:
      return reduce<float>(to, from, d.count, plain);
    case ncclFloat64:
      return reduce<double>(to, from, d.count, plain);
    case ncclBfloat16:
      return reduce<gyre::bf16>(to, from, d.count, [&](gyre::bf16 a, gyre::bf16 b) {
        return gyre::to_bf16(reduced(gyre::to_float(a), gyre::to_float(b), d.op));
      });
  }
}

}  // namespace softgpu

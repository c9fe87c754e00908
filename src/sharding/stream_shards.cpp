#include "sharding/stream_shards.hpp"

#include <algorithm>
#include <numeric>

#include "sharding/cuda_sharding.hpp"
#include "sharding/distributed.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

std::span<const std::byte> span_at(const void* data, int64_t bytes) {
  return {static_cast<const std::byte*>(data), static_cast<size_t>(bytes)};
}
std::span<std::byte> span_at(void* data, int64_t bytes) {
  return {static_cast<std::byte*>(data), static_cast<size_t>(bytes)};
}

class HostStreamShards final : public StreamShards {
 public:
  explicit HostStreamShards(const Layout& layout) : layout_(layout) {}

  void shard(int rank, const void* stream, int64_t rows, void* local, int64_t row_bytes,
             const RowFill& fill) override {
    // The element size divides both the 16-byte pattern and the row.
    const int64_t element = std::gcd(row_bytes, std::ssize(fill.bytes));
    detail::shard_bytes(layout_, rank, span_at(stream, rows * row_bytes),
                        std::as_bytes(std::span(fill.bytes)).first(element),
                        span_at(local, layout_.slots_of_rank() * row_bytes), row_bytes);
  }
  void unshard(int rank, const void* local, void* stream, int64_t rows,
               int64_t row_bytes) override {
    detail::unshard_bytes(layout_, rank, span_at(local, layout_.slots_of_rank() * row_bytes),
                          span_at(stream, rows * row_bytes), row_bytes);
  }
  void gather(Communicator& comm, const void* local, void* stream, int64_t row_bytes) override {
    const auto mine = span_at(local, layout_.slots_of_rank() * row_bytes);
    detail::check_gather(layout_, comm, mine.size(), 1, row_bytes);
    detail::gather_bytes(layout_, comm, mine, 1, span_at(stream, layout_.stream_slots * row_bytes),
                         row_bytes);
  }
  void shift_left(Communicator& comm, std::span<const int32_t> bounds, const int32_t* local,
                  int32_t* out, int32_t fill) override {
    const std::span<const int32_t> mine(local, layout_.slots_of_rank());
    std::ranges::copy(shift_left_sharded<int32_t>(layout_, bounds, comm, mine, fill), out);
  }

 private:
  const Layout& layout_;
};

}  // namespace

std::unique_ptr<StreamShards> make_stream_shards(const Layout& layout, Stream& stream) {
  if (stream.space() == MemorySpace::device) return make_cuda_stream_shards(layout, stream);
  return std::make_unique<HostStreamShards>(layout);
}

}  // namespace gyre

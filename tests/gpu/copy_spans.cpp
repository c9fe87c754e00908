// Copies between spans of device memory by one kernel: every byte of theirs, and none beside it.

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "gpu_test.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/row_copy.hpp"

namespace gyre {
namespace GYRE_FILE {

using Bytes = std::vector<unsigned char>;

class CopySpans : public test::GpuTest {
 protected:
  struct Piece {
    size_t from, to, bytes;
  };
  /// Of random bytes, compared with memcpy.
  void check(const std::vector<Piece>& pieces, size_t size) {
    std::mt19937 random(5);
    Bytes source(size), want(size, 0xee);
    for (unsigned char& byte : source) byte = static_cast<unsigned char>(random());
    Bytes got = want;
    Buffer<std::byte> from(static_cast<int64_t>(size), MemorySpace::device),
        to(static_cast<int64_t>(size), MemorySpace::device);
    stream().copy(from.data(), source.data(), size);
    stream().copy(to.data(), want.data(), size);
    std::vector<SpanCopy> copies;
    for (const Piece& p : pieces) {
      copies.push_back({from.span().subspan(p.from, p.bytes), to.span().subspan(p.to, p.bytes)});
      std::memcpy(want.data() + p.to, source.data() + p.from, p.bytes);
    }
    cuda_copy_spans(copies, cuda_handle(stream()));
    stream().copy(got.data(), to.data(), size);
    stream().synchronize();
    EXPECT_EQ(got, want);
  }
};

TEST_F(CopySpans, OfAnyLengthAtAnyAddress) {
  std::vector<Piece> pieces;
  size_t at = 0;
  for (const size_t bytes : {0, 1, 15, 16, 17, 255, 4096, 65535, 65536, 65537, 200000})
    for (const auto& [from, to] : {std::pair<size_t, size_t>{0, 0}, {5, 5}, {3, 9}}) {
      pieces.push_back({at + from, at + to, bytes});
      at += (bytes + 16 + 31) / 32 * 32;
    }
  check(pieces, at);
}

TEST_F(CopySpans, ManyAndOneAndNone) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < 300; ++i) pieces.push_back({7 * i, 7 * (299 - i), 7});
  check(pieces, 2100);
  check({{3, 1, 90}}, 100);
  check({}, 10);
}

}  // namespace GYRE_FILE
}  // namespace gyre

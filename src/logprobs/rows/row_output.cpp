#include "logprobs/rows/row_output.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "logprobs/rows/row_output.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "logprobs/rows/row_lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {

class Constant {
 public:
  HWY_INLINE Constant(F f, float x) : x_(hn::Set(f, x)) {}
  HWY_INLINE V operator()() const { return x_; }

 private:
  V x_;
};

void fill_row(const MatrixRef& out, bool stream, int64_t r, int64_t begin, int64_t end,
              float value) {
  with_row(out, r, [&](auto* to) HWY_ATTR {
    map_row(F(), Constant(F(), value), end - begin, stream, to + begin);
  });
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
HWY_EXPORT(fill_row);

namespace {
/// Whether the results are too large to be found in a cache later.
bool exceeds_caches(const MatrixRef& results) {
  return results.rows * results.cols * size_of(results.type) > 4 << 20;
}
}  // namespace

RowOutput output_at(const MatrixRef& to, const ConstMatrixRef& from) {
  return {to, exceeds_caches(to) && to.data != from.data};
}

void fill(const RowOutput& out, int64_t r, int64_t begin, int64_t end, float value) {
  HWY_DYNAMIC_DISPATCH(fill_row)(out.matrix, out.stream, r, begin, end, value);
}
void clear(const RowOutput& out, int64_t r, int64_t begin, int64_t end) {
  fill({out.matrix, exceeds_caches(out.matrix)}, r, begin, end, 0);
}

}  // namespace gyre
#endif  // HWY_ONCE

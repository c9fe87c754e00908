#include "sharding/slices.hpp"

#include <algorithm>
#include <limits>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/index.hpp"
#include "sharding/distributed.hpp"

namespace gyre {
namespace {

/// Product of the axes [from, to).
int64_t product(const std::vector<int64_t>& shape, int from, int to) {
  return std::accumulate(shape.begin() + from, shape.begin() + to, int64_t{1}, std::multiplies<>());
}

int rank_of(const std::vector<int64_t>& shape) {
  return static_cast<int>(shape.size());
}

/// Transposes in [m, n, run] to out [n, m, run]. With m the elements before an axis and n the parts
/// of the axis, this splits a tensor into n contiguous blocks; with m and n swapped, it joins n
/// blocks along the axis.
template <class T>
void swap_outer(std::span<const T> in, std::span<T> out, int64_t m, int64_t n, int64_t run) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      std::copy_n(in.begin() + (i * n + j) * run, run, out.begin() + (j * m + i) * run);
}

/// Splits axis `dim` of `shape` into n parts: blocks [n, ...].
template <class T>
std::vector<T> split_axis(std::span<const T> x, const std::vector<int64_t>& shape, int dim,
                          int64_t n) {
  std::vector<T> blocks(x.size());
  const int64_t before = product(shape, 0, dim);
  const int64_t run = product(shape, dim, rank_of(shape)) / n;
  swap_outer<T>(x, blocks, before, n, run);
  return blocks;
}

/// Joins n blocks of `shape` each along axis `dim`.
template <class T>
std::vector<T> join_axis(std::span<const T> blocks, const std::vector<int64_t>& shape, int dim,
                         int64_t n) {
  std::vector<T> x(blocks.size());
  swap_outer<T>(blocks, x, n, product(shape, 0, dim), product(shape, dim, rank_of(shape)));
  return x;
}

std::vector<int64_t> gathered_shape(const AxisGather& gather, int ranks) {
  std::vector<int64_t> shape = gather.shape;
  shape[gather.dim] *= ranks;
  return shape;
}

/// Elements of a gathered tensor after the padding is dropped.
int64_t unpadded_size(const AxisGather& gather, int ranks) {
  std::vector<int64_t> shape = gathered_shape(gather, ranks);
  if (gather.pad > 0) shape[gather.unpad_dim] -= gather.pad;
  return product(shape, 0, rank_of(shape));
}

void check_gather(const AxisGather& gather, int ranks) {
  const int axes = rank_of(gather.shape);
  for (const int64_t extent : gather.shape)
    if (extent < 0) throw_usage("gathering an axis: an extent of {}", extent);
  if (gather.dim < 0 || gather.dim >= axes)
    throw_usage("gathering axis {}: the tensor has axes 0 to {}", gather.dim, axes - 1);
  if (gather.pad < 0) throw_usage("gathering an axis: padding of {} entries", gather.pad);
  if (gather.pad == 0) return;
  if (gather.unpad_dim < 0 || gather.unpad_dim >= axes)
    throw_usage("dropping {} entries of padding from axis {}: the tensor has axes 0 to {}",
                gather.pad, gather.unpad_dim, axes - 1);
  const int64_t extent = gathered_shape(gather, ranks)[gather.unpad_dim];
  if (gather.pad > extent)
    throw_usage("dropping {} entries of padding from axis {}: it has {}", gather.pad,
                gather.unpad_dim, extent);
}

void agree_on_gather(Communicator& comm, const AxisGather& gather, int64_t elements,
                     bool is_gradient) {
  agree_on_arguments(
      comm, "gathering an axis",
      [&] {
        check_gather(gather, comm.size());
        const int64_t want = is_gradient ? unpadded_size(gather, comm.size())
                                         : product(gather.shape, 0, rank_of(gather.shape));
        if (elements != want)
          throw_usage("gathering an axis: {} elements, but the {} has {}", elements,
                      is_gradient ? "gathered tensor" : "local shape", want);
      },
      {{"the number of local elements", product(gather.shape, 0, rank_of(gather.shape))},
       {"the axis", gather.dim},
       {"the padding", gather.pad}});
}

}  // namespace

namespace detail {

std::vector<int64_t> bytes_of_all(Communicator& comm, size_t mine) {
  return all_gather_value(comm, static_cast<int64_t>(mine));
}

void check_split(Communicator& comm, size_t items) {
  const int64_t count = items;
  agree_on_arguments(comm, "splitting a list",
                     [&] {
                       const int64_t below = count / comm.size() * comm.size();
                       if (count != below)
                         throw_usage(
                             "a list of {} items does not split over {} ranks; "
                             "the nearest lengths are {} and {}",
                             count, comm.size(), below, below + comm.size());
                     },
                     {{"the length of the list", count}});
}

}  // namespace detail

SlicedInput slice_and_pad(std::span<const int64_t> ids, int64_t batch,
                          std::span<const int64_t> positions, int64_t axes,
                          std::span<const int32_t> bounds, int ranks, int rank) {
  if (ranks < 1 || rank < 0 || rank >= ranks) throw_usage("rank {} of {} ranks", rank, ranks);
  if (batch < 1 || std::ssize(ids) % batch != 0)
    throw_usage("{} ids are not {} rows of equal length", ids.size(), batch);
  const int64_t n = std::ssize(ids) / batch, padded = round_up(n, ranks);
  if (padded > std::numeric_limits<int32_t>::max())
    throw_usage("a row of {} slots exceeds the int32 range of boundaries", padded);
  if (!positions.empty() && std::ssize(positions) != axes * n)
    throw_usage("{} positions of {} axes for rows of {} tokens; one row serves the whole batch",
                positions.size(), axes, n);
  check_bounds({bounds, bounds});
  if (bounds.back() != n)
    throw_usage("document boundaries end at {}, but rows have {} tokens", bounds.back(), n);
  SlicedInput result;
  result.pad = padded - n;
  const int64_t width = padded / ranks, begin = rank * width;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = begin; t < begin + width; ++t)
      result.ids.push_back(t < n ? ids[b * n + t] : 0);
  const int64_t given_axes = positions.empty() ? 0 : axes;
  for (int64_t axis = 0; axis < given_axes; ++axis) {
    const auto mine = positions.subspan(axis * n, n);
    result.positions.insert(result.positions.end(), mine.begin(), mine.end());
    for (int64_t i = 0; i < result.pad; ++i) result.positions.push_back(i);
  }
  result.cu_seqlens.assign(bounds.begin(), bounds.end());
  result.cu_seqlens_padded = result.cu_seqlens;
  if (result.pad > 0) {
    result.cu_seqlens.push_back(static_cast<int32_t>(n));
    result.cu_seqlens_padded.push_back(static_cast<int32_t>(padded));
  }
  return result;
}

template <class T>
std::vector<T> gather_forward_and_unpad(Communicator& comm, std::span<const T> x,
                                        const AxisGather& gather) {
  agree_on_gather(comm, gather, x.size(), false);
  std::vector<T> blocks(x.size() * comm.size());
  HostStream stream;
  comm.all_gather(bytes_of(x), writable_bytes_of(std::span<T>(blocks)), stream, "gathering an axis")
      ->wait();
  std::vector<T> whole = join_axis<T>(blocks, gather.shape, gather.dim, comm.size());
  if (gather.pad == 0) return whole;
  const std::vector<int64_t> shape = gathered_shape(gather, comm.size());
  const int64_t after = product(shape, gather.unpad_dim + 1, rank_of(shape));
  const int64_t run = shape[gather.unpad_dim] * after;
  std::vector<T> kept;
  kept.reserve(unpadded_size(gather, comm.size()));
  for (int64_t i = 0; i < product(shape, 0, gather.unpad_dim); ++i)
    kept.insert(kept.end(), whole.begin() + i * run,
                whole.begin() + (i + 1) * run - gather.pad * after);
  return kept;
}

template <class T>
std::vector<T> split_backward_and_unpad(Communicator& comm, std::span<const T> grad,
                                        const AxisGather& gather) {
  agree_on_gather(comm, gather, grad.size(), true);
  const std::vector<int64_t> shape = gathered_shape(gather, comm.size());
  std::vector<T> whole(grad.begin(), grad.end());
  if (gather.pad > 0) {
    const int64_t after = product(shape, gather.unpad_dim + 1, rank_of(shape));
    const int64_t run = shape[gather.unpad_dim] * after;
    const int64_t kept = run - gather.pad * after;
    whole.assign(product(shape, 0, rank_of(shape)), T{0});
    for (int64_t i = 0; i < product(shape, 0, gather.unpad_dim); ++i)
      std::copy_n(grad.begin() + i * kept, kept, whole.begin() + i * run);
  }
  const std::vector<T> blocks = split_axis<T>(whole, shape, gather.dim, comm.size());
  const auto count = std::ssize(blocks) / comm.size();
  return {blocks.begin() + comm.rank() * count, blocks.begin() + (comm.rank() + 1) * count};
}

template std::vector<float> gather_forward_and_unpad(Communicator&, std::span<const float>,
                                                     const AxisGather&);
template std::vector<double> gather_forward_and_unpad(Communicator&, std::span<const double>,
                                                      const AxisGather&);
template std::vector<float> split_backward_and_unpad(Communicator&, std::span<const float>,
                                                     const AxisGather&);
template std::vector<double> split_backward_and_unpad(Communicator&, std::span<const double>,
                                                      const AxisGather&);

}  // namespace gyre

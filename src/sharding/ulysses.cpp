#include "sharding/ulysses.hpp"

#include <algorithm>
#include <limits>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/index.hpp"
#include "sharding/distributed.hpp"
#include "sharding/heads.hpp"
#include "sharding/transfer.hpp"

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

int64_t scatter_parts(const AxisExchange& exchange, int ranks) {
  return ranks / exchange.scatter_replicas;
}
int64_t gather_parts(const AxisExchange& exchange, int ranks) {
  return ranks / exchange.gather_replicas;
}

/// Shape of the block that one rank receives.
std::vector<int64_t> block_shape(const AxisExchange& exchange, int ranks) {
  std::vector<int64_t> shape = exchange.shape;
  shape[exchange.scatter] /= scatter_parts(exchange, ranks);
  return shape;
}

/// Repeats every block `replicas` times: [n · replicas, block].
template <class T>
std::vector<T> repeat_blocks(const std::vector<T>& blocks, int64_t n, int64_t replicas) {
  const int64_t block = std::ssize(blocks) / n;
  std::vector<T> repeated;
  repeated.reserve(blocks.size() * replicas);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < replicas; ++k)
      repeated.insert(repeated.end(), blocks.begin() + i * block, blocks.begin() + (i + 1) * block);
  return repeated;
}

/// Sums every `replicas` consecutive blocks: [n, block]. The order is by rank, so that results are
/// reproducible to the bit.
template <class T>
std::vector<T> sum_blocks(const std::vector<T>& blocks, int64_t n, int64_t replicas) {
  const int64_t block = std::ssize(blocks) / (n * replicas);
  std::vector<T> sums(n * block, T{0});
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < replicas; ++k)
      for (int64_t e = 0; e < block; ++e)
        sums[i * block + e] += blocks[(i * replicas + k) * block + e];
  return sums;
}

/// Text such as "the nearest valid numbers are 2 and 4", for the next numbers below and above
/// `value`, from 1 to `most`, that `valid` accepts.
template <class Valid>
std::string nearest(int64_t value, int64_t most, Valid valid) {
  int64_t below = std::min(value - 1, most), above = std::max<int64_t>(value + 1, 1);
  while (below >= 1 && !valid(below)) --below;
  while (above <= most && !valid(above)) ++above;
  if (below < 1) return fmt::format("the nearest valid number is {}", above);
  if (above > most) return fmt::format("the nearest valid number is {}", below);
  return fmt::format("the nearest valid numbers are {} and {}", below, above);
}

void check_heads(const UlyssesShape& shape, int ranks) {
  if (shape.heads < 1 || shape.heads % ranks != 0)
    throw_usage("{} query heads do not divide over {} ranks; {}", shape.heads, ranks,
                nearest(shape.heads, round_up(std::max<int64_t>(shape.heads, 1), ranks),
                        [&](int64_t h) { return h % ranks == 0; }));
  const auto valid = [&](int64_t k) {
    return k >= 1 && shape.heads % k == 0 && (k % ranks == 0 || ranks % k == 0);
  };
  if (!valid(shape.kv_heads))
    throw_usage(
        "{} key/value heads over {} ranks: the number must divide the {} query heads, and divide "
        "the number of ranks or be a multiple of it; {}",
        shape.kv_heads, ranks, shape.heads, nearest(shape.kv_heads, shape.heads, valid));
  if (shape.batch < 1 || shape.tokens < 0 || shape.dim < 1)
    throw_usage("{} rows of {} tokens with heads of {}; at least 1, 0 and 1 are needed",
                shape.batch, shape.tokens, shape.dim);
}

void check_planes(const Layout& layout, int64_t elements, int64_t planes, int64_t row) {
  if (planes < 0 || row < 1 || elements != planes * layout.padded_slots * row)
    throw_usage("reordering a sequence: {} elements, but {} planes x {} slots x {}", elements,
                planes, layout.padded_slots, row);
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

std::vector<int64_t> exchanged_shape(const AxisExchange& exchange, int ranks) {
  std::vector<int64_t> shape = block_shape(exchange, ranks);
  shape[exchange.gather] *= gather_parts(exchange, ranks);
  return shape;
}

AxisExchange backward_of(const AxisExchange& exchange, int ranks) {
  return {exchanged_shape(exchange, ranks), exchange.gather, exchange.scatter,
          exchange.gather_replicas, exchange.scatter_replicas};
}

template <class T>
PendingExchange<T>::PendingExchange(Communicator& comm, std::span<const T> x, AxisExchange exchange)
    : exchange_(std::move(exchange)), ranks_(comm.size()) {
  const std::vector<int64_t>& shape = exchange_.shape;
  GYRE_CHECK(exchange_.scatter != exchange_.gather, "an exchange of axis {} with itself",
             exchange_.scatter);
  GYRE_CHECK(ranks_ % exchange_.scatter_replicas == 0 && ranks_ % exchange_.gather_replicas == 0,
             "{} and {} replicas over {} ranks", exchange_.scatter_replicas,
             exchange_.gather_replicas, ranks_);
  const int64_t parts = scatter_parts(exchange_, ranks_);
  const int64_t extent = shape[exchange_.scatter];
  GYRE_CHECK(extent % parts == 0, "an axis of {} in {} parts", extent, parts);
  GYRE_CHECK(std::ssize(x) == product(shape, 0, rank_of(shape)), "{} elements for a shape of {}",
             x.size(), product(shape, 0, rank_of(shape)));
  send_ = split_axis<T>(x, shape, exchange_.scatter, parts);
  if (exchange_.scatter_replicas > 1)
    send_ = repeat_blocks(send_, parts, exchange_.scatter_replicas);
  recv_.resize(send_.size());
  HostStream stream;
  work_ = comm.all_to_all(bytes_of(std::span<const T>(send_)),
                          writable_bytes_of(std::span<T>(recv_)), stream, "heads for tokens");
}

template <class T>
std::vector<T> PendingExchange<T>::finish() {
  work_->wait();
  const int64_t parts = gather_parts(exchange_, ranks_);
  if (exchange_.gather_replicas > 1) recv_ = sum_blocks(recv_, parts, exchange_.gather_replicas);
  return join_axis<T>(recv_, block_shape(exchange_, ranks_), exchange_.gather, parts);
}

UlyssesPlan plan_ulysses(Communicator& comm, const UlyssesShape& shape) {
  const int ranks = comm.size();
  agree_on_arguments(comm, "exchanging heads for tokens", [&] { check_heads(shape, ranks); },
                     {{"the batch", shape.batch},
                      {"the number of query heads", shape.heads},
                      {"the number of key/value heads", shape.kv_heads},
                      {"the number of tokens a rank", shape.tokens},
                      {"the dimension of a head", shape.dim}});
  const int64_t b = shape.batch, n = shape.tokens * ranks, d = shape.dim;
  UlyssesPlan plan;
  const int64_t q_heads = assigned_heads(shape.heads, ranks, 0).count;  // per rank
  const int64_t replicas = kv_heads_assigned(shape.heads, shape.kv_heads, ranks) / shape.kv_heads;
  plan.query = {{b, shape.heads, shape.tokens, d}, 1, 2};
  plan.key_value = {{b, shape.kv_heads, shape.tokens, d}, 1, 2, replicas};
  plan.output = backward_of(plan.query, ranks);
  plan.output_token_major = {{b, n, q_heads, d}, 1, 2};
  return plan;
}

namespace {

/// Elements [begin, begin + length) of an array.
struct Part {
  size_t begin, length;
};

/// Calls move(rank, plane, shard) for all planes and ranks, with the range of the plane in stream
/// order, and the range of the rank's shard of the plane in rank order.
template <class Move>
void for_each_shard(const Layout& layout, int64_t planes, int64_t row, Move move) {
  const size_t plane = layout.padded_slots * row;
  const size_t shard = plane / layout.cp();
  for (int64_t p = 0; p < planes; ++p)
    for (int r = 0; r < layout.cp(); ++r)
      move(r, Part{p * plane, plane}, Part{p * plane + r * shard, shard});
}

}  // namespace

template <class T>
std::vector<T> to_sequence_order(const Layout& layout, std::span<const T> x, int64_t planes,
                                 int64_t row) {
  check_planes(layout, x.size(), planes, row);
  std::vector<T> out(x.size());
  for_each_shard(layout, planes, row, [&](int r, Part plane, Part shard) {
    unshard_rows<T>(layout, r, x.subspan(shard.begin, shard.length),
                    std::span<T>(out).subspan(plane.begin, plane.length), row);
  });
  return out;
}

template <class T>
std::vector<T> to_rank_order(const Layout& layout, std::span<const T> x, int64_t planes,
                             int64_t row) {
  check_planes(layout, x.size(), planes, row);
  std::vector<T> out(x.size());
  for_each_shard(layout, planes, row, [&](int r, Part plane, Part shard) {
    shard_rows<T>(layout, r, x.subspan(plane.begin, plane.length),
                  std::span<T>(out).subspan(shard.begin, shard.length), row);
  });
  return out;
}

#define GYRE_INSTANTIATE(T)                                                                       \
  template std::vector<T> gather_forward_and_unpad(Communicator&, std::span<const T>,             \
                                                   const AxisGather&);                            \
  template std::vector<T> split_backward_and_unpad(Communicator&, std::span<const T>,             \
                                                   const AxisGather&);                            \
  template class PendingExchange<T>;                                                              \
  template std::vector<T> to_sequence_order(const Layout&, std::span<const T>, int64_t, int64_t); \
  template std::vector<T> to_rank_order(const Layout&, std::span<const T>, int64_t, int64_t);
GYRE_INSTANTIATE(float)
GYRE_INSTANTIATE(double)
#undef GYRE_INSTANTIATE

}  // namespace gyre

#include "logprobs/sequence_scores.hpp"

#include <algorithm>

#include "comm/agree.hpp"
#include "runtime/buffer.hpp"
#include "sharding/local_batch.hpp"

namespace gyre {
namespace {

/// `length` local slots from slot `local` on, which lie in one run of the layout and one segment,
/// at positions position, position + stride, ... of the segment.
struct Run {
  int64_t segment, position, stride, length, local;
};

/// Calls body(run) for all local slots of a rank that are in the stream.
template <class Body>
void for_each_run(const Layout& layout, std::span<const int32_t> bounds, int rank, Body body) {
  for (const SlotRun& piece : layout.shard(rank).runs) {
    int64_t slot = piece.start.value(), done = 0;
    while (done < piece.length && slot < layout.stream_slots) {
      const auto end = std::upper_bound(bounds.begin(), bounds.end(), slot);
      const int64_t length = std::min(piece.length - done, ceil_div(*end - slot, piece.stride));
      const int64_t segment = end - bounds.begin() - 1;
      body(Run{segment, slot - *(end - 1), piece.stride, length, piece.local_begin.value() + done});
      slot += length * piece.stride;
      done += length;
    }
  }
}

void check_rank(const Layout& layout, int rank) {
  if (rank < 0 || rank >= layout.cp())
    throw_usage("rank {} of a layout of {} ranks", rank, layout.cp());
}

/// Target of each local slot: next(segment, position) if the slot is in the stream, else no_target.
template <class Next>
std::vector<int32_t> targets_of(const Layout& layout, std::span<const int32_t> bounds, int rank,
                                Next next) {
  std::vector<int32_t> targets(layout.shard(rank).slots, no_target);
  for_each_run(layout, bounds, rank, [&](const Run& run) {
    for (int64_t i = 0; i < run.length; ++i)
      targets[run.local + i] = next(run.segment, run.position + i * run.stride);
  });
  return targets;
}

/// All ranks throw the same error if an argument does not fit. Collective.
void check_gather(const Layout& layout, const PredictionShape& shape, int64_t elements,
                  bool gradient, Communicator& cp, GatherGradient convention) {
  const char* what = gradient ? "gradient of predictions" : "gathering predictions";
  agree_on_arguments(cp, what,
                     [&] {
                       if (layout.cp() != cp.size())
                         throw_usage("layout {} is for {} ranks, but the group has {}", layout.name,
                                     layout.cp(), cp.size());
                       check_boundaries(layout, shape.bounds);
                       if (shape.row < 1)
                         throw_usage("{}: {} values each; at least 1", what, shape.row);
                       if (shape.width < 0)
                         throw_usage("{}: rows of {}; at least 0", what, shape.width);
                       const int64_t rows = gradient ? shape.segments() : layout.slots_of_rank();
                       const int64_t width = gradient ? shape.width : 1;
                       if (elements != rows * width * shape.row)
                         throw_usage("{}: {} elements, but {} x {} values are {}", what, elements,
                                     gradient ? fmt::format("{} sequences x {}", rows, width)
                                              : fmt::format("{} slots", rows),
                                     shape.row, rows * width * shape.row);
                     },
                     {{"the number of sequences", shape.segments()},
                      {"the width", shape.width},
                      {"the number of values of a prediction", shape.row},
                      {"the number of slots a rank", layout.slots_of_rank()},
                      {"the gradient convention", static_cast<int64_t>(convention)}});
}

/// Calls body(local, place, step, length) for runs of the rank's predictions: prediction i < length
/// is in local slot local + i and has index place + i · step in [segments · width].
template <class Body>
void for_each_prediction(const Layout& layout, const PredictionShape& shape, int rank, Body body) {
  for_each_run(layout, shape.bounds, rank, [&](const Run& run) {
    const int64_t left = shape.predictions(run.segment) - run.position;
    const int64_t length = std::min(run.length, ceil_div(std::max<int64_t>(0, left), run.stride));
    body(run.local, run.segment * shape.width + run.position, run.stride, length);
  });
}

/// local [slots, row] of `rank` <- predictions [segments, width, row]; other slots are unchanged.
void take_predictions(const Layout& layout, const PredictionShape& shape, int rank,
                      std::span<const float> predictions, float* local) {
  const int64_t row = shape.row;
  for_each_prediction(
      layout, shape, rank, [&](int64_t at, int64_t place, int64_t step, int64_t length) {
        for (int64_t i = 0; i < length; ++i)
          std::copy_n(predictions.begin() + (place + i * step) * row, row, local + (at + i) * row);
      });
}

}  // namespace

std::vector<int32_t> next_token_targets(const Layout& layout, std::span<const int32_t> bounds,
                                        std::span<const int32_t> tokens, int rank) {
  check_boundaries(layout, bounds);
  check_rank(layout, rank);
  if (std::ssize(tokens) != layout.stream_slots)
    throw_usage("{} tokens, but layout {} is of {} slots", tokens.size(), layout.name,
                layout.stream_slots);
  return targets_of(layout, bounds, rank, [&](int64_t segment, int64_t position) {
    const auto next = bounds[segment] + position + 1;
    return next == bounds[segment + 1] ? no_target : tokens[next];
  });
}

std::vector<int32_t> rolled_targets(const Layout& layout, const SegmentBounds& bounds,
                                    std::span<const int32_t> rows, int64_t row_width, int rank) {
  check_bounds(bounds);
  check_boundaries(layout, bounds.padded);
  check_rank(layout, rank);
  const int64_t segments = bounds.segments();
  if (row_width < 0) throw_usage("rows of {} tokens; at least 0", row_width);
  if (std::ssize(rows) != segments * row_width)
    throw_usage("{} tokens, but {} rows of {} are {}", rows.size(), segments, row_width,
                segments * row_width);
  for (int64_t i = 0; i + 1 < segments; ++i)
    if (bounds.real_length(i) > row_width)
      throw_usage(
          "segment {}: {} tokens in a row of {}; only the last segment may be longer than its row",
          i, bounds.real_length(i), row_width);
  return targets_of(layout, bounds.padded, rank, [&](int64_t segment, int64_t position) {
    const int64_t next = (position + 1) % bounds.slot_length(segment);
    return next < std::min(bounds.real_length(segment), row_width)
               ? rows[segment * row_width + next]
               : 0;
  });
}

int64_t PredictionShape::predictions(int64_t i) const {
  const size_t at = i;
  return std::max<int64_t>(0, std::min<int64_t>(bounds[at + 1] - bounds[at] - 1, width));
}

std::vector<float> gather_predictions(const Layout& layout, const PredictionShape& shape,
                                      std::span<const float> local, Communicator& cp) {
  check_gather(layout, shape, local.size(), false, cp, GatherGradient::none);
  Buffer<float> blocks;
  std::span<const float> all = local;
  if (cp.size() > 1) {
    blocks = Buffer<float>(std::ssize(local) * cp.size());
    HostStream host;
    cp.all_gather(bytes_of(local), writable_bytes_of(blocks.span()), host, "gathering predictions")
        ->wait();
    all = blocks.span();
  }
  const int64_t row = shape.row;
  std::vector<float> out(shape.segments() * shape.width * row, 0.0F);
  for (int rank = 0; rank < cp.size(); ++rank) {
    const float* from = all.data() + rank * local.size();
    for_each_prediction(
        layout, shape, rank, [&](int64_t at, int64_t place, int64_t step, int64_t length) {
          for (int64_t i = 0; i < length; ++i)
            std::copy_n(from + (at + i) * row, row, out.begin() + (place + i * step) * row);
        });
  }
  return out;
}

std::vector<float> gather_predictions_backward(const Layout& layout, const PredictionShape& shape,
                                               std::span<const float> d_predictions,
                                               Communicator& cp, GatherGradient convention) {
  check_gather(layout, shape, d_predictions.size(), true, cp, convention);
  const int64_t count = layout.slots_of_rank() * shape.row;
  std::vector<float> grad(count, 0.0F);
  if (convention == GatherGradient::none) return grad;
  if (convention == GatherGradient::split || cp.size() == 1) {
    take_predictions(layout, shape, cp.rank(), d_predictions, grad.data());
    return grad;
  }
  Buffer<float> blocks(count * cp.size());
  std::fill_n(blocks.data(), blocks.size(), 0.0F);
  for (int rank = 0; rank < cp.size(); ++rank)
    take_predictions(layout, shape, rank, d_predictions, blocks.data() + rank * count);
  HostStream host;
  cp.reduce_scatter(blocks.data(), grad.data(), count, DType::f32, ReduceOp::sum, host,
                    "gradient of predictions")
      ->wait();
  return grad;
}

}  // namespace gyre

#include "recurrence/convolution_stage.hpp"

#include <algorithm>

#include "recurrence/halo.hpp"
#include "runtime/row_copy.hpp"

namespace gyre {
namespace {

ConvolutionRows rows_of(const RecurrenceData& data, bool gradients, int64_t begin, int64_t count) {
  ConvolutionRows rows;
  for (size_t i = 0; i < rows.size(); ++i) {
    const RecurrenceArray of = convolved_arrays[i],
                          gradient = std::array{RecurrenceArray::d_q, RecurrenceArray::d_k,
                                                RecurrenceArray::d_v}[i];
    rows[i] = data[gradients ? gradient : of].rows_from(begin, count);
  }
  return rows;
}

std::span<std::byte> bytes_of_rows(const MatrixRef& all, int64_t begin, int64_t count) {
  const MatrixRef rows = all.rows_from(begin, count);
  return {rows.data, static_cast<size_t>(rows.rows * rows.cols) * size_of(rows.type)};
}

int64_t tail_rows(const StatePart& part, int64_t width) {
  return std::min(width - 1, part.tokens);
}

}  // namespace

ConvolutionArrays::ConvolutionArrays(const RecurrenceShape& shape, DType type, int64_t tokens,
                                     MemorySpace space)
    : bytes(tokens * shape.channels() * static_cast<int64_t>(size_of(type)), space) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t width = width_of(shape, convolved_arrays[i]);
    std::byte* const first = bytes.data() + first_channel(shape, i) * tokens * size_of(type);
    rows[i] = {first, type, tokens, width, width};
  }
}

ConvolutionStage::ConvolutionStage(const StatePlan& plan, const RecurrenceShape& shape,
                                   const RecurrenceData& layer, RecurrenceKernel& kernel)
    : plan_(plan),
      all_heads_(shape),
      shape_(plan.computed(shape)),
      layer_(layer),
      data_(layer),
      stream_(kernel.stream()),
      kernel_(kernel.convolution(shape_)),
      y_(shape_, DType::f32, layer[RecurrenceArray::q].rows, stream_.space()),
      d_y_(shape_, DType::f32, layer[RecurrenceArray::q].rows, stream_.space()),
      d_weights_(shape.channels() * shape.convolution, stream_.space()) {
  const MemorySpace space = stream_.space();
  for (size_t i = 0; i < convolved_arrays.size(); ++i) {
    data_[convolved_arrays[i]] = y_.rows[i];
    data_[std::array{RecurrenceArray::d_q, RecurrenceArray::d_k, RecurrenceArray::d_v}[i]] =
        d_y_.rows[i];
  }
  for (const StatePart& f : plan.parts) {
    const int64_t rows = history_rows(f, shape.convolution);
    histories_.emplace_back(shape_, layer[RecurrenceArray::q].type, rows, space);
    d_histories_.emplace_back(shape_, DType::f32, rows, space);
    added_.emplace_back(shape_, DType::f32, tail_rows(f, shape.convolution), space);
  }
  for (const HistoryPiece& piece : plan.history)
    received_.emplace_back(shape_, DType::f32, piece.from == plan.rank ? piece.rows : 0, space);
}

void ConvolutionStage::overwrite(std::byte value) {
  const auto overwrite = [&](ConvolutionArrays& arrays) {
    stream_.fill(arrays.bytes.data(), value, arrays.bytes.size());
  };
  overwrite(y_);
  overwrite(d_y_);
  for (std::vector<ConvolutionArrays>* all : {&histories_, &d_histories_, &added_, &received_})
    std::ranges::for_each(*all, overwrite);
  fill(d_weights_.span(), value);
}

template <class Body>
void ConvolutionStage::for_each_channels(Body body) const {
  const int share = plan_.rank % plan_.head_ranks();
  for (size_t i = 0; i < convolved_arrays.size(); ++i) {
    const int64_t count = width_of(shape_, convolved_arrays[i]);
    body(first_channel(all_heads_, i) + share * count, first_channel(shape_, i), count);
  }
}

void ConvolutionStage::set_weights(std::span<const float> weights) {
  const int64_t width = shape_.convolution;
  std::vector<float> own(shape_.channels() * width);
  for_each_channels([&](int64_t all, int64_t first, int64_t count) {
    std::copy_n(weights.begin() + all * width, count * width, own.begin() + first * width);
  });
  kernel_->set_weights(own);
}

ConvolutionPart ConvolutionStage::part(int index) {
  const auto [row, tokens] = std::pair{plan_.parts.at(index).row, plan_.parts.at(index).tokens};
  return {.x = rows_of(layer_, false, row, tokens),
          .d_x = rows_of(layer_, true, row, tokens),
          .y = rows_of(data_, false, row, tokens),
          .d_y = rows_of(data_, true, row, tokens),
          .history = histories_[index].rows,
          .d_history = d_histories_[index].rows,
          .added = added_[index].rows};
}

void ConvolutionStage::convolve(std::span<const int> parts) {
  for (const int index : parts) kernel_->forward(part(index));
}

void ConvolutionStage::slopes() {
  kernel_->clear_weight_gradients();
  for (int index = 0; index < static_cast<int>(plan_.parts.size()); ++index)
    kernel_->slopes(part(index));
  const int64_t width = shape_.convolution;
  fill(d_weights_.span(), std::byte{0});
  for_each_channels([&](int64_t all, int64_t first, int64_t count) {
    kernel_->weight_gradients(first, d_weights_.span().subspan(all * width, count * width));
  });
}

void ConvolutionStage::add_received(int index, const ConvolutionRows& added) {
  const int64_t first = plan_.parts[index].tokens - added.front().rows;
  for (size_t i = 0; i < added.size(); ++i) {
    fill({added[i].as<float>().data, static_cast<size_t>(added[i].rows * added[i].cols)},
         std::byte{0});
    for (size_t p = 0; p < plan_.history.size(); ++p) {
      const HistoryPiece& piece = plan_.history[p];
      if (piece.from != plan_.rank || piece.from_part != index) continue;
      copy_matrix(received_[p].rows[i], added[i].rows_from(piece.row - first, piece.rows), stream_,
                  true);
    }
  }
}

void ConvolutionStage::backward(std::span<const int> parts) {
  for (const int index : parts) {
    add_received(index, added_[index].rows);
    kernel_->backward(part(index));
  }
}

void ConvolutionStage::add_sends(const StateMessage& message, Pass pass,
                                 std::vector<SendSlice>& to) {
  for (const int index : message.pieces) {
    const HistoryPiece& piece = plan_.history[index];
    const bool forward = pass == Pass::forward;
    const int64_t first = forward ? plan_.parts[piece.from_part].row + piece.row : piece.at;
    for (size_t i = 0; i < convolved_arrays.size(); ++i) {
      const MatrixRef& rows =
          forward ? layer_[convolved_arrays[i]] : d_histories_[piece.to_part].rows[i];
      to.push_back({message.peer, bytes_of_rows(rows, first, piece.rows)});
    }
  }
}

void ConvolutionStage::add_recvs(const StateMessage& message, Pass pass,
                                 std::vector<RecvSlice>& to) {
  for (const int index : message.pieces) {
    const HistoryPiece& piece = plan_.history[index];
    for (size_t i = 0; i < convolved_arrays.size(); ++i)
      to.push_back({message.peer,
                    pass == Pass::forward
                        ? bytes_of_rows(histories_[piece.to_part].rows[i], piece.at, piece.rows)
                        : bytes_of_rows(received_[index].rows[i], 0, piece.rows)});
  }
}

int64_t convolution_bytes(const StatePlan& plan, int64_t slots, const RecurrenceShape& shape) {
  if (shape.convolution == 0) return 0;
  const auto wide = static_cast<int64_t>(sizeof(float)),
             own = static_cast<int64_t>(size_of(plan.type));
  const int64_t width = shape.convolution,
                rows = plan.rank_tokens.empty() ? slots : tokens_of_all(plan);
  int64_t bytes = 2 * rows * wide;
  for (const StatePart& f : plan.parts)
    bytes += history_rows(f, width) * (own + wide) + tail_rows(f, width) * wide;
  for (const HistoryPiece& piece : plan.history)
    if (piece.from == plan.rank) bytes += piece.rows * wide;
  return bytes * plan.computed(shape).channels() + width * wide * shape.channels();
}

int64_t transient_bytes(const StatePlan& plan, const RecurrenceProblem& problem) {
  return buffer_bytes(plan, problem.shape) +
         convolution_bytes(plan, problem.layout->slots_of_rank(), problem.shape);
}

}  // namespace gyre

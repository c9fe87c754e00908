// Measures the kernels of recurrent layers for predictions: each kind, direction and type.

#include <algorithm>

#include "predict/calibrate.hpp"
#include "recurrence/chunk_kernel.hpp"
#include "recurrence/head_transfer.hpp"
#include "recurrence/inputs.hpp"

namespace gyre {
namespace {

constexpr int64_t few_tokens = 64, many_tokens = 512, recurrent_heads = 4, recurrent_dim = 64;

RecurrenceData random_arrays(const RecurrenceShape& shape, DType type,
                             std::vector<Buffer<std::byte>>& buffers) {
  RecurrenceData data = new_arrays(shape, type, many_tokens, MemorySpace::host, buffers);
  std::vector<float> row;
  for (int a = 0; a < static_cast<int>(first_result); ++a) {
    const auto array = static_cast<RecurrenceArray>(a);
    const MatrixRef& matrix = data[array];
    row.resize(matrix.cols);
    for (int64_t token = 0; token < matrix.rows; ++token) {
      fill_recurrence_row(shape, 1, type, array, token, row);
      copy_converted(MatrixView<const float>(row.data(), 1, matrix.cols),
                     matrix.rows_from(token, 1));
    }
  }
  return data;
}

}  // namespace

RecurrenceModel calibrate_recurrences(const CalibratedBackend& b) {
  RecurrenceModel model;
  for (const RecurrenceKind& kind : recurrence_kinds())
    for (const DType type : activation_types) {
      const RecurrenceShape shape(kind, recurrent_heads, recurrent_heads, recurrent_dim,
                                  recurrent_dim);
      std::vector<Buffer<std::byte>> buffers;
      const RecurrenceData data = random_arrays(shape, type, buffers);
      CpuRecurrenceKernel kernel(shape, b.threads);
      std::vector<float> map(recurrent_heads * shape.map_elements());
      std::vector<float> state(recurrent_heads * shape.state_elements());
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const bool forward = pass == Pass::forward;
        StatePlan plan;
        plan.parts = {{}};
        const auto seconds = [&](int64_t tokens) {
          return seconds_of_call(b, [&] {
            forward ? kernel.forward(data, {0, tokens}, {})
                    : kernel.backward(data, {0, tokens}, {});
          });
        };
        const auto flops = [&](int64_t tokens, const StateStep& step) {
          plan.parts.front().tokens = tokens;
          return chunked_work(step, plan, pass, shape).flops;
        };
        const StateStep run = state_step::Run{.part = 0};
        const double of_few = seconds(few_tokens), of_many = seconds(many_tokens);
        const double rate = (flops(many_tokens, run) - flops(few_tokens, run)) /
                            std::max(of_many - of_few, of_many / 2);
        const double launch = std::max(0.0, of_few - flops(few_tokens, run) / rate);
        const double of_summary = seconds_of_call(b, [&] {
          forward ? kernel.summarize(data, {0, many_tokens}, map, state)
                  : kernel.summarize_back(data, {0, many_tokens}, state);
        });
        const StateStep summary = forward ? StateStep(state_step::Summarize{.part = 0})
                                          : StateStep(state_step::SummarizeBack{.part = 0});
        model.rates.push_back(
            {kind.name, pass, type, launch, 0, rate, flops(many_tokens, summary) / of_summary});
      }
    }
  return model;
}

}  // namespace gyre

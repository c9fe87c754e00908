#include "recurrence/chunk_kernel.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/index.hpp"
#include "runtime/gemm.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Part `index` of a span of parts of `elements` each; empty of an empty one.
template <class T>
std::span<T> part_of(std::span<T> all, int64_t index, int64_t elements) {
  return all.empty() ? all : all.subspan(index * elements, elements);
}

/// Calls body(begin, tokens, chunk) for each chunk of a run, in order, or the last first.
template <class Body>
void for_each_chunk(TokenRun run, bool backwards, Body body) {
  const int64_t chunks = ceil_div(run.tokens, recurrence_chunk);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t chunk = backwards ? chunks - 1 - i : i, first = chunk * recurrence_chunk;
    body(run.begin + first, std::min(recurrence_chunk, run.tokens - first), chunk);
  }
}

void copy_or_zero(std::span<const float> from, std::span<float> to) {
  if (from.empty())
    std::ranges::fill(to, 0.0F);
  else
    std::ranges::copy(from, to.begin());
}

}  // namespace

CpuRecurrenceKernel::CpuRecurrenceKernel(const RecurrenceShape& shape, int threads)
    : RecurrenceKernel(shape), threads_(threads) {
  const int64_t width = shape.value_dim + (shape.delta ? shape.key_dim : 0);
  for (int t = 0; t < threads; ++t)
    scratch_.push_back(std::make_unique<Scratch>(Scratch{RecurrenceChunk(shape, shape.value_dim),
                                                         RecurrenceChunk(shape, width),
                                                         std::vector<float>(shape.key_dim * width),
                                                         {},
                                                         {},
                                                         {}}));
}

void CpuRecurrenceKernel::for_each_head(int64_t heads,
                                        const std::function<void(int64_t, int)>& body) {
  for_each_task(threads_, heads, [&](int64_t head, int thread) {
    body(head, thread);
    if (thread == 0 && progress_) progress_();
  });
}

void CpuRecurrenceKernel::forward(const RecurrenceData& data, TokenRun run,
                                  const RunStates& states) {
  const int64_t elements = shape_.state_elements();
  for_each_head(shape_.value_heads, [&](int64_t head, int thread) {
    Scratch& scratch = *scratch_[thread];
    const std::span<float> all = std::span(scratch.state).first(elements);
    copy_or_zero(part_of(states.before, head, elements), all);
    const MatrixView<float> state(all.data(), shape_.key_dim, shape_.value_dim);
    for_each_chunk(run, false, [&](int64_t begin, int64_t tokens, int64_t) {
      scratch.narrow.load(data, head, begin, tokens);
      scratch.narrow.solve(state);
      scratch.narrow.output(state, data, head, begin);
      scratch.narrow.advance(state);
    });
    if (!states.behind.empty())
      std::ranges::copy(all, part_of(states.behind, head, elements).begin());
  });
}

void CpuRecurrenceKernel::summarize(const RecurrenceData& data, TokenRun run, std::span<float> map,
                                    std::span<float> state) {
  const int64_t dim = shape_.key_dim, values = shape_.value_dim;
  const bool with_matrix = shape_.delta && !map.empty();
  for_each_head(shape_.value_heads, [&](int64_t head, int thread) {
    Scratch& scratch = *scratch_[thread];
    RecurrenceChunk& chunk = with_matrix ? scratch.wide : scratch.narrow;
    const MatrixView<float> wide(scratch.state.data(), dim, values + (with_matrix ? dim : 0));
    std::fill_n(wide.data, wide.rows * wide.cols, 0.0F);
    for (int64_t c = 0; with_matrix && c < dim; ++c) wide(c, values + c) = 1;
    const std::span<float> own_map = part_of(map, head, shape_.map_elements());
    if (!with_matrix) std::ranges::fill(own_map, 1.0F);
    for_each_chunk(run, false, [&](int64_t begin, int64_t tokens, int64_t) {
      chunk.load(data, head, begin, tokens);
      chunk.solve(wide);
      chunk.advance(wide);
      if (!with_matrix) chunk.decay(own_map);
    });
    float* const own_state = part_of(state, head, shape_.state_elements()).data();
    for (int64_t c = 0; c < dim; ++c) {
      std::copy_n(wide.row(c), values, own_state + c * values);
      if (with_matrix) std::copy_n(wide.row(c) + values, dim, own_map.data() + c * dim);
    }
  });
}

void CpuRecurrenceKernel::summarize_back(const RecurrenceData& data, TokenRun run,
                                         std::span<float> d_state) {
  const int64_t elements = shape_.state_elements();
  std::ranges::fill(d_state, 0.0F);
  for_each_head(shape_.value_heads, [&](int64_t head, int thread) {
    RecurrenceChunk& chunk = scratch_[thread]->narrow;
    const MatrixView<float> d_own(part_of(d_state, head, elements).data(), shape_.key_dim,
                                  shape_.value_dim);
    for_each_chunk(run, true, [&](int64_t begin, int64_t tokens, int64_t) {
      chunk.load(data, head, begin, tokens);
      chunk.load_d_out(data, head, begin);
      chunk.solve_back(d_own);
      chunk.retreat(d_own);
    });
  });
}

void CpuRecurrenceKernel::backward(const RecurrenceData& data, TokenRun run,
                                   const RunStates& states) {
  // A task is a key head: its gradients are sums over its value heads.
  for_each_head(shape_.key_heads, [&](int64_t key_head, int thread) {
    Scratch& scratch = *scratch_[thread];
    const int64_t dim = shape_.key_dim;
    for (std::vector<float>* sum : {&scratch.d_q, &scratch.d_k})
      sum->assign(run.tokens * dim, 0.0F);
    for (int64_t h = 0; h < shape_.group(); ++h)
      backward_head(data, run, states, key_head * shape_.group() + h, scratch);
    for (const auto& [array, sum] :
         {std::pair(RecurrenceArray::d_q, &scratch.d_q), {RecurrenceArray::d_k, &scratch.d_k}})
      copy_converted(
          MatrixView<const float>(sum->data(), run.tokens, dim),
          data[array].rows_from(run.begin, run.tokens).columns_from(key_head * dim, dim));
  });
}

void CpuRecurrenceKernel::backward_head(const RecurrenceData& data, TokenRun run,
                                        const RunStates& states, int64_t head, Scratch& scratch) {
  const int64_t elements = shape_.state_elements(), keys = shape_.key_dim;
  RecurrenceChunk& chunk = scratch.narrow;
  scratch.states.resize((ceil_div(run.tokens, recurrence_chunk) + 1) * elements);
  const auto state_before = [&](int64_t index) {
    return MatrixView<float>(scratch.states.data() + index * elements, keys, shape_.value_dim);
  };
  copy_or_zero(part_of(states.before, head, elements), std::span(scratch.states).first(elements));
  for_each_chunk(run, false, [&](int64_t begin, int64_t tokens, int64_t index) {
    const MatrixView<float> state = state_before(index), next = state_before(index + 1);
    std::copy_n(state.data, elements, next.data);
    chunk.load(data, head, begin, tokens);
    chunk.solve(state);
    chunk.advance(next);
  });
  const std::span<float> all = std::span(scratch.state).first(elements);
  copy_or_zero(part_of(states.d_behind, head, elements), all);
  const MatrixView<float> d_state(all.data(), keys, shape_.value_dim);
  for_each_chunk(run, true, [&](int64_t begin, int64_t tokens, int64_t index) {
    chunk.load(data, head, begin, tokens);
    chunk.load_d_out(data, head, begin);
    chunk.solve(state_before(index));
    chunk.solve_back(d_state);
    const auto rows_of = [&](std::vector<float>& sum) {
      return MatrixView<float>(sum.data() + (begin - run.begin) * keys, tokens, keys);
    };
    chunk.gradients(state_before(index), d_state, data, head, begin, rows_of(scratch.d_q),
                    rows_of(scratch.d_k));
    chunk.retreat(d_state);
  });
  if (!states.d_before.empty())
    std::ranges::copy(all, part_of(states.d_before, head, elements).begin());
}

void CpuRecurrenceKernel::apply(std::span<const float> map, std::span<const float> state,
                                bool transposed, std::span<float> into) {
  const int64_t keys = shape_.key_dim, values = shape_.value_dim;
  std::vector<float> before(shape_.state_elements());
  for (int64_t head = 0; head < shape_.value_heads; ++head) {
    const std::span<float> all = part_of(into, head, shape_.state_elements());
    const std::span<const float> m = part_of(map, head, shape_.map_elements());
    const MatrixView<float> own(all.data(), keys, values);
    if (shape_.delta) {
      std::ranges::copy(all, before.begin());
      const MatrixView<const float> matrix(m.data(), keys, keys);
      const MatrixView<const float> old(before.data(), keys, values);
      if (transposed)
        gemm_a_transposed(matrix, old, own);
      else
        gemm(matrix, old, own);
    } else {
      for (int64_t c = 0; c < keys; ++c)
        for (int64_t e = 0; e < values; ++e) own(c, e) *= m[shape_.channel_decay ? c : 0];
    }
    const std::span<const float> b = part_of(state, head, shape_.state_elements());
    for (size_t i = 0; i < all.size(); ++i) all[i] += b[i];
  }
}

void CpuRecurrenceKernel::join(const RunMap& first, const RunMap& second, bool transposed,
                               std::span<float> map, std::span<float> state) {
  std::vector<float> joined(first.state.begin(), first.state.end());
  apply(second.map, second.state, transposed, joined);
  std::ranges::copy(joined, state.begin());
  const auto &left = transposed ? first.map : second.map,
             &right = transposed ? second.map : first.map;
  joined.resize(map.size());
  for (int64_t head = 0; head < shape_.value_heads; ++head) {
    const int64_t elements = shape_.map_elements(), keys = shape_.key_dim;
    const std::span<const float> a = part_of(left, head, elements),
                                 b = part_of(right, head, elements);
    float* const to = joined.data() + head * elements;
    if (shape_.delta)
      gemm(MatrixView<const float>(a.data(), keys, keys),
           MatrixView<const float>(b.data(), keys, keys), MatrixView<float>(to, keys, keys));
    else
      for (int64_t i = 0; i < elements; ++i) to[i] = a[i] * b[i];
  }
  std::ranges::copy(joined, map.begin());
}

void CpuRecurrenceKernel::identity(std::span<float> map, std::span<float> state) {
  std::ranges::fill(state, 0.0F);
  std::ranges::fill(map, shape_.delta ? 0.0F : 1.0F);
  for (int64_t head = 0; shape_.delta && head < shape_.value_heads; ++head)
    for (int64_t c = 0; c < shape_.key_dim; ++c)
      map[head * shape_.map_elements() + c * (shape_.key_dim + 1)] = 1;
}

}  // namespace gyre

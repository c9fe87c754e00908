// The kernel of a recurrence on the device, and its convolution and maps: against the definition in
// double precision, and against the kernels of CPUs.

#include <cmath>

#include "errors.hpp"
#include "gpu_test.hpp"
#include "recurrence/chunk_kernel.hpp"
#include "recurrence/cuda_kernel.hpp"
#include "recurrence_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::copy_arrays;

/// Arrays of some rows in the memory of a stream, with random inputs; results are NaN.
struct Arrays {
  Arrays(const RecurrenceShape& shape_, DType type_, int64_t rows, Stream& stream_)
      : shape(shape_), type(type_), host(shape, type, rows), stream(stream_), there(host.data) {
    for (int64_t t = 0; t < rows; ++t) host.fill(shape, type, t, t);
    for (MatrixRef& array : there.arrays)
      if (!array.empty()) {
        buffers.emplace_back(rows * array.cols * size_of(array.type), stream.space());
        array.data = buffers.back().data();
      }
    copy_arrays(host.data, there, stream);
  }
  /// The results of a document, in units of their tolerances.
  double worst_error(std::string& text) {
    copy_arrays(there, host.data, stream);
    const int64_t tokens = host.data[RecurrenceArray::q].rows;
    std::vector<test::RecurrenceRow> rows;
    for (int64_t t = 0; t < tokens; ++t) rows.push_back({t, t});
    test::RecurrenceErrors errors(shape, type, {tokens, 0});
    errors.compare(host.data, {0, tokens}, rows, true);
    text = errors.text();
    return errors.worst();
  }
  RecurrenceShape shape;
  DType type;
  test::RecurrenceArrays host;
  Stream& stream;
  RecurrenceData there;
  std::vector<Buffer<std::byte>> buffers;
};

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i)
    most = std::isnan(a[i] + b[i]) ? INFINITY : std::max<double>(most, std::abs(a[i] - b[i]));
  return most;
}

class RecurrenceKernelOnDevice : public test::GpuTest {
 protected:
  /// As many elements as this, all NaN.
  Buffer<float> numbers(int64_t count) { return to_device<float>(std::vector<float>(count, NAN)); }
};

struct Size {
  int64_t key_heads, value_heads, key_dim, value_dim, tokens;
};

TEST_F(RecurrenceKernelOnDevice, AgreesWithTheDefinition) {
  const Size sizes[] = {{1, 2, 8, 5, 150},
                        {2, 4, 33, 16, 64},
                        {1, 1, 1, 1, 65},
                        {1, 1, 96, 70, 65},
                        {2, 2, 4, 33, 1}};
  for (const RecurrenceKind& kind : recurrence_kinds())
    for (const DType type : activation_types)
      for (const Size& size : sizes) {
        const RecurrenceShape shape(kind, size.key_heads, size.value_heads, size.key_dim,
                                    size.value_dim);
        Arrays arrays(shape, type, size.tokens, stream());
        // Scratch for all heads, or for those of one head of keys.
        const auto kernel = make_cuda_recurrence_kernel(
            shape, stream(), type == DType::f32 ? device_scratch_bytes : 1);
        kernel->forward(arrays.there, {0, size.tokens}, {});
        kernel->backward(arrays.there, {0, size.tokens}, {});
        std::string text;
        EXPECT_LT(arrays.worst_error(text), 1)
            << kind.name << ' ' << name_of(type) << ' ' << size.tokens << " tokens, dim "
            << size.key_dim << ": " << text;
      }
}

// A run that is cut continues from the states at the cut, and equal calls give equal bits.
TEST_F(RecurrenceKernelOnDevice, RunsContinueFromStates) {
  constexpr int64_t tokens = 100, cut = 70;
  for (const RecurrenceKind& kind : recurrence_kinds()) {
    const RecurrenceShape shape(kind, 1, 2, 8, 40);
    const auto kernel = make_cuda_recurrence_kernel(shape, stream());
    Arrays arrays(shape, DType::f32, tokens, stream());
    const int64_t elements = shape.value_heads * shape.state_elements();
    std::vector<std::vector<float>> gradients;
    for (int i = 0; i < 2; ++i) {
      Buffer<float> at = numbers(elements), d_at = numbers(elements);
      kernel->forward(arrays.there, {0, cut}, {.behind = at.span()});
      kernel->forward(arrays.there, {cut, tokens - cut}, {.before = at.span()});
      kernel->backward(arrays.there, {cut, tokens - cut},
                       {.before = at.span(), .d_before = d_at.span()});
      kernel->backward(arrays.there, {0, cut}, {.d_behind = d_at.span()});
      gradients.push_back(to_host(d_at));
    }
    std::string text;
    EXPECT_LT(arrays.worst_error(text), 1) << kind.name << ": " << text;
    EXPECT_EQ(gradients[0], gradients[1]) << kind.name;
  }
}

// Maps, states and their compositions are those of CPUs.
TEST_F(RecurrenceKernelOnDevice, MapsAreThoseOfCpus) {
  constexpr int64_t tokens = 150, cut = 85;
  for (const RecurrenceKind& kind : recurrence_kinds()) {
    const RecurrenceShape shape(kind, 1, 2, 20, 28);
    const int64_t states = shape.value_heads * shape.state_elements(),
                  maps = shape.value_heads * shape.map_elements();
    CpuRecurrenceKernel on_cpu(shape, 1);
    const auto on_device = make_cuda_recurrence_kernel(shape, stream());
    HostStream host;
    Arrays here(shape, DType::f32, tokens, host), there(shape, DType::f32, tokens, stream());
    /// Everything that a schedule does with maps; each result behind the other.
    const auto all_of = [&](RecurrenceKernel& kernel, const RecurrenceData& data, auto make) {
      auto map = make(maps), later = make(maps), state = make(states), later_state = make(states),
           d_state = make(states), alone = make(states);
      const TokenRun first{0, cut}, second{cut, tokens - cut};
      kernel.summarize(data, first, map.span(), state.span());
      kernel.summarize(data, second, later.span(), later_state.span());
      kernel.summarize(data, first, {}, alone.span());
      kernel.summarize_back(data, second, d_state.span());
      kernel.apply(map.span(), alone.span(), true, d_state.span());
      kernel.apply(later.span(), later_state.span(), false, alone.span());
      kernel.join({map.span(), state.span()}, {later.span(), later_state.span()}, false, map.span(),
                  state.span());
      kernel.join({later.span(), later_state.span()}, {map.span(), state.span()}, true, map.span(),
                  later_state.span());
      kernel.identity(later.span(), {});
      std::vector<float> results;
      for (auto* one : {&map, &later, &state, &later_state, &d_state, &alone}) {
        kernel.stream().synchronize();
        std::vector<float> values(one->size());
        kernel.stream().copy(values.data(), one->data(), values.size() * sizeof(float));
        kernel.stream().synchronize();
        results.insert(results.end(), values.begin(), values.end());
      }
      return results;
    };
    const auto want =
        all_of(on_cpu, here.there, [](int64_t count) { return Buffer<float>(count); });
    const auto got = all_of(*on_device, there.there, [&](int64_t count) { return numbers(count); });
    ASSERT_EQ(want.size(), got.size());
    EXPECT_LT(largest_difference(want, got), 2e-5) << kind.name;
  }
}

/// A part with a history and additions to its gradients; all results, one behind the other.
std::vector<float> convolve(RecurrenceKernel& recurrence, const RecurrenceShape& shape,
                            DType type) {
  constexpr int64_t tokens = 70;
  Stream& stream = recurrence.stream();
  const int64_t before = std::min<int64_t>(shape.convolution - 1, 5);
  Arrays layer(shape, type, tokens + before, stream), inner(shape, DType::f32, tokens, stream),
      history(shape, DType::f32, before + 1, stream);
  using Array = RecurrenceArray;
  ConvolutionPart part;
  for (size_t i = 0; i < convolved_arrays.size(); ++i) {
    const Array of = convolved_arrays[i], d = std::array{Array::d_q, Array::d_k, Array::d_v}[i];
    part.x[i] = layer.there[of].rows_from(before, tokens);
    part.history[i] = layer.there[of].rows_from(0, before);
    part.d_x[i] = layer.there[d].rows_from(before, tokens);
    part.y[i] = inner.there[of];
    part.d_y[i] = inner.there[d];
    part.d_history[i] = history.there[d].rows_from(0, before);
    part.added[i] = history.there[of].rows_from(0, before);
    const MatrixRef& own = inner.host.data[d];
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t c = 0; c < own.cols; ++c)
        own.as<float>()(t, c) = static_cast<float>(std::sin(t + 3 * c));
    stream.copy(inner.there[d].data, own.data, own.rows * own.cols * sizeof(float));
  }
  const auto kernel = recurrence.convolution(shape);
  kernel->set_weights(random_weights(shape, test::recurrence_seed));
  kernel->clear_weight_gradients();
  kernel->forward(part);
  kernel->slopes(part);
  kernel->slopes(part);  // the sum of two parts
  kernel->backward(part);
  Buffer<float> d_weights(shape.channels() * shape.convolution, stream.space());
  kernel->weight_gradients(0, d_weights.span());
  std::vector<float> results(d_weights.size());
  stream.copy(results.data(), d_weights.data(), results.size() * sizeof(float));
  for (Arrays* arrays : {&layer, &inner, &history})
    copy_arrays(arrays->there, arrays->host.data, stream);
  const auto add = [&](const MatrixRef& rows, int64_t first) {
    for (int64_t t = first; t < rows.rows; ++t)
      for (int64_t c = 0; c < rows.cols; ++c) results.push_back(rows.at(t, c));
  };
  for (size_t i = 0; i < convolved_arrays.size(); ++i) {
    const Array of = convolved_arrays[i], d = std::array{Array::d_q, Array::d_k, Array::d_v}[i];
    add(inner.host.data[of], 0);
    add(inner.host.data[d], 0);
    add(layer.host.data[d], before);
    add(history.host.data[d].rows_from(0, before), 0);
  }
  return results;
}

TEST_F(RecurrenceKernelOnDevice, ConvolutionsAreThoseOfCpus) {
  for (const int64_t width : {1, 4, 70})
    for (const DType type : activation_types) {
      RecurrenceShape shape(test::named(recurrence_kinds(), "gdn"), 1, 2, 40, 5);
      shape.convolution = width;
      CpuRecurrenceKernel on_cpu(shape, 1);
      const std::vector<float> want = convolve(on_cpu, shape, type);
      const std::vector<float> got =
          convolve(*make_cuda_recurrence_kernel(shape, stream()), shape, type);
      ASSERT_EQ(want.size(), got.size());
      // A gradient that is stored as bf16 may be rounded the other way.
      const double bound = type == DType::bf16 ? 0.04 : 2e-4;
      EXPECT_LT(largest_difference(want, got), bound) << width << ' ' << name_of(type);
    }
}

TEST_F(RecurrenceKernelOnDevice, RefusesWhatDoesNotFit) {
  const RecurrenceShape shape(recurrence_kinds().front(), 1, 1, 257, 8);
  test::expect_usage("a recurrence on a GPU with 257 elements of a key; at most 256",
                     [&] { make_cuda_recurrence_kernel(shape, stream()); });
}

}  // namespace GYRE_FILE
}  // namespace gyre

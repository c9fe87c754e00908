// Recurrences on one rank: the definition's gradients against finite differences, the chunked
// kernel against the definition, and the maps of runs of tokens.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "recurrence_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::RecurrenceArrays;
using test::RecurrenceErrors;

RecurrenceHead random_head(const RecurrenceShape& shape, int64_t tokens) {
  RecurrenceHead head;
  head.tokens = tokens;
  const auto fill = [&](RecurrenceArray array, std::vector<double>& to) {
    std::vector<float> row(width_of(shape, array));
    for (int64_t t = 0; t < tokens && has_array(shape, array); ++t) {
      fill_recurrence_row(shape, 3, DType::f32, array, t, row);
      to.insert(to.end(), row.begin(), row.end());
    }
  };
  fill(RecurrenceArray::q, head.q);
  fill(RecurrenceArray::k, head.k);
  fill(RecurrenceArray::v, head.v);
  fill(RecurrenceArray::g, head.g);
  fill(RecurrenceArray::beta, head.beta);
  fill(RecurrenceArray::d_out, head.d_out);
  return head;
}

TEST(Recurrence, GradientsOfTheDefinitionAreThoseOfFiniteDifferences) {
  for (const RecurrenceKind& kind : recurrence_kinds()) {
    const RecurrenceShape shape(kind, 1, 1, 3, 2);
    const RecurrenceHead head = random_head(shape, 70);
    const RecurrenceHeadResults results = recurrence_reference(shape, head, true);
    const auto loss = [&](const RecurrenceHead& at) {
      const auto out = recurrence_reference(shape, at, false).out.values;
      return std::inner_product(out.begin(), out.end(), head.d_out.begin(), 0.0);
    };
    const auto check = [&](std::vector<double> RecurrenceHead::*input, const SizedRows& gradient) {
      for (size_t i = 0; i < (head.*input).size(); i += 7) {
        RecurrenceHead moved = head;
        constexpr double step = 1e-5;
        (moved.*input)[i] += step;
        const double above = loss(moved);
        (moved.*input)[i] -= 2 * step;
        EXPECT_NEAR(gradient.values[i], (above - loss(moved)) / (2 * step), 1e-8)
            << kind.name << ' ' << i;
      }
    };
    check(&RecurrenceHead::q, results.d_q);
    check(&RecurrenceHead::k, results.d_k);
    check(&RecurrenceHead::v, results.d_v);
    check(&RecurrenceHead::g, results.d_g);
    check(&RecurrenceHead::beta, results.d_beta);
  }
}

// The sum that a recurrence without the delta rule is: scale · Σ_i <q_t, a k_i> v_i.
TEST(Recurrence, TheDefinitionWithoutDeltaRuleIsASumOverTokens) {
  const RecurrenceShape shape(test::named(recurrence_kinds(), "gla"), 1, 1, 3, 2);
  const RecurrenceHead head = random_head(shape, 9);
  const auto out = recurrence_reference(shape, head, false).out.values;
  for (int64_t t = 0; t < head.tokens; ++t)
    for (int64_t e = 0; e < 2; ++e) {
      double sum = 0;
      for (int64_t i = 0; i <= t; ++i)
        for (int64_t c = 0; c < 3; ++c) {
          double g = 0;
          for (int64_t j = i + 1; j <= t; ++j) g += head.g[j * 3 + c];
          sum += head.q[t * 3 + c] * std::exp(g) * head.k[i * 3 + c] * head.v[i * 2 + e];
        }
      EXPECT_NEAR(out[t * 2 + e], sum / std::sqrt(3.0), 1e-7);
    }
}

// With beta = 1 and no decay, the state returns the last value that was stored under a key.
TEST(Recurrence, TheDeltaRuleReplaces) {
  RecurrenceShape shape(test::named(recurrence_kinds(), "gdn"), 1, 1, 2, 1);
  shape.scale = 1;
  const RecurrenceHead head{.tokens = 3,
                            .q = {1, 0, 0, 1, 1, 0},
                            .k = {1, 0, 0, 1, 1, 0},
                            .v = {5, 7, 11},
                            .g = {0, 0, 0},
                            .beta = {1, 1, 1},
                            .d_out = {}};
  EXPECT_EQ(recurrence_reference(shape, head, false).out.values, (std::vector<double>{5, 7, 11}));
}

struct Size {
  int64_t key_heads, value_heads, key_dim, value_dim;
};

TEST(Recurrence, TheChunkedKernelAgreesWithTheDefinition) {
  for (const RecurrenceKind& kind : recurrence_kinds())
    for (const DType type : {DType::f32, DType::bf16})
      for (const Size& size : {Size{1, 2, 8, 5}, {2, 2, 32, 16}, {1, 1, 1, 1}, {1, 1, 96, 128}})
        for (const int64_t tokens : {1, 2, 63, 64, 65, 150}) {
          if (size.key_dim > 64 && tokens != 65) continue;  // seconds
          const RecurrenceShape shape(kind, size.key_heads, size.value_heads, size.key_dim,
                                      size.value_dim);
          RecurrenceArrays arrays(shape, type, tokens);
          std::vector<test::RecurrenceRow> rows;
          for (int64_t t = 0; t < tokens; ++t) {
            arrays.fill(shape, type, t, t);
            rows.push_back({t, t});
          }
          CpuRecurrenceKernel kernel(shape, 2);
          kernel.forward(arrays.data, {0, tokens}, {});
          kernel.backward(arrays.data, {0, tokens}, {});
          RecurrenceErrors errors(shape, type, {tokens, 0});
          errors.compare(arrays.data, {0, tokens}, rows, true);
          EXPECT_LT(errors.worst(), 1) << kind.name << ' ' << name_of(type) << ' ' << tokens
                                       << " tokens, dim " << size.key_dim << ": " << errors.text();
        }
}

/// The states and maps of a run.
struct States {
  explicit States(const RecurrenceShape& shape)
      : map(shape.value_heads * shape.map_elements()),
        state(shape.value_heads * shape.state_elements()) {}
  std::vector<float> map, state;
};

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max<double>(most, std::abs(a[i] - b[i]));
  return most;
}

TEST(Recurrence, MapsOfRunsCompose) {
  for (const RecurrenceKind& kind : recurrence_kinds()) {
    const RecurrenceShape shape(kind, 1, 2, 16, 12);
    constexpr int64_t tokens = 230, cut = 101, later = 170;
    RecurrenceArrays arrays(shape, DType::f32, tokens);
    for (int64_t t = 0; t < tokens; ++t) arrays.fill(shape, DType::f32, t, t);
    CpuRecurrenceKernel kernel(shape, 1);
    States first(shape), middle(shape), last(shape), whole(shape), behind(shape);
    const auto summarize = [&](TokenRun run, States& to) {
      kernel.summarize(arrays.data, run, to.map, to.state);
    };
    summarize({0, cut}, first);
    summarize({cut, later - cut}, middle);
    summarize({later, tokens - later}, last);
    kernel.forward(arrays.data, {0, tokens}, {.behind = behind.state});
    kernel.summarize(arrays.data, {0, tokens}, {}, whole.state);
    EXPECT_LT(largest_difference(whole.state, behind.state), 1e-5) << kind.name;
    std::vector<float> state = first.state;
    kernel.apply(middle.map, middle.state, false, state);
    kernel.apply(last.map, last.state, false, state);
    EXPECT_LT(largest_difference(state, behind.state), 1e-5) << kind.name;
    States none(shape);
    kernel.identity(none.map, none.state);
    kernel.apply(none.map, none.state, false, state);
    EXPECT_LT(largest_difference(state, behind.state), 1e-5) << kind.name;

    // The gradient of the state at `cut`, of one run or of its maps.
    std::vector<float> d_state(state.size()), d_last(state.size()), d_middle(state.size());
    kernel.backward(arrays.data, {cut, tokens - cut}, {.before = first.state, .d_before = d_state});
    kernel.summarize_back(arrays.data, {later, tokens - later}, d_last);
    kernel.summarize_back(arrays.data, {cut, later - cut}, d_middle);
    kernel.apply(middle.map, d_middle, true, d_last);
    EXPECT_LT(largest_difference(d_state, d_last), 1e-5) << kind.name;
  }
}

// The map of two runs as one is that of the whole run, forward and backward, in the place of either.
TEST(Recurrence, MapsJoin) {
  for (const RecurrenceKind& kind : recurrence_kinds()) {
    const RecurrenceShape shape(kind, 1, 2, 16, 12);
    constexpr int64_t tokens = 45, cut = 20;
    RecurrenceArrays arrays(shape, DType::f32, tokens);
    for (int64_t t = 0; t < tokens; ++t) arrays.fill(shape, DType::f32, t, t);
    CpuRecurrenceKernel kernel(shape, 1);
    States first(shape), second(shape), whole(shape), joined(shape);
    kernel.summarize(arrays.data, {0, cut}, first.map, first.state);
    kernel.summarize(arrays.data, {cut, tokens - cut}, second.map, second.state);
    kernel.summarize(arrays.data, {0, tokens}, whole.map, whole.state);
    kernel.join({first.map, first.state}, {second.map, second.state}, false, joined.map,
                joined.state);
    EXPECT_LT(largest_difference(joined.map, whole.map), 1e-5) << kind.name;
    EXPECT_LT(largest_difference(joined.state, whole.state), 1e-5) << kind.name;

    kernel.summarize_back(arrays.data, {0, cut}, first.state);
    kernel.summarize_back(arrays.data, {cut, tokens - cut}, second.state);
    kernel.summarize_back(arrays.data, {0, tokens}, whole.state);
    kernel.join({second.map, second.state}, {first.map, first.state}, true, first.map, first.state);
    EXPECT_LT(largest_difference(first.map, whole.map), 1e-5) << kind.name;
    EXPECT_LT(largest_difference(first.state, whole.state), 1e-5) << kind.name;
  }
}

// A run that is cut continues from the states at the cut: all results are those of the whole run.
TEST(Recurrence, RunsContinueFromStates) {
  for (const RecurrenceKind& kind : recurrence_kinds()) {
    const RecurrenceShape shape(kind, 2, 4, 16, 24);
    constexpr int64_t tokens = 150, cut = 70;
    RecurrenceArrays arrays(shape, DType::f32, tokens);
    std::vector<test::RecurrenceRow> rows;
    for (int64_t t = 0; t < tokens; ++t) {
      arrays.fill(shape, DType::f32, t, t);
      rows.push_back({t, t});
    }
    CpuRecurrenceKernel kernel(shape, 1);
    States at(shape), d_at(shape);
    kernel.forward(arrays.data, {0, cut}, {.behind = at.state});
    kernel.forward(arrays.data, {cut, tokens - cut}, {.before = at.state});
    kernel.backward(arrays.data, {cut, tokens - cut}, {.before = at.state, .d_before = d_at.state});
    kernel.backward(arrays.data, {0, cut}, {.d_behind = d_at.state});
    RecurrenceErrors errors(shape, DType::f32, {tokens, 0});
    errors.compare(arrays.data, {0, tokens}, rows, true);
    EXPECT_LT(errors.worst(), 1) << kind.name << ": " << errors.text();
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

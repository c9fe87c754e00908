#pragma once
// A recurrent layer on the ranks of a test, on the host or on a device.

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "mpi_test.hpp"
#include "recurrence/execute.hpp"
#include "recurrence/schedules/schedule.hpp"
#include "recurrence_cases.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre::test {

struct Mix {
  const char* name;
  std::vector<int64_t> lengths;
};

/// Offsets of documents of these lengths.
inline std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets{0};
  for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

inline LayoutOptions of_ranks(int cp, int64_t run) {
  LayoutOptions options;
  options.cp = cp;
  options.stripe = options.chunk = run;
  return options;
}

/// A layout; `run`: tokens of a stripe or a chunk.
struct Sharding {
  const char* layout = "contiguous";
  int64_t run = 1;
};

/// One recurrence under one schedule, on this rank.
struct Layer {
  Layer(const RecurrenceShape& shape_, DType type_, const StateSchedule& schedule_, const Mix& mix,
        const Sharding& sharding = {}, Communicator& group_ = world(), Stream* stream_ = nullptr)
      : group(group_),
        stream(stream_ == nullptr ? host : *stream_),
        shape(shape_),
        type(type_),
        schedule(schedule_),
        offsets(offsets_of(mix.lengths)),
        placed(offsets, find_layout(sharding.layout), of_ranks(group.size(), sharding.run)),
        problem{&placed.layout, shape, type},
        rank(group.rank()),
        plan(plan_rank(schedule, problem, rank)),
        kernel(make_recurrence_kernel(plan.computed(shape), 1, stream)),
        executor(plan, placed.layout, group, *kernel) {
    if (shape.convolution > 0)
      executor.convolution()->set_weights(random_weights(shape, recurrence_seed));
    RecurrenceArrays inputs(shape, type, shard().slots);
    for (const Fragment& f : shard().fragments)
      for (int64_t i = 0; i < f.length; ++i)
        inputs.fill(shape, type, f.local_begin.value() + i, token_of(f, i));
    copy_arrays(inputs.data, executor.data(), stream);
  }
  const Shard& shard() const { return placed.layout.shard(rank); }
  int64_t token_of(const Fragment& f, int64_t i) const {
    return offsets[f.segment] + f.start.value() + i * f.stride;
  }
  void check_traffic(Pass pass) {
    const Traffic before = group.traffic();
    executor.run(pass);
    const Traffic after = group.traffic();
    const StateForm form = closed_form(schedule, problem, rank, pass);
    EXPECT_EQ(after.bytes_sent - before.bytes_sent, form.bytes_sent) << name_of(pass);
    EXPECT_EQ(after.messages - before.messages, form.messages) << name_of(pass);
    const StateCount counted = count(plan, pass, shape);
    EXPECT_EQ(counted.bytes_sent, form.bytes_sent);
    EXPECT_EQ(counted.messages, form.messages);
  }
  double worst_error(std::string& text) {
    int64_t longest = 0;
    for (size_t d = 0; d + 1 < offsets.size(); ++d)
      longest = std::max(longest, offsets[d + 1] - offsets[d]);
    RecurrenceArrays computed(shape, type, shard().slots);
    copy_arrays(executor.data(), computed.data, stream);
    RecurrenceErrors errors(shape, type, {longest, schedule.maps(problem), problem.cp()});
    std::map<int64_t, std::vector<RecurrenceRow>> rows;  // by document
    for (const Fragment& f : shard().fragments)
      for (int64_t i = 0; i < f.length; ++i)
        rows[f.segment].push_back({f.local_begin.value() + i, f.start.value() + i * f.stride});
    for (const auto& [document, own] : rows)
      errors.compare(computed.data, {offsets[document], offsets[document + 1] - offsets[document]},
                     own, true);
    std::vector<DocumentTokens> documents;
    for (size_t d = 0; d + 1 < offsets.size(); ++d)
      documents.push_back({offsets[d], offsets[d + 1] - offsets[d]});
    if (shape.convolution > 0) errors.compare_weights(weight_gradients(), documents);
    text = errors.text();
    return errors.worst();
  }

  /// Results of this rank's tokens, and the gradient of the weights.
  std::vector<float> results() {
    std::vector<float> mine;
    RecurrenceArrays computed(shape, type, shard().slots);
    copy_arrays(executor.data(), computed.data, stream);
    for (const Fragment& f : shard().fragments)
      for (int a = static_cast<int>(first_result); a < recurrence_arrays; ++a)
        for (int64_t i = 0; i < f.length; ++i)
          for (int64_t c = 0; c < computed.data.arrays[a].cols; ++c)
            mine.push_back(computed.data.arrays[a].at(f.local_begin.value() + i, c));
    const std::vector<float> of_weights = weight_gradients();
    mine.insert(mine.end(), of_weights.begin(), of_weights.end());
    return mine;
  }
  /// Gradients of the convolution's weights; empty without one.
  std::vector<float> weight_gradients() {
    if (shape.convolution == 0) return {};
    const std::span<const float> there = executor.convolution()->weight_gradients();
    std::vector<float> here(there.size());
    stream.copy(here.data(), there.data(), there.size_bytes());
    stream.synchronize();
    return here;
  }

  HostStream host;
  Communicator& group;
  Stream& stream;
  RecurrenceShape shape;
  DType type;
  const StateSchedule& schedule;
  std::vector<int64_t> offsets;
  PaddedLayout placed;
  RecurrenceProblem problem;
  int rank;
  StatePlan plan;
  std::unique_ptr<RecurrenceKernel> kernel;
  RecurrenceExecutor executor;
};

}  // namespace gyre::test

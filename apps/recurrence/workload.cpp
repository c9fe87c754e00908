#include "apps/recurrence/workload.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "apps/common/workload_options.hpp"
#include "core/error.hpp"
#include "recurrence/convolution_stage.hpp"
#include "recurrence/device_scratch.hpp"
#include "recurrence/inputs.hpp"

namespace gyre {
namespace {

using Array = RecurrenceArray;

const std::vector<float>& input_of(const RecurrenceFile& file, Array array) {
  switch (array) {
    case Array::q:
      return file.q;
    case Array::k:
      return file.k;
    case Array::v:
      return file.v;
    case Array::g:
      return file.g;
    case Array::beta:
      return file.beta;
    default:
      return file.d_out;
  }
}

bool rounds(Array array, DType type) {
  return stored_type(array, type) == DType::bf16;
}

void check_decays(const RecurrenceFile& file, ConfigErrors& errors) {
  for (size_t i = 0; i < file.g.size(); ++i)
    if (file.g[i] > 0) {
      errors.add("/recurrence/g[{}] is {}; it is the logarithm of a decay: at most 0", i,
                 file.g[i]);
      return;
    }
}

void check_strengths(const RecurrenceFile& file, ConfigErrors& errors) {
  const int64_t group = file.heads / file.key_heads;
  for (size_t i = 0; i < file.beta.size(); ++i) {
    const int64_t token = static_cast<int64_t>(i) / file.heads,
                  head = static_cast<int64_t>(i) % file.heads;
    double square = 0;
    const auto key = file.k.begin() + (token * file.key_heads + head / group) * file.key_dim;
    for (auto x = key; x != key + file.key_dim; ++x) square += double{*x} * *x;
    if (file.conv_width > 0) square = 1;  // the most that a normalised key has
    // Beyond 2, I - beta k kᵀ makes states and their errors grow without end.
    constexpr double most = 2.001;
    if (file.beta[i] >= 0 && file.beta[i] * square <= most) continue;
    errors.add(
        "/recurrence/beta[{}, {}] is {}, and the key has the square {:.4g}; their product "
        "must be from 0 to 2",
        token, head, file.beta[i], square);
    return;
  }
}

}  // namespace

int64_t RecurrenceWorkload::longest() const {
  int64_t most = 0;
  for (int64_t d = 0; d < documents(); ++d) most = std::max(most, document(d).tokens);
  return most;
}

RecurrenceWorkload generated_workload(const RecurrenceOptions& o, int64_t size) {
  RecurrenceWorkload workload;
  workload.type = o.type();
  std::vector<int64_t> lengths(o.batch, size);
  workload.origin = fmt::format("{} x {} tokens", o.batch, size);
  if (!o.generate.empty()) lengths = generated_lengths(o.generate, o.capacity, workload.origin);
  workload.offsets = {0};
  for (const int64_t length : lengths) workload.offsets.push_back(workload.offsets.back() + length);
  return workload;
}

RecurrenceWorkload workload_of(const RecurrenceFile& file, const RecurrenceOptions& o) {
  ConfigErrors errors;
  check_decays(file, errors);
  check_strengths(file, errors);
  errors.throw_if_any(o.input);
  return {file.offsets, o.type(), o.input};
}

const RecurrenceKind& kind_of(const RecurrenceFile& file) {
  return *std::ranges::find_if(recurrence_kinds(), [&](const RecurrenceKind& kind) {
    return kind.delta == file.has_delta_rule() && kind.channel_decay == file.has_channel_decay();
  });
}

RecurrenceShape shape_of(const RecurrenceFile& file) {
  RecurrenceShape shape(kind_of(file), file.key_heads, file.heads, file.key_dim, file.value_dim);
  shape.scale = static_cast<float>(file.scale);
  shape.convolution = file.conv_width;
  return shape;
}

RecurrenceShape shape_of(const RecurrenceOptions& o, const RecurrenceKind& kind) {
  RecurrenceShape shape(kind, o.key_heads, o.heads, o.key_dim, o.value_dim);
  shape.convolution = o.conv;
  return shape;
}

RecurrenceRows random_rows(const RecurrenceShape& shape, const RecurrenceOptions& o) {
  return [shape, seed = static_cast<uint64_t>(o.seed), type = o.type()](Array array, int64_t token,
                                                                        std::span<float> row) {
    fill_recurrence_row(shape, seed, type, array, token, row);
  };
}

RecurrenceRows rows_of(const RecurrenceFile& file, DType type) {
  return [&file, type](Array array, int64_t token, std::span<float> row) {
    std::copy_n(input_of(file, array).begin() + token * std::ssize(row), row.size(), row.begin());
    if (!rounds(array, type)) return;
    for (float& x : row) x = to_float(to_bf16(x));
  };
}

std::vector<AnswerUse> keep_answers(RecurrenceFile& file, const RecurrenceOptions& o) {
  if (!file.reference) return {};
  std::string rounded = file.rounded.empty() ? "" : *file.rounded.begin();
  for (const Array array : {Array::q, Array::k, Array::v, Array::d_out})
    for (const float x : input_of(file, array))
      if (rounds(array, o.type()) && to_float(to_bf16(x)) != x)
        rounded = fmt::format("/recurrence/{}", name_of(array));
  std::vector<AnswerUse> uses;
  for (auto& [name, answers] : file.reference->arrays) {
    AnswerUse& use = uses.emplace_back();
    use.name = name;
    if (o.check == "none") use.why_not = "--check none";
    if (name != name_of(Array::out) && o.pass == "fwd") {
      use.why_not = "--pass fwd";
      use.was_asked = false;
    }
    if (use.why_not.empty() && !rounded.empty())
      use.why_not = fmt::format("the run rounds {}", rounded);
    if (!use.why_not.empty()) answers.clear();
  }
  for (const std::string& name : file.reference->unknown) uses.push_back({name, "not known"});
  return uses;
}

PlannedRecurrence::PlannedRecurrence(const RecurrenceWorkload& workload,
                                     const RecurrenceKind& kind_, const RecurrenceShape& shape,
                                     const StateSchedule& schedule_, const LayoutKind& layout,
                                     const LayoutOptions& options, int rank)
    : kind(kind_),
      schedule(schedule_),
      placed(workload.offsets, layout, options),
      problem{&placed.layout, shape, workload.type},
      plan(plan_rank(schedule, problem, rank)) {}

int64_t planned_bytes(const PlannedRecurrence& planned, DType type, MemorySpace space) {
  const RecurrenceShape& shape = planned.problem.shape;
  int64_t longest = 0;
  if (space == MemorySpace::device)
    for (const StatePart& part : planned.plan.parts) longest = std::max(longest, part.tokens);
  return transient_bytes(planned.plan, planned.problem) +
         bytes_of_arrays(shape, type, planned.placed.layout.slots_of_rank()) +
         scratch_bytes(planned.plan.computed(shape), longest, true);
}

}  // namespace gyre

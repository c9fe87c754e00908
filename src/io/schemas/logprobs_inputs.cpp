#include "io/schemas/logprobs_inputs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/bf16.hpp"

namespace gyre {
namespace {

using Input = LogprobsInput;

/// Adds an error for the first value that is not right.
template <class T, class Right>
void check_each(ConfigErrors& errors, const std::vector<T>& values, const Input& input,
                const Right& is_right, const std::string& must) {
  const auto wrong = std::ranges::find_if_not(values, is_right);
  if (wrong != values.end())
    errors.add("{}[{}] is {}; {}", input.path(), wrong - values.begin(), *wrong, must);
}

void check_finite_values(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_finite(errors, input.path(), f.floats(input.name));
}

/// Gradients of values, finite and so small that sums of their terms stay in f32: at most 1e31, or
/// 1e31 times the temperature squared.
void check_gradients(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  const std::vector<float>& gradients = f.floats(input.name);
  const std::vector<double>& temperatures = f.arrays.of<double>("temperature");
  const int64_t width = std::ssize(gradients) / std::max<int64_t>(1, f.tokens());
  constexpr double largest = 1e31F;
  for (int64_t i = 0; i < std::ssize(gradients); ++i) {
    const double t = temperatures.empty() ? f.temperature : temperatures[i / width];
    const double most = largest * std::min(1.0, t * t);
    if (std::abs(gradients[i]) <= most) continue;
    if (!std::isfinite(gradients[i]))
      return errors.add("{}[{}] is {}; it must be finite", input.path(), i, gradients[i]);
    return errors.add("{}[{}] is {}; a gradient at a temperature of {:g} is from {:g} to {:g}",
                      input.path(), i, gradients[i], t, -most, most);
  }
}

void check_finite_or_masked(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_finite(errors, input.path(), f.floats(input.name), true);
}

/// Logits are finite or -inf; a row needs a finite one.
void check_logits(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  const std::vector<float>& values = f.floats(input.name);
  const std::vector<double>& heats = f.arrays.of<double>("temperature");
  constexpr float infinite = std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < f.tokens(); ++t) {
    float least = infinite, most = -infinite;
    for (int64_t v = 0; v < f.vocab_size; ++v) {
      const float z = values[t * f.columns + v];
      if (!(z < infinite))
        return errors.add("{}[{}, {}] is {}; it must be finite or -inf", input.path(), t, v, z);
      if (z == -infinite) continue;
      least = std::min(least, z);
      most = std::max(most, z);
    }
    if (most == -infinite)
      return errors.add("{}[{}] is -inf throughout; a row needs a finite logit", input.path(), t);
    // Over a temperature above 1, their difference could be within f32.
    const double heat = heats.empty() ? f.temperature : heats[t];
    if (input.name == "logits" && heat > 1 && most - least == infinite)
      return errors.add(
          "{}[{}] has logits of {:g} and {:g}, whose difference float32 does not hold, and a "
          "temperature above 1",
          input.path(), t, least, most);
  }
}

void check_logprobs(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_each(
      errors, f.floats(input.name), input, [](float x) { return x <= 0; },
      "a log-probability is at most 0");
}

std::string ids_text(const LogprobsFile& f) {
  return fmt::format("ids are 0 to {}", f.vocab_size - 1);
}
bool is_id(const LogprobsFile& f, int32_t id) {
  return id >= 0 && id < f.vocab_size;
}

void check_ids(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_each(
      errors, f.ints(input.name), input, [&](int32_t id) { return is_id(f, id); }, ids_text(f));
}

/// A teacher's log-probabilities of ids, each id once in a row.
void check_logprobs_of_ids(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_logprobs(errors, f, input);
  const std::vector<int32_t>& all = f.ints(input.of);
  if (!std::ranges::all_of(all, [&](int32_t id) { return is_id(f, id); })) return;
  std::vector<int64_t> row_of_id(f.vocab_size, -1);
  for (int64_t i = 0; i < std::ssize(all); ++i) {
    const int64_t t = i / f.picks;
    if (row_of_id[all[i]] == t)
      return errors.add(
          "/logprobs/{}[{}, {}] is {}, which the row has already; {} is of different ids", input.of,
          t, i % f.picks, all[i], input.path());
    row_of_id[all[i]] = t;
  }
}

/// Sets of ids of the vocabulary, an id once in each.
void check_kept_ids(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  const std::vector<int64_t>& offsets = f.arrays.of<int64_t>(input.of);
  const std::vector<int32_t>& kept = f.ints(input.name);
  const size_t before = errors.messages().size();
  check_offsets(errors, "/logprobs/" + input.of, offsets, std::ssize(kept), input.path());
  if (errors.messages().size() > before) return;
  std::vector<int64_t> row_of_id(f.vocab_size, -1);
  for (int64_t t = 0; t < f.tokens(); ++t)
    for (int64_t i = offsets[t]; i < offsets[t + 1]; ++i) {
      if (!is_id(f, kept[i]))
        return errors.add("{}[{}] is {}; {}", input.path(), i, kept[i], ids_text(f));
      if (row_of_id[kept[i]] == t)
        return errors.add("{}[{}] is {}, which row {} has already", input.path(), i, kept[i], t);
      row_of_id[kept[i]] = t;
    }
}

void check_projection(ConfigErrors& errors, const LogprobsFile& f, const Input&) {
  const std::string fault = fault_of(f.projection(), f.vocab_size, "/logprobs/projection_");
  if (!fault.empty()) errors.add("{}", fault);
}

void check_temperature(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_each(errors, f.arrays.of<double>(input.name), input, is_temperature,
             "it must be " + temperature_range());
}
void check_top_k(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_each(
      errors, f.ints(input.name), input, [&](int32_t k) { return k >= 0 && k <= f.vocab_size; },
      "it must be " + top_k_range(f.vocab_size));
}
void check_top_p(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_each(errors, f.arrays.of<double>(input.name), input, is_top_p,
             fmt::format("it must be {}", top_p_range));
}
void check_min_p(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  check_each(errors, f.arrays.of<double>(input.name), input, is_min_p,
             fmt::format("it must be {}", min_p_range));
}

/// Rows of an input that operations declare.
void check_rows_of_operation(ConfigErrors& errors, const LogprobsFile& f, const Input& input) {
  const std::vector<float>& values = f.floats(input.name);
  const std::vector<int32_t>& ids = f.ints("ids");
  const size_t width = input.shape == "T" ? 1 : f.picks, picks = input.of.empty() ? 0 : f.picks;
  for (size_t t = 0; t * width < values.size(); ++t) {
    const std::string fault = input.own->fault(std::span(ids).subspan(t * picks, picks),
                                               std::span(values).subspan(t * width, width));
    if (!fault.empty()) return errors.add("{}[{}] {}", input.path(), t, fault);
  }
}

/// Whether rounding to `type` changes a value that is no padding.
bool changes(const LogprobsFile& f, const Input& input, DType type) {
  if (type != DType::bf16) return false;
  const std::vector<float>& values = f.floats(input.name);
  const bool padded = input.shape.ends_with('C');
  for (int64_t i = 0; i < std::ssize(values); ++i)
    if (!(padded && i % f.columns >= f.vocab_size) && to_float(to_bf16(values[i])) != values[i])
      return true;
  return false;
}

/// Lists the inputs that score each row: targets, gradients, filters, sets of ids, projections.
std::vector<Input> inputs_of_rows() {
  using enum Input::Stored;
  using enum Input::Rounded;
  using enum SchemaName::Presence;
  return {
      {.name = "offsets", .shape = "s", .stored = i64, .presence = depends},
      {.name = "logits",
       .shape = "TC",
       .presence = required,
       .check = check_logits,
       .rounded = logits},
      {.name = "targets", .shape = "T", .stored = i32, .presence = required},
      {.name = "d_value", .shape = "T", .check = check_gradients},
      {.name = "d_logprobs",
       .shape = "TV",
       .check = check_gradients,
       .rounded = outputs,
       .stand_in = "d_value"},
      {.name = "d_entropies", .shape = "T", .check = check_gradients, .stand_in = "d_value"},
      {.name = "temperature", .shape = "T", .stored = f64, .check = check_temperature},
      {.name = "top_k", .shape = "T", .stored = i32, .check = check_top_k},
      {.name = "top_p", .shape = "T", .stored = f64, .check = check_top_p},
      {.name = "min_p", .shape = "T", .stored = f64, .check = check_min_p},
      {.name = "sampling_mask_offsets",
       .shape = "t",
       .stored = i64,
       .presence = depends,
       .set = "kept"},
      {.name = "sampling_mask_ids",
       .shape = "I",
       .stored = i32,
       .presence = depends,
       .check = check_kept_ids,
       .set = "kept",
       .of = "sampling_mask_offsets"},
      {.name = "projection_offsets",
       .shape = "v",
       .stored = i64,
       .presence = depends,
       .set = "projection"},
      {.name = "projection_columns",
       .shape = "E",
       .stored = i32,
       .presence = depends,
       .set = "projection"},
      {.name = "projection_weights",
       .shape = "E",
       .presence = depends,
       .check = check_projection,
       .set = "projection"},
      {.name = "d_projected",
       .shape = "TJ",
       .check = check_gradients,
       .of = "projection_offsets",
       .stand_in = "d_value"},
  };
}

/// Lists the other inputs: more ids of a row, a teacher, hidden states and the head.
std::vector<Input> inputs_beside_rows() {
  using enum Input::Stored;
  using enum Input::Rounded;
  using enum SchemaName::Presence;
  return {
      {.name = "ids", .shape = "TK", .stored = i32, .presence = depends, .check = check_ids},
      {.name = "d_ids",
       .shape = "TK",
       .check = check_gradients,
       .of = "ids",
       .stand_in = "d_value"},
      {.name = "teacher", .shape = "TC", .check = check_logits, .rounded = logits},
      {.name = "teacher_values",
       .shape = "TK",
       .check = check_finite_or_masked,
       .of = "ids",
       .rounded = logits,
       .stand_in = "teacher"},
      {.name = "teacher_logprobs",
       .shape = "TK",
       .presence = depends,
       .check = check_logprobs_of_ids,
       .set = "teacher_logprobs",
       .of = "ids",
       .stand_in = "teacher"},
      {.name = "teacher_target_logprobs",
       .shape = "T",
       .presence = depends,
       .check = check_logprobs,
       .set = "teacher_logprobs"},
      {.name = "hidden",
       .shape = "TD",
       .presence = depends,
       .check = check_finite_values,
       .set = "linear",
       .rounded = logits},
      {.name = "head",
       .shape = "VD",
       .presence = depends,
       .check = check_finite_values,
       .set = "linear",
       .rounded = logits},
  };
}

}  // namespace

const std::vector<LogprobsInput>& logprobs_inputs() {
  static const std::vector<Input> all = [] {
    std::vector<Input> inputs = inputs_of_rows();
    for (Input& input : inputs_beside_rows()) inputs.push_back(std::move(input));
    for (const RowInput& own : row_inputs())
      inputs.push_back({.name = own.name,
                        .shape = own.shape,
                        .check = check_rows_of_operation,
                        .of = own.shape == "TK" ? "ids" : "",
                        .own = &own});
    return inputs;
  }();
  return all;
}

const LogprobsInput* input_with_extent(char letter) {
  static const std::map<char, std::string> names = {
      {'K', "ids"}, {'D', "hidden"}, {'J', "projection_offsets"}};
  const auto name = names.find(letter);
  if (name == names.end()) return nullptr;
  return &logprobs_input(name->second);
}

const LogprobsInput& logprobs_input(const std::string& name) {
  const auto found = std::ranges::find(logprobs_inputs(), name, &Input::name);
  GYRE_CHECK(found != logprobs_inputs().end(), "/logprobs has no input {}", name);
  return *found;
}

std::string temperature_range() {
  return fmt::format("from {} to {}", least_temperature, max_temperature);
}

std::string top_k_range(int64_t vocab_size) {
  return fmt::format("0, none, or at most vocab_size, {}", vocab_size);
}

std::set<std::string> rounded_inputs(const LogprobsFile& file, DType logits, DType outputs) {
  std::set<std::string> names;
  for (const Input& input : logprobs_inputs()) {
    if (input.stored != Input::Stored::f32) continue;
    const bool stands_in = !file.has(input.name) && !input.stand_in.empty();
    const Input& source = stands_in ? logprobs_input(input.stand_in) : input;
    const DType type = input.rounded == Input::Rounded::logits    ? logits
                       : input.rounded == Input::Rounded::outputs ? outputs
                                                                  : DType::f32;
    if (file.rounded.contains(source.path()) || changes(file, source, type) ||
        (stands_in && names.contains(source.name)))
      names.insert(input.name);
  }
  return names;
}

}  // namespace gyre

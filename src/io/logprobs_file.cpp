#include "io/logprobs_file.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "comm/agree.hpp"
#include "io/logprobs_checks.hpp"

namespace gyre {
namespace {

constexpr const char* answers_group = "/reference";
constexpr const char *projection_arrays = "/logprobs/projection_",
                     *projection_width = "projection_width",
                     *projection_offsets_path = "/logprobs/projection_offsets",
                     *projection_columns_path = "/logprobs/projection_columns",
                     *projection_weights_path = "/logprobs/projection_weights",
                     *d_projected_path = "/logprobs/d_projected";

struct LogprobsParts {
  std::optional<h5::Dataset> offsets, logits, teacher, teacher_values, teacher_logprobs,
      teacher_target_logprobs, targets, ids, d_value, d_logprobs, hidden, head, temperature, top_k,
      top_p, min_p, kept_offsets, kept_ids, projection_offsets, projection_columns,
      projection_weights, d_projected;
  std::vector<std::pair<std::string, h5::Dataset>> answers;
};

constexpr const char *temperature_name = "temperature", *top_k_name = "top_k",
                     *top_p_name = "top_p", *min_p_name = "min_p";

std::string temperature_range() {
  return fmt::format("from {} to {}", least_temperature, max_temperature);
}
std::string top_k_range(const LogprobsFile& f) {
  return fmt::format("0, none, or at most vocab_size, {}", f.vocab_size);
}
constexpr const char *top_p_range = "above 0 and at most 1, none",
                     *min_p_range = "from 0, none, to 1";

void check_attributes(SchemaReader& reader, LogprobsFile& f) {
  ConfigErrors& errors = reader.errors();
  f.vocab_size = reader.integer("/logprobs", "vocab_size");
  const auto is_of_tokens = [&](const char* name) {
    const bool both =
        reader.is_there(fmt::format("/logprobs/{}", name)) && reader.has("/logprobs", name);
    if (both)
      errors.add(
          "'/logprobs' has {0} as an attribute, of all tokens, and as the dataset "
          "/logprobs/{0}, of each; leave one out",
          name);
    return both;
  };
  const auto real = [&](const char* name, double usual) {
    return is_of_tokens(name) ? usual : reader.real("/logprobs", name, usual);
  };
  f.top_k = is_of_tokens(top_k_name) ? 0 : reader.integer("/logprobs", top_k_name, 0);
  f.top_p = real(top_p_name, 1);
  f.min_p = real(min_p_name, 0);
  f.temperature = real(temperature_name, 1);
  check_vocabulary(errors, "/logprobs", f.vocab_size);
  const auto check = [&](const char* name, double value, bool right, const std::string& range) {
    if (!right) errors.add("{} of '/logprobs' is {}; it must be {}", name, value, range);
  };
  check(top_k_name, static_cast<double>(f.top_k), f.top_k >= 0 && f.top_k <= f.vocab_size,
        top_k_range(f));
  check(top_p_name, f.top_p, is_top_p(f.top_p), top_p_range);
  check(min_p_name, f.min_p, is_min_p(f.min_p), min_p_range);
  check(temperature_name, f.temperature, is_temperature(f.temperature), temperature_range());
}

/// Without ids, the first array of largest logits sets the entries per token; others must agree.
void check_top(SchemaReader& reader, LogprobsFile& f, const std::string& path, int64_t entries) {
  if (entries < 1 || entries > f.vocab_size || (f.top > 0 && entries != f.top))
    reader.errors().add("{} has {} entries a token; it must be {}", path, entries,
                        f.top > 0 ? fmt::format("{}, as many as there are values", f.top)
                                  : fmt::format("1 to {}, of the vocabulary", f.vocab_size));
  f.top = entries;
}

/// Extents of an array; -1 where unknown.
h5::Shape shape_of(LogprobsShape shape, const LogprobsFile& f, int64_t tokens, int64_t sequences) {
  const int64_t ids = f.vocab_size > 0 ? f.vocab_size : -1, width = f.linear ? f.linear->width : -1;
  switch (shape) {
    case LogprobsShape::tokens:
      return {tokens};
    case LogprobsShape::picks:
      return {tokens, f.picks > 0 ? f.picks : -1};
    case LogprobsShape::top:
      return {tokens, f.picks > 0 && ids > 0 ? std::min(f.picks, ids) : -1};
    case LogprobsShape::vocab:
      return {tokens, ids};
    case LogprobsShape::predictions:
      return {sequences, -1};
    case LogprobsShape::hidden:
      return {tokens, width};
    case LogprobsShape::head:
      return {ids, width};
    case LogprobsShape::projected:
      return {tokens, f.projection ? f.projection->width : -1};
  }
  return {};
}

std::string place_of(const LogprobsArray& array) {
  return fmt::format("{}/{}", answers_group, array.name);
}
std::vector<std::string> places_of(const std::vector<LogprobsArray>& arrays) {
  std::vector<std::string> places;
  for (const LogprobsArray& array : arrays) places.push_back(place_of(array));
  return places;
}

/// Opens the arrays of answers that are present, and notes datasets of unknown names.
void open_reference(SchemaReader& reader, const h5::File& file,
                    const std::vector<LogprobsArray>& arrays, LogprobsFile& f, int64_t tokens,
                    LogprobsParts& parts) {
  const int64_t sequences = parts.offsets ? parts.offsets->shape()[0] - 1 : 1;
  for (const LogprobsArray& array : arrays) {
    const std::string path = place_of(array);
    if (!reader.is_there(path)) continue;
    const h5::Shape shape = shape_of(array.shape, f, tokens, sequences);
    auto dataset = array.integers ? reader.integers(path, shape) : reader.reals(path, shape);
    if (!dataset) continue;
    if (array.shape == LogprobsShape::picks && !reader.is_there("/logprobs/ids"))
      reader.errors().add("{} is there, and '/logprobs/ids', which it is of, is not", path);
    if ((array.shape == LogprobsShape::hidden || array.shape == LogprobsShape::head) && !f.linear)
      reader.errors().add("{} is there, and '/logprobs/hidden', which it is of, is not", path);
    if (array.shape == LogprobsShape::projected && !f.projection)
      reader.errors().add("{} is there, and '{}', which it is of, is not", path,
                          projection_offsets_path);
    if (array.shape == LogprobsShape::top) check_top(reader, f, path, dataset->shape()[1]);
    parts.answers.emplace_back(array.name, std::move(*dataset));
  }
  f.reference->unknown = unknown_answers(file, logprobs_schema, places_of(arrays));
}

/// Opens hidden states and head; a file must have both or neither.
void open_linear(SchemaReader& reader, LogprobsFile& f, int64_t tokens, LogprobsParts& parts) {
  const char *hidden = "/logprobs/hidden", *head = "/logprobs/head";
  if (!reader.is_there(hidden) && !reader.is_there(head)) return;
  int64_t width = -1;
  parts.hidden = reader.reals(hidden, {tokens, -1});
  if (parts.hidden) width = parts.hidden->shape()[1];
  if (width == 0)
    reader.errors().add("{} is {}; a hidden state has at least one element", hidden,
                        h5::to_string(parts.hidden->shape()));
  parts.head = reader.reals(head, {f.vocab_size > 0 ? f.vocab_size : -1, width});
  f.linear.emplace().width = width;
}

/// Opens ids and teacher, if the file has them.
void open_ids(SchemaReader& reader, LogprobsFile& f, int64_t tokens, LogprobsParts& parts) {
  const char *ids = row_ids_path, *teacher = "/logprobs/teacher",
             *values = "/logprobs/teacher_values";
  parts.ids = reader.integers_if(ids, {tokens, -1});
  if (parts.ids) f.picks = parts.ids->shape()[1];
  if (parts.ids && f.picks < 1)
    reader.errors().add("{} is {}; it needs an id for each token", ids,
                        h5::to_string(parts.ids->shape()));
  parts.teacher = reader.reals_if(teacher, {tokens, f.columns});
  if (!reader.is_there(values)) return;
  if (!reader.is_there(ids))
    reader.errors().add("{} is there, and '{}', which it is of, is not", values, ids);
  parts.teacher_values = reader.reals(values, {tokens, f.picks > 0 ? f.picks : -1});
}

/// Opens a teacher's log-probabilities of ids and targets; a file must have both or neither.
void open_teacher_logprobs(SchemaReader& reader, LogprobsFile& f, int64_t tokens,
                           LogprobsParts& parts) {
  if (!reader.is_there(teacher_logprobs_path) && !reader.is_there(teacher_target_path)) return;
  if (!reader.is_there(row_ids_path))
    reader.errors().add("{} is there, and '{}', which it is of, is not", teacher_logprobs_path,
                        row_ids_path);
  parts.teacher_logprobs =
      reader.reals(teacher_logprobs_path, {tokens, f.picks > 0 ? f.picks : -1});
  parts.teacher_target_logprobs = reader.reals(teacher_target_path, {tokens});
}

/// Opens the temperatures and filters of tokens, if the file has them.
void open_filters(SchemaReader& reader, int64_t tokens, LogprobsParts& parts) {
  parts.temperature = reader.reals_if("/logprobs/temperature", {tokens});
  parts.top_k = reader.integers_if("/logprobs/top_k", {tokens});
  parts.top_p = reader.reals_if("/logprobs/top_p", {tokens});
  parts.min_p = reader.reals_if("/logprobs/min_p", {tokens});
}

/// Opens the sets of ids that a sampler kept; a file must have both datasets or neither.
void open_kept(SchemaReader& reader, int64_t tokens, LogprobsParts& parts) {
  if (!reader.is_there(kept_offsets_path) && !reader.is_there(kept_ids_path)) return;
  parts.kept_offsets = reader.integers(kept_offsets_path, {tokens < 0 ? -1 : tokens + 1});
  parts.kept_ids = reader.integers(kept_ids_path, {-1});
}

/// Opens the projection to other columns; a file must have all of its parts or none.
void open_projection(SchemaReader& reader, LogprobsFile& f, int64_t tokens, LogprobsParts& parts) {
  const auto is_there = [&](const char* path) { return reader.is_there(path); };
  const bool any = is_there(projection_offsets_path) || is_there(projection_columns_path) ||
                   is_there(projection_weights_path) || reader.has("/logprobs", projection_width);
  if (!any) {
    if (is_there(d_projected_path))
      reader.errors().add("{} is there, and '{}', which it is of, is not", d_projected_path,
                          projection_offsets_path);
    return;
  }
  f.projection.emplace().width = reader.integer("/logprobs", projection_width);
  parts.projection_offsets =
      reader.integers(projection_offsets_path, {f.vocab_size > 0 ? f.vocab_size + 1 : int64_t{-1}});
  parts.projection_columns = reader.integers(projection_columns_path, {-1});
  const int64_t entries = parts.projection_columns ? parts.projection_columns->shape()[0] : -1;
  parts.projection_weights = reader.reals(projection_weights_path, {entries});
  parts.d_projected =
      reader.reals_if(d_projected_path, shape_of(LogprobsShape::projected, f, tokens, 0));
}

LogprobsParts open_problem(const h5::File& file, const std::vector<LogprobsArray>& arrays,
                           LogprobsFile& f) {
  SchemaReader reader(file, logprobs_schema);
  check_attributes(reader, f);
  LogprobsParts parts;
  parts.offsets = reader.integers_if("/logprobs/offsets", {-1});
  parts.logits = reader.reals("/logprobs/logits", {-1, -1});
  int64_t tokens = -1;  // -1 matches any extent until the number is known
  f.columns = -1;
  if (parts.logits) {
    tokens = parts.logits->shape()[0], f.columns = parts.logits->shape()[1];
    if (f.columns < f.vocab_size)
      reader.errors().add("/logprobs/logits is {}; it needs a column for each of {} ids",
                          h5::to_string(parts.logits->shape()), f.vocab_size);
  }
  parts.targets = reader.integers("/logprobs/targets", {tokens});
  parts.d_value = reader.reals_if("/logprobs/d_value", {tokens});
  parts.d_logprobs =
      reader.reals_if("/logprobs/d_logprobs", shape_of(LogprobsShape::vocab, f, tokens, 0));
  open_filters(reader, tokens, parts);
  open_kept(reader, tokens, parts);
  open_projection(reader, f, tokens, parts);
  open_ids(reader, f, tokens, parts);
  open_teacher_logprobs(reader, f, tokens, parts);
  open_linear(reader, f, tokens, parts);
  if (file.has_group(answers_group)) {
    f.reference.emplace();
    f.reference->generator = reader.text(answers_group, "generator", "");
    open_reference(reader, file, arrays, f, tokens, parts);
  }
  reader.throw_if_any();
  return parts;
}

/// Adds errors for the first logit that is NaN or +inf and for the first row without a finite one.
void check_logits(ConfigErrors& errors, const std::string& name, const LogprobsFile& f,
                  const std::vector<float>& logits) {
  for (int64_t t = 0; t < f.tokens(); ++t) {
    bool some = false;
    for (int64_t v = 0; v < f.vocab_size; ++v) {
      const float z = logits[t * f.columns + v];
      some = some || std::isfinite(z);
      if (z < std::numeric_limits<float>::infinity()) continue;
      return errors.add("{}[{}, {}] is {}; it must be finite or -inf", name, t, v, z);
    }
    if (!some) return errors.add("{}[{}] is -inf throughout; a row needs a finite logit", name, t);
  }
}

void check_answers(ConfigErrors& errors, const std::vector<LogprobsArray>& arrays,
                   const LogprobsFile& f) {
  for (const auto& [name, values] : f.reference->arrays) {
    const auto bad = std::find_if(values.begin(), values.end(), [](double x) { return x != x; });
    if (bad != values.end())
      errors.add("{}/{}[{}] is nan; an answer is a number", answers_group, name,
                 bad - values.begin());
  }
  const int64_t wanted = (std::ssize(f.offsets) - 1) * std::max<int64_t>(0, f.longest() - 1);
  for (const LogprobsArray& array : arrays) {
    const auto answer = f.reference->arrays.find(array.name);
    if (array.shape != LogprobsShape::predictions || answer == f.reference->arrays.end()) continue;
    if (std::ssize(answer->second) != wanted)
      errors.add("{}/{} has {} elements; it must have {}", answers_group, array.name,
                 answer->second.size(), wanted);
  }
}

/// Adds an error for the first number of a token that is not right.
template <class T, class Right>
void check_filters(ConfigErrors& errors, const char* name, const std::vector<T>& values,
                   Right is_right, const std::string& range) {
  const auto wrong = std::ranges::find_if_not(values, is_right);
  if (wrong != values.end())
    errors.add("/logprobs/{}[{}] is {}; it must be {}", name, wrong - values.begin(), *wrong,
               range);
}
void check_projection(ConfigErrors& errors, const LogprobsFile& f) {
  const std::string fault = fault_of(f.projection->matrix(), f.vocab_size, projection_arrays);
  if (!fault.empty()) errors.add("{}", fault);
  check_gradients(errors, d_projected_path, f.projection->d_projected, f.projection->width, f);
}

void check_numbers(const h5::File& file, const std::vector<LogprobsArray>& arrays,
                   const LogprobsFile& f) {
  SchemaReader reader(file, logprobs_schema);
  ConfigErrors& errors = reader.errors();
  check_offsets(errors, "/logprobs/offsets", f.offsets, std::ssize(f.targets),
                "the rows of /logprobs/logits");
  reader.throw_if_any();
  check_filters(errors, temperature_name, f.temperatures, is_temperature, temperature_range());
  check_filters(
      errors, top_k_name, f.top_ks, [&](int32_t k) { return k >= 0 && k <= f.vocab_size; },
      top_k_range(f));
  check_filters(errors, top_p_name, f.top_ps, is_top_p, top_p_range);
  check_filters(errors, min_p_name, f.min_ps, is_min_p, min_p_range);
  check_kept(errors, f);
  if (f.projection) check_projection(errors, f);
  check_logits(errors, "/logprobs/logits", f, f.logits);
  if (f.has_teacher) check_logits(errors, "/logprobs/teacher", f, f.teacher);
  check_finite(errors, "/logprobs/teacher_values", f.teacher_values, true);
  check_logprobs(errors, teacher_logprobs_path, f.teacher_logprobs);
  check_logprobs(errors, teacher_target_path, f.teacher_target_logprobs);
  check_gradients(errors, "/logprobs/d_value", f.d_value, 1, f);
  check_gradients(errors, "/logprobs/d_logprobs", f.d_logprobs, f.vocab_size, f);
  if (f.linear) {
    check_finite(errors, "/logprobs/hidden", f.linear->hidden);
    check_finite(errors, "/logprobs/head", f.linear->head);
  }
  const auto bad = std::find_if(f.ids.begin(), f.ids.end(),
                                [&](int32_t id) { return id < 0 || id >= f.vocab_size; });
  if (bad != f.ids.end())
    errors.add("/logprobs/ids[{}] is {}; ids are 0 to {}", bad - f.ids.begin(), *bad,
               f.vocab_size - 1);
  else
    check_largest(errors, f);
  if (f.reference) check_answers(errors, arrays, f);
  reader.throw_if_any();
}

}  // namespace

int64_t LogprobsFile::longest() const {
  int64_t most = 0;
  for (size_t i = 0; i + 1 < offsets.size(); ++i)
    most = std::max(most, offsets[i + 1] - offsets[i]);
  return most;
}

double LinearFactors::logit_size() const {
  const auto largest_square = [&](const std::vector<float>& rows) {
    double most = 0;
    for (auto row = rows.begin(); row != rows.end(); row += width) {
      double sum = 0;
      for (auto x = row; x != row + width; ++x)
        sum += static_cast<double>(*x) * static_cast<double>(*x);
      most = std::max(most, sum);
    }
    return most;
  };
  return std::sqrt(largest_square(hidden) * largest_square(head) / static_cast<double>(width));
}

LogprobsFile read_logprobs_file(Communicator& comm, const std::string& path,
                                const std::vector<LogprobsArray>& arrays) {
  const h5::File file = open_schema_file(comm, path, logprobs_schema, places_of(arrays));
  LogprobsFile f;
  LogprobsParts parts;
  run_agreed(comm, "opening the logits of " + path, [&] { parts = open_problem(file, arrays, f); });
  f.logits = read_floats(*parts.logits, f.rounded, f.columns, f.vocab_size);
  f.targets = read_int32s(*parts.targets);
  f.offsets = parts.offsets ? parts.offsets->read_all<int64_t>()
                            : std::vector<int64_t>{0, std::ssize(f.targets)};
  f.d_value = parts.d_value ? read_floats(*parts.d_value, f.rounded)
                            : std::vector<float>(f.targets.size(), 1);
  if (parts.d_logprobs) f.d_logprobs = read_floats(*parts.d_logprobs, f.rounded);
  if (parts.temperature) f.temperatures = parts.temperature->read_all<double>();
  if (parts.top_k) f.top_ks = read_int32s(*parts.top_k);
  if (parts.top_p) f.top_ps = parts.top_p->read_all<double>();
  if (parts.min_p) f.min_ps = parts.min_p->read_all<double>();
  if (parts.kept_offsets) {
    f.kept_offsets = parts.kept_offsets->read_all<int64_t>();
    f.kept_ids = read_int32s(*parts.kept_ids);
  }
  if (f.projection) {
    f.projection->offsets = parts.projection_offsets->read_all<int64_t>();
    f.projection->columns = read_int32s(*parts.projection_columns);
    f.projection->weights = read_floats(*parts.projection_weights, f.rounded);
    if (parts.d_projected) f.projection->d_projected = read_floats(*parts.d_projected, f.rounded);
  }
  f.has_teacher = parts.teacher.has_value();
  f.has_teacher_values = parts.teacher_values.has_value();
  if (parts.teacher) f.teacher = read_floats(*parts.teacher, f.rounded, f.columns, f.vocab_size);
  if (parts.teacher_values) f.teacher_values = read_floats(*parts.teacher_values, f.rounded);
  f.has_teacher_logprobs = parts.teacher_logprobs.has_value();
  if (f.has_teacher_logprobs) {
    f.teacher_logprobs = read_floats(*parts.teacher_logprobs, f.rounded);
    f.teacher_target_logprobs = read_floats(*parts.teacher_target_logprobs, f.rounded);
  }
  if (parts.ids) f.ids = read_int32s(*parts.ids);
  if (f.linear) {
    f.linear->hidden = read_floats(*parts.hidden, f.rounded);
    f.linear->head = read_floats(*parts.head, f.rounded);
  }
  for (const auto& [name, dataset] : parts.answers)
    f.reference->arrays[name] = dataset.read_all<double>();
  run_agreed(comm, "checking the logits of " + path, [&] { check_numbers(file, arrays, f); });
  return f;
}

}  // namespace gyre

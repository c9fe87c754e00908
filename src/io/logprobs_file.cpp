#include "io/logprobs_file.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "comm/agree.hpp"

namespace gyre {
namespace {

constexpr const char* answers_group = "/reference";
constexpr const char* results_group = "/results";

struct LogprobsParts {
  std::optional<h5::Dataset> offsets, logits, teacher, teacher_values, targets, ids, d_value,
      d_logprobs, hidden, head;
  std::vector<std::pair<std::string, h5::Dataset>> answers;
};

void check_attributes(SchemaReader& reader, LogprobsFile& f) {
  ConfigErrors& errors = reader.errors();
  f.vocab_size = reader.integer("/logprobs", "vocab_size");
  f.top_k = reader.integer("/logprobs", "top_k", 0);
  f.top_p = reader.real("/logprobs", "top_p", 1);
  f.temperature = reader.real("/logprobs", "temperature", 1);
  check_vocabulary(errors, "/logprobs", f.vocab_size);
  if (f.top_k < 0 || f.top_k > f.vocab_size)
    errors.add("top_k of '/logprobs' is {}; it must be 0, none, or at most vocab_size, {}", f.top_k,
               f.vocab_size);
  if (!(f.top_p > 0 && f.top_p <= 1))
    errors.add("top_p of '/logprobs' is {}; it must be above 0 and at most 1, none", f.top_p);
  if (!(f.temperature >= least_temperature && f.temperature <= max_temperature))
    errors.add("temperature of '/logprobs' is {}; it must be from {} to {}", f.temperature,
               least_temperature, max_temperature);
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
  const char *ids = "/logprobs/ids", *teacher = "/logprobs/teacher",
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
  open_ids(reader, f, tokens, parts);
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

void check_numbers(const h5::File& file, const std::vector<LogprobsArray>& arrays,
                   const LogprobsFile& f) {
  SchemaReader reader(file, logprobs_schema);
  ConfigErrors& errors = reader.errors();
  check_offsets(errors, "/logprobs/offsets", f.offsets, std::ssize(f.targets),
                "the rows of /logprobs/logits");
  reader.throw_if_any();
  check_logits(errors, "/logprobs/logits", f, f.logits);
  if (f.has_teacher) check_logits(errors, "/logprobs/teacher", f, f.teacher);
  check_finite(errors, "/logprobs/teacher_values", f.teacher_values, true);
  check_finite(errors, "/logprobs/d_value", f.d_value);
  check_finite(errors, "/logprobs/d_logprobs", f.d_logprobs);
  if (f.linear) {
    check_finite(errors, "/logprobs/hidden", f.linear->hidden);
    check_finite(errors, "/logprobs/head", f.linear->head);
  }
  const auto bad = std::find_if(f.ids.begin(), f.ids.end(),
                                [&](int32_t id) { return id < 0 || id >= f.vocab_size; });
  if (bad != f.ids.end())
    errors.add("/logprobs/ids[{}] is {}; ids are 0 to {}", bad - f.ids.begin(), *bad,
               f.vocab_size - 1);
  if (f.reference) check_answers(errors, arrays, f);
  reader.throw_if_any();
}

/// Throws unless every element of an array comes from exactly one rank.
void check_coverage(Communicator& comm, const LogprobsPart& part) {
  const int64_t rows = part.shape[0];
  const int64_t width = h5::elements_of(part.shape) / std::max<int64_t>(1, rows);
  std::vector<int64_t> columns(rows, 0);
  for (const int64_t row : part.rows)
    if (row >= 0) columns.at(row) += part.columns;
  HostStream stream;
  comm.all_reduce(columns.data(), rows, DType::i64, ReduceOp::sum, stream, "rows of results")
      ->wait();
  run_agreed(comm, "checking who has which results", [&] {
    for (int64_t row = 0; row < rows; ++row)
      GYRE_CHECK(columns[row] == width, "{}[{}]: {} elements come from ranks, of {}", part.name,
                 row, columns[row], width);
  });
}

void create_results(const std::string& path, const LogprobsResultsHeader& header,
                    const std::vector<LogprobsPart>& parts) {
  h5::File file = h5::File::create(path);
  write_schema(file, logprobs_results_schema, header.provenance);
  file.create_group(results_group);
  file.write_attribute(results_group, "input_sha256", header.input_sha256);
  file.write_attribute(results_group, "vocab_size", header.vocab_size);
  file.write_attribute(results_group, "top_k", header.top_k);
  file.write_attribute(results_group, "top_p", header.top_p);
  file.write_attribute(results_group, "temperature", header.temperature);
  for (const LogprobsPart& part : parts)
    file.create_dataset(fmt::format("{}/{}", results_group, part.name),
                        part.whole_numbers ? DType::i32 : DType::f32, part.shape,
                        h5::Checksum::fletcher32);
  file.close();
}

/// Writes this rank's rows, `values` [rows, columns], in file order.
template <class T>
void write_rows(const h5::Dataset& dataset, const LogprobsPart& part,
                const std::vector<T>& values) {
  std::vector<h5::Slab> slabs;
  std::vector<T> ordered;
  if (part.columns > 0) {
    std::vector<size_t> order(part.rows.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::erase_if(order, [&](size_t i) { return part.rows[i] < 0; });
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return part.rows[a] < part.rows[b]; });
    int64_t next = -1;
    for (const size_t i : order) {
      const int64_t row = part.rows[i];
      if (row == next)
        ++slabs.back().count[0];
      else if (part.shape.size() == 1)
        slabs.push_back({{row}, {1}});
      else
        slabs.push_back({{row, part.first}, {1, part.columns}});
      next = row + 1;
      const auto from = values.begin() + static_cast<int64_t>(i) * part.columns;
      ordered.insert(ordered.end(), from, from + part.columns);
    }
  }
  dataset.write<T>(slabs, ordered);
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
  f.has_teacher = parts.teacher.has_value();
  f.has_teacher_values = parts.teacher_values.has_value();
  if (parts.teacher) f.teacher = read_floats(*parts.teacher, f.rounded, f.columns, f.vocab_size);
  if (parts.teacher_values) f.teacher_values = read_floats(*parts.teacher_values, f.rounded);
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

void write_logprobs_results(OutputFile& output, const LogprobsResultsHeader& header,
                            const std::vector<LogprobsPart>& mine) {
  Communicator& comm = output.comm();
  run_agreed(comm, "checking the shapes of results", [&] {
    for (const LogprobsPart& part : mine) {
      const size_t elements = part.whole_numbers ? part.integers.size() : part.values.size();
      GYRE_CHECK(elements == part.rows.size() * static_cast<size_t>(part.columns),
                 "{} has {} elements; it must have {} x {}", part.name, elements, part.rows.size(),
                 part.columns);
    }
  });
  for (const LogprobsPart& part : mine) check_coverage(comm, part);
  run_on_root(comm, "creating " + output.path(),
              [&] { create_results(output.temporary_path(), header, mine); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  for (const LogprobsPart& part : mine) {
    const h5::Dataset dataset = file.dataset(fmt::format("{}/{}", results_group, part.name));
    if (part.whole_numbers)
      write_rows(dataset, part, part.integers);
    else
      write_rows(dataset, part, part.values);
  }
  file.close();
}

}  // namespace gyre

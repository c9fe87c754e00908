#include "io/schemas/logprobs_file.hpp"

#include <algorithm>
#include <utility>

#include "comm/agree.hpp"
#include "io/schemas/logprobs_inputs.hpp"
#include "logprobs/operations/operation.hpp"

namespace gyre {
namespace {

constexpr const char *inputs_group = "/logprobs", *answers_group = "/reference",
                     *projection_width = "projection_width";

/// An open dataset of an input or of answers.
struct OpenArray {
  std::string name;
  h5::Dataset dataset;
};

/// Keeps the extents that are known while the datasets of a file are opened.
class Extents {
 public:
  /// -1 for an unknown extent, which matches any.
  h5::Shape shape(const LogprobsShape& letters) const {
    h5::Shape shape;
    for (const char letter : letters) {
      const auto found = known_.find(upper(letter));
      shape.push_back(found == known_.end() ? -1 : found->second + more(letter));
    }
    return shape;
  }
  int64_t of(char letter, int64_t otherwise) const {
    const auto found = known_.find(letter);
    return found == known_.end() ? otherwise : found->second;
  }
  void set(char letter, int64_t extent) { known_.emplace(letter, extent); }
  /// Takes the extents that are not known yet from an array.
  void take(const LogprobsShape& letters, const h5::Shape& shape) {
    for (size_t i = 0; i < letters.size(); ++i) set(upper(letters[i]), shape[i] - more(letters[i]));
  }

 private:
  static char upper(char letter) { return more(letter) == 0 ? letter : letter - 'a' + 'A'; }
  static int64_t more(char letter) { return letter >= 'a' ? 1 : 0; }
  std::map<char, int64_t> known_;
};

/// Opens the datasets of a problem and of its answers.
class Opener {
 public:
  Opener(const h5::File& file, LogprobsFile& f)
      : file_(file), f_(f), reader_(file, logprobs_schema) {}

  void open(const std::vector<LogprobsArray>& arrays) {
    read_attributes();
    for (const LogprobsInput& input : logprobs_inputs()) open_input(input);
    f_.columns = extents_.of('C', 0);
    f_.picks = extents_.of('K', 0);
    f_.hidden = extents_.of('D', 0);
    if (file_.has_group(answers_group)) open_answers(arrays);
    reader_.throw_if_any();
  }

  std::vector<OpenArray> inputs, answers;

 private:
  bool is_there(const std::string& name) const {
    return reader_.is_there(fmt::format("{}/{}", inputs_group, name));
  }
  bool has_some_of(const std::string& set) const {
    return !set.empty() && std::ranges::any_of(logprobs_inputs(), [&](const LogprobsInput& input) {
      return input.set == set && is_there(input.name);
    });
  }

  void read_attributes();
  void open_input(const LogprobsInput& input);
  void open_answers(const std::vector<LogprobsArray>& arrays);
  void require(const std::string& path, const LogprobsInput& input) {
    if (!is_there(input.name))
      reader_.errors().add("{} is there, and '{}', which it is of, is not", path, input.path());
  }
  /// Adds an error for an array without ids or elements.
  void check_extents(const LogprobsInput& input, const h5::Shape& shape);

  const h5::File& file_;
  LogprobsFile& f_;
  SchemaReader reader_;
  Extents extents_;
};

void Opener::read_attributes() {
  ConfigErrors& errors = reader_.errors();
  f_.vocab_size = reader_.integer(inputs_group, "vocab_size");
  check_vocabulary(errors, inputs_group, f_.vocab_size);
  if (f_.vocab_size > 0) extents_.set('V', f_.vocab_size);
  const auto is_of_tokens = [&](const char* name) {
    const bool both = is_there(name) && reader_.has(inputs_group, name);
    if (both)
      errors.add(
          "'/logprobs' has {0} as an attribute, of all tokens, and as the dataset "
          "/logprobs/{0}, of each; leave one out",
          name);
    return both;
  };
  const auto real = [&](const char* name, double usual, bool (*is_right)(double),
                        const std::string& range) {
    if (is_of_tokens(name)) return usual;
    const double value = reader_.real(inputs_group, name, usual);
    if (!is_right(value)) errors.add("{} of '/logprobs' is {}; it must be {}", name, value, range);
    return value;
  };
  f_.top_k = is_of_tokens("top_k") ? 0 : reader_.integer(inputs_group, "top_k", 0);
  if (f_.top_k < 0 || f_.top_k > f_.vocab_size)
    errors.add("top_k of '/logprobs' is {}; it must be {}", f_.top_k, top_k_range(f_.vocab_size));
  f_.top_p = real("top_p", 1, is_top_p, top_p_range);
  f_.min_p = real("min_p", 0, is_min_p, min_p_range);
  f_.temperature = real("temperature", 1, is_temperature, temperature_range());
  for (const RowParameter& parameter : row_parameters()) {
    const double value = reader_.real(inputs_group, parameter.name.c_str(), parameter.usual);
    if (!(value >= parameter.least && value <= parameter.most))
      errors.add("{} of '/logprobs' is {}; it must be {}", parameter.name, value,
                 parameter.range());
    f_.parameters.push_back(value);
  }
  if (!has_some_of("projection") && !reader_.has(inputs_group, projection_width)) return;
  f_.projected = reader_.integer(inputs_group, projection_width);
  extents_.set('J', f_.projected);
}

void Opener::check_extents(const LogprobsInput& input, const h5::Shape& shape) {
  const auto add = [&](const std::string& must) {
    reader_.errors().add("{} is {}; {}", input.path(), h5::to_string(shape), must);
  };
  for (size_t i = 0; i < shape.size(); ++i) {
    if (input.shape[i] == 'C' && shape[i] < f_.vocab_size)
      add(fmt::format("it needs a column for each of {} ids", f_.vocab_size));
    if (input.shape[i] == 'K' && shape[i] < 1) add("it needs an id for each token");
    if (input.shape[i] == 'D' && shape[i] < 1) add("a hidden state has at least one element");
  }
}

void Opener::open_input(const LogprobsInput& input) {
  using Stored = LogprobsInput::Stored;
  const std::string path = input.path();
  const bool there = is_there(input.name);
  const bool needed = input.presence == SchemaName::Presence::required || has_some_of(input.set);
  if (!there && !needed) return;
  const h5::Shape shape = extents_.shape(input.shape);
  const bool integers = input.stored == Stored::i32 || input.stored == Stored::i64;
  auto dataset = integers ? reader_.integers(path, shape) : reader_.reals(path, shape);
  if (there && !input.of.empty()) {
    const LogprobsInput& other = logprobs_input(input.of);
    if (other.set.empty() || other.set != input.set) require(path, other);
  }
  if (!dataset) return;
  const bool defines = extents_.shape(input.shape) != dataset->shape();
  if (defines) check_extents(input, dataset->shape());
  extents_.take(input.shape, dataset->shape());
  inputs.push_back({input.name, std::move(*dataset)});
}

void Opener::open_answers(const std::vector<LogprobsArray>& arrays) {
  f_.reference.emplace().generator = reader_.text(answers_group, "generator", "");
  extents_.set('S', 1);
  if (f_.picks > 0 && f_.vocab_size > 0) extents_.set('L', std::min(f_.picks, f_.vocab_size));
  std::vector<std::string> places;
  for (const LogprobsArray& array : arrays) {
    const std::string path = places.emplace_back(fmt::format("{}/{}", answers_group, array.name));
    if (!reader_.is_there(path)) continue;
    const h5::Shape shape = extents_.shape(array.shape);
    auto dataset = array.integers ? reader_.integers(path, shape) : reader_.reals(path, shape);
    if (!dataset) continue;
    for (const char letter : array.shape)
      if (const LogprobsInput* input = input_with_extent(letter)) require(path, *input);
    // Without ids, the first array of largest logits sets the entries per token; others must agree.
    if (const size_t at = array.shape.find('L'); at != LogprobsShape::npos) {
      f_.top = dataset->shape()[at];
      if (f_.top < 1 || f_.top > f_.vocab_size)
        reader_.errors().add("{} has {} entries a token; it must be 1 to {}, of the vocabulary",
                             path, f_.top, f_.vocab_size);
      extents_.set('L', f_.top);
    }
    answers.push_back({array.name, std::move(*dataset)});
  }
  f_.reference->unknown = unknown_answers(file_, logprobs_schema, places);
}

LogprobsArrays::Values read_values(const LogprobsInput& input, const h5::Dataset& dataset,
                                   LogprobsFile& f) {
  using Stored = LogprobsInput::Stored;
  const bool padded = input.shape.ends_with('C');
  switch (input.stored) {
    case Stored::f32:
      return read_floats(dataset, f.rounded, padded ? f.columns : 1, padded ? f.vocab_size : 1);
    case Stored::f64:
      return dataset.read_all<double>();
    case Stored::i32:
      return read_int32s(dataset);
    case Stored::i64:
      return dataset.read_all<int64_t>();
  }
  return {};
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
    if (!array.shape.ends_with('P') || answer == f.reference->arrays.end()) continue;
    if (std::ssize(answer->second) != wanted)
      errors.add("{}/{} has {} elements; it must have {}", answers_group, array.name,
                 answer->second.size(), wanted);
  }
}

void check_values(const h5::File& file, const std::vector<LogprobsArray>& arrays,
                  const LogprobsFile& f) {
  SchemaReader reader(file, logprobs_schema);
  ConfigErrors& errors = reader.errors();
  check_offsets(errors, "/logprobs/offsets", f.offsets, std::ssize(f.ints("targets")),
                "the rows of /logprobs/logits");
  reader.throw_if_any();
  for (const LogprobsInput& input : logprobs_inputs())
    if (input.check != nullptr && f.has(input.name)) input.check(errors, f, input);
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

SparseMatrixRef LogprobsFile::projection() const {
  return {projected, arrays.of<int64_t>("projection_offsets"), ints("projection_columns"),
          floats("projection_weights")};
}

LogprobsFile read_logprobs_file(Communicator& comm, const std::string& path,
                                const std::vector<LogprobsArray>& arrays) {
  std::vector<std::string> places;
  for (const LogprobsArray& array : arrays)
    places.push_back(fmt::format("{}/{}", answers_group, array.name));
  const h5::File file = open_schema_file(comm, path, logprobs_schema, places);
  LogprobsFile f;
  Opener opener(file, f);
  run_agreed(comm, "opening the logits of " + path, [&] { opener.open(arrays); });
  for (const auto& [name, dataset] : opener.inputs)
    f.arrays.set(name, read_values(logprobs_input(name), dataset, f));
  const std::vector<int64_t>& offsets = f.arrays.of<int64_t>("offsets");
  const int64_t tokens = std::ssize(f.ints("targets"));
  f.offsets = f.has("offsets") ? offsets : std::vector<int64_t>{0, tokens};
  if (!f.has("d_value")) f.arrays.set("d_value", std::vector<float>(tokens, 1));
  for (const auto& [name, dataset] : opener.answers)
    f.reference->arrays[name] = dataset.read_all<double>();
  run_agreed(comm, "checking the logits of " + path, [&] { check_values(file, arrays, f); });
  return f;
}

}  // namespace gyre

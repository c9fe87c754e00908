#include "io/logprobs_file.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "comm/agree.hpp"

namespace gyre {
namespace {

using RealAnswer = std::vector<double> LogprobsReference::*;
struct NamedAnswer {
  const char* path;
  RealAnswer answer;
};

constexpr std::array<NamedAnswer, 4> scalars{
    {{"/reference/logprob", &LogprobsReference::logprob},
     {"/reference/entropy", &LogprobsReference::entropy},
     {"/reference/soft_cross_entropy", &LogprobsReference::soft_cross_entropy},
     {"/reference/filtered_logprob", &LogprobsReference::filtered_logprob}}};
constexpr std::array<NamedAnswer, 5> gradients{
    {{"/reference/d_logprob", &LogprobsReference::d_logprob},
     {"/reference/d_entropy", &LogprobsReference::d_entropy},
     {"/reference/d_gathered", &LogprobsReference::d_gathered},
     {"/reference/d_soft_cross_entropy", &LogprobsReference::d_soft_cross_entropy},
     {"/reference/d_filtered_logprob", &LogprobsReference::d_filtered_logprob}}};

using LinearAnswer = std::vector<double> LinearReference::*;
constexpr std::array<std::pair<const char*, LinearAnswer>, 4> linear_answers{
    {{"/reference/linear_logprob", &LinearReference::logprob},
     {"/reference/linear_entropy", &LinearReference::entropy},
     {"/reference/d_hidden", &LinearReference::d_hidden},
     {"/reference/d_head", &LinearReference::d_head}}};

struct LogprobsParts {
  std::optional<h5::Dataset> offsets, logits, teacher, targets, ids, d_value, hidden, head, top_ids;
  std::vector<std::pair<RealAnswer, std::optional<h5::Dataset>>> answers;
  std::vector<std::pair<LinearAnswer, std::optional<h5::Dataset>>> linear_answers;
};

void check_attributes(SchemaReader& reader, LogprobsFile& f) {
  ConfigErrors& errors = reader.errors();
  f.vocab_size = reader.integer("/logprobs", "vocab_size");
  f.top_k = reader.integer("/logprobs", "top_k");
  f.top_p = reader.real("/logprobs", "top_p");
  f.temperature = reader.real("/logprobs", "temperature");
  check_vocabulary(errors, "/logprobs", f.vocab_size);
  if (f.top_k < 0 || f.top_k > f.vocab_size)
    errors.add("top_k of '/logprobs' is {}; it must be 0, none, or at most vocab_size, {}", f.top_k,
               f.vocab_size);
  if (!(f.top_p > 0 && f.top_p <= 1))
    errors.add("top_p of '/logprobs' is {}; it must be above 0 and at most 1, none", f.top_p);
  if (!(f.temperature >= least_temperature && f.temperature <= most_temperature))
    errors.add("temperature of '/logprobs' is {}; it must be from {} to {}", f.temperature,
               least_temperature, most_temperature);
}

void open_reference(SchemaReader& reader, const LogprobsFile& f, int64_t tokens,
                    LogprobsParts& parts) {
  const std::vector<h5::Type> type{h5::Type::f64};
  const int64_t ids = f.vocab_size > 0 ? f.vocab_size : -1;  // -1: any, where it is not known
  const int64_t length = f.picks < 0 || ids < 0 ? -1 : std::min(f.picks, ids);
  const auto add = [&](const char* path, RealAnswer answer, const h5::Shape& shape) {
    parts.answers.emplace_back(answer, reader.dataset(path, type, shape));
  };
  for (const NamedAnswer& a : scalars) add(a.path, a.answer, {tokens});
  for (const NamedAnswer& a : gradients) add(a.path, a.answer, {tokens, ids});
  add("/reference/gathered", &LogprobsReference::gathered, {tokens, f.picks});
  add("/reference/top_values", &LogprobsReference::top_values, {tokens, length});
  add("/reference/next_token_logprob", &LogprobsReference::next_token_logprob,
      {parts.offsets ? parts.offsets->shape()[0] - 1 : -1, -1});
  parts.top_ids = reader.dataset("/reference/top_ids", {h5::Type::i32}, {tokens, length});
}

/// Hidden states and a head, if the file has one of them: then it must have both, and answers of
/// theirs if it has any.
void open_linear(SchemaReader& reader, const h5::File& file, LogprobsFile& f, int64_t tokens,
                 LogprobsParts& parts) {
  const char *hidden = "/logprobs/hidden", *head = "/logprobs/head";
  if (!file.has_dataset(hidden) && !file.has_dataset(head)) return;
  const int64_t ids = f.vocab_size > 0 ? f.vocab_size : -1;
  int64_t width = -1;
  parts.hidden = reader.dataset(hidden, {h5::Type::f32}, {tokens, -1});
  if (parts.hidden) width = parts.hidden->shape()[1];
  if (width == 0)
    reader.errors().add("{} is {}; a hidden state has at least one element", hidden,
                        h5::to_string(parts.hidden->shape()));
  parts.head = reader.dataset(head, {h5::Type::f32}, {ids, width});
  f.linear.emplace().width = width;
  if (!f.reference) return;
  f.reference->linear.emplace();
  for (const auto& [path, answer] : linear_answers) {
    h5::Shape shape{tokens};
    if (answer == &LinearReference::d_hidden) shape = {tokens, width};
    if (answer == &LinearReference::d_head) shape = {ids, width};
    parts.linear_answers.emplace_back(answer, reader.dataset(path, {h5::Type::f64}, shape));
  }
}

LogprobsParts open_problem(const h5::File& file, LogprobsFile& f) {
  SchemaReader reader(file, logprobs_schema);
  check_attributes(reader, f);
  LogprobsParts parts;
  const std::vector<h5::Type> real{h5::Type::f32}, whole{h5::Type::i32};
  parts.offsets = reader.dataset("/logprobs/offsets", {h5::Type::i64}, {-1});
  parts.logits = reader.dataset("/logprobs/logits", real, {-1, -1});
  int64_t tokens = -1;  // whatever it is, until it is known
  f.columns = f.picks = -1;
  if (parts.logits) {
    tokens = parts.logits->shape()[0], f.columns = parts.logits->shape()[1];
    if (f.columns < f.vocab_size)
      reader.errors().add("/logprobs/logits is {}; it needs a column for each of {} ids",
                          h5::to_string(parts.logits->shape()), f.vocab_size);
  }
  parts.teacher = reader.dataset("/logprobs/teacher", real, {tokens, f.columns});
  parts.targets = reader.dataset("/logprobs/targets", whole, {tokens});
  parts.ids = reader.dataset("/logprobs/ids", whole, {tokens, -1});
  if (parts.ids) f.picks = parts.ids->shape()[1];
  if (parts.ids && f.picks < 1)
    reader.errors().add("/logprobs/ids is {}; it needs an id for each token",
                        h5::to_string(parts.ids->shape()));
  parts.d_value = reader.dataset("/logprobs/d_value", real, {tokens});
  if (file.has_group("/reference")) {
    f.reference.emplace().generator = reader.text("/reference", "generator");
    open_reference(reader, f, tokens, parts);
  }
  open_linear(reader, file, f, tokens, parts);
  reader.throw_if_any();
  return parts;
}

/// A problem for the first logit that is NaN or +inf, and for the first row without a finite one.
void check_logits(ConfigErrors& errors, const std::string& name, const LogprobsFile& f,
                  const std::vector<float>& logits) {
  for (int64_t t = 0; t < f.tokens(); ++t) {
    bool some = false;
    for (int64_t v = 0; v < f.vocab_size; ++v) {
      const float z = logits[static_cast<size_t>(t * f.columns + v)];
      some = some || std::isfinite(z);
      if (z < std::numeric_limits<float>::infinity()) continue;
      return errors.add("{}[{}, {}] is {}; it must be finite or -inf", name, t, v, z);
    }
    if (!some) return errors.add("{}[{}] is -inf throughout; a row needs a finite logit", name, t);
  }
}

void check_answers(ConfigErrors& errors, const LogprobsReference& reference) {
  const auto check = [&](const std::string& name, const std::vector<double>& values) {
    const auto bad = std::find_if(values.begin(), values.end(), [](double x) { return x != x; });
    if (bad != values.end())
      errors.add("{}[{}] is nan; an answer is a number", name, bad - values.begin());
  };
  for (const NamedAnswer& a : scalars) check(a.path, reference.*a.answer);
  for (const NamedAnswer& a : gradients) check(a.path, reference.*a.answer);
  check("/reference/gathered", reference.gathered);
  check("/reference/top_values", reference.top_values);
  check("/reference/next_token_logprob", reference.next_token_logprob);
  if (!reference.linear) return;
  for (const auto& [path, answer] : linear_answers) check(path, (*reference.linear).*answer);
}

void check_numbers(const h5::File& file, const LogprobsFile& f) {
  SchemaReader reader(file, logprobs_schema);
  ConfigErrors& errors = reader.errors();
  const auto tokens = std::ssize(f.targets);
  check_offsets(errors, "/logprobs/offsets", f.offsets, tokens, "the rows of /logprobs/logits");
  reader.throw_if_any();
  check_logits(errors, "/logprobs/logits", f, f.logits);
  check_logits(errors, "/logprobs/teacher", f, f.teacher);
  check_finite(errors, "/logprobs/d_value", f.d_value);
  if (f.linear) {
    check_finite(errors, "/logprobs/hidden", f.linear->hidden);
    check_finite(errors, "/logprobs/head", f.linear->head);
  }
  const auto bad = std::find_if(f.ids.begin(), f.ids.end(),
                                [&](int32_t id) { return id < 0 || id >= f.vocab_size; });
  if (bad != f.ids.end())
    errors.add("/logprobs/ids[{}] is {}; ids are 0 to {}", bad - f.ids.begin(), *bad,
               f.vocab_size - 1);
  if (f.reference) {
    check_answers(errors, *f.reference);
    const int64_t wanted = (std::ssize(f.offsets) - 1) * std::max<int64_t>(0, f.longest() - 1);
    if (std::ssize(f.reference->next_token_logprob) != wanted)
      errors.add("/reference/next_token_logprob has {} elements; it must have {}",
                 f.reference->next_token_logprob.size(), wanted);
  }
  reader.throw_if_any();
}

struct LogprobsArray {
  std::string path;
  std::span<const float> values;
  int64_t width;
};

std::vector<LogprobsArray> real_results(const LogprobsResultRows& mine, int64_t length) {
  return {{"/results/logprob", mine.logprob, 1},
          {"/results/entropy", mine.entropy, 1},
          {"/results/filtered_logprob", mine.filtered_logprob, 1},
          {"/results/top_values", mine.top_values, length}};
}

h5::Shape shape_of(int64_t rows, const std::string& path, int64_t width) {
  return path.find("top_") == std::string::npos ? h5::Shape{rows} : h5::Shape{rows, width};
}

/// Fails unless the ranks' tokens are all tokens, each once.
void check_coverage(Communicator& comm, int64_t begin, int64_t rows, int64_t tokens) {
  const std::vector<int64_t> begins = all_gather_value(comm, begin),
                             counts = all_gather_value(comm, rows);
  run_agreed(comm, "checking who has which results", [&] {
    std::vector<std::pair<int64_t, int64_t>> blocks;
    for (size_t r = 0; r < begins.size(); ++r)
      if (counts[r] > 0) blocks.emplace_back(begins[r], counts[r]);
    std::sort(blocks.begin(), blocks.end());
    int64_t next = 0;
    for (const auto& [first, count] : blocks) {
      GYRE_CHECK(first >= next, "token {} comes from two ranks", first);
      GYRE_CHECK(first == next, "token {} of {} comes from no rank", next, tokens);
      next = first + count;
    }
    GYRE_CHECK(next >= tokens, "token {} of {} comes from no rank", next, tokens);
    GYRE_CHECK(next == tokens, "token {} comes from a rank, but there are {}", next - 1, tokens);
  });
}

void create_results(const std::string& path, const LogprobsResultsHeader& header,
                    const std::vector<LogprobsArray>& arrays) {
  h5::File file = h5::File::create(path);
  write_schema(file, logprobs_results_schema, header.provenance);
  file.create_group("/results");
  file.write_attribute("/results", "input_sha256", header.input_sha256);
  file.write_attribute("/results", "vocab_size", header.vocab_size);
  file.write_attribute("/results", "top_k", header.top_k);
  file.write_attribute("/results", "top_p", header.top_p);
  file.write_attribute("/results", "temperature", header.temperature);
  for (const LogprobsArray& array : arrays)
    file.create_dataset(array.path, DType::f32, shape_of(header.tokens, array.path, array.width),
                        h5::Checksum::fletcher32);
  file.create_dataset("/results/top_ids", DType::i32, {header.tokens, header.length},
                      h5::Checksum::fletcher32);
  file.close();
}

template <class T>
void write_rows(const h5::File& file, const std::string& path, int64_t begin, int64_t rows,
                int64_t width, std::span<const T> values) {
  h5::Slab slab{shape_of(begin, path, 0), shape_of(rows, path, width)};
  const size_t slabs = values.empty() ? 0 : 1;
  file.dataset(path).write<T>(std::span(&slab, slabs), values);
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

LogprobsFile read_logprobs_file(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, logprobs_schema);
  LogprobsFile f;
  LogprobsParts parts;
  run_agreed(comm, "opening the logits of " + path, [&] { parts = open_problem(file, f); });
  f.offsets = parts.offsets->read_all<int64_t>();
  f.logits = parts.logits->read_all<float>();
  f.teacher = parts.teacher->read_all<float>();
  f.targets = parts.targets->read_all<int32_t>();
  f.ids = parts.ids->read_all<int32_t>();
  f.d_value = parts.d_value->read_all<float>();
  for (const auto& [answer, dataset] : parts.answers)
    (*f.reference).*answer = dataset->read_all<double>();
  if (f.reference) f.reference->top_ids = parts.top_ids->read_all<int32_t>();
  if (f.linear) {
    f.linear->hidden = parts.hidden->read_all<float>();
    f.linear->head = parts.head->read_all<float>();
  }
  for (const auto& [answer, dataset] : parts.linear_answers)
    (*f.reference->linear).*answer = dataset->read_all<double>();
  run_agreed(comm, "checking the logits of " + path, [&] { check_numbers(file, f); });
  return f;
}

void write_logprobs_results(OutputFile& output, const LogprobsResultsHeader& header,
                            const LogprobsResultRows& mine) {
  Communicator& comm = output.comm();
  const std::vector<LogprobsArray> arrays = real_results(mine, header.length);
  const auto rows = std::ssize(mine.logprob);
  run_agreed(comm, "checking the shapes of results", [&] {
    for (const LogprobsArray& array : arrays)
      GYRE_CHECK(std::ssize(array.values) == rows * array.width,
                 "{} has {} elements; it must have {}", array.path, array.values.size(),
                 rows * array.width);
    GYRE_CHECK(mine.top_ids.size() == mine.top_values.size(), "{} ids of {} largest values",
               mine.top_ids.size(), mine.top_values.size());
  });
  check_coverage(comm, mine.begin, rows, header.tokens);
  run_on_root(comm, "creating " + output.path(),
              [&] { create_results(output.temporary_path(), header, arrays); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  for (const LogprobsArray& array : arrays)
    write_rows<float>(file, array.path, mine.begin, rows, array.width, array.values);
  write_rows<int32_t>(file, "/results/top_ids", mine.begin, rows, header.length, mine.top_ids);
  file.close();
}

}  // namespace gyre

#include "io/schemas/schema.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "comm/agree.hpp"
#include "core/nearest.hpp"
#include "io/trust/content_digest.hpp"

namespace gyre {
namespace {

std::string join(const std::vector<h5::Type>& types) {
  std::string text;
  for (h5::Type type : types) text += (text.empty() ? "" : " or ") + std::string(name_of(type));
  return text;
}

/// The error is agreed because every rank has the whole dataset.
template <class T>
[[noreturn]] void refuse_element(const h5::Dataset& dataset, size_t i, T value, const char* type) {
  throw AgreedError(ExitCode::usage,
                    fmt::format("dataset '{}' of '{}': element {} is {}, which does not fit {}",
                                dataset.path(), dataset.file(), i, value, type));
}

std::string kind_of(const h5::File& file) {
  const h5::AttributeValue kind = file.attribute("/", "schema");
  if (const auto* name = std::get_if<std::string>(&kind)) return *name;
  throw_usage("'{}' is not a file of Gyre: it has no text attribute 'schema'", file.path());
}

bool matches(const h5::Shape& shape, const h5::Shape& wanted) {
  return std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end(),
                    [](int64_t has, int64_t want) { return want < 0 || has == want; });
}

}  // namespace

SchemaReader::SchemaReader(const h5::File& file, std::string schema)
    : file_(file), schema_(std::move(schema)) {}

std::string SchemaReader::or_dataset(const std::string& object, const std::string& name) const {
  const std::string place = fmt::format("{}/{}", object, name);
  const auto& names = names_of_schema(schema_);
  const bool known =
      std::ranges::any_of(names, [&](const SchemaName& one) { return one.place == place; });
  return known ? fmt::format("; a number of each row goes to the dataset '{}'", place) : "";
}

template <class T, class Convert>
T SchemaReader::attribute(const std::string& object, const std::string& name, const char* wanted,
                          const std::optional<T>& otherwise, const Convert& convert) {
  const h5::AttributeValue value = file_.attribute(object, name);
  if (value == h5::AttributeValue() && otherwise) return *otherwise;
  if (const std::optional<T> right = convert(value)) return *right;
  if (value == h5::AttributeValue())
    errors_.add("'{}' has no {} attribute '{}'", object, wanted, name);
  else
    errors_.add("attribute '{}' of '{}' is {}; it must be {}{}", name, object, to_string(value),
                wanted, or_dataset(object, name));
  return otherwise.value_or(T());
}

int64_t SchemaReader::integer(const std::string& object, const std::string& name,
                              std::optional<int64_t> otherwise) {
  return attribute(object, name, "integer", otherwise,
                   [](const h5::AttributeValue& value) -> std::optional<int64_t> {
                     if (const auto* number = std::get_if<int64_t>(&value)) return *number;
                     return {};
                   });
}

double SchemaReader::real(const std::string& object, const std::string& name,
                          std::optional<double> otherwise) {
  return attribute(object, name, "real", otherwise,
                   [](const h5::AttributeValue& value) -> std::optional<double> {
                     if (const auto* number = std::get_if<double>(&value)) return *number;
                     if (const auto* number = std::get_if<int64_t>(&value))
                       return static_cast<double>(*number);
                     return {};
                   });
}

std::string SchemaReader::text(const std::string& object, const std::string& name,
                               const std::optional<std::string>& otherwise) {
  return attribute(object, name, "text", otherwise,
                   [](const h5::AttributeValue& value) -> std::optional<std::string> {
                     if (const auto* text = std::get_if<std::string>(&value)) return *text;
                     return {};
                   });
}

bool SchemaReader::has(const std::string& object, const std::string& name) const {
  return file_.attribute(object, name) != h5::AttributeValue();
}

std::optional<h5::Dataset> SchemaReader::dataset(const std::string& path,
                                                 const std::vector<h5::Type>& types,
                                                 const h5::Shape& shape) {
  const auto is_right = [&](h5::Type type) {
    return std::find(types.begin(), types.end(), type) != types.end();
  };
  return open(path, is_right, join(types), shape);
}

bool SchemaReader::is_there(const std::string& path) const {
  return file_.has_object(path);
}

std::optional<h5::Dataset> SchemaReader::open(const std::string& path,
                                              const std::function<bool(h5::Type)>& is_right,
                                              const std::string& right, const h5::Shape& shape) {
  if (!file_.has_dataset(path)) {
    errors_.add("there is no dataset '{}'; it must be {} {}", path, right, h5::to_string(shape));
    return {};
  }
  h5::Dataset dataset = file_.dataset(path);
  if (is_right(dataset.type()) && matches(dataset.shape(), shape)) return dataset;
  errors_.add("dataset '{}' is {} {}; it must be {} {}", path, name_of(dataset.type()),
              h5::to_string(dataset.shape()), right, h5::to_string(shape));
  return {};
}

std::optional<h5::Dataset> SchemaReader::reals(const std::string& path, const h5::Shape& shape) {
  return open(path, h5::is_real, "real", shape);
}

std::optional<h5::Dataset> SchemaReader::integers(const std::string& path, const h5::Shape& shape) {
  return open(path, h5::is_integer, "integer", shape);
}

void SchemaReader::throw_if_any() const {
  errors_.throw_if_any(
      fmt::format("'{}' breaks the schema {} version {}:", file_.path(), schema_, schema_version));
}

std::vector<float> read_floats(const h5::Dataset& dataset, std::set<std::string>& rounded,
                               int64_t columns, int64_t valid) {
  if (dataset.stored_type().bytes <= static_cast<int64_t>(sizeof(float)))
    return dataset.read_all<float>();
  const std::vector<double> wide = dataset.read_all<double>();
  std::vector<float> floats(wide.begin(), wide.end());
  for (size_t i = 0; i < wide.size(); ++i) {
    if (static_cast<int64_t>(i) % columns >= valid || std::isnan(wide[i])) continue;
    if (std::isinf(floats[i]) && std::isfinite(wide[i]))
      refuse_element(dataset, i, wide[i], "float32");
    if (static_cast<double>(floats[i]) != wide[i]) rounded.insert(dataset.path());
  }
  return floats;
}

std::vector<std::string> unknown_answers(const h5::File& file, const std::string& schema,
                                         const std::vector<std::string>& more) {
  const std::string group = "/reference/";
  std::vector<std::string> known, places = more, unknown;
  for (const SchemaName& name : names_of_schema(schema)) places.push_back(name.place);
  for (const std::string& place : places)
    if (place.starts_with(group)) known.push_back(place.substr(group.size()));
  for (const std::string& name : file.datasets_below(group)) {
    if (std::ranges::find(known, name) != known.end()) continue;
    const std::string meant = nearest(name, known);
    unknown.push_back(group + name +
                      (meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant)));
  }
  return unknown;
}

std::vector<int32_t> read_int32s(const h5::Dataset& dataset) {
  if (dataset.type() == h5::Type::i32) return dataset.read_all<int32_t>();
  const std::vector<int64_t> wide = dataset.read_all<int64_t>();
  for (size_t i = 0; i < wide.size(); ++i)
    if (!std::in_range<int32_t>(wide[i])) refuse_element(dataset, i, wide[i], "32 bits");
  return {wide.begin(), wide.end()};
}

std::string schema_of(Communicator& comm, const std::string& path) {
  const h5::File file = h5::File::open(comm, path);
  std::string schema;
  run_agreed(comm, "reading the schema of " + path, [&] { schema = kind_of(file); });
  return schema;
}

h5::File open_schema_file(Communicator& comm, const std::string& path, const std::string& schema,
                          const std::vector<std::string>& more) {
  h5::File file = h5::File::open(comm, path);
  run_agreed(comm, "reading the schema of " + path, [&] {
    const std::string kind = kind_of(file);
    if (kind != schema) throw_usage("'{}' is of the kind '{}'; '{}' is needed", path, kind, schema);
    const h5::AttributeValue version = file.attribute("/", "schema_version");
    if (!std::holds_alternative<int64_t>(version))
      throw_usage("'{}' has no integer attribute 'schema_version'; it must be {}", path,
                  schema_version);
    if (version != h5::AttributeValue(schema_version))
      throw_usage("'{}' has version {} of the schema {}; this program reads version {}", path,
                  to_string(version), schema, schema_version);
  });
  run_agreed(comm, "reading the names in " + path, [&] { check_names(file, schema, more); });
  return file;
}

void write_schema(h5::File& file, const std::string& schema, const Provenance& provenance) {
  file.write_attribute("/", "schema", schema);
  file.write_attribute("/", "schema_version", schema_version);
  file.create_group("/provenance");
  for (const auto& [name, text] : provenance) file.write_attribute("/provenance", name, text);
}

void check_offsets(ConfigErrors& errors, const std::string& name, std::span<const int64_t> offsets,
                   int64_t total, const std::string& what) {
  if (offsets.empty()) {
    errors.add("{} is empty; it must hold one element more than there are parts", name);
    return;
  }
  if (offsets.front() != 0) errors.add("{}[0] is {}; it must be 0", name, offsets.front());
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] >= offsets[i - 1]) continue;
    errors.add("{0}[{1}] is {2}, less than {0}[{3}] = {4}; offsets must not decrease", name, i,
               offsets[i], i - 1, offsets[i - 1]);
    return;
  }
  if (offsets.back() != total)
    errors.add("{}[{}], the last, is {}; it must be {}, {}", name, offsets.size() - 1,
               offsets.back(), total, what);
}

void check_vocabulary(ConfigErrors& errors, const std::string& object, int64_t vocab_size) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (vocab_size < 1 || vocab_size > most)
    errors.add("vocab_size of '{}' is {}; it must be 1 to {}", object, vocab_size, most);
}

OutputFile::OutputFile(Communicator& comm, std::string path) : comm_(comm), path_(std::move(path)) {
  run_on_root(comm_, "preparing output", [&] { guard_ = std::make_unique<OutputGuard>(path_); });
  temporary_path_ = broadcast_string(comm_, guard_ ? guard_->temporary_path() : std::string(), 0);
}

void OutputFile::record_contents() {
  HostStream stream;
  comm_.barrier(stream, "all ranks before the contents of the output are recorded")->wait();
  run_on_root(comm_, "recording the contents of the output",
              [&] { h5::record_content_digest(temporary_path_, path_); });
}

std::unique_ptr<OutputGuard> OutputFile::take_guard() {
  record_contents();
  return std::move(guard_);
}

void OutputFile::commit() {
  record_contents();
  HostStream stream;
  comm_.barrier(stream, "all ranks before the output gets its name")->wait();
  run_on_root(comm_, "naming the output", [&] { guard_->commit(); });
}

}  // namespace gyre

#pragma once
// Common parts of all Gyre files, which inputs/SCHEMA.md describes: kind, version, provenance, and
// reading against a schema.

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "core/error.hpp"
#include "io/h5.hpp"
#include "io/schemas/schema_names.hpp"
#include "supervision/output_guard.hpp"

namespace gyre {

inline constexpr const char* documents_schema = "gyre/documents";
inline constexpr const char* model_schema = "gyre/model";
inline constexpr const char* results_schema = "gyre/results";
inline constexpr int64_t schema_version = 1;

/// Provenance of a file: free texts by name (generator, command, sources, ...).
using Provenance = std::map<std::string, std::string>;

/// Reads the items of a schema from an open file, and collects all errors: required items that are
/// missing, and items of a wrong type or shape. Such items read as zero, empty or std::nullopt. No
/// communication.
class SchemaReader {
 public:
  SchemaReader(const h5::File& file, std::string schema);

  /// Reads an attribute of an object; a missing one is `otherwise`, if given.
  int64_t integer(const std::string& object, const std::string& attribute,
                  std::optional<int64_t> otherwise = {});
  double real(const std::string& object, const std::string& attribute,
              std::optional<double> otherwise = {});
  std::string text(const std::string& object, const std::string& attribute,
                   const std::optional<std::string>& otherwise = {});
  /// Whether the object has an attribute of this name, of any type.
  bool has(const std::string& object, const std::string& attribute) const;
  /// Opens a dataset of one of `types` and of shape `shape` (-1 matches any extent).
  std::optional<h5::Dataset> dataset(const std::string& path, const std::vector<h5::Type>& types,
                                     const h5::Shape& shape);
  /// Whether there is an object at this path. An optional dataset that is there must be valid.
  bool is_there(const std::string& path) const;
  /// As reals() and integers(), but std::nullopt without an error if there is no such object.
  std::optional<h5::Dataset> reals_if(const std::string& path, const h5::Shape& shape) {
    return is_there(path) ? reals(path, shape) : std::nullopt;
  }
  std::optional<h5::Dataset> integers_if(const std::string& path, const h5::Shape& shape) {
    return is_there(path) ? integers(path, shape) : std::nullopt;
  }
  /// As dataset(), for reals of any type.
  std::optional<h5::Dataset> reals(const std::string& path, const h5::Shape& shape);
  /// As dataset(), for integers of any width.
  std::optional<h5::Dataset> integers(const std::string& path, const h5::Shape& shape);
  ConfigErrors& errors() { return errors_; }
  /// Throws a usage error that lists all errors, if there are any.
  void throw_if_any() const;

 private:
  template <class T, class Convert>
  T attribute(const std::string& object, const std::string& name, const char* wanted,
              const std::optional<T>& otherwise, const Convert& convert);
  /// Hint at the dataset of the schema that has the attribute's name; "" if there is none.
  std::string or_dataset(const std::string& object, const std::string& name) const;
  std::optional<h5::Dataset> open(const std::string& path,
                                  const std::function<bool(h5::Type)>& is_right,
                                  const std::string& right, const h5::Shape& shape);

  const h5::File& file_;
  std::string schema_;
  ConfigErrors errors_;
};

/// Reads a dataset of reals as f32 onto every rank. Of each row of `columns` values, the first
/// `valid` count: adds the dataset's name to `rounded` if rounding changes one; a finite one beyond
/// f32 is a usage error. Collective.
std::vector<float> read_floats(const h5::Dataset& dataset, std::set<std::string>& rounded,
                               int64_t columns = 1, int64_t valid = 1);
/// Datasets below /reference that neither the schema nor `more` lists: "/reference/logprop (did you
/// mean logprob?)".
std::vector<std::string> unknown_answers(const h5::File& file, const std::string& schema,
                                         const std::vector<std::string>& more = {});
/// Reads a dataset of integers onto every rank. A value that does not fit 32 bits is a usage error.
/// Collective.
std::vector<int32_t> read_int32s(const h5::Dataset& dataset);

/// Opens a file of kind `schema` and of schema_version, and compares its names with the schema's
/// and `more` (check_names). Any other file is a usage error. Collective.
h5::File open_schema_file(Communicator& comm, const std::string& path, const std::string& schema,
                          const std::vector<std::string>& more = {});

/// Kind of a file: its attribute `schema`. Throws a usage error if there is none. Collective.
std::string schema_of(Communicator& comm, const std::string& path);

/// Writes kind, version and provenance to a new file.
void write_schema(h5::File& file, const std::string& schema, const Provenance& provenance);

/// Adds an error unless `offsets` divide `total` elements of `what`: they must start at 0, not
/// decrease, and end at `total`.
void check_offsets(ConfigErrors& errors, const std::string& name, std::span<const int64_t> offsets,
                   int64_t total, const std::string& what);

/// Adds an error for the first of `values` that is not finite. `or_minus_infinity` allows -inf, as
/// for logits and for logarithms of sums that may be empty.
template <class T>
void check_finite(ConfigErrors& errors, const std::string& name, const std::vector<T>& values,
                  bool or_minus_infinity = false) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i]) || (or_minus_infinity && std::isinf(values[i]) && values[i] < 0))
      continue;
    errors.add("{}[{}] is {}; it must be finite{}", name, i, values[i],
               or_minus_infinity ? " or -inf" : "");
    return;
  }
}

/// Adds an error unless ids below `vocab_size`, an attribute of `object`, fit 32 bits.
void check_vocabulary(ConfigErrors& errors, const std::string& object, int64_t vocab_size);

/// An output file of all ranks that appears complete or not at all. If it is constructed early, a
/// missing folder is found before hours of work. All members are collective.
class OutputFile {
 public:
  /// A missing or read-only folder of `path` is a usage error.
  OutputFile(Communicator& comm, std::string path);

  Communicator& comm() const { return comm_; }
  const std::string& path() const { return path_; }
  const std::string& temporary_path() const { return temporary_path_; }
  /// Gives the complete file its final name. All ranks must have closed it. Programs hand the file
  /// to their Outputs instead.
  void commit();
  /// Returns, once and on rank 0, the guard that removes the file or gives it its final name.
  std::unique_ptr<OutputGuard> take_guard();

 private:
  /// Adds the digest of the file's contents.
  void record_contents();

  Communicator& comm_;
  std::string path_;
  std::string temporary_path_;
  std::unique_ptr<OutputGuard> guard_;  // on rank 0
};

}  // namespace gyre

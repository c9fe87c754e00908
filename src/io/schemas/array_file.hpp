#pragma once
// Files of named arrays that a run makes of its inputs, and that another program can make as well:
// "gyre/row-shards", "gyre/ulysses" and "gyre/encoder" (inputs/SCHEMA.md).

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "io/schemas/schema.hpp"

namespace gyre {

inline constexpr const char* row_shards_schema = "gyre/row-shards";
inline constexpr const char* ulysses_schema = "gyre/ulysses";
inline constexpr const char* encoder_schema = "gyre/encoder";

struct NamedArray {
  std::string name;
  h5::Shape shape;
  std::variant<std::vector<int32_t>, std::vector<int64_t>, std::vector<float>> values;
};

/// All of a file. Only rank 0 needs the values of the arrays.
struct ArrayFile {
  std::string schema;
  std::string group;                       ///< "/ulysses"
  std::map<std::string, int64_t> numbers;  ///< attributes of the group
  std::map<std::string, std::string> texts = {};
  std::string input_sha256 = {};  ///< "" if the input was generated
  std::vector<NamedArray> arrays = {};
  Provenance provenance = {};
};

/// Writes the temporary file of `output`; the caller commits it. Collective.
void fill_arrays(OutputFile& output, const ArrayFile& file);

/// An array of a file as it was read, whatever the width of its type.
struct ReadArray {
  h5::Shape shape;
  std::vector<double> values;
};

/// Reads the arrays of `expected` that the file at `path` has, by name, onto rank 0. Throws a usage
/// error that lists all problems: another kind of file; attributes other than those of `expected`
/// (input_sha256 may be missing or empty); an array of other shape, or of integers where reals are
/// expected, or the other way round; none of the arrays. Collective.
std::map<std::string, ReadArray> read_arrays(Communicator& comm, const std::string& path,
                                             const ArrayFile& expected);

}  // namespace gyre

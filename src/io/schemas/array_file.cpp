#include "io/schemas/array_file.hpp"

#include <fmt/format.h>

#include "comm/agree.hpp"

namespace gyre {
namespace {

std::string path_of(const ArrayFile& file, const NamedArray& array) {
  return fmt::format("{}/{}", file.group, array.name);
}

/// Adds an error for each attribute of the file that is missing, or not that of `expected`.
void check_attributes(SchemaReader& reader, const ArrayFile& expected) {
  // Reading a missing attribute has added an error.
  const auto require = [&](const std::string& name, const auto& found, const auto& must) {
    if (reader.has(expected.group, name) && found != must)
      reader.errors().add("{} of '{}' is {}; the run has {}", name, expected.group, found, must);
  };
  for (const auto& [name, number] : expected.numbers)
    require(name, reader.integer(expected.group, name), number);
  for (const auto& [name, text] : expected.texts)
    require(name, reader.text(expected.group, name), text);
  const std::string input = reader.text(expected.group, "input_sha256", "");
  if (!input.empty()) require("input_sha256", input, expected.input_sha256);
}

}  // namespace

void fill_arrays(OutputFile& output, const ArrayFile& file) {
  run_on_root(output.comm(), "creating " + output.path(), [&] {
    h5::File out = h5::File::create(output.temporary_path());
    write_schema(out, file.schema, file.provenance);
    out.create_group(file.group);
    for (const auto& [name, number] : file.numbers) out.write_attribute(file.group, name, number);
    for (const auto& [name, text] : file.texts) out.write_attribute(file.group, name, text);
    out.write_attribute(file.group, "input_sha256", file.input_sha256);
    for (const NamedArray& array : file.arrays)
      std::visit(
          [&](const auto& values) {
            out.write_dataset(path_of(file, array), std::span(values), array.shape);
          },
          array.values);
    out.close();
  });
}

std::map<std::string, ReadArray> read_arrays(Communicator& comm, const std::string& path,
                                             const ArrayFile& expected) {
  const h5::File file = open_schema_file(comm, path, expected.schema);
  std::map<std::string, ReadArray> found;
  run_on_root(comm, "reading " + path, [&] {
    const h5::File own = h5::File::open(path);
    SchemaReader reader(own, expected.schema);
    check_attributes(reader, expected);
    std::vector<std::pair<std::string, h5::Dataset>> datasets;
    bool any = false;
    for (const NamedArray& array : expected.arrays) {
      const std::string place = path_of(expected, array);
      const bool reals = std::holds_alternative<std::vector<float>>(array.values);
      any = any || reader.is_there(place);
      auto dataset =
          reals ? reader.reals_if(place, array.shape) : reader.integers_if(place, array.shape);
      if (dataset) datasets.emplace_back(array.name, std::move(*dataset));
    }
    if (!any)
      reader.errors().add("'{}' has none of the {} datasets of {}", expected.group,
                          expected.arrays.size(), expected.schema);
    reader.throw_if_any();
    for (const auto& [name, dataset] : datasets)
      found[name] = {dataset.shape(), dataset.read_all<double>()};
  });
  return found;
}

}  // namespace gyre

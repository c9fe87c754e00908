#include "io/schemas/shard_file.hpp"

#include <fmt/format.h>

#include "comm/agree.hpp"

namespace gyre {
namespace {

constexpr const char* shards_group = "/shards";

/// An integer array with one row per rank: its dataset in the file and its member of ShardRows.
struct Column {
  const char* path;
  std::vector<int32_t> ShardRows::*values;
};
constexpr Column columns[] = {
    {"/shards/ids", &ShardRows::ids},
    {"/shards/labels", &ShardRows::labels},
    {"/shards/positions", &ShardRows::positions},
    {"/shards/index", &ShardRows::index},
    {"/shards/cu_seqlens", &ShardRows::cu_seqlens},
    {"/shards/cu_seqlens_padded", &ShardRows::cu_seqlens_padded},
};
constexpr const char* shards_embeddings_path = "/shards/embeddings";
constexpr const char* shards_extras_path = "/shards/extras";

/// Leading extents of extras that are aligned to slots.
h5::Shape slots_of_ranks(const ShardsHeader& header) {
  return {header.cp, header.slot_offsets.back()};
}

/// Elements per row of the dataset.
int64_t width_of(const std::string& path, const ShardsHeader& header) {
  const int64_t bins = std::ssize(header.slot_offsets) - 1;
  return path.find("cu_seqlens") != std::string::npos ? header.bin_offsets.back() + bins
                                                      : header.slot_offsets.back();
}

/// Number of axes of the column: 1, or for positions that of the file.
int64_t axes_of(const Column& column, const ShardsHeader& header) {
  return column.values == &ShardRows::positions ? header.position_axes : 1;
}

/// [cp, width], of several axes [cp, axes, width].
h5::Shape shape_of(const Column& column, const ShardsHeader& header) {
  h5::Shape shape{header.cp, width_of(column.path, header)};
  if (axes_of(column, header) > 1) shape.insert(shape.begin() + 1, axes_of(column, header));
  return shape;
}

bool has(const Column& column, const ShardsHeader& header) {
  return header.hidden_size == 0 || std::string(column.path) != "/shards/ids";
}

void create_shards(const std::string& path, const ShardsHeader& header) {
  h5::File file = h5::File::create(path);
  write_schema(file, shards_schema, header.provenance);
  file.create_group(shards_group);
  file.write_attribute(shards_group, "layout", header.layout);
  file.write_attribute(shards_group, "cp", header.cp);
  file.write_attribute(shards_group, "hidden_size", header.hidden_size);
  file.write_attribute(shards_group, "packed_sha256", header.packed_sha256);
  file.write_dataset("/shards/bin_offsets", std::span<const int64_t>(header.bin_offsets));
  file.write_dataset("/shards/slot_offsets", std::span<const int64_t>(header.slot_offsets));
  for (const Column& column : columns)
    if (has(column, header))
      file.create_dataset(column.path, DType::i32, shape_of(column, header),
                          h5::Checksum::fletcher32);
  if (header.hidden_size > 0)
    file.create_dataset(shards_embeddings_path, DType::f32,
                        {header.cp, header.slot_offsets.back(), header.hidden_size},
                        h5::Checksum::fletcher32);
  create_extras(file, shards_extras_path, header.extras, slots_of_ranks(header));
  file.close();
}

/// Writes this rank's rows of an extra that has one item per slot.
void fill_extra(const h5::File& file, const ShardsHeader& header, const std::string& name,
                const Communicator& comm, std::span<const ShardRows> mine) {
  const StoredExtra& stored = header.extras.at(name);
  const int64_t width = header.slot_offsets.back() * stored.extra.item_bytes;
  std::vector<h5::Slab> slabs;
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < mine.size(); ++i) {
    const std::vector<std::byte>& row = mine[i].extras.at(name).bytes;
    GYRE_CHECK(std::ssize(row) == width, "extra {}: a row of {} bytes, not {}", name, row.size(),
               width);
    h5::Slab slab{{comm.rank() + static_cast<int64_t>(i) * comm.size()},
                  {1, header.slot_offsets.back()}};
    slab.start.resize(stored.item.size() + 2, 0);
    slab.count.insert(slab.count.end(), stored.item.begin(), stored.item.end());
    if (width > 0) slabs.push_back(std::move(slab));
    bytes.insert(bytes.end(), row.begin(), row.end());
  }
  file.dataset(fmt::format("{}/{}", shards_extras_path, name)).write_bytes(slabs, bytes);
}

/// Header of a file, as its attributes and datasets give it, and the datasets.
struct ShardParts {
  ShardsHeader header;
  std::optional<h5::Dataset> bin_offsets, slot_offsets, embeddings;
  std::vector<std::pair<const Column*, std::optional<h5::Dataset>>> columns;
};

/// Opens the datasets. Throws a usage error unless their types and shapes follow from `header`.
ShardParts open_rows(const h5::File& file, const ShardsHeader& header) {
  SchemaReader reader(file, shards_schema);
  ShardParts parts;
  parts.header.layout = reader.text(shards_group, "layout");
  parts.header.cp = reader.integer(shards_group, "cp");
  parts.header.hidden_size = reader.integer(shards_group, "hidden_size");
  parts.header.packed_sha256 = reader.text(shards_group, "packed_sha256");
  parts.bin_offsets =
      reader.dataset("/shards/bin_offsets", {h5::Type::i64}, {std::ssize(header.bin_offsets)});
  parts.slot_offsets =
      reader.dataset("/shards/slot_offsets", {h5::Type::i64}, {std::ssize(header.slot_offsets)});
  for (const Column& column : columns)
    if (has(column, header))
      parts.columns.emplace_back(
          &column, reader.dataset(column.path, {h5::Type::i32}, shape_of(column, header)));
  if (header.hidden_size > 0)
    parts.embeddings = reader.dataset(shards_embeddings_path, {h5::Type::f32},
                                      {header.cp, header.slot_offsets.back(), header.hidden_size});
  reader.throw_if_any();
  return parts;
}

/// Throws a usage error unless a file has the attributes and offsets of the header `wanted`.
void check_header(const h5::File& file, const ShardsHeader& stored, const ShardsHeader& wanted) {
  SchemaReader reader(file, shards_schema);
  const auto require = [&](const std::string& what, const auto& has, const auto& must) {
    if (has != must) reader.errors().add("{} is {}; it must be {}", what, has, must);
  };
  require("layout of '/shards'", stored.layout, wanted.layout);
  require("cp of '/shards'", stored.cp, wanted.cp);
  require("hidden_size of '/shards'", stored.hidden_size, wanted.hidden_size);
  require("packed_sha256 of '/shards'", stored.packed_sha256, wanted.packed_sha256);
  for (size_t i = 0; i < wanted.bin_offsets.size(); ++i)
    require(fmt::format("/shards/bin_offsets[{}]", i), stored.bin_offsets[i],
            wanted.bin_offsets[i]);
  for (size_t i = 0; i < wanted.slot_offsets.size(); ++i)
    require(fmt::format("/shards/slot_offsets[{}]", i), stored.slot_offsets[i],
            wanted.slot_offsets[i]);
  reader.throw_if_any();
}

}  // namespace

void fill_shards(OutputFile& output, const ShardsHeader& header, std::span<const ShardRows> mine) {
  Communicator& comm = output.comm();
  run_on_root(comm, "creating " + output.path(),
              [&] { create_shards(output.temporary_path(), header); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  for (const Column& column : columns) {
    if (!has(column, header)) continue;
    const int64_t axes = axes_of(column, header), slots = width_of(column.path, header);
    const int64_t width = axes * slots;
    std::vector<h5::Slab> slabs;
    std::vector<int32_t> values;
    for (size_t i = 0; i < mine.size(); ++i) {
      const std::vector<int32_t>& row = mine[i].*column.values;
      GYRE_CHECK(std::ssize(row) == width, "{}: a row of {}, not {}", column.path, row.size(),
                 width);
      h5::Slab slab;
      slab.count = shape_of(column, header);
      slab.start.resize(slab.count.size(), 0);
      slab.start[0] = comm.rank() + static_cast<int64_t>(i) * comm.size();
      slab.count[0] = 1;
      if (width > 0) slabs.push_back(std::move(slab));
      const std::vector<int32_t> turned = transposed(row, slots, axes);
      values.insert(values.end(), turned.begin(), turned.end());
    }
    file.dataset(column.path).write<int32_t>(slabs, values);
  }
  if (header.hidden_size > 0) {
    std::vector<h5::Slab> slabs;
    std::vector<float> values;
    for (size_t i = 0; i < mine.size(); ++i) {
      slabs.push_back({{comm.rank() + static_cast<int64_t>(i) * comm.size(), 0, 0},
                       {1, header.slot_offsets.back(), header.hidden_size}});
      values.insert(values.end(), mine[i].embeddings.begin(), mine[i].embeddings.end());
    }
    file.dataset(shards_embeddings_path).write<float>(slabs, values);
  }
  for (const auto& [name, stored] : header.extras)
    if (stored.extra.aligned == Extra::Aligned::slots) fill_extra(file, header, name, comm, mine);
  file.close();
}

StoredExtras read_shard_extras(Communicator& comm, const std::string& path,
                               const ShardsHeader& header) {
  const h5::File file = open_schema_file(comm, path, shards_schema);
  StoredExtras extras;
  ExtraDatasets datasets;
  run_agreed(comm, "opening the extras of " + path, [&] {
    SchemaReader reader(file, shards_schema);
    datasets = open_extras(file, reader, shards_extras_path, {-1}, slots_of_ranks(header), extras);
    reader.throw_if_any();
  });
  read_extras(datasets, false, extras);
  return extras;
}

std::vector<ShardRows> read_shard_rows(Communicator& comm, const std::string& path,
                                       const ShardsHeader& header) {
  const h5::File file = open_schema_file(comm, path, shards_schema);
  ShardParts parts;
  run_agreed(comm, "opening the shards of " + path, [&] { parts = open_rows(file, header); });
  parts.header.bin_offsets = parts.bin_offsets->read_all<int64_t>();
  parts.header.slot_offsets = parts.slot_offsets->read_all<int64_t>();
  run_agreed(comm, "checking the shards of " + path,
             [&] { check_header(file, parts.header, header); });
  std::vector<ShardRows> rows(header.cp);
  const auto cut = [](const auto& all, size_t row, int64_t width, auto& to) {
    const auto begin = all.begin() + static_cast<int64_t>(row) * width;
    to.assign(begin, begin + width);
  };
  for (const auto& [column, dataset] : parts.columns) {
    const auto all = dataset->read_all<int32_t>();
    const int64_t axes = axes_of(*column, header), slots = width_of(column->path, header);
    for (size_t r = 0; r < rows.size(); ++r) {
      cut(all, r, axes * slots, rows[r].*column->values);
      rows[r].*column->values = transposed(rows[r].*column->values, axes, slots);
    }
  }
  if (parts.embeddings) {
    const auto all = parts.embeddings->read_all<float>();
    for (size_t r = 0; r < rows.size(); ++r)
      cut(all, r, header.slot_offsets.back() * header.hidden_size, rows[r].embeddings);
  }
  for (const auto& [name, stored] : header.extras) {
    if (stored.extra.aligned != Extra::Aligned::slots) continue;
    const int64_t item = stored.extra.item_bytes, width = header.slot_offsets.back() * item;
    const std::string extra = fmt::format("{}/{}", shards_extras_path, name);
    const std::vector<std::byte> all = file.dataset(extra).read_all_bytes();
    GYRE_CHECK(std::ssize(all) == header.cp * width, "{}: {} bytes", extra, all.size());
    for (size_t r = 0; r < rows.size(); ++r) {
      rows[r].extras[name].item_bytes = item;
      rows[r].extras[name].fill = stored.extra.fill;
      cut(all, r, width, rows[r].extras[name].bytes);
    }
  }
  return rows;
}

}  // namespace gyre

#include "io/shard_file.hpp"

#include <fmt/format.h>

#include "comm/agree.hpp"

namespace gyre {
namespace {

constexpr const char* shards_group = "/shards";

/// An integer array with one row per rank: its dataset and its member.
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

/// Leading extents of extras.
h5::Shape slots_of_ranks(const ShardsHeader& header) {
  return {header.cp, header.slot_offsets.back()};
}

/// Elements per row of the dataset.
int64_t width_of(const std::string& path, const ShardsHeader& header) {
  const int64_t bins = std::ssize(header.slot_offsets) - 1;
  return path.find("cu_seqlens") != std::string::npos ? header.bin_offsets.back() + bins
                                                      : header.slot_offsets.back();
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
      file.create_dataset(column.path, DType::i32, {header.cp, width_of(column.path, header)},
                          h5::Checksum::fletcher32);
  if (header.hidden_size > 0)
    file.create_dataset(shards_embeddings_path, DType::f32,
                        {header.cp, header.slot_offsets.back(), header.hidden_size},
                        h5::Checksum::fletcher32);
  create_extras(file, shards_extras_path, header.extras, slots_of_ranks(header));
  file.close();
}

/// Writes this rank's rows of an extra aligned to slots.
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

}  // namespace

void fill_shards(OutputFile& output, const ShardsHeader& header, std::span<const ShardRows> mine) {
  Communicator& comm = output.comm();
  run_on_root(comm, "creating " + output.path(),
              [&] { create_shards(output.temporary_path(), header); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  for (const Column& column : columns) {
    if (!has(column, header)) continue;
    const int64_t width = width_of(column.path, header);
    std::vector<h5::Slab> slabs;
    std::vector<int32_t> values;
    for (size_t i = 0; i < mine.size(); ++i) {
      const std::vector<int32_t>& row = mine[i].*column.values;
      GYRE_CHECK(std::ssize(row) == width, "{}: a row of {}, not {}", column.path, row.size(),
                 width);
      if (width > 0)
        slabs.push_back({{comm.rank() + static_cast<int64_t>(i) * comm.size(), 0}, {1, width}});
      values.insert(values.end(), row.begin(), row.end());
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
  std::vector<ShardRows> rows(static_cast<size_t>(header.cp));
  const auto cut = [](const auto& all, size_t row, int64_t width, auto& to) {
    const auto begin = all.begin() + static_cast<int64_t>(row) * width;
    to.assign(begin, begin + width);
  };
  for (const Column& column : columns) {
    if (!has(column, header)) continue;
    const int64_t width = width_of(column.path, header);
    const auto all = file.dataset(column.path).read_all<int32_t>();
    GYRE_CHECK(std::ssize(all) == header.cp * width, "{}: {} elements", column.path, all.size());
    for (size_t r = 0; r < rows.size(); ++r) cut(all, r, width, rows[r].*column.values);
  }
  if (header.hidden_size > 0) {
    const int64_t width = header.slot_offsets.back() * header.hidden_size;
    const auto all = file.dataset(shards_embeddings_path).read_all<float>();
    GYRE_CHECK(std::ssize(all) == header.cp * width, "{}: {} elements", shards_embeddings_path,
               all.size());
    for (size_t r = 0; r < rows.size(); ++r) cut(all, r, width, rows[r].embeddings);
  }
  for (const auto& [name, stored] : header.extras) {
    if (stored.extra.aligned != Extra::Aligned::slots) continue;
    const int64_t item = stored.extra.item_bytes, width = header.slot_offsets.back() * item;
    const std::string extra = fmt::format("{}/{}", shards_extras_path, name);
    const std::vector<std::byte> all = file.dataset(extra).read_all_bytes();
    GYRE_CHECK(std::ssize(all) == header.cp * width, "{}: {} bytes", extra, all.size());
    for (size_t r = 0; r < rows.size(); ++r) {
      rows[r].extras[name].item_bytes = item;
      cut(all, r, width, rows[r].extras[name].bytes);
    }
  }
  return rows;
}

}  // namespace gyre

#include "io/schemas/batch_file.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "comm/agree.hpp"
#include "core/label.hpp"
#include "io/schemas/packed_file.hpp"

namespace gyre {
namespace {

using OptionalDataset = std::optional<h5::Dataset>;

template <class T>
std::vector<T> read_if(const OptionalDataset& dataset) {
  return dataset ? dataset->read_all<T>() : std::vector<T>();
}

constexpr int64_t max_index = int64_t{1} << 31;

/// Adds an error for the first of `values` [rows, columns] that is not in [0, limit) or in `also`.
void check_cells(ConfigErrors& errors, const char* dataset, const std::vector<int64_t>& values,
                 int64_t columns, int64_t limit, const std::vector<int64_t>& also) {
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t value = values[i];
    if (value >= 0 && value < limit) continue;
    if (std::find(also.begin(), also.end(), value) != also.end()) continue;
    errors.add("{}[{}, {}] is {}; it must be 0 to {}{}{}", dataset,
               static_cast<int64_t>(i) / columns, static_cast<int64_t>(i) % columns, value,
               limit - 1, also.empty() ? "" : ", or ", fmt::join(also, " or "));
    return;
  }
}

struct BshdParts {
  OptionalDataset ids, embeddings, labels, positions, seq_lens, seq_lens_padded;
  ExtraDatasets extras;
};

constexpr const char* seq_lens_path = "/bshd/seq_lens";
constexpr const char* seq_lens_padded_path = "/bshd/seq_lens_padded";

/// Opens the tables of lengths: both, or only that of real lengths; rows of ids need neither if
/// there is a padding id.
void open_lengths(SchemaReader& reader, BshdArrays& batch, BshdParts& parts) {
  const bool real = reader.is_there(seq_lens_path), slots = reader.is_there(seq_lens_padded_path);
  const bool told = reader.has("/bshd", "pad_id");
  if (real || reader.has("/bshd", "sentinel")) batch.sentinel = reader.integer("/bshd", "sentinel");
  if (real) {
    parts.seq_lens = reader.dataset(seq_lens_path, {h5::Type::i64}, {batch.rows, -1});
    if (parts.seq_lens) batch.segments_per_row = parts.seq_lens->shape()[1];
  }
  if (real && slots)
    parts.seq_lens_padded =
        reader.dataset(seq_lens_padded_path, {h5::Type::i64}, {batch.rows, batch.segments_per_row});
  if (!real && slots)
    reader.errors().add("there is '{}' without '{}': real lengths are unknown",
                        seq_lens_padded_path, seq_lens_path);
  if (!real && parts.embeddings)
    reader.errors().add(
        "there is '/bshd/inputs_embeds' without '{}': padding cannot be told from embeddings",
        seq_lens_path);
  if (!real && !told && !parts.embeddings)
    reader.errors().add(
        "there is neither a dataset '{}' nor an attribute 'pad_id' of '/bshd': padding is unknown",
        seq_lens_path);
  if (!told) return;
  batch.pad_id = reader.integer("/bshd", "pad_id");
  if (*batch.pad_id < 0 || *batch.pad_id >= batch.vocab_size)
    reader.errors().add("pad_id of '/bshd' is {}; it must be 0 to {}", *batch.pad_id,
                        batch.vocab_size - 1);
}

/// Opens positions: an array per row, one array for all rows, or one per axis and row. Rows that
/// are not packed may lack them.
OptionalDataset open_positions(const h5::File& file, SchemaReader& reader, BshdArrays& batch) {
  constexpr const char* path = "/bshd/position_ids";
  if (!file.has_dataset(path)) return {};
  const h5::Shape shape = file.dataset(path).shape();
  if (shape.size() == 3) {
    batch.position_axes = shape[0];
    if (shape[0] < 1 || shape[0] > max_position_axes)
      reader.errors().add("{} has {} axes; it must have 1 to {}", path, shape[0],
                          max_position_axes);
    return reader.dataset(path, {h5::Type::i64}, {-1, batch.rows, batch.slots});
  }
  const bool shared = shape.size() == 2 && shape[0] == 1;
  return reader.dataset(path, {h5::Type::i64}, {shared ? 1 : batch.rows, batch.slots});
}

BshdParts open_bshd(const h5::File& file, BshdArrays& batch) {
  SchemaReader reader(file, bshd_schema);
  BshdParts parts;
  batch.vocab_size = reader.integer("/bshd", "vocab_size");
  batch.rows = batch.slots = batch.segments_per_row = -1;  // -1: any extent, until known
  if (file.has_dataset("/bshd/inputs_embeds") && file.has_dataset("/bshd/input_ids"))
    reader.errors().add(
        "there are both '/bshd/input_ids' and '/bshd/inputs_embeds'; one is needed");
  if (file.has_dataset("/bshd/inputs_embeds")) {
    parts.embeddings = reader.dataset("/bshd/inputs_embeds", {h5::Type::f32}, {-1, -1, -1});
    if (parts.embeddings) {
      const h5::Shape& shape = parts.embeddings->shape();
      batch.rows = shape[0], batch.slots = shape[1], batch.hidden = shape[2];
    }
  } else {
    parts.ids = reader.dataset("/bshd/input_ids", {h5::Type::i64}, {-1, -1});
    if (parts.ids) batch.rows = parts.ids->shape()[0], batch.slots = parts.ids->shape()[1];
  }
  const h5::Shape tokens{batch.rows, batch.slots};
  parts.labels = reader.dataset("/bshd/labels", {h5::Type::i64}, tokens);
  parts.positions = open_positions(file, reader, batch);
  open_lengths(reader, batch, parts);
  parts.extras = open_extras(file, reader, "/bshd/extras", {batch.rows}, tokens, batch.extras);
  check_vocabulary(reader.errors(), "/bshd", batch.vocab_size);
  if (parts.embeddings && batch.hidden < 1)
    reader.errors().add("/bshd/inputs_embeds is {}; its last extent must be at least 1",
                        h5::to_string(parts.embeddings->shape()));
  reader.throw_if_any();
  return parts;
}

struct SalmParts {
  OptionalDataset ids, embeddings, targets, samples, offsets, encoder;
};

SalmParts open_salm(const h5::File& file, SalmArrays& batch) {
  SchemaReader reader(file, salm_schema);
  SalmParts parts;
  batch.vocab_size = reader.integer("/salm", "vocab_size");
  batch.pad_id = reader.integer("/salm", "pad_id");
  batch.placeholder_id = reader.integer("/salm", "placeholder_id");
  batch.rows = batch.width = batch.hidden = -1;  // -1: any extent, until known
  parts.ids = reader.dataset("/salm/input_ids", {h5::Type::i64}, {-1, -1});
  if (parts.ids) batch.rows = parts.ids->shape()[0], batch.width = parts.ids->shape()[1];
  parts.embeddings =
      reader.dataset("/salm/inputs_embeds", {h5::Type::f32}, {batch.rows, batch.width, -1});
  if (parts.embeddings) batch.hidden = parts.embeddings->shape()[2];
  parts.targets = reader.dataset("/salm/target_ids", {h5::Type::i64}, {batch.rows, batch.width});
  parts.samples = reader.dataset("/salm/audio", {h5::Type::f32}, {-1});
  parts.offsets = reader.dataset("/salm/audio_offsets", {h5::Type::i64}, {-1});
  parts.encoder = reader.dataset("/salm/encoder", {h5::Type::f32}, {-1, batch.hidden});
  if (parts.encoder) batch.window = parts.encoder->shape()[0];
  if (parts.encoder && (batch.window < 1 || batch.hidden < 1))
    reader.errors().add("/salm/encoder is {}; both extents must be at least 1",
                        h5::to_string(parts.encoder->shape()));
  check_vocabulary(reader.errors(), "/salm", batch.vocab_size);
  reader.throw_if_any();
  return parts;
}

}  // namespace

BshdArrays read_bshd(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, bshd_schema);
  BshdArrays batch;
  BshdParts parts;
  run_agreed(comm, "opening the batch of " + path, [&] { parts = open_bshd(file, batch); });
  batch.ids = read_if<int64_t>(parts.ids);
  batch.embeddings = read_if<float>(parts.embeddings);
  batch.labels = read_if<int64_t>(parts.labels);
  batch.positions = read_if<int64_t>(parts.positions);
  if (parts.seq_lens) batch.seq_lens = parts.seq_lens->read_all<int64_t>();
  if (parts.seq_lens_padded) batch.seq_lens_padded = parts.seq_lens_padded->read_all<int64_t>();
  for (const bool of_slots : {false, true}) read_extras(parts.extras, of_slots, batch.extras);
  run_agreed(comm, "checking the batch of " + path, [&] {
    SchemaReader reader(file, bshd_schema);
    check_cells(reader.errors(), "/bshd/input_ids", batch.ids, batch.slots, batch.vocab_size, {});
    check_cells(reader.errors(), "/bshd/labels", batch.labels, batch.slots, batch.vocab_size,
                {ignored_label});
    check_cells(reader.errors(), "/bshd/position_ids", batch.positions, batch.slots, max_index, {});
    check_finite(reader.errors(), "/bshd/inputs_embeds", batch.embeddings);
    reader.throw_if_any();
  });
  return batch;
}

void fill_bshd(OutputFile& output, const BshdArrays& batch, const Provenance& provenance) {
  run_on_root(output.comm(), "creating " + output.path(), [&] {
    h5::File file = h5::File::create(output.temporary_path());
    write_schema(file, bshd_schema, provenance);
    file.create_group("/bshd");
    file.write_attribute("/bshd", "vocab_size", batch.vocab_size);
    file.write_attribute("/bshd", "sentinel", batch.sentinel);
    const auto write = [&](const std::string& name, const std::vector<int64_t>& values,
                           int64_t columns) {
      file.write_dataset("/bshd/" + name, std::span<const int64_t>(values), {batch.rows, columns});
    };
    write("input_ids", batch.ids, batch.slots);
    write("labels", batch.labels, batch.slots);
    write("position_ids", batch.positions, batch.slots);
    write("seq_lens", *batch.seq_lens, batch.segments_per_row);
    write("seq_lens_padded", *batch.seq_lens_padded, batch.segments_per_row);
    file.close();
  });
}

SalmArrays read_salm(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, salm_schema);
  SalmArrays batch;
  SalmParts parts;
  run_agreed(comm, "opening the batch of " + path, [&] { parts = open_salm(file, batch); });
  batch.ids = read_if<int64_t>(parts.ids);
  batch.embeddings = read_if<float>(parts.embeddings);
  batch.targets = read_if<int64_t>(parts.targets);
  batch.samples = read_if<float>(parts.samples);
  batch.audio_offsets = read_if<int64_t>(parts.offsets);
  batch.encoder = read_if<float>(parts.encoder);
  run_agreed(comm, "checking the batch of " + path, [&] {
    SchemaReader reader(file, salm_schema);
    check_offsets(reader.errors(), "/salm/audio_offsets", batch.audio_offsets,
                  std::ssize(batch.samples), "the elements of /salm/audio");
    check_cells(reader.errors(), "/salm/input_ids", batch.ids, batch.width, batch.vocab_size,
                {batch.pad_id, batch.placeholder_id});
    check_cells(reader.errors(), "/salm/target_ids", batch.targets, batch.width, batch.vocab_size,
                {ignored_label});
    check_finite(reader.errors(), "/salm/inputs_embeds", batch.embeddings);
    check_finite(reader.errors(), "/salm/audio", batch.samples);
    check_finite(reader.errors(), "/salm/encoder", batch.encoder);
    reader.throw_if_any();
  });
  return batch;
}

}  // namespace gyre

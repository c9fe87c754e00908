#include "io/batch_file.hpp"

#include "comm/agree.hpp"

namespace gyre {
namespace {

using OptionalDataset = std::optional<h5::Dataset>;

template <class T>
std::vector<T> read_if(const OptionalDataset& dataset) {
  return dataset ? dataset->read_all<T>() : std::vector<T>();
}

struct BshdParts {
  OptionalDataset ids, embeddings, labels, positions, seq_lens, seq_lens_padded;
};

BshdParts open_bshd(const h5::File& file, BshdArrays& batch) {
  SchemaReader reader(file, bshd_schema);
  BshdParts parts;
  batch.vocab_size = reader.integer("/bshd", "vocab_size");
  batch.sentinel = reader.integer("/bshd", "sentinel");
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
  parts.positions = reader.dataset("/bshd/position_ids", {h5::Type::i64}, tokens);
  parts.seq_lens = reader.dataset("/bshd/seq_lens", {h5::Type::i64}, {batch.rows, -1});
  if (parts.seq_lens) batch.segments_per_row = parts.seq_lens->shape()[1];
  parts.seq_lens_padded = reader.dataset("/bshd/seq_lens_padded", {h5::Type::i64},
                                         {batch.rows, batch.segments_per_row});
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
  if (parts.encoder && batch.window < 1)
    reader.problems().add("/salm/encoder has no rows; it needs one for each sample of a frame");
  reader.throw_if_any();
  return parts;
}

}  // namespace

std::string schema_of(Communicator& comm, const std::string& path) {
  const h5::File file = h5::File::open(comm, path);
  std::string schema;
  run_agreed(comm, "reading the schema of " + path, [&] {
    const h5::AttributeValue kind = file.attribute("/", "schema");
    const auto* name = std::get_if<std::string>(&kind);
    if (name == nullptr)
      throw_usage("'{}' is not a file of Gyre: it has no text attribute 'schema'", path);
    schema = *name;
  });
  return schema;
}

BshdArrays read_bshd(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, bshd_schema);
  BshdArrays batch;
  BshdParts parts;
  run_agreed(comm, "opening the batch of " + path, [&] { parts = open_bshd(file, batch); });
  batch.ids = read_if<int64_t>(parts.ids);
  batch.embeddings = read_if<float>(parts.embeddings);
  batch.labels = read_if<int64_t>(parts.labels);
  batch.positions = read_if<int64_t>(parts.positions);
  batch.seq_lens = read_if<int64_t>(parts.seq_lens);
  batch.seq_lens_padded = read_if<int64_t>(parts.seq_lens_padded);
  return batch;
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
    check_offsets(reader.problems(), "/salm/audio_offsets", batch.audio_offsets,
                  std::ssize(batch.samples), "the elements of /salm/audio");
    reader.throw_if_any();
  });
  return batch;
}

}  // namespace gyre

#include "io/schemas/packed_file.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "core/rolled_labels.hpp"

namespace gyre {
namespace {

constexpr const char* ids_path = "/packed/ids";
constexpr const char* packed_embeddings_path = "/packed/embeddings";
constexpr const char* labels_path = "/packed/labels";
constexpr const char* positions_path = "/packed/positions";
constexpr const char* packed_extras_path = "/packed/extras";

std::string path_of_extra(const std::string& name) {
  return fmt::format("{}/{}", packed_extras_path, name);
}

/// Calls visit(name, item_bytes) for each extra aligned to slots.
template <class Visit>
void for_each_slot_extra(const PackedHeader& header, const Visit& visit) {
  for (const auto& [name, stored] : header.extras)
    if (stored.extra.aligned == Extra::Aligned::slots) visit(name, stored.extra.item_bytes);
}

/// Bytes of an extra aligned to slots; empty on ranks without slots.
std::span<const std::byte> bytes_of_extra(const PackedSlots& slots, const std::string& name) {
  const auto extra = slots.extras.find(name);
  if (extra == slots.extras.end()) return {};
  return extra->second.bytes;
}

/// [slots], or of several axes [axes, slots].
h5::Shape shape_of_positions(const PackedHeader& header) {
  const int64_t slots = header.slot_offsets().back();
  return header.position_axes == 1 ? h5::Shape{slots} : h5::Shape{header.position_axes, slots};
}

/// Positions of slots [begin, begin + count).
h5::Slab positions_of(const PackedHeader& header, int64_t begin, int64_t count) {
  if (header.position_axes == 1) return {{begin}, {count}};
  return {{0, begin}, {header.position_axes, count}};
}

void create_packed(const std::string& path, const PackedHeader& header) {
  const int64_t slots = header.slot_offsets().back();
  h5::File file = h5::File::create(path);
  write_schema(file, packed_schema, header.provenance);
  write_packed_bins(file, header.bins);
  file.write_attribute(packed_group, "slot_multiple", header.slot_multiple);
  file.write_attribute(packed_group, "documents", header.documents);
  file.write_attribute(packed_group, "vocab_size", header.vocab_size);
  file.write_attribute(packed_group, "hidden_size", header.hidden_size);
  file.write_attribute(packed_group, "tokenizer", header.tokenizer);
  file.write_attribute(packed_group, "algorithm", header.algorithm);
  if (!header.names.empty())
    file.write_dataset("/packed/names", std::span<const std::string>(header.names));
  file.create_dataset(labels_path, DType::i32, {slots}, h5::Checksum::fletcher32);
  file.create_dataset(positions_path, DType::i32, shape_of_positions(header),
                      h5::Checksum::fletcher32);
  if (header.hidden_size == 0)
    file.create_dataset(ids_path, DType::i32, {slots}, h5::Checksum::fletcher32);
  else
    file.create_dataset(packed_embeddings_path, DType::f32, {slots, header.hidden_size},
                        h5::Checksum::fletcher32);
  create_extras(file, packed_extras_path, header.extras, {slots});
  file.close();
}

struct PackedParts {
  PackedBinParts bins;
  std::optional<h5::Dataset> names;
};

PackedParts open_parts(const h5::File& file, PackedHeader& header) {
  SchemaReader reader(file, packed_schema);
  PackedParts parts;
  parts.bins = open_packed_bins(reader, header.bins);
  header.slot_multiple = reader.integer(packed_group, "slot_multiple");
  header.documents = reader.integer(packed_group, "documents");
  header.vocab_size = reader.integer(packed_group, "vocab_size");
  header.hidden_size = reader.integer(packed_group, "hidden_size");
  header.tokenizer = reader.text(packed_group, "tokenizer");
  header.algorithm = reader.text(packed_group, "algorithm");
  if (file.has_dataset("/packed/names"))
    parts.names = reader.dataset("/packed/names", {h5::Type::text}, {-1});
  if (file.has_dataset(positions_path))
    if (const h5::Shape shape = file.dataset(positions_path).shape(); shape.size() == 2) {
      header.position_axes = shape[0];
      if (shape[0] < 2 || shape[0] > max_position_axes)
        reader.errors().add("{} is {}; positions of one axis are [slots], of 2 to {} [axes, slots]",
                            positions_path, h5::to_string(shape), max_position_axes);
    }
  reader.throw_if_any();
  return parts;
}

/// Checks the boundaries of one bin; returns whether they are valid.
bool check_bin(ConfigErrors& errors, const PackedHeader& header, int64_t b) {
  const auto real = header.cu_seqlens(b), padded = header.cu_seqlens_padded(b);
  if (real[0] != 0 || padded[0] != 0) {
    errors.add("bin {}: boundaries begin at {} (cu_seqlens) and {} (cu_seqlens_padded), not at 0",
               b, real[0], padded[0]);
    return false;
  }
  for (size_t i = 0; i + 1 < real.size(); ++i) {
    const int64_t length = int64_t{real[i + 1]} - real[i];
    const int64_t slots = int64_t{padded[i + 1]} - padded[i];
    if (length < 0 || slots < length) {
      errors.add("bin {}, segment {}: real length {} in {} slots; 0 <= real <= slots must hold", b,
                 i, length, slots);
      return false;
    }
    if (slots % header.slot_multiple != 0) {
      errors.add(
          "bin {}, segment {}: {} slots are not a multiple of slot_multiple {}; the next one is {}",
          b, i, slots, header.slot_multiple, round_up(slots, header.slot_multiple));
      return false;
    }
    const int64_t document = header.documents_of(b)[i];
    if (document < 0 || document >= header.documents) {
      errors.add("bin {}, segment {}: document {}; it must be 0 to {}", b, i, document,
                 header.documents - 1);
      return false;
    }
    if (header.bins.prefixes.empty()) continue;
    int64_t tokens = 0;
    for (const StoredNode& node : header.bins.prefixes.tree(document)) tokens += node.tokens;
    if (tokens != length) {
      errors.add("bin {}, segment {}: real length {}, but tree {} has {} tokens", b, i, length,
                 document, tokens);
      return false;
    }
  }
  return true;
}

/// Adds an error for the first value outside [0, limit); `may_be_ignored` allows ignored_label.
void check_range(ConfigErrors& errors, const char* dataset, std::span<const int32_t> values,
                 int64_t begin, int64_t limit, bool may_be_ignored) {
  const auto bad = std::find_if(values.begin(), values.end(), [&](int32_t value) {
    return (value < 0 || value >= limit) && !(may_be_ignored && value == ignored_label);
  });
  if (bad == values.end()) return;
  errors.add("{}[{}] is {}; it must be 0 to {}{}", dataset, begin + (bad - values.begin()), *bad,
             limit - 1, may_be_ignored ? fmt::format(", or {}", ignored_label) : "");
}

/// Adds an error for the first negative element of positions [slots, axes].
void check_positions(ConfigErrors& errors, std::span<const int32_t> positions, int64_t begin,
                     int64_t axes) {
  const auto bad = std::ranges::find_if(positions, [](int32_t value) { return value < 0; });
  if (bad == positions.end()) return;
  const int64_t at = bad - positions.begin();
  errors.add("{}[{}{}] is {}; it must be 0 or more", positions_path,
             axes > 1 ? fmt::format("{}, ", at % axes) : "", begin + at / axes, *bad);
}

/// Adds an error for padding in bins [first, last) whose label is another document's token.
void check_labels(ConfigErrors& errors, const PackedHeader& header, const PackedSlots& slots,
                  int64_t first, int64_t last) {
  size_t begin = 0;
  for (int64_t b = first; b < last; ++b) {
    const auto real = header.cu_seqlens(b), padded = header.cu_seqlens_padded(b);
    std::vector<uint8_t> padding(padded.back(), 1);
    for (size_t i = 0; i + 1 < real.size(); ++i)
      std::fill_n(padding.begin() + padded[i], real[i + 1] - real[i], uint8_t{0});
    const int64_t slot = find_rolled_label(std::span(slots.ids).subspan(begin, padding.size()),
                                           std::span(slots.labels).subspan(begin, padding.size()),
                                           padding, padded.back());
    if (slot >= 0) return errors.add("bin {}, slot {} {}", b, slot, rolled_label_text);
    begin += padding.size();
  }
}

struct SlotParts {
  std::optional<h5::Dataset> ids, embeddings, labels, positions;
};

SlotParts open_slots(const h5::File& file, const PackedHeader& header) {
  SchemaReader reader(file, packed_schema);
  const int64_t slots = header.slot_offsets().back();
  SlotParts parts;
  if (header.hidden_size == 0)
    parts.ids = reader.dataset(ids_path, {h5::Type::i32}, {slots});
  else
    parts.embeddings =
        reader.dataset(packed_embeddings_path, {h5::Type::f32}, {slots, header.hidden_size});
  parts.labels = reader.dataset(labels_path, {h5::Type::i32}, {slots});
  parts.positions = reader.dataset(positions_path, {h5::Type::i32}, shape_of_positions(header));
  reader.throw_if_any();
  return parts;
}

/// Hyperslab of slots [begin, begin + count) of an array [slots, item...].
h5::Slab slots_of(const h5::Shape& item, int64_t begin, int64_t count) {
  h5::Slab slab{{begin}, {count}};
  slab.start.resize(item.size() + 1, 0);
  slab.count.insert(slab.count.end(), item.begin(), item.end());
  return slab;
}

template <class T>
std::vector<T> read_rows(const h5::Dataset& dataset, int64_t begin, int64_t count, int64_t row) {
  std::vector<T> values;
  dataset.make_room(count * row, sizeof(T), [&] { values.resize(count * row); });
  h5::Slab slab{{begin}, {count}};
  if (dataset.shape().size() == 2) slab = {{begin, 0}, {count, row}};
  dataset.read<T>(std::span(&slab, count > 0 ? 1 : 0), std::span<T>(values));
  return values;
}

}  // namespace

std::span<const int32_t> PackedHeader::bounds(const std::vector<int32_t>& all, int64_t b) const {
  const int64_t begin = bins.bin_offsets[b] + b;
  const int64_t end = bins.bin_offsets[b + 1] + b + 1;
  return std::span(all).subspan(begin, end - begin);
}

void count_on(std::vector<int32_t>& positions, size_t begin, int64_t slots, int64_t axes) {
  for (int64_t k = 0; k < slots * axes; ++k) {
    const size_t at = positions.size();
    constexpr int32_t largest = std::numeric_limits<int32_t>::max();
    positions.push_back(at < begin + axes ? 0 : std::min(positions[at - axes], largest - 1) + 1);
  }
}

std::vector<int32_t> transposed(std::span<const int32_t> values, int64_t rows, int64_t columns) {
  std::vector<int32_t> turned;
  turned.reserve(values.size());
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) turned.push_back(values[r * columns + c]);
  return turned;
}

std::vector<int64_t> PackedHeader::slot_offsets() const {
  std::vector<int64_t> offsets{0};
  for (int64_t b = 0; b < bin_count(); ++b)
    offsets.push_back(offsets.back() + cu_seqlens_padded(b).back());
  return offsets;
}

void check_packed(ConfigErrors& errors, const PackedHeader& header) {
  const size_t before = errors.messages().size();
  if (header.slot_multiple < 1 || header.slot_multiple > max_slots)
    errors.add("slot_multiple of '{}' is {}; it must be 1 to {}", packed_group,
               header.slot_multiple, max_slots);
  if (header.bins.bin_capacity < 0)
    errors.add("bin_capacity of '{}' is {}; it must be at least 0", packed_group,
               header.bins.bin_capacity);
  const int64_t segments = std::ssize(header.bins.document);
  if (header.documents < 0 || header.documents > segments)
    errors.add("documents of '{}' is {}; it must be 0 to {}, the number of segments", packed_group,
               header.documents, segments);
  check_vocabulary(errors, packed_group, header.vocab_size);
  const PrefixTables& prefixes = header.bins.prefixes;
  check_prefixes(errors, prefixes);
  if (!prefixes.empty() && prefixes.trees() != header.documents)
    errors.add("documents of '{}' is {}; there are {} trees", packed_group, header.documents,
               prefixes.trees());
  if (!header.names.empty() && std::ssize(header.names) != header.document_count())
    errors.add("/packed/names has {} names of {} documents", header.names.size(),
               header.document_count());
  if (header.hidden_size < 0)
    errors.add("hidden_size of '{}' is {}; it must be at least 0", packed_group,
               header.hidden_size);
  const std::vector<int64_t>& offsets = header.bins.bin_offsets;
  check_offsets(errors, "/packed/bin_offsets", offsets, std::ssize(header.bins.document),
                "the elements of /packed/document");
  if (errors.messages().size() != before) return;
  for (int64_t b = 0; b < header.bin_count(); ++b)
    if (!check_bin(errors, header, b)) return;  // the errors of one bin suffice
}

void fill_packed(OutputFile& output, const PackedHeader& header, const PackedSlots& mine) {
  Communicator& comm = output.comm();
  const int64_t count = std::ssize(mine.labels), total = header.slot_offsets().back();
  int64_t begin = 0, all = 0;
  const std::vector<int64_t> counts = all_gather_value(comm, count);
  for (int r = 0; r < comm.size(); ++r) {
    if (r < comm.rank()) begin += counts[r];
    all += counts[r];
  }
  run_agreed(comm, "checking packed streams", [&] {
    ConfigErrors errors;
    check_packed(errors, header);
    errors.throw_if_any(fmt::format("'{}' cannot be written:", output.path()));
    GYRE_CHECK(all == total, "{} slots of {} are brought", all, total);
    GYRE_CHECK(std::ssize(mine.positions) == count * header.position_axes &&
                   std::ssize(mine.ids) == (header.hidden_size == 0 ? count : 0) &&
                   std::ssize(mine.embeddings) == count * header.hidden_size,
               "{} labels, {} positions, {} ids, {} embeddings of {}", count, mine.positions.size(),
               mine.ids.size(), mine.embeddings.size(), header.hidden_size);
    for_each_slot_extra(header, [&](const std::string& name, int64_t item_bytes) {
      GYRE_CHECK(std::ssize(bytes_of_extra(mine, name)) == count * item_bytes,
                 "extra {}: {} bytes of {} slots", name, bytes_of_extra(mine, name).size(), count);
    });
  });
  run_on_root(comm, "creating " + output.path(),
              [&] { create_packed(output.temporary_path(), header); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  const h5::Slab share{{begin}, {count}}, rows{{begin, 0}, {count, header.hidden_size}};
  file.dataset(labels_path).write<int32_t>(std::span(&share, 1), mine.labels);
  const h5::Slab positions = positions_of(header, begin, count);
  file.dataset(positions_path)
      .write<int32_t>(std::span(&positions, 1),
                      transposed(mine.positions, count, header.position_axes));
  if (header.hidden_size == 0)
    file.dataset(ids_path).write<int32_t>(std::span(&share, 1), mine.ids);
  else
    file.dataset(packed_embeddings_path).write<float>(std::span(&rows, 1), mine.embeddings);
  for_each_slot_extra(header, [&](const std::string& name, int64_t) {
    const h5::Slab items = slots_of(header.extras.at(name).item, begin, count);
    file.dataset(path_of_extra(name)).write_bytes(std::span(&items, 1), bytes_of_extra(mine, name));
  });
  file.close();
}

PackedHeader read_packed_header(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, packed_schema);
  PackedHeader header;
  PackedParts parts;
  run_agreed(comm, "opening the packed streams of " + path,
             [&] { parts = open_parts(file, header); });
  read_packed_bins(parts.bins, header.bins);
  if (parts.names) header.names = parts.names->read_texts();
  run_agreed(comm, "checking the packed streams of " + path, [&] {
    SchemaReader reader(file, packed_schema);
    check_packed(reader.errors(), header);
    if (parts.names && header.names.empty() && header.document_count() > 0)
      reader.errors().add("/packed/names is empty; it must have {}, one for each document",
                          header.document_count());
    reader.throw_if_any();
  });
  ExtraDatasets extras;
  run_agreed(comm, "opening the extras of " + path, [&] {
    SchemaReader reader(file, packed_schema);
    const h5::Shape slots{header.slot_offsets().back()};
    extras = open_extras(file, reader, packed_extras_path, {-1}, slots, header.extras);
    reader.throw_if_any();
  });
  read_extras(extras, false, header.extras);
  return header;
}

PackedSlots read_packed_slots(Communicator& comm, const std::string& path,
                              const PackedHeader& header, int64_t first, int64_t last) {
  const h5::File file = open_schema_file(comm, path, packed_schema);
  SlotParts parts;
  run_agreed(comm, "opening the slots of " + path, [&] { parts = open_slots(file, header); });
  const std::vector<int64_t> offsets = header.slot_offsets();
  const int64_t begin = offsets[first];
  const int64_t count = offsets[last] - begin;
  PackedSlots slots;
  slots.labels = read_rows<int32_t>(*parts.labels, begin, count, 1);
  const int64_t axes = header.position_axes;
  parts.positions->make_room(count * axes, sizeof(int32_t),
                             [&] { slots.positions.resize(count * axes); });
  const h5::Slab positions = positions_of(header, begin, count);
  parts.positions->read<int32_t>(std::span(&positions, count > 0 ? 1 : 0), slots.positions);
  slots.positions = transposed(slots.positions, axes, count);
  if (parts.ids) slots.ids = read_rows<int32_t>(*parts.ids, begin, count, 1);
  if (parts.embeddings)
    slots.embeddings = read_rows<float>(*parts.embeddings, begin, count, header.hidden_size);
  for_each_slot_extra(header, [&](const std::string& name, int64_t item_bytes) {
    const h5::Dataset dataset = file.dataset(path_of_extra(name));
    const h5::Slab items = slots_of(header.extras.at(name).item, begin, count);
    ExtraSlots extra{item_bytes, {}, header.extras.at(name).extra.fill};
    dataset.make_room(count, item_bytes, [&] { extra.bytes.resize(count * item_bytes); });
    dataset.read_bytes(std::span(&items, 1), extra.bytes);
    slots.extras.emplace(name, std::move(extra));
  });
  run_agreed(comm, "checking the slots of " + path, [&] {
    SchemaReader reader(file, packed_schema);
    check_range(reader.errors(), ids_path, slots.ids, begin, header.vocab_size, false);
    check_range(reader.errors(), labels_path, slots.labels, begin, header.vocab_size, true);
    check_positions(reader.errors(), slots.positions, begin, axes);
    check_finite(reader.errors(), packed_embeddings_path, slots.embeddings);
    if (parts.ids) check_labels(reader.errors(), header, slots, first, last);
    reader.throw_if_any();
  });
  return slots;
}

}  // namespace gyre

#include "io/schemas/extras_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

namespace gyre {
namespace {

constexpr Extra::Aligned alignments[] = {Extra::Aligned::none, Extra::Aligned::rows,
                                         Extra::Aligned::slots};

/// Alignment named by the dataset's attribute `aligned`; adds an error if it names none.
std::optional<Extra::Aligned> alignment_of(const h5::File& file, ConfigErrors& errors,
                                           const std::string& path) {
  const h5::AttributeValue value = file.attribute(path, "aligned");
  const auto* name = std::get_if<std::string>(&value);
  for (const Extra::Aligned aligned : alignments)
    if (name != nullptr && *name == name_of(aligned)) return aligned;
  if (name == nullptr)
    errors.add("'{}' has no text attribute 'aligned'; it must be none, rows or slots", path);
  else
    errors.add("'{}' is aligned to '{}'; it must be none, rows or slots", path, *name);
  return {};
}

bool begins_with(const h5::Shape& shape, const h5::Shape& front) {
  return shape.size() >= front.size() &&
         std::equal(front.begin(), front.end(), shape.begin(),
                    [](int64_t want, int64_t has) { return want < 0 || has == want; });
}

constexpr const char* padding_attribute = "padding";

/// Bytes of an element of padding, by the dataset's attribute `padding`; empty: zeros. Adds an
/// error unless it is an integer that the elements can hold, of slots.
std::vector<std::byte> fill_of(const h5::File& file, const h5::Dataset& dataset,
                               Extra::Aligned aligned, ConfigErrors& errors) {
  const std::string& path = dataset.path();
  const h5::AttributeValue value = file.attribute(path, padding_attribute);
  if (value == h5::AttributeValue()) return {};
  const auto* number = std::get_if<int64_t>(&value);
  const int64_t bits = 8 * dataset.stored_type().bytes;
  const bool plain = (dataset.type() == h5::Type::i32 || dataset.type() == h5::Type::i64) &&
                     dataset.stored_type() == h5::stored_type_of(dataset.type());
  if (number == nullptr || aligned != Extra::Aligned::slots || !plain) {
    errors.add(
        "attribute '{}' of '{}' must be an integer, "
        "and the dataset int32 or int64, little-endian, of slots",
        padding_attribute, path);
    return {};
  }
  if (bits < 64 && (*number >= int64_t{1} << (bits - 1) || *number < -(int64_t{1} << (bits - 1)))) {
    errors.add("attribute '{}' of '{}' is {}, which does not fit {}", padding_attribute, path,
               *number, name_of(dataset.type()));
    return {};
  }
  const auto bytes = std::as_bytes(std::span(number, 1)).first(bits / 8);
  return {bytes.begin(), bytes.end()};
}

/// Describes a numeric dataset whose extents begin with `front`; adds an error for any other.
std::optional<StoredExtra> describe(const h5::Dataset& dataset, Extra::Aligned aligned,
                                    const h5::Shape& front, ConfigErrors& errors) {
  const h5::Shape& shape = dataset.shape();
  const std::string what = fmt::format("dataset '{}' is {} {}", dataset.path(),
                                       name_of(dataset.type()), h5::to_string(shape));
  const bool numeric = is_integer(dataset.type()) || is_real(dataset.type()) ||
                       dataset.type() == h5::Type::enumeration;
  if (!numeric) errors.add("{}; an extra must be integer, real or an enumeration", what);
  if (!begins_with(shape, front))
    errors.add("{}; aligned to {}, its extents must begin with {}", what, name_of(aligned),
               h5::to_string(front));
  if (!numeric || !begins_with(shape, front)) return {};
  StoredExtra stored;
  stored.item.assign(shape.begin() + std::ssize(front), shape.end());
  stored.type = dataset.stored_type();
  stored.extra = {aligned, h5::elements_of(stored.item) * stored.type.bytes, nullptr};
  if (stored.extra.item_bytes > 0 || aligned == Extra::Aligned::none) return stored;
  errors.add("{}; each extent behind {} must be at least 1", what, h5::to_string(front));
  return {};
}

}  // namespace

std::string name_of(Extra::Aligned aligned) {
  switch (aligned) {
    case Extra::Aligned::none:
      return "none";
    case Extra::Aligned::rows:
      return "rows";
    case Extra::Aligned::slots:
      return "slots";
  }
  return "?";
}

ExtraDatasets open_extras(const h5::File& file, SchemaReader& reader, const std::string& group,
                          const h5::Shape& rows, const h5::Shape& slots, StoredExtras& extras) {
  ExtraDatasets datasets;
  if (!reader.is_there(group)) return datasets;
  for (const std::string& name : file.datasets_below(group)) {
    const std::string path = group + "/" + name;
    const auto aligned = alignment_of(file, reader.errors(), path);
    if (!aligned) continue;
    const h5::Shape front = *aligned == Extra::Aligned::slots  ? slots
                            : *aligned == Extra::Aligned::rows ? rows
                                                               : h5::Shape();
    h5::Dataset dataset = file.dataset(path);
    std::optional<StoredExtra> stored = describe(dataset, *aligned, front, reader.errors());
    if (!stored) continue;
    stored->extra.fill = fill_of(file, dataset, *aligned, reader.errors());
    extras.emplace(name, *std::move(stored));
    datasets.emplace(name, std::move(dataset));
  }
  return datasets;
}

void read_extras(const ExtraDatasets& datasets, bool of_slots, StoredExtras& extras) {
  for (const auto& [name, dataset] : datasets) {
    Extra& extra = extras.at(name).extra;
    if ((extra.aligned == Extra::Aligned::slots) == of_slots)
      extra.bytes = std::make_shared<const std::vector<std::byte>>(dataset.read_all_bytes());
  }
}

void create_extras(h5::File& file, const std::string& group, const StoredExtras& extras,
                   const h5::Shape& slots) {
  for (const auto& [name, stored] : extras) {
    const std::string path = group + "/" + name;
    const Extra& extra = stored.extra;
    h5::Shape shape;
    if (extra.aligned == Extra::Aligned::slots) {
      shape = slots;
    } else if (extra.aligned == Extra::Aligned::rows) {
      shape = {std::ssize(*extra.bytes) / extra.item_bytes};
    }
    shape.insert(shape.end(), stored.item.begin(), stored.item.end());
    if (extra.aligned == Extra::Aligned::slots)
      file.create_dataset(path, stored.type, shape, h5::Checksum::fletcher32);
    else
      file.write_dataset(path, stored.type, *extra.bytes, shape);
    file.write_attribute(path, "aligned", name_of(extra.aligned));
    if (extra.fill.empty()) continue;
    // The sign is that of the last byte, as the machine's integers are little-endian.
    const bool negative = (extra.fill.back() & std::byte{0x80}) != std::byte{0};
    int64_t number = negative ? -1 : 0;
    std::ranges::copy(extra.fill, std::as_writable_bytes(std::span(&number, 1)).begin());
    file.write_attribute(path, padding_attribute, number);
  }
}

}  // namespace gyre

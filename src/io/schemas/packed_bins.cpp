#include "io/schemas/packed_bins.hpp"

namespace gyre {
namespace {

constexpr const char* bin_offsets_path = "/packed/bin_offsets";
constexpr const char* document_path = "/packed/document";
constexpr const char* cu_seqlens_path = "/packed/cu_seqlens";
constexpr const char* cu_seqlens_padded_path = "/packed/cu_seqlens_padded";

}  // namespace

void PackedBins::add_bin(std::span<const int64_t> documents, std::span<const int32_t> real,
                         std::span<const int32_t> padded) {
  document.insert(document.end(), documents.begin(), documents.end());
  cu_seqlens.insert(cu_seqlens.end(), real.begin(), real.end());
  cu_seqlens_padded.insert(cu_seqlens_padded.end(), padded.begin(), padded.end());
  bin_offsets.push_back(std::ssize(document));
}

void write_packed_bins(h5::File& file, const PackedBins& bins) {
  file.create_group(packed_group);
  file.write_attribute(packed_group, "bin_capacity", bins.bin_capacity);
  file.write_dataset(bin_offsets_path, std::span<const int64_t>(bins.bin_offsets));
  file.write_dataset(document_path, std::span<const int64_t>(bins.document));
  file.write_dataset(cu_seqlens_path, std::span<const int32_t>(bins.cu_seqlens));
  file.write_dataset(cu_seqlens_padded_path, std::span<const int32_t>(bins.cu_seqlens_padded));
  write_prefixes(file, bins.prefixes);
}

PackedBinParts open_packed_bins(SchemaReader& reader, PackedBins& bins) {
  bins.bin_capacity = reader.integer(packed_group, "bin_capacity");
  PackedBinParts parts;
  parts.bin_offsets = reader.dataset(bin_offsets_path, {h5::Type::i64}, {-1});
  parts.document = reader.dataset(document_path, {h5::Type::i64}, {-1});
  const int64_t bounds = parts.bin_offsets && parts.document
                             ? parts.document->elements() + parts.bin_offsets->elements() - 1
                             : -1;
  parts.cu_seqlens = reader.dataset(cu_seqlens_path, {h5::Type::i32}, {bounds});
  parts.cu_seqlens_padded = reader.dataset(cu_seqlens_padded_path, {h5::Type::i32}, {bounds});
  parts.prefixes = open_prefixes(reader);
  return parts;
}

void read_packed_bins(const PackedBinParts& parts, PackedBins& bins) {
  bins.bin_offsets = parts.bin_offsets->read_all<int64_t>();
  bins.document = parts.document->read_all<int64_t>();
  bins.cu_seqlens = parts.cu_seqlens->read_all<int32_t>();
  bins.cu_seqlens_padded = parts.cu_seqlens_padded->read_all<int32_t>();
  bins.prefixes = read_prefixes(parts.prefixes);
}

}  // namespace gyre

#pragma once
// The root attribute `content_sha256` of a file: a digest of the file's whole contents, as defined
// in inputs/SCHEMA.md. Checksums of HDF5 1.10 cover only chunk elements; this also detects changed
// bytes in metadata (types, extents, names, addresses).

#include <hdf5.h>

#include <cstdint>
#include <string>

namespace gyre::h5 {

inline constexpr const char* content_attribute = "content_sha256";

/// Larger files have no digest. The values of larger datasets are left out of the digest.
inline constexpr int64_t max_content_bytes = int64_t{1} << 26;

/// Digest of an open file, 64 hexadecimal digits. `path` names the file in errors. Throws a runtime
/// error if something cannot be read. Serial.
std::string content_digest(hid_t file, const std::string& path);

/// Whether an open file has the attribute.
bool has_content_digest(hid_t file, const std::string& path);

/// Throws a runtime error unless the attribute exists and equals the digest of the contents.
void check_content_digest(hid_t file, const std::string& path);

/// Adds the attribute to a complete, closed file of at most `max_content_bytes`, after reserving
/// disk space. `name` names the file in errors. Serial.
void record_content_digest(const std::string& path, const std::string& name);

}  // namespace gyre::h5

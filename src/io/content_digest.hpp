#pragma once
// The root attribute `content_sha256` of a file: a digest of all that the file says, as
// inputs/SCHEMA.md defines it. Checksums of HDF5 1.10 cover the elements of chunks; a changed byte
// of what describes them (a type, the extents, the names, the addresses) shows here.

#include <hdf5.h>

#include <cstdint>
#include <string>

namespace gyre::h5 {

inline constexpr const char* content_attribute = "content_sha256";

/// A file with more bytes has no digest, and values of a dataset with more are left out of it.
inline constexpr int64_t most_content_bytes = int64_t{1} << 26;

/// The digest of an open file, 64 hexadecimal digits. `path` is its name in errors. Throws a
/// runtime error when something cannot be read. Serial.
std::string content_digest(hid_t file, const std::string& path);

/// Whether an open file has the attribute.
bool has_content_digest(hid_t file, const std::string& path);

/// Throws a runtime error unless an open file has the attribute with the digest of its contents.
void check_content_digest(hid_t file, const std::string& path);

/// Adds the attribute to a complete, closed file that is not larger than `most_content_bytes`, and
/// reserves space before. `name` is the file's name in errors. Serial.
void record_content_digest(const std::string& path, const std::string& name);

}  // namespace gyre::h5

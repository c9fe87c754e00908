#pragma once
// SHA-256 of files.

#include <string>

#include "comm/communicator.hpp"

namespace gyre {

/// SHA-256 of a file's bytes, 64 hexadecimal digits. A file that cannot be opened is a usage error.
std::string sha256_of_file(const std::string& path);

/// The same on every rank; rank 0 reads the file. Collective.
std::string sha256_of_file(Communicator& comm, const std::string& path);

}  // namespace gyre

#pragma once
// HDF5 1.10 trusts sizes and addresses in a file: about one in a hundred files with a changed byte
// makes it crash or corrupt the program's memory.

#include <string>

namespace gyre::h5 {

/// Reads a file in a child process; a crash there is a runtime error that names the file. Every
/// object and attribute is read, and every dataset unless the file is large. A file that has not
/// changed since is not read again. A wrong digest of the contents is a runtime error as well
/// (io/content_digest.hpp). Call it before opening the file. Serial.
void try_reading(const std::string& path);

}  // namespace gyre::h5

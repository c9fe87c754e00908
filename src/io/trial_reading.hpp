#pragma once
// HDF5 1.10 trusts sizes and addresses in a file: one file in some hundred with a changed byte
// crashes it, or makes it destroy the memory of the program.

#include <string>

namespace gyre::h5 {

/// Reads a file in a child process, which may crash: that is a runtime error which names the file.
/// Every object and attribute is read, and every dataset of a file that is not large. A file that
/// has not changed since is not read again. A file with a digest of its contents that has others is
/// a runtime error, too (io/content_digest.hpp). To be called before the file is opened. Serial.
void try_reading(const std::string& path);

}  // namespace gyre::h5

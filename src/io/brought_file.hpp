#pragma once
// Files that Gyre brings: descriptions of machines and models, found by name from any folder.

#include <string>

#include "core/error.hpp"

namespace gyre {

/// Resolves the value of an option that is a path, or the name of a file that Gyre brings:
///
///     "h100-sxm-8", "machines"    FOLDER/../share/gyre/inputs/machines/h100-sxm-8.toml
///
/// FOLDER is that of the running program, so that an installation can be moved; a build folder has
/// a link to the source tree there. A path of an existing file, or with a folder, is returned as it
/// is. Adds an error for another word that is no name.
std::string find_brought_file(const char* option, const std::string& value, const char* kind,
                              ConfigErrors& errors);

}  // namespace gyre

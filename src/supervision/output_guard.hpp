#pragma once
// Output files appear complete or not at all.

#include <memory>
#include <string>
#include <vector>

namespace gyre {

/// Owns the temporary file of an output. Exactly one rank, the one that renames it, has a guard.
///
/// The file is written under temporary_path(), in the same folder; commit() renames it to its final
/// name. Before that, the destructor removes the temporary file. If any signal, including SIGKILL,
/// ends the process, its guard (guard.hpp) removes the file.
class OutputGuard {
 public:
  /// Follows links and replaces their target. Throws a usage error if the folder does not exist or
  /// is not writable, or if the path exists and is not a regular file: renaming would replace a
  /// device or a folder.
  explicit OutputGuard(std::string path);
  ~OutputGuard();
  OutputGuard(const OutputGuard&) = delete;
  OutputGuard& operator=(const OutputGuard&) = delete;

  const std::string& temporary_path() const { return temporary_; }
  /// Marks the contents as wrong: commit() will use NAME.invalid.h5 instead of NAME.h5. Returns
  /// that name.
  const std::string& name_as_invalid();
  /// Throws a runtime error if the file cannot be renamed.
  void commit();

 private:
  std::string path_;
  std::string temporary_;
};

/// A file and the option that names it. An empty path means no file.
struct NamedPath {
  std::string option;
  std::string path;
};

/// Files that a run reads and writes.
struct RunFiles {
  std::vector<NamedPath> outputs;  ///< regular files: HDF5, or lines that are read again
  std::vector<NamedPath> texts;    ///< documents written once, from beginning to end
  std::vector<NamedPath> inputs = {};
};

/// Checks outputs before hours of work. Throws a usage error if one could not be written (as
/// OutputGuard would; a text may be a special file), if two are the same file, or if one, also
/// under its NAME.invalid.h5, is an input or standard output or error. Links, including hard links,
/// and other spellings count as the same file.
void check_output_places(const RunFiles& files);

/// Whether two paths refer to the same file, which need not exist.
bool is_same_file(const std::string& a, const std::string& b);

/// Whether `path` is no regular file (a device, a pipe, a socket), or an open descriptor of any
/// kind (/dev/stdout, /dev/fd/3): it is written to rather than replaced.
bool is_special(const std::string& path);

/// Opens a special file for writing; duplicates it if it is a descriptor of this process. Waits for
/// the reader of a pipe. Throws a usage error if it cannot be written.
int open_special(const std::string& path);

/// Writes `text` to the temporary file of `path`.
std::unique_ptr<OutputGuard> write_temporary(const std::string& path, const std::string& text);

}  // namespace gyre

#pragma once
// Output files appear complete or not at all.

#include <memory>
#include <string>
#include <vector>

namespace gyre {

/// Owns the temporary file of an output. Exactly one rank (the one that renames it) has a guard.
///
/// The file is written under temporary_path(), in the same folder; commit() renames it to its final
/// name. If the object dies first, or the process does, by whatever signal, SIGKILL included, the
/// temporary file is removed: a small shell, detached from the process group, watches a pipe from
/// this process and removes the file when the pipe closes without the word "keep".
class OutputGuard {
 public:
  /// Follows links: the file that they lead to is replaced. Throws a usage error when its folder
  /// does not exist or cannot be written, or when it exists and is not a regular file: renaming
  /// would replace a device or a folder. Throws a runtime error when nothing can watch over the
  /// file.
  explicit OutputGuard(std::string path);
  ~OutputGuard();
  OutputGuard(const OutputGuard&) = delete;
  OutputGuard& operator=(const OutputGuard&) = delete;

  const std::string& temporary_path() const { return temporary_; }
  /// What is in the file was found to be wrong: commit() names it NAME.invalid.h5 instead of
  /// NAME.h5. Returns that name.
  const std::string& name_as_invalid();
  /// Throws a runtime error when the file cannot get its name.
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  int watcher_pipe_ = -1;
};

/// A file and the option that names it. An empty path is no file.
struct NamedPath {
  std::string option;
  std::string path;
};

/// The files that a run reads and writes.
struct RunFiles {
  std::vector<NamedPath> outputs;  ///< regular files: HDF5, or lines that are read again
  std::vector<NamedPath> texts;    ///< documents that are written once, from begin to end
  std::vector<NamedPath> inputs = {};
};

/// Refuses impossible outputs before hours of work. Throws a usage error when one could not be
/// written (as OutputGuard would; a text may be special), when two are the same file, or when one
/// is an input or the file of standard output, or would be by its name of wrong results. Links,
/// hard ones too, and other spellings are the same file.
void check_output_places(const RunFiles& files);

/// Whether two paths lead to the same file, which need not exist.
bool is_same_file(const std::string& a, const std::string& b);

/// Whether `path` is there and is written to rather than replaced: a device, a pipe, a socket, or
/// an open descriptor (/dev/stdout, /dev/fd/3), whatever is behind it.
bool is_special(const std::string& path);

/// Opens a special file to write to it. A descriptor of this process is duplicated. Waits for the
/// reader of a pipe. Throws a usage error when it cannot be written.
int open_special(const std::string& path);

/// Writes `text` to the temporary file of `path`.
std::unique_ptr<OutputGuard> write_temporary(const std::string& path, const std::string& text);

}  // namespace gyre

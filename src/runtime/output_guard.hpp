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
  /// Throws a usage error when the folder of `path` does not exist or cannot be written, or when
  /// `path` exists and is not a regular file: renaming would replace a device or a folder.
  explicit OutputGuard(std::string path);
  ~OutputGuard();
  OutputGuard(const OutputGuard&) = delete;
  OutputGuard& operator=(const OutputGuard&) = delete;

  const std::string& temporary_path() const { return temporary_; }
  /// What is in the file was found to be wrong: commit() names it NAME.invalid.h5 instead of
  /// NAME.h5. Returns that name.
  const std::string& name_as_invalid();
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

/// Refuses impossible outputs before hours of work. Throws a usage error when one could not be
/// written (as OutputGuard would), when two are the same file, or when one is an input, or would be
/// by its name of wrong results.
void check_output_places(const std::vector<NamedPath>& outputs,
                         const std::vector<NamedPath>& inputs);

/// Writes `text` to the temporary file of `path`.
std::unique_ptr<OutputGuard> write_temporary(const std::string& path, const std::string& text);

}  // namespace gyre

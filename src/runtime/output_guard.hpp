#pragma once
// Output files appear complete or not at all.

#include <string>

namespace gyre {

/// Owns the temporary file behind an output. Exactly one rank (the one that renames) holds it.
///
/// The file is written under temporary_path(), in the same folder; commit() renames it to its final
/// name. If the object dies first, or the process does, by whatever signal, SIGKILL included, the
/// temporary file is removed: a small shell, detached from the process group, watches a pipe from
/// this process and removes the file when the pipe closes without the word "keep".
class OutputGuard {
 public:
  /// Throws a usage error when the folder of `path` does not exist or cannot be written.
  explicit OutputGuard(std::string path);
  ~OutputGuard();
  OutputGuard(const OutputGuard&) = delete;
  OutputGuard& operator=(const OutputGuard&) = delete;

  const std::string& temporary_path() const { return temporary_; }
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  int watcher_pipe_ = -1;
};

/// Throws what OutputGuard(path) would throw: to find an impossible place before hours of work.
/// Empty paths are no outputs and pass.
void check_output_place(const std::string& path);

/// Writes `text` to `path` by way of a temporary file and a rename.
void write_file_atomically(const std::string& path, const std::string& text);

}  // namespace gyre

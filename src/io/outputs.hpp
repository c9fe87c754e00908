#pragma once
// Outputs of a run: at its end all of them get their final names, or none does.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/schemas/schema.hpp"

namespace gyre {

/// Complete files under temporary names. Files that publish() has not named are removed.
class Outputs {
 public:
  explicit Outputs(Communicator& world) : world_(world) {}
  ~Outputs();
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  /// Refuses impossible outputs (check_output_places). Opens text outputs that are special files,
  /// which are not replaced; waits until a pipe has a reader. Collective.
  void plan(const RunFiles& files);

  /// Takes a file that all ranks have written and closed. All ranks must call it.
  void add(OutputFile file);
  /// Keeps a text for the special file that plan() has opened, or writes it to a temporary file. An
  /// empty path is ignored. Rank 0 only.
  void add_text(const std::string& path, const std::string& text);

  /// Prints rank 0's `text` to standard output at once. If that fails, rank 0 throws a runtime
  /// error if the run writes nothing but standard output; otherwise the run goes on to save its
  /// files, and publish() throws.
  void print(const std::string& text);

  /// Marks the files of add() as wrong: publish() names each NAME.invalid.h5 instead of NAME.h5.
  /// Returns these names on rank 0. Files of add_text() keep their names.
  std::vector<std::string> name_as_invalid();

  /// Completes the run: writes the special files, gives the other files their names and prints rank
  /// 0's `text` to standard output. From here on a signal that asks the run to end is ignored; if
  /// one has reached any rank before, all ranks end here, with nothing named or printed. Throws a
  /// runtime error if a file cannot be written or named, or, after all files are named, if
  /// something could not be printed. Collective.
  void publish(const std::string& text);

 private:
  Communicator& world_;
  bool writes_files_ = false;
  std::vector<std::unique_ptr<OutputGuard>> files_, texts_;         // on rank 0
  std::map<std::string, int> special_;                              // on rank 0: descriptors
  std::vector<std::pair<std::string, std::string>> special_texts_;  // path and text
};

/// Throws a runtime error if text printed to standard output was lost.
void require_stdout();

}  // namespace gyre

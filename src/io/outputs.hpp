#pragma once
// The outputs of a run: all of them get their names together, at its end, or none does.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/schema.hpp"

namespace gyre {

/// Complete files under temporary names. Without publish() they are removed.
class Outputs {
 public:
  explicit Outputs(Communicator& world) : world_(world) {}
  ~Outputs();
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  /// Refuses impossible outputs (check_output_places), and opens the texts that are special files:
  /// they are written to, not replaced. Waits for the reader of a pipe. Collective.
  void plan(const RunFiles& files);

  /// Takes a file that all ranks have written and closed. Every rank calls it.
  void add(OutputFile file);
  /// Keeps a text for the special file that plan() has opened, or writes it to a temporary file. An
  /// empty path is no file. On rank 0.
  void add_text(const std::string& path, const std::string& text);

  /// Prints `text` of rank 0 to standard output at once. When that is not possible, rank 0 throws a
  /// runtime error if standard output is all that the run writes; otherwise the run goes on, for
  /// the sake of its files, and publish() throws.
  void print(const std::string& text);

  /// What the files of add() hold was found to be wrong: publish() names each NAME.invalid.h5
  /// instead of NAME.h5. Returns these names, on rank 0. Those of add_text() keep theirs.
  std::vector<std::string> name_as_invalid();

  /// Ends the work of the run: writes the special files, gives the others their names and prints
  /// `text` (of rank 0) to standard output. From here on a signal that asks the run to end is
  /// ignored; one that came to any rank before ends all ranks here, with nothing named and nothing
  /// printed. Throws a runtime error when a file cannot be written or named, or, with all files in
  /// their places, when something could not be printed. Collective.
  void publish(const std::string& text);

 private:
  Communicator& world_;
  bool writes_files_ = false;
  std::vector<std::unique_ptr<OutputGuard>> files_, texts_;         // on rank 0
  std::map<std::string, int> special_;                              // on rank 0: descriptors
  std::vector<std::pair<std::string, std::string>> special_texts_;  // path and text
};

/// Throws a runtime error when what was printed to standard output did not get there.
void require_stdout();

}  // namespace gyre

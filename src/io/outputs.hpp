#pragma once
// The outputs of a run: all of them get their names together, at its end, or none does.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/schema.hpp"

namespace gyre {

/// Complete files under temporary names. Without publish() they are removed.
class Outputs {
 public:
  explicit Outputs(Communicator& world) : world_(world) {}

  /// Takes a file that all ranks have written and closed. Every rank calls it.
  void add(OutputFile file);
  /// Writes a text to a temporary file. An empty path is no file. On rank 0.
  void add_text(const std::string& path, const std::string& text);

  /// What the files of add() hold was found to be wrong: publish() names each NAME.invalid.h5
  /// instead of NAME.h5. Returns these names, on rank 0. Those of add_text() keep theirs.
  std::vector<std::string> name_as_invalid();

  /// Ends the work of the run: gives the files their names and prints `text` (of rank 0) to
  /// standard output. From here on a signal that asks the run to end is ignored; one that came to
  /// any rank before ends all ranks here, with nothing named and nothing printed. Throws a runtime
  /// error when a file cannot be named, or the text cannot be printed. Collective.
  void publish(const std::string& text);

 private:
  Communicator& world_;
  std::vector<std::unique_ptr<OutputGuard>> files_, texts_;  // on rank 0
};

/// Throws a runtime error when what was printed to standard output did not get there.
void flush_output();

}  // namespace gyre

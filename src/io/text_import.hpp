#pragma once
// Imports text files as documents: one document per file, one token per byte.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "io/schemas/documents.hpp"

namespace gyre {

/// Files that a list of paths expands to.
struct FileList {
  std::vector<std::string> files;
  int64_t duplicates = 0;   ///< paths that lead to a file already listed
  int64_t not_regular = 0;  ///< dangling links, pipes and the like, found in folders
  int64_t left_out = 0;     ///< the output file, found in folders under any name
};

/// Expands paths in their order. A file stands for itself; a folder stands for all files below it,
/// sorted by path, except names that begin with a dot; links are followed. A file reached twice
/// counts once. A path that does not exist, or is neither file nor folder, is a usage error. So is
/// the file `output` itself, but in a folder it is skipped as the result of an earlier run. Serial.
FileList list_files(const std::vector<std::string>& paths, const std::string& output = {});

struct ImportReport {
  int64_t files = 0;  ///< files read, binary ones included
  int64_t bytes = 0;  ///< bytes of the text files
  int64_t duplicates = 0;
  int64_t not_regular = 0;
  int64_t left_out = 0;
  std::vector<std::string> binary;  ///< skipped because they contain a NUL byte
};

/// Reads the files that `paths` expand to. A document is bos, the bytes, eos. A file of more than
/// `max_tokens` tokens (0: no limit, else at least 3) becomes several documents; the later ones are
/// named "path#2", "path#3", ... Ranks share the reading; all ranks get all documents. `output` is
/// the file that will hold them, see list_files. Collective.
Documents import_text(Communicator& comm, const std::vector<std::string>& paths, int64_t max_tokens,
                      ImportReport& report, const std::string& output = {});

}  // namespace gyre

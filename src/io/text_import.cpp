#include "io/text_import.hpp"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>

#include "comm/agree.hpp"
#include "comm/collective.hpp"
#include "core/error.hpp"
#include "io/resources.hpp"
#include "supervision/output_guard.hpp"

namespace gyre {
namespace {

namespace fs = std::filesystem;

/// Finds files below `folder`. Skips hidden names and folders already visited (links may form
/// cycles).
void walk(const fs::path& folder, std::set<fs::path>& seen, std::vector<std::string>& found,
          FileList& list) {
  if (!seen.insert(fs::canonical(folder)).second) return;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with('.')) continue;
    std::error_code dangling;
    const fs::file_status status = entry.status(dangling);
    if (fs::is_directory(status))
      walk(entry.path(), seen, found, list);
    else if (fs::is_regular_file(status))
      found.push_back(entry.path().string());
    else
      ++list.not_regular;
  }
}

std::string without_trailing_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

std::string read_file(const std::string& path) {
  std::string text;
  read_blocks(path, [&](std::string_view block) { text += block; });
  return text;
}

/// Names must be UTF-8: HDF5 stores them as UTF-8 texts.
bool is_utf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xc2 && lead < 0xe0 ? 2
                          : lead >= 0xe0 && lead < 0xf0 ? 3
                          : lead >= 0xf0 && lead < 0xf5 ? 4
                                                        : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (size_t k = 1; k < length; ++k)
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return false;
    i += length;
  }
  return true;
}

void append_document(Documents& documents, std::string_view text, std::string name) {
  documents.tokens.push_back(byte_tokenizer::bos);
  for (char c : text) documents.tokens.push_back(static_cast<unsigned char>(c));
  documents.tokens.push_back(byte_tokenizer::eos);
  documents.offsets.push_back(std::ssize(documents.tokens));
  documents.names.push_back(std::move(name));
}

/// Appends the file as one document, or as parts of at most `max_tokens` tokens.
void append_file(Documents& documents, std::string_view text, const std::string& path,
                 int64_t max_tokens) {
  const size_t part =
      max_tokens == 0 ? std::max<size_t>(1, text.size()) : static_cast<size_t>(max_tokens) - 2;
  append_document(documents, text.substr(0, part), path);
  for (size_t at = part, number = 2; at < text.size(); at += part, ++number)
    append_document(documents, text.substr(at, part), fmt::format("{}#{}", path, number));
}

/// Half-open range of files that `rank` reads. All ranks read about equally many bytes.
std::pair<size_t, size_t> share_of(const std::vector<int64_t>& bytes, int rank, int ranks) {
  const int64_t total = std::accumulate(bytes.begin(), bytes.end(), std::ssize(bytes));
  std::pair<size_t, size_t> share{0, 0};
  int64_t before = 0;
  for (int64_t size : bytes) {
    const int64_t middle = before + (size + 1) / 2;
    const int64_t owner = middle * ranks / std::max<int64_t>(1, total);
    if (owner < rank) ++share.first;
    if (owner <= rank) ++share.second;
    before += size + 1;
  }
  return share;
}

/// Gathers the documents of all ranks, in rank order.
Documents gather(Communicator& comm, const Documents& mine) {
  Documents all;
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < mine.count(); ++i) lengths.push_back(mine.length(i));
  for (int64_t length : all_gather_elements(comm, std::span<const int64_t>(lengths)))
    all.offsets.push_back(all.offsets.back() + length);
  all.tokens = all_gather_elements(comm, std::span<const int32_t>(mine.tokens));
  all.names = all_gather_texts(comm, mine.names);
  return all;
}

}  // namespace

FileList list_files(const std::vector<std::string>& paths, const std::string& output) {
  FileList list;
  std::vector<std::string> candidates;
  for (const std::string& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) throw_usage("cannot read '{}': No such file or directory", path);
    if (fs::is_regular_file(status)) {
      if (!output.empty() && is_same_file(path, output))
        throw_usage("the output '{}' is the file of the input '{}'", output, path);
      candidates.push_back(path);
    } else if (fs::is_directory(status)) {
      std::set<fs::path> seen;
      std::vector<std::string> found;
      walk(without_trailing_slashes(path), seen, found, list);
      std::sort(found.begin(), found.end());
      candidates.insert(candidates.end(), found.begin(), found.end());
    } else {
      throw_usage("cannot read '{}': it is neither a file nor a folder", path);
    }
  }
  std::set<fs::path> seen;
  for (std::string& path : candidates) {
    if (!output.empty() && is_same_file(path, output)) {
      ++list.left_out;
    } else if (!seen.insert(fs::canonical(path)).second) {
      ++list.duplicates;
    } else {
      if (!is_utf8(path)) throw_usage("the name of '{}' is not UTF-8 text", path);
      list.files.push_back(std::move(path));
    }
  }
  return list;
}

Documents import_text(Communicator& comm, const std::vector<std::string>& paths, int64_t max_tokens,
                      ImportReport& report, const std::string& output) {
  FileList list;
  std::vector<int64_t> bytes;
  run_on_root(comm, "listing files", [&] {
    if (max_tokens != 0 && max_tokens < 3)
      throw_usage("a limit of {} tokens a document leaves no room for text; at least 3 are needed",
                  max_tokens);
    list = list_files(paths, output);
    for (const std::string& file : list.files) {
      bytes.push_back(static_cast<int64_t>(fs::file_size(file)));
      require_memory("the import of '" + file + "'", bytes.back(), sizeof(int32_t));
    }
  });
  list.files = broadcast_texts(comm, list.files);
  bytes = all_gather_elements(comm, std::span<const int64_t>(bytes));  // only rank 0 has sizes

  const auto share = share_of(bytes, comm.rank(), comm.size());
  Documents mine;
  std::vector<std::string> binary;
  run_agreed(comm, "reading text files", [&] {
    for (size_t i = share.first; i < share.second; ++i) {
      const std::string text = read_file(list.files[i]);
      if (text.find('\0') != std::string::npos)
        binary.push_back(list.files[i]);
      else
        append_file(mine, text, list.files[i], max_tokens);
    }
  });
  Documents all = gather(comm, mine);
  report.files = std::ssize(list.files);
  report.bytes = all.total() - 2 * all.count();
  report.duplicates = all_reduce_value(comm, list.duplicates, ReduceOp::max);
  report.not_regular = all_reduce_value(comm, list.not_regular, ReduceOp::max);
  report.left_out = all_reduce_value(comm, list.left_out, ReduceOp::max);
  report.binary = all_gather_texts(comm, binary);
  return all;
}

}  // namespace gyre

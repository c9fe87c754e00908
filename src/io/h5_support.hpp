#pragma once
// Internals of io/h5: error texts and types shared by its source files.

#include <hdf5.h>

#include <set>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/error.hpp"
#include "io/h5.hpp"
#include "io/resources.hpp"

namespace gyre::h5 {

/// Deeper nesting is an error, because each object is opened from the root.
inline constexpr std::ptrdiff_t max_group_levels = 64;

/// Reads a file in a child process, because HDF5 1.10 trusts sizes and addresses in a file: about
/// one in a hundred files with a changed byte makes it crash or corrupt the program's memory. A
/// crash is a runtime error that names the file. Every object and attribute is read, and every
/// dataset unless the file is large. A file that has not changed since is not read again. A wrong
/// digest of the contents is a runtime error as well (io/trust/content_digest.hpp). Call it before
/// opening the file. Serial.
void try_reading(const std::string& path);

}  // namespace gyre::h5

namespace gyre::h5::detail {

/// Stops HDF5 from printing its own errors.
void silence();

/// Deepest message on HDF5's error stack, as one line; clears the stack.
std::string deepest_message();

/// "cannot <what>: <HDF5's reason>"
std::string failure_text(const std::string& what);
/// Throws a runtime error with the text failure_text(what).
[[noreturn]] void fail(const std::string& what);

/// Returns an HDF5 result; throws a runtime error if it is negative.
template <class T>
T check(T result, const std::string& what) {
  if (result < 0) fail(what);
  return result;
}

/// Names of a group's links, or of an object's attributes, sorted. `what` is the task, for errors.
std::vector<std::string> names_of_links(hid_t group, const std::string& what);
std::vector<std::string> names_of_attributes(hid_t object, const std::string& what);

hid_t native_type(DType type);
/// HDF5 type of a StoredType. Throws a runtime error if the description is invalid.
Handle type_of(const StoredType& type);
Type classify(hid_t type);
/// HDF5 type in files, little-endian.
hid_t file_type(Type type);
StoredType describe(hid_t type, const std::string& what);

/// How a dataset stores its elements in other files ("is virtual"); null if it does not.
const char* foreign_storage(hid_t dataset);

/// Filter of a dataset that this HDF5 lacks, such as "32000 (lzf)"; or "".
std::string missing_filter(hid_t dataset);

/// Extents of a dataspace; {0} for a null dataspace. Throws a runtime error if the number of
/// elements overflows.
Shape shape_of(hid_t space, const std::string& what);

/// Variable-length text type with the character set of `like`, or UTF-8.
Handle text_type(hid_t like = -1);

/// Memory for the variable-length data of H5Dread, with a limit: a damaged file can claim gigabytes
/// per text. After a successful read, the caller frees it by H5Dvlen_reclaim.
class TextMemory {
 public:
  explicit TextMemory(int64_t max_bytes);
  TextMemory(const TextMemory&) = delete;
  TextMemory& operator=(const TextMemory&) = delete;
  /// Transfer property list for H5Dread.
  hid_t transfer_list() const { return list_.get(); }
  bool is_exceeded() const { return exceeded_; }
  /// Frees all blocks after an error, when HDF5 no longer knows them.
  void free_all();

 private:
  static void* allocate(size_t bytes, void* self);
  static void release(void* block, void* self);

  Handle list_;
  int64_t left_;
  bool exceeded_ = false;
  std::set<void*> blocks_;
};

/// Reads `count` texts of at most `max_bytes` in all through `read(memory type, transfer list,
/// buffer)`, which wraps H5Dread or H5Aread. Throws a runtime error that names `what` if they
/// exceed the limit or memory. (H5Aread cannot be limited.)
template <class Read>
std::vector<std::string> read_texts(const std::string& what, hid_t file_type, hid_t space,
                                    size_t count, int64_t max_bytes, const Read& read) {
  const bool variable = H5Tis_variable_str(file_type) > 0;
  const size_t each = sizeof(std::string) + (variable ? sizeof(char*) : H5Tget_size(file_type));
  require_memory(what, count, each);
  std::vector<std::string> texts;
  texts.reserve(count);
  TextMemory text_memory(max_bytes);
  if (variable) {
    const Handle memory = text_type(file_type);
    std::vector<char*> pointers(count, nullptr);
    try {
      read(memory.get(), text_memory.transfer_list(), pointers.data());
    } catch (const Error&) {
      text_memory.free_all();
      if (!text_memory.is_exceeded()) throw;
      throw_runtime("{} claims texts of more than {} bytes: the file is damaged", what, max_bytes);
    }
    for (const char* pointer : pointers) texts.emplace_back(pointer == nullptr ? "" : pointer);
    H5Dvlen_reclaim(memory.get(), space, H5P_DEFAULT, pointers.data());
    return texts;
  }
  const size_t width = H5Tget_size(file_type);
  const Handle memory(H5Tcopy(file_type), H5Tclose);
  std::string bytes(width * count, '\0');
  read(memory.get(), text_memory.transfer_list(), bytes.data());
  const char pad = H5Tget_strpad(file_type) == H5T_STR_SPACEPAD ? ' ' : '\0';
  for (size_t i = 0; i < count; ++i) {
    const std::string text = bytes.substr(i * width, width);
    const size_t end = pad == ' ' ? text.find_last_not_of(' ') + 1 : text.find('\0');
    texts.push_back(text.substr(0, end));
  }
  return texts;
}

}  // namespace gyre::h5::detail

#pragma once
// Internals of io/h5: error texts and types that its source files share.

#include <hdf5.h>

#include <string>

#include "core/dtype.hpp"
#include "io/h5.hpp"
#include "io/resources.hpp"

namespace gyre::h5::detail {

/// Stops HDF5 from printing its own errors.
void silence();

/// The deepest message on HDF5's error stack, in one line; clears the stack.
std::string deepest_message();

/// Throws a runtime error, "cannot <what>: <HDF5's reason>".
[[noreturn]] void fail(const std::string& what);

/// Returns a result of HDF5; throws a runtime error if it is negative.
template <class T>
T check(T result, const std::string& what) {
  if (result < 0) fail(what);
  return result;
}

hid_t native_type(DType type);
Type classify(hid_t type);

/// How a dataset has its elements in other files ("is virtual"), or null.
const char* foreign_storage(hid_t dataset);

/// Extents of a dataspace; {0} for one without elements. A runtime error when there are more
/// elements than can be counted.
Shape shape_of(hid_t space, const std::string& what);

/// The variable-length text type of the character set of `like`, or UTF-8.
Handle text_type(hid_t like = -1);

/// Reads `count` texts through `read(memory type, buffer)`, which wraps H5Dread or H5Aread. Throws
/// a runtime error when `what`, their name, does not fit into memory.
template <class Read>
std::vector<std::string> read_texts(const std::string& what, hid_t file_type, hid_t space,
                                    size_t count, const Read& read) {
  const bool variable = H5Tis_variable_str(file_type) > 0;
  const size_t each = sizeof(std::string) + (variable ? sizeof(char*) : H5Tget_size(file_type));
  require_memory(what, static_cast<int64_t>(count), static_cast<int64_t>(each));
  std::vector<std::string> texts;
  texts.reserve(count);
  if (variable) {
    const Handle memory = text_type(file_type);
    std::vector<char*> pointers(count, nullptr);
    read(memory.get(), pointers.data());
    for (const char* pointer : pointers) texts.emplace_back(pointer == nullptr ? "" : pointer);
    H5Dvlen_reclaim(memory.get(), space, H5P_DEFAULT, pointers.data());
    return texts;
  }
  const size_t width = H5Tget_size(file_type);
  const Handle memory(H5Tcopy(file_type), H5Tclose);
  std::string bytes(width * count, '\0');
  read(memory.get(), bytes.data());
  const char pad = H5Tget_strpad(file_type) == H5T_STR_SPACEPAD ? ' ' : '\0';
  for (size_t i = 0; i < count; ++i) {
    const std::string text = bytes.substr(i * width, width);
    const size_t end = pad == ' ' ? text.find_last_not_of(' ') + 1 : text.find('\0');
    texts.push_back(text.substr(0, end));
  }
  return texts;
}

}  // namespace gyre::h5::detail

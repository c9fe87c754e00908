#pragma once
// Files for tests: a folder that all ranks share, ways to damage files, and expectations of errors.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "io/h5.hpp"
#include "mpi_test.hpp"

namespace gyre::test {

/// A temporary folder of all ranks, removed with its contents. Collective.
class SharedFolder {
 public:
  SharedFolder() {
    if (world().rank() == 0) {
      std::string name = (std::filesystem::temp_directory_path() / "gyre-test-XXXXXX").string();
      if (mkdtemp(name.data()) != nullptr) path_ = name;
    }
    path_ = broadcast_string(world(), path_, 0);
  }
  ~SharedFolder() {
    HostStream stream;
    world().barrier(stream, "end of a shared folder")->wait();
    if (world().rank() == 0 && !path_.empty()) std::filesystem::remove_all(path_);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;

  std::string file(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Rank 0 works, the others wait; an exception is thrown on all ranks. Collective.
inline void on_root(const std::function<void()>& work) {
  run_on_root(world(), "test", work);
}

/// Path of an input file in the source tree.
inline std::string input(const std::string& name) {
  return std::string(GYRE_SOURCE_DIR) + "/inputs/" + name;
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

/// Copies a file without its last `missing` bytes.
inline void copy_truncated(const std::string& from, const std::string& to, size_t missing) {
  const std::string bytes = read_bytes(from);
  write_bytes(to, bytes.substr(0, bytes.size() - missing));
}

/// Copies a file and flips one bit of the first byte of `pattern` in it.
inline void copy_damaged(const std::string& from, const std::string& to,
                         const std::string& pattern) {
  std::string bytes = read_bytes(from);
  const size_t at = bytes.find(pattern);
  if (at == std::string::npos) throw_runtime("'{}' does not hold the pattern", from);
  bytes[at] = static_cast<char>(bytes[at] ^ 1);
  write_bytes(to, bytes);
}

/// Changes an existing file by calls of HDF5.
inline void change_file(const std::string& path, const std::function<void(hid_t file)>& work) {
  const h5::Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
  ASSERT_TRUE(file.valid()) << path;
  work(file.get());
}

/// Makes a dataset and the groups above it; without extents it is a scalar.
inline void make_dataset(hid_t file, const std::string& path, hid_t type,
                         const std::vector<hsize_t>& extents, const void* values = nullptr,
                         hid_t creation = H5P_DEFAULT) {
  const h5::Handle space(
      H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), H5Sclose);
  const h5::Handle links(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(links.get(), 1);
  const h5::Handle dataset(
      H5Dcreate2(file, path.c_str(), type, space.get(), links.get(), creation, H5P_DEFAULT),
      H5Dclose);
  ASSERT_TRUE(dataset.valid()) << path;
  if (values != nullptr) H5Dwrite(dataset.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values);
}

/// Makes an attribute; without extents it is a scalar.
inline void make_attribute(hid_t file, const char* object, const char* name, hid_t type,
                           const void* value, const std::vector<hsize_t>& extents = {}) {
  const h5::Handle space(
      H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), H5Sclose);
  const h5::Handle made(H5Acreate_by_name(file, object, name, type, space.get(), H5P_DEFAULT,
                                          H5P_DEFAULT, H5P_DEFAULT),
                        H5Aclose);
  ASSERT_TRUE(made.valid()) << name;
  if (value != nullptr) H5Awrite(made.get(), type, value);
}

/// Enumeration of 8 bits; its values are 0, 1, ...
inline h5::Handle make_enumeration(const std::vector<const char*>& names) {
  h5::Handle type(H5Tenum_create(H5T_NATIVE_INT8), H5Tclose);
  for (int8_t i = 0; i < std::ssize(names); ++i) H5Tenum_insert(type.get(), names[i], &i);
  return type;
}

/// Writes a dataset whose elements are all `value`.
template <class T>
void write_filled(h5::File& file, const std::string& path, const h5::Shape& shape, T value) {
  const std::vector<T> values(h5::elements_of(shape), value);
  file.write_dataset(path, std::span<const T>(values), shape);
}

/// Expects an Error of `code` whose message holds `part`; under several ranks, an agreed one with
/// the same message on all of them.
inline void expect_error(ExitCode code, const std::string& part,
                         const std::function<void()>& work) {
  std::string message = "(nothing thrown)";
  try {
    work();
  } catch (const Error& error) {
    message = error.what();
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << message;
    EXPECT_TRUE(error.agreed() || world().size() == 1) << message;
  }
  EXPECT_NE(message.find(part), std::string::npos)
      << "message: " << message << "\nexpected in it: " << part;
  EXPECT_EQ(broadcast_string(world(), message, 0), message);
}

}  // namespace gyre::test

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "comm/agree.hpp"
#include "comm/mpi.hpp"
#include "core/error.hpp"
#include "io/h5_support.hpp"
#include "runtime/watchdog.hpp"

namespace gyre::h5 {
namespace {

constexpr int64_t chunk_bytes = int64_t{1} << 20;

/// Throws when `path` cannot be opened, or is no complete HDF5 file. Serial.
void check_readable(const std::string& path) {
  detail::silence();
  if (std::filesystem::is_directory(path)) throw_usage("cannot read '{}': it is a folder", path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) throw_usage("cannot read '{}': {}", path, std::strerror(errno));
  const WaitScope scope("opening " + path);
  if (H5Fis_hdf5(path.c_str()) <= 0) {
    H5Eclear2(H5E_DEFAULT);
    throw_usage("'{}' is not an HDF5 file", path);
  }
  const Handle id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  detail::check(id.get(), fmt::format("open '{}'", path));
}

/// Every prefix of an absolute path that ends at a '/' or at its end: "/a/b" -> "/a", "/a/b".
std::vector<std::string> prefixes(const std::string& path) {
  std::vector<std::string> result;
  for (size_t at = 1; at < path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    result.push_back(path.substr(0, end));
    at = end + 1;
  }
  return result;
}

/// Property list for links and datasets that creates missing parent groups.
Handle with_groups() {
  Handle list(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(list.get(), 1);
  return list;
}

/// Chunks of whole rows, about `chunk_bytes` each.
std::vector<hsize_t> chunk_of(const Shape& shape, DType type) {
  std::vector<hsize_t> chunk(shape.begin(), shape.end());
  const int64_t row = elements_of(shape) / shape[0] * static_cast<int64_t>(size_of(type));
  chunk[0] = static_cast<hsize_t>(std::clamp<int64_t>(chunk_bytes / row, 1, shape[0]));
  return chunk;
}

Handle creation_list(DType type, const Shape& shape, Checksum checksum) {
  Handle list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (elements_of(shape) == 0) return list;
  if (checksum == Checksum::fletcher32 && !shape.empty()) {
    const std::vector<hsize_t> chunk = chunk_of(shape, type);
    H5Pset_chunk(list.get(), static_cast<int>(chunk.size()), chunk.data());
    H5Pset_fletcher32(list.get());
  } else {
    H5Pset_alloc_time(list.get(), H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(list.get(), H5D_FILL_TIME_NEVER);
  }
  return list;
}

AttributeValue read_attribute(hid_t attribute, const std::string& what) {
  const Handle type(H5Aget_type(attribute), H5Tclose);
  const Handle space(H5Aget_space(attribute), H5Sclose);
  if (H5Sget_simple_extent_npoints(space.get()) != 1) return {};
  const Type kind = detail::classify(type.get());
  if (is_integer(kind)) {
    int64_t value = 0;
    detail::check(H5Aread(attribute, H5T_NATIVE_INT64, &value), what);
    return value;
  }
  if (is_real(kind)) {
    double value = 0;
    detail::check(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value), what);
    return value;
  }
  if (kind != Type::text) return {};
  return detail::read_texts(type.get(), space.get(), 1, [&](hid_t memory_type, void* buffer) {
    detail::check(H5Aread(attribute, memory_type, buffer), what);
  })[0];
}

Handle open_parallel(Communicator& comm, const std::string& path, unsigned flags) {
  Handle id;
  run_agreed(comm, "opening " + path, [&] {
    detail::silence();
    const WaitScope scope("opening " + path);
    const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
    detail::check(H5Pset_fapl_mpio(access.get(), mpi_handle(comm), MPI_INFO_NULL),
                  fmt::format("open '{}' over MPI-IO", path));
    id = Handle(H5Fopen(path.c_str(), flags, access.get()), H5Fclose);
    detail::check(id.get(), fmt::format("open '{}'", path));
  });
  return id;
}

}  // namespace

File File::open(const std::string& path) {
  check_readable(path);
  Handle id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  detail::check(id.get(), fmt::format("open '{}'", path));
  return File(path, nullptr, std::move(id));
}

File File::open(Communicator& comm, const std::string& path) {
  run_on_root(comm, "opening " + path, [&] { check_readable(path); });
  return File(path, &comm, open_parallel(comm, path, H5F_ACC_RDONLY));
}

File File::create(const std::string& path) {
  detail::silence();
  Handle id(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
  detail::check(id.get(), fmt::format("create '{}'", path));
  return File(path, nullptr, std::move(id));
}

File File::open_to_fill(Communicator& comm, const std::string& path) {
  return File(path, &comm, open_parallel(comm, path, H5F_ACC_RDWR));
}

File::~File() {
  if (!id_.valid()) return;
  const WaitScope scope("closing " + path_);
  id_.reset();
}

void File::close() {
  const auto close_here = [&] {
    const WaitScope scope("closing " + path_);
    detail::check(id_.reset(), fmt::format("close '{}'", path_));
  };
  if (comm_ == nullptr) return close_here();
  run_agreed(*comm_, "closing " + path_, close_here);
}

H5I_type_t File::kind_of(const std::string& path) const {
  const std::string what = fmt::format("look for '{}' in '{}'", path, path_);
  H5I_type_t kind = H5I_GROUP;
  for (const std::string& prefix : prefixes(path)) {
    if (kind != H5I_GROUP) return H5I_BADID;  // HDF5 fails below a dataset
    if (detail::check(H5Lexists(id_.get(), prefix.c_str(), H5P_DEFAULT), what) == 0 ||
        detail::check(H5Oexists_by_name(id_.get(), prefix.c_str(), H5P_DEFAULT), what) == 0)
      return H5I_BADID;
    const Handle object(H5Oopen(id_.get(), prefix.c_str(), H5P_DEFAULT), H5Oclose);
    detail::check(object.get(), what);
    kind = H5Iget_type(object.get());
  }
  return kind;
}

bool File::has_group(const std::string& path) const {
  return kind_of(path) == H5I_GROUP;
}
bool File::has_dataset(const std::string& path) const {
  return kind_of(path) == H5I_DATASET;
}

std::vector<std::string> File::datasets_below(const std::string& group) const {
  std::vector<std::string> links;
  const auto collect = [](hid_t, const char* name, const H5L_info_t* info, void* data) -> herr_t {
    if (info->type == H5L_TYPE_HARD) static_cast<std::vector<std::string>*>(data)->push_back(name);
    return 0;
  };
  detail::check(H5Lvisit_by_name(id_.get(), group.c_str(), H5_INDEX_NAME, H5_ITER_INC, collect,
                                 &links, H5P_DEFAULT),
                fmt::format("list '{}' of '{}'", group, path_));
  const std::string front = group == "/" ? "/" : group + "/";
  std::erase_if(links, [&](const std::string& link) { return !has_dataset(front + link); });
  std::sort(links.begin(), links.end());
  return links;
}

Dataset File::dataset(const std::string& path) const {
  const std::string what = fmt::format("open dataset '{}' of '{}'", path, path_);
  Dataset result;
  result.file_ = path_;
  result.path_ = path;
  result.comm_ = comm_;
  result.id_ = Handle(H5Dopen2(id_.get(), path.c_str(), H5P_DEFAULT), H5Dclose);
  detail::check(result.id_.get(), what);
  const Handle type(H5Dget_type(result.id_.get()), H5Tclose);
  result.type_ = detail::classify(type.get());
  const Handle space(H5Dget_space(result.id_.get()), H5Sclose);
  if (H5Sget_simple_extent_type(space.get()) == H5S_NULL) {
    result.shape_ = {0};
    return result;
  }
  std::vector<hsize_t> extents(
      static_cast<size_t>(detail::check(H5Sget_simple_extent_ndims(space.get()), what)));
  detail::check(H5Sget_simple_extent_dims(space.get(), extents.data(), nullptr), what);
  result.shape_.assign(extents.begin(), extents.end());
  return result;
}

AttributeValue File::attribute(const std::string& object, const std::string& name) const {
  // HDF5 can loop for ever in a damaged file: the scope lets the watchdog end the run.
  const WaitScope scope("reading attributes of " + path_);
  if (kind_of(object) == H5I_BADID) return {};
  const std::string what = fmt::format("read attribute '{}' of '{}' in '{}'", name, object, path_);
  if (detail::check(H5Aexists_by_name(id_.get(), object.c_str(), name.c_str(), H5P_DEFAULT),
                    what) == 0)
    return {};
  const Handle attribute(
      H5Aopen_by_name(id_.get(), object.c_str(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  detail::check(attribute.get(), what);
  return read_attribute(attribute.get(), what);
}

void File::create_group(const std::string& path) {
  const Handle links = with_groups();
  const Handle group(H5Gcreate2(id_.get(), path.c_str(), links.get(), H5P_DEFAULT, H5P_DEFAULT),
                     H5Gclose);
  detail::check(group.get(), fmt::format("create group '{}' of '{}'", path, path_));
}

void File::write_attribute(const std::string& object, const std::string& name, hid_t type,
                           const void* value) {
  const std::string what = fmt::format("write attribute '{}' of '{}' in '{}'", name, object, path_);
  const Handle scalar(H5Screate(H5S_SCALAR), H5Sclose);
  const Handle attribute(H5Acreate_by_name(id_.get(), object.c_str(), name.c_str(), type,
                                           scalar.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                         H5Aclose);
  detail::check(attribute.get(), what);
  detail::check(H5Awrite(attribute.get(), type, value), what);
}

void File::write_attribute(const std::string& object, const std::string& name, int64_t value) {
  write_attribute(object, name, H5T_NATIVE_INT64, &value);
}
void File::write_attribute(const std::string& object, const std::string& name, double value) {
  write_attribute(object, name, H5T_NATIVE_DOUBLE, &value);
}
void File::write_attribute(const std::string& object, const std::string& name,
                           const std::string& value) {
  const Handle type = detail::text_type();
  const char* pointer = value.c_str();
  write_attribute(object, name, type.get(), &pointer);
}

void File::create_dataset(const std::string& path, DType type, const Shape& shape,
                          Checksum checksum) {
  const std::string what = fmt::format("create dataset '{}' of '{}'", path, path_);
  const std::vector<hsize_t> extents(shape.begin(), shape.end());
  const Handle space(
      shape.empty() ? H5Screate(H5S_SCALAR)
                    : H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr),
      H5Sclose);
  detail::check(space.get(), what);
  const Handle links = with_groups(), creation = creation_list(type, shape, checksum);
  const Handle id(H5Dcreate2(id_.get(), path.c_str(), detail::native_type(type), space.get(),
                             links.get(), creation.get(), H5P_DEFAULT),
                  H5Dclose);
  detail::check(id.get(), what);
}

void File::write_dataset(const std::string& path, std::span<const std::string> texts) {
  const std::string what = fmt::format("write dataset '{}' of '{}'", path, path_);
  const hsize_t count = texts.size();
  const Handle type = detail::text_type(), links = with_groups();
  const Handle space(H5Screate_simple(1, &count, nullptr), H5Sclose);
  const Handle id(H5Dcreate2(id_.get(), path.c_str(), type.get(), space.get(), links.get(),
                             H5P_DEFAULT, H5P_DEFAULT),
                  H5Dclose);
  detail::check(id.get(), what);
  if (texts.empty()) return;
  std::vector<const char*> pointers;
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  detail::check(H5Dwrite(id.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, pointers.data()),
                what);
}

std::string library_version() {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  return fmt::format("{}.{}.{}", major, minor, release);
}

}  // namespace gyre::h5

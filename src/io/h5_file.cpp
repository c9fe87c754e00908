#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "comm/agree.hpp"
#include "comm/mpi.hpp"
#include "core/error.hpp"
#include "core/index.hpp"
#include "io/h5_support.hpp"
#include "io/trust/reading.hpp"

namespace gyre::h5 {
namespace {

constexpr int64_t chunk_bytes = int64_t{1} << 20;

// Upper limits of the bytes that HDF5 writes besides the elements: per file, per group or dataset
// with its first index block, per attribute, per chunk, per text.
constexpr int64_t file_overhead = int64_t{1} << 16;
constexpr int64_t object_overhead = 8192;
constexpr int64_t attribute_overhead = 1024;
constexpr int64_t chunk_overhead = 256;
constexpr int64_t text_overhead = 64;

/// Free disk space, in bytes, below which no file is created.
constexpr int64_t least_space = int64_t{1} << 18;

/// Throws if `path` cannot be opened or is not a complete HDF5 file. Serial.
void check_readable(const std::string& path) {
  detail::silence();
  require_regular_file(path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) throw_unreadable(path, errno);
  const Reading scope("opening " + path, path);
  const htri_t is_hdf5 = H5Fis_hdf5(path.c_str());
  if (is_hdf5 == 0) throw_usage("'{}' is not an HDF5 file", path);
  detail::check(is_hdf5, fmt::format("open '{}'", path));
  try_reading(path);
  const Handle id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  detail::check(id.get(), fmt::format("open '{}'", path));
}

/// Property list for links and datasets that creates missing parent groups.
Handle with_groups() {
  Handle list(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(list.get(), 1);
  return list;
}

/// Extents of a chunk: whole rows, about `chunk_bytes` in all. Empty: the dataset has no chunks.
Shape chunk_of(const Shape& shape, int64_t width, Checksum checksum) {
  if (elements_of(shape) == 0 || shape.empty() || checksum == Checksum::none) return {};
  Shape chunk = shape;
  const int64_t row = elements_of(shape) / shape[0] * width;
  chunk[0] = std::clamp<int64_t>(chunk_bytes / row, 1, shape[0]);
  return chunk;
}

Handle creation_list(const Shape& shape, const Shape& chunk) {
  Handle list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (elements_of(shape) == 0) return list;
  if (!chunk.empty()) {
    const std::vector<hsize_t> extents(chunk.begin(), chunk.end());
    H5Pset_chunk(list.get(), static_cast<int>(extents.size()), extents.data());
    H5Pset_fletcher32(list.get());
  } else {
    H5Pset_alloc_time(list.get(), H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(list.get(), H5D_FILL_TIME_NEVER);
  }
  return list;
}

/// Bytes of a dataset in the file. Chunks at its end count in full.
int64_t bytes_in_file(int64_t width, const Shape& shape, const Shape& chunk) {
  if (chunk.empty()) return object_overhead + elements_of(shape) * width;
  int64_t chunks = 1;
  for (size_t d = 0; d < shape.size(); ++d) chunks *= ceil_div(shape[d], chunk[d]);
  return object_overhead + chunks * (elements_of(chunk) * width + chunk_overhead);
}

/// Enumerations of FALSE and TRUE are read as bool; others are not read.
AttributeValue read_enumeration(hid_t attribute, hid_t type, const std::string& what) {
  const Handle native(H5Tget_native_type(type, H5T_DIR_ASCEND), H5Tclose);
  std::array<char, 64> value{}, named{};  // no integer of HDF5 is longer
  if (H5Tget_size(native.get()) <= value.size() && H5Tget_nmembers(type) == 2) {
    detail::check(H5Aread(attribute, native.get(), value.data()), "read " + what);
    for (const auto& [name, truth] : {std::pair{"FALSE", false}, std::pair{"TRUE", true}})
      if (H5Tenum_valueof(native.get(), name, named.data()) >= 0 && value == named) return truth;
    H5Eclear2(H5E_DEFAULT);
  }
  return Unreadable{"an enumeration other than of FALSE and TRUE"};
}

AttributeValue read_integer(hid_t attribute, hid_t type, const std::string& what) {
  if (H5Tget_sign(type) == H5T_SGN_NONE) {
    uint64_t value = 0;
    detail::check(H5Aread(attribute, H5T_NATIVE_UINT64, &value), "read " + what);
    if (!std::in_range<int64_t>(value)) return Unreadable{fmt::format("{}, above 2^63 - 1", value)};
    return static_cast<int64_t>(value);
  }
  int64_t value = 0;
  detail::check(H5Aread(attribute, H5T_NATIVE_INT64, &value), "read " + what);
  return value;
}

AttributeValue read_attribute(hid_t attribute, const std::string& what) {
  const Handle type(H5Aget_type(attribute), H5Tclose);
  const Handle space(H5Aget_space(attribute), H5Sclose);
  const Type kind = detail::classify(type.get());
  const Shape shape = detail::shape_of(space.get(), "read " + what);
  if (elements_of(shape) == 0) return Unreadable{"empty"};
  if (elements_of(shape) != 1)
    return Unreadable{fmt::format("{} {}", name_of(kind), to_string(shape))};
  if (kind == Type::enumeration) return read_enumeration(attribute, type.get(), what);
  if (is_integer(kind)) return read_integer(attribute, type.get(), what);
  if (is_real(kind)) {
    double value = 0;
    detail::check(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value), "read " + what);
    return value;
  }
  if (kind != Type::text) return Unreadable{std::string(name_of(kind))};
  const auto read = [&](hid_t memory_type, hid_t, void* buffer) {
    detail::check(H5Aread(attribute, memory_type, buffer), "read " + what);
  };
  return detail::read_texts(what, type.get(), space.get(), 1, INT64_MAX, read)[0];
}

Handle open_parallel(Communicator& comm, const std::string& path, unsigned flags) {
  Handle id;
  run_agreed(comm, "opening " + path, [&] {
    detail::silence();
    std::string failure;
    run_in_step(comm, [&] {
      const Reading scope("opening " + path, path);
      const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
      detail::check(H5Pset_fapl_mpio(access.get(), mpi_handle(comm), MPI_INFO_NULL),
                    fmt::format("open '{}' over MPI-IO", path));
      id = Handle(H5Fopen(path.c_str(), flags, access.get()), H5Fclose);
      if (!id.valid()) failure = detail::failure_text(fmt::format("open '{}'", path));
    });
    if (!failure.empty()) throw_runtime("{}", failure);
  });
  return id;
}

}  // namespace

std::string to_string(const AttributeValue& value) {
  if (const auto* truth = std::get_if<bool>(&value)) return *truth ? "true" : "false";
  if (const auto* whole = std::get_if<int64_t>(&value)) return fmt::format("{}", *whole);
  if (const auto* real = std::get_if<double>(&value)) return fmt::format("{:g}", *real);
  constexpr size_t max_text = 60;
  if (const auto* text = std::get_if<std::string>(&value))
    return text->size() > max_text ? fmt::format("'{}...'", text->substr(0, max_text))
                                   : fmt::format("'{}'", *text);
  if (const auto* other = std::get_if<Unreadable>(&value)) return other->what;
  return "not there";
}

void initialise() {
  std::signal(SIGXFSZ, SIG_IGN);
  detail::check(H5dont_atexit(), "keep HDF5 from writing at exit");
  detail::check(H5open(), "start HDF5");
  detail::silence();
}

File File::open(const std::string& path) {
  check_readable(path);
  const Reading scope("opening " + path, path);
  Handle id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  detail::check(id.get(), fmt::format("open '{}'", path));
  return File(path, nullptr, std::move(id), Access::read);
}

File File::open(Communicator& comm, const std::string& path) {
  run_on_root(comm, "opening " + path, [&] { check_readable(path); });
  return File(path, &comm, open_parallel(comm, path, H5F_ACC_RDONLY), Access::read);
}

File File::create(const std::string& path) {
  detail::silence();
  require_space(path, least_space);
  Handle id(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
  detail::check(id.get(), fmt::format("create '{}'", path));
  File file(path, nullptr, std::move(id), Access::create);
  file.reserve();
  return file;
}

File File::open_to_fill(Communicator& comm, const std::string& path) {
  return File(path, &comm, open_parallel(comm, path, H5F_ACC_RDWR), Access::fill);
}

File File::open_to_fill(const std::string& path) {
  Handle id(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
  detail::check(id.get(), fmt::format("open '{}'", path));
  return File(path, nullptr, std::move(id), Access::fill);
}

File::~File() {
  if (access_ != Access::read && std::uncaught_exceptions() > exceptions_) id_.abandon();
  if (!id_.valid()) return;
  const Reading scope("closing " + path_, path_);
  id_.reset();
}

void File::close() {
  const auto close_here = [&] {
    herr_t result = 0;
    const auto close_file = [&] {
      const Reading scope("closing " + path_, path_);
      result = id_.reset();
    };
    if (access_ == Access::create) reserve();
    comm_ == nullptr ? close_file() : run_in_step(*comm_, close_file);
    detail::check(result, fmt::format("close '{}'", path_));
  };
  if (comm_ == nullptr)
    close_here();
  else
    run_agreed(*comm_, "closing " + path_, close_here);
  const bool complete = access_ == Access::fill || (access_ == Access::create && unfilled_ == 0);
  if (complete && (comm_ == nullptr || comm_->rank() == 0)) release_space(path_);
}

void File::reserve() const {
  reserve_space(path_, file_overhead + planned_bytes_ + planned_bytes_ / 100);
}

Dataset File::dataset(const std::string& path) const {
  const std::string what = fmt::format("open dataset '{}' of '{}'", path, path_);
  const Reading scope(what, path_);
  Dataset result;
  result.file_ = path_;
  result.path_ = path;
  result.comm_ = comm_;
  result.id_ = find(path);
  if (!result.id_.valid()) throw_runtime("cannot {}: there is none", what);
  if (H5Iget_type(result.id_.get()) != H5I_DATASET)
    throw_runtime("cannot {}: it is no dataset", what);
  // Checked before the shape: HDF5 would open other files for the shape of a virtual dataset.
  if (const char* kind = detail::foreign_storage(result.id_.get()))
    throw_usage("dataset '{}' of '{}' {}: its elements are in other files; copy them into this one",
                path, path_, kind);
  if (const std::string filter = detail::missing_filter(result.id_.get()); !filter.empty())
    throw_usage("dataset '{}' of '{}' needs HDF5 filter {}; store it without, or by gzip", path,
                path_, filter);
  const Handle type(H5Dget_type(result.id_.get()), H5Tclose);
  detail::check(type.get(), what);
  result.type_ = detail::classify(type.get());
  if (H5Tequal(type.get(), H5T_NATIVE_UINT16) > 0) {
    const AttributeValue dtype = attribute(path, "dtype");
    if (dtype != AttributeValue() && !std::holds_alternative<std::string>(dtype))
      throw_usage("attribute 'dtype' of '{}' in '{}' is {}; it must be a text, or not there", path,
                  path_, to_string(dtype));
    result.is_words_ = dtype == AttributeValue("bfloat16");
    if (result.is_words_) result.type_ = Type::bfloat16;
  }
  const Handle space(H5Dget_space(result.id_.get()), H5Sclose);
  result.shape_ = detail::shape_of(detail::check(space.get(), what), what);
  return result;
}

AttributeValue File::attribute(const std::string& object, const std::string& name) const {
  const std::string what = fmt::format("attribute '{}' of '{}' in '{}'", name, object, path_);
  const Reading scope("reading " + what, path_);
  const Handle holder = find(object);
  if (!holder.valid()) return {};
  if (detail::check(H5Aexists(holder.get(), name.c_str()), "read " + what) == 0) return {};
  const Handle attribute(H5Aopen(holder.get(), name.c_str(), H5P_DEFAULT), H5Aclose);
  detail::check(attribute.get(), "read " + what);
  return read_attribute(attribute.get(), what);
}

void File::create_group(const std::string& path) {
  const Handle links = with_groups();
  const Handle group(H5Gcreate2(id_.get(), path.c_str(), links.get(), H5P_DEFAULT, H5P_DEFAULT),
                     H5Gclose);
  detail::check(group.get(), fmt::format("create group '{}' of '{}'", path, path_));
  planned_bytes_ += object_overhead;
}

void File::write_attribute(const std::string& object, const std::string& name, hid_t type,
                           const void* value) {
  const std::string what = fmt::format("write attribute '{}' of '{}' in '{}'", name, object, path_);
  planned_bytes_ += attribute_overhead;
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
  planned_bytes_ += std::ssize(value);
  reserve();
  write_attribute(object, name, type.get(), &pointer);
}

void File::create_dataset(const std::string& path, hid_t type, const Shape& shape,
                          Checksum checksum, const Shape& chunk) {
  const std::string what = fmt::format("create dataset '{}' of '{}'", path, path_);
  const std::vector<hsize_t> extents(shape.begin(), shape.end());
  const Handle space(
      shape.empty() ? H5Screate(H5S_SCALAR)
                    : H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr),
      H5Sclose);
  detail::check(space.get(), what);
  const int64_t width = H5Tget_size(type);
  const Shape parts = chunk.empty() ? chunk_of(shape, width, checksum) : chunk;
  planned_bytes_ += bytes_in_file(width, shape, parts);
  ++unfilled_;
  const Handle links = with_groups(), creation = creation_list(shape, parts);
  const Handle id(H5Dcreate2(id_.get(), path.c_str(), type, space.get(), links.get(),
                             creation.get(), H5P_DEFAULT),
                  H5Dclose);
  detail::check(id.get(), what);
}

void File::create_dataset(const std::string& path, DType type, const Shape& shape,
                          Checksum checksum) {
  create_dataset(path, detail::native_type(type), shape, checksum, {});
}

void File::create_dataset(const std::string& path, const StoredType& type, const Shape& shape,
                          Checksum checksum, const Shape& chunk) {
  create_dataset(path, detail::type_of(type).get(), shape, checksum, chunk);
  if (type.is_words) write_attribute(path, "dtype", std::string("bfloat16"));
}

void File::write_dataset(const std::string& path, const StoredType& type,
                         std::span<const std::byte> data, const Shape& shape) {
  create_dataset(path, type, shape, Checksum::fletcher32);
  reserve();
  const Slab all{Shape(shape.size(), 0), shape};
  dataset(path).write_bytes(std::span(&all, 1), data);
  --unfilled_;
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
  planned_bytes_ += object_overhead;
  if (texts.empty()) return;
  std::vector<const char*> pointers;
  for (const std::string& text : texts) {
    pointers.push_back(text.c_str());
    planned_bytes_ += std::ssize(text) + text_overhead;
  }
  reserve();
  detail::check(H5Dwrite(id.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, pointers.data()),
                what);
}

std::string library_version() {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  return fmt::format("{}.{}.{}", major, minor, release);
}

}  // namespace gyre::h5

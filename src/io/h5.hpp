#pragma once
// HDF5 files: handles that close themselves, errors that name file and dataset, and transfers of
// hyperslabs between file and memory by one process or by all ranks together.
//
// A file opened over a communicator is collective: every rank makes the same calls in the same
// order, each with its own slabs or none. An error on one rank becomes one agreed error
// on all ranks. Queries of the structure (attributes, shapes, existence) are not collective.
//
// A file that many ranks write is made in two steps, because HDF5 cannot write variable-length
// texts in parallel. First one process creates it with its attributes, texts and empty datasets;
// then all ranks open it and fill the datasets.

#include <hdf5.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "comm/communicator.hpp"
#include "core/dtype.hpp"

namespace gyre::h5 {

/// Owns one HDF5 identifier.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Handle() = default;
  Handle(hid_t id, Close close) : id_(id), close_(close) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Handle() { reset(); }
  /// Closes the object now; the result is negative if HDF5 failed.
  herr_t reset() { return id_ < 0 ? 0 : close_(std::exchange(id_, -1)); }
  /// Gives the identifier up without closing it.
  void abandon() { id_ = -1; }
  hid_t get() const { return id_; }
  bool valid() const { return id_ >= 0; }

 private:
  hid_t id_ = -1;
  Close close_ = nullptr;
};

/// Extents, slowest dimension first; empty for a scalar.
using Shape = std::vector<int64_t>;
int64_t elements_of(const Shape& shape);
/// "[3, 4]"; extents of -1 print as "any".
std::string to_string(const Shape& shape);

/// A hyperslab of a dataset: count[d] elements from start[d] in dimension d.
struct Slab {
  Shape start;
  Shape count;
};

/// Element type of a dataset. `integer` and `real` are other types that a long double represents
/// exactly. `bfloat16` is a type of HDF5 (8 bits of exponent, 7 of mantissa), or uint16 with the
/// text attribute `dtype`. `enumeration` names integers, such as the booleans of h5py.
enum class Type { f32, f64, float16, bfloat16, i32, i64, integer, real, enumeration, text, other };
std::string_view name_of(Type type);
inline bool is_integer(Type t) {
  return t == Type::i32 || t == Type::i64 || t == Type::integer;
}
inline bool is_real(Type t) {
  return t == Type::f32 || t == Type::f64 || t == Type::float16 || t == Type::bfloat16 ||
         t == Type::real;
}

/// Element type as stored in the file, byte order included: another dataset of this type holds the
/// same bytes.
struct StoredType {
  std::string description;  ///< HDF5's encoding
  int64_t bytes = 0;        ///< per element
  bool is_words = false;    ///< bfloat16 stored as uint16 with the attribute `dtype`
};
/// Whether equal bytes mean equal values.
bool operator==(const StoredType& a, const StoredType& b);
/// How elements of a type are written: little-endian; bfloat16 as a type of HDF5.
StoredType stored_type_of(Type type);

class Dataset {
 public:
  Dataset(Dataset&&) = default;
  Dataset& operator=(Dataset&&) = default;
  ~Dataset();
  const std::string& file() const { return file_; }
  const std::string& path() const { return path_; }  ///< inside the file, from "/"
  const Shape& shape() const { return shape_; }
  int64_t elements() const { return elements_of(shape_); }
  Type type() const { return type_; }

  /// Reads `slabs`, one after another, into `out`, converting to T. The slabs are disjoint and in
  /// file order: every element of one comes before every element of the next. Collective.
  template <class T>
  void read(std::span<const Slab> slabs, std::span<T> out) const {
    transfer(false, dtype_of<T>, slabs, out.data(), std::ssize(out));
  }
  /// Writes `data` to `slabs`, ordered as for read(). Ranks write disjoint slabs. Collective.
  template <class T>
  void write(std::span<const Slab> slabs, std::span<const T> data) const {
    transfer(true, dtype_of<T>, slabs, const_cast<T*>(data.data()), std::ssize(data));
  }
  /// Reads any integers, reals or enumerations without loss. Collective.
  void read_exactly(std::span<const Slab> slabs, std::span<long double> out) const;
  /// Reads the whole dataset onto every rank: each rank reads a share of the rows, then all shares
  /// are gathered. Collective.
  template <class T>
  std::vector<T> read_all() const {
    std::vector<T> out;
    make_room(elements(), sizeof(T), [&] { out.resize(elements()); });
    read_shares(dtype_of<T>, out.data());
    return out;
  }
  StoredType stored_type() const;
  /// As read, write and read_all, for elements in their stored form, whatever the type. Collective.
  void read_bytes(std::span<const Slab> slabs, std::span<std::byte> out) const;
  void write_bytes(std::span<const Slab> slabs, std::span<const std::byte> data) const;
  std::vector<std::byte> read_all_bytes() const;
  /// Writes a chunk as it lies in the file: its elements, whose type, order and padding are those
  /// of the file, and their checksum (add_checksum). write() copies elements twice and adds them up
  /// more slowly. By one process.
  void write_chunk(const Shape& begin, std::span<const std::byte> chunk) const;
  /// Runs `allocate`, which allocates `count` elements of `width` bytes. A damaged file can claim
  /// any size; more than the machine's memory is a runtime error. Collective.
  void make_room(int64_t count, int64_t width, const std::function<void()>& allocate) const;
  /// Reads all texts onto every rank. Collective.
  std::vector<std::string> read_texts() const;

 private:
  friend class File;
  /// Elements in memory: their HDF5 type and size in bytes.
  struct Element {
    hid_t type;
    int64_t width;
  };
  Dataset() = default;
  void transfer(bool writing, DType type, std::span<const Slab> slabs, void* data,
                int64_t size) const;
  void transfer(bool writing, Element element, std::span<const Slab> slabs, void* data,
                int64_t size) const;
  /// Reads float16 or bfloat16, which are widened here: HDF5 takes ten times as long.
  template <class T>
  void read_words(std::span<const Slab> slabs, T* out, int64_t size) const;
  /// Reads back what this rank has written, and throws if it differs: HDF5 and MPI-IO send file
  /// data between ranks in messages without checksums.
  void compare_written(Element element, std::span<const Slab> slabs, const void* data,
                       int64_t size) const;
  /// Returns the error of the transfer, or "".
  std::string transfer_round(bool writing, hid_t type, std::span<const Slab> slabs,
                             void* data) const;
  /// Reads one slab into memory. Collective.
  using ReadSlab = std::function<void(std::span<const Slab>, void*, int64_t size)>;
  void read_shares(DType type, void* data) const;
  void read_shares(int64_t width, const ReadSlab& read, void* data) const;
  std::vector<std::string> read_texts_here() const;

  std::string file_;
  std::string path_;
  Communicator* comm_ = nullptr;  // null: serial
  Handle id_;
  Shape shape_;
  Type type_ = Type::other;
  bool is_words_ = false;  // as in StoredType
};

enum class Checksum { none, fletcher32 };
/// Bytes of a checksum of fletcher32.
inline constexpr int64_t checksum_bytes = 4;
/// Writes to the last checksum_bytes of a chunk the checksum of the bytes before, an even number.
/// Makes no call of HDF5.
void add_checksum(std::span<std::byte> chunk);

/// Describes an attribute that is not one value of a known type: "float64 [24]",
/// "18446744073709551615, above 2^63 - 1".
struct Unreadable {
  std::string what;
  bool operator==(const Unreadable&) const = default;
};
/// Value of an attribute; std::monostate: the attribute is missing. A bool is an enumeration of
/// FALSE and TRUE, as in h5py.
using AttributeValue = std::variant<std::monostate, bool, int64_t, double, std::string, Unreadable>;
/// For messages: "5", "true", "'text'", "float64 [24]", "not there".
std::string to_string(const AttributeValue& value);

/// An HDF5 file. All data come from the file itself: links inside the file are followed; links to
/// other files and datasets stored in other files are usage errors, because the file's checksum
/// would not cover them. So are dangling links.
class File {
 public:
  /// Opens for reading, serially. A path that cannot be opened, or that is no HDF5 file, is a usage
  /// error; a truncated or damaged file is a runtime error.
  static File open(const std::string& path);
  /// Opens for reading by all ranks, after rank 0 has checked the file. Collective.
  static File open(Communicator& comm, const std::string& path);
  /// Creates or truncates a file, serially. Disk space is reserved before anything is written, also
  /// for what open_to_fill will write: HDF5 neither reports a full disk on all ranks nor survives
  /// it.
  static File create(const std::string& path);
  /// Opens an existing file whose datasets all ranks will write. Collective.
  static File open_to_fill(Communicator& comm, const std::string& path);
  /// As above, by one process.
  static File open_to_fill(const std::string& path);
  File(File&&) = default;
  File& operator=(File&&) = default;
  /// A file left half written by an exception stays open: closing it would write, and wait for
  /// ranks that may not come.
  ~File();
  /// Closes; throws if not everything could be written. Collective; no dataset may be open.
  void close();

  const std::string& path() const { return path_; }
  bool has_group(const std::string& path) const;
  bool has_dataset(const std::string& path) const;
  /// Whether a group, a dataset or a named type exists at the path.
  bool has_object(const std::string& path) const;
  /// Names of a group's links, or of an object's attributes; empty if there is no such object.
  std::vector<std::string> links_of(const std::string& group) const;
  std::vector<std::string> attributes_of(const std::string& object) const;
  /// Paths of all datasets in and below `group`, relative to it, sorted.
  std::vector<std::string> datasets_below(const std::string& group) const;
  /// Opens a dataset. One that needs an external filter, such as lzf, is a usage error.
  Dataset dataset(const std::string& path) const;
  AttributeValue attribute(const std::string& object, const std::string& name) const;

  // These write to a file made by create(). Missing parent groups are created.
  void create_group(const std::string& path);
  void write_attribute(const std::string& object, const std::string& name, int64_t value);
  void write_attribute(const std::string& object, const std::string& name, double value);
  void write_attribute(const std::string& object, const std::string& name,
                       const std::string& value);
  void create_dataset(const std::string& path, DType type, const Shape& shape, Checksum checksum);
  /// `chunk`: extents of what has one checksum; empty: whole rows, about 1 MiB in all.
  void create_dataset(const std::string& path, const StoredType& type, const Shape& shape,
                      Checksum checksum, const Shape& chunk = {});
  void write_dataset(const std::string& path, std::span<const std::string> texts);
  /// Writes a dataset with checksums; it is one-dimensional unless a shape is given.
  template <class T>
  void write_dataset(const std::string& path, std::span<const T> data) {
    write_dataset(path, data, {std::ssize(data)});
  }
  template <class T>
  void write_dataset(const std::string& path, std::span<const T> data, const Shape& shape) {
    create_dataset(path, dtype_of<T>, shape, Checksum::fletcher32);
    reserve();
    const Slab all{Shape(shape.size(), 0), shape};
    dataset(path).template write<T>(std::span(&all, 1), data);
    --unfilled_;
  }
  /// Writes a dataset of elements in their stored form, with checksums.
  void write_dataset(const std::string& path, const StoredType& type,
                     std::span<const std::byte> data, const Shape& shape);

 private:
  enum class Access { read, create, fill };
  File(std::string path, Communicator* comm, Handle id, Access access)
      : path_(std::move(path)), comm_(comm), id_(std::move(id)), access_(access) {}
  void write_attribute(const std::string& object, const std::string& name, hid_t type,
                       const void* value);
  /// `type` is the HDF5 type of the elements.
  void create_dataset(const std::string& path, hid_t type, const Shape& shape, Checksum checksum,
                      const Shape& chunk);
  /// The object at a path; invalid if there is none.
  Handle find(const std::string& path) const;
  H5I_type_t kind_of(const std::string& path) const;
  void list_datasets(const std::string& group, const std::string& front,
                     std::vector<haddr_t>& above, std::vector<std::string>& paths) const;
  /// Reserves disk space for everything created so far.
  void reserve() const;

  std::string path_;
  Communicator* comm_ = nullptr;
  Handle id_;
  Access access_ = Access::read;
  int64_t planned_bytes_ = 0;  // upper limit of the size of what was created
  int unfilled_ = 0;           // datasets not written yet: left to open_to_fill
  int exceptions_ = std::uncaught_exceptions();
};

/// Prepares HDF5 for programs of many ranks; must be called before MPI is initialised. By default
/// HDF5 retries failed writes at the end of the program, or of MPI, and crashes if they fail again:
/// this is turned off. A file that gets too large is an error instead of a signal.
void initialise();

/// Version of the loaded library, such as "1.10.8".
std::string library_version();

}  // namespace gyre::h5

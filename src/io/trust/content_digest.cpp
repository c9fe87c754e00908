#include "io/trust/content_digest.hpp"

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <vector>

#include "core/error.hpp"
#include "io/h5_support.hpp"
#include "io/resources.hpp"
#include "io/trust/reading.hpp"
#include "io/trust/sha256.hpp"

namespace gyre::h5 {
namespace {

using detail::check;

/// Upper limit of the bytes that an attribute adds to a file.
constexpr int64_t attribute_bytes = 8192;

bool is_number(H5T_class_t kind) {
  return kind == H5T_INTEGER || kind == H5T_FLOAT || kind == H5T_ENUM;
}

/// An HDF5 object, and its path for errors.
struct Object {
  hid_t id;
  const std::string& path;
};

/// Adds the whole contents of a file to a digest, part by part, each after its length.
class Walk {
 public:
  Walk(hid_t file, const std::string& name) : file_(file), name_(name) {}

  std::string digest() {
    const std::string root = "/";
    H5O_info_t info;
    check(H5Oget_info2(file_, &info, H5O_INFO_BASIC), "read " + described(root));
    const Handle group(H5Oopen(file_, "/", H5P_DEFAULT), H5Oclose);
    check(group.get(), "read " + described(root));
    first_path_[info.addr] = root;
    add_object({group.get(), root});
    return sha256_.hex();
  }

 private:
  void add(const void* bytes, size_t count) {
    const uint64_t length = count;
    unsigned char encoded[8];
    for (int i = 0; i < 8; ++i) encoded[i] = static_cast<unsigned char>(length >> (8 * i));
    sha256_.add(encoded, sizeof(encoded));
    sha256_.add(bytes, count);
  }
  void add(const std::string& text) { add(text.data(), text.size()); }
  void add_number(int64_t number) { add(std::to_string(number)); }

  std::string described(const std::string& path) const {
    return fmt::format("'{}' of '{}'", path, name_);
  }

  void add_object(const Object& object) {
    switch (H5Iget_type(object.id)) {
      case H5I_GROUP:
        add("group");
        add_attributes(object);
        return add_links(object);
      case H5I_DATASET:
        add("dataset");
        add_attributes(object);
        return add_dataset(object);
      default:
        add("type");
        add_attributes(object);
        return add_type(object.id, described(object.path));
    }
  }

  void add_attributes(const Object& object) {
    std::vector<std::string> names =
        detail::names_of_attributes(object.id, "list the attributes of " + described(object.path));
    if (object.path == "/") std::erase(names, content_attribute);
    add_number(std::ssize(names));
    for (const std::string& name : names) {
      add(name);
      const std::string what =
          fmt::format("attribute '{}' of '{}' in '{}'", name, object.path, name_);
      const Handle attribute(H5Aopen(object.id, name.c_str(), H5P_DEFAULT), H5Aclose);
      check(attribute.get(), "read " + what);
      add_values(
          Handle(H5Aget_type(attribute.get()), H5Tclose),
          Handle(H5Aget_space(attribute.get()), H5Sclose), what,
          [&](hid_t type, hid_t, void* buffer) { return H5Aread(attribute.get(), type, buffer); });
    }
  }

  void add_links(const Object& group) {
    const std::vector<std::string> names =
        detail::names_of_links(group.id, "list " + described(group.path));
    add_number(std::ssize(names));
    for (const std::string& name : names) {
      add(name);
      add_link(group, name, (group.path == "/" ? "/" : group.path + "/") + name);
    }
  }

  void add_link(const Object& group, const std::string& name, const std::string& path) {
    H5L_info_t info;
    check(H5Lget_info(group.id, name.c_str(), &info, H5P_DEFAULT), "read " + described(path));
    if (info.type != H5L_TYPE_HARD) return add_symbolic_link(group, name, info, described(path));
    const auto [seen, is_new] = first_path_.try_emplace(info.u.address, path);
    if (!is_new) {
      add("again");
      return add(seen->second);
    }
    const Handle object(H5Oopen(group.id, name.c_str(), H5P_DEFAULT), H5Oclose);
    check(object.get(), "read " + described(path));
    add_object({object.get(), path});
  }

  void add_symbolic_link(const Object& group, const std::string& name, const H5L_info_t& info,
                         const std::string& what) {
    std::string value(info.u.val_size + 1, '\0');
    check(H5Lget_val(group.id, name.c_str(), value.data(), info.u.val_size, H5P_DEFAULT),
          "read the link " + what);
    if (info.type == H5L_TYPE_SOFT) {
      add("soft");
      return add(std::string(value.c_str()));
    }
    const char *file = "", *object = "";
    check(H5Lunpack_elink_val(value.data(), info.u.val_size, nullptr, &file, &object),
          "read the link " + what);
    add("external");
    add(std::string(file));
    add(std::string(object));
  }

  void add_dataset(const Object& object) {
    const std::string what = "dataset " + described(object.path);
    if (const char* kind = detail::foreign_storage(object.id)) return add(std::string(kind));
    add_values(Handle(H5Dget_type(object.id), H5Tclose), Handle(H5Dget_space(object.id), H5Sclose),
               what, [&](hid_t type, hid_t transfer_list, void* buffer) {
                 return H5Dread(object.id, type, H5S_ALL, H5S_ALL, transfer_list, buffer);
               });
  }

  void add_type(hid_t type, const std::string& what) {
    const H5T_class_t kind = H5Tget_class(type);
    const size_t size = H5Tget_size(type);
    check(kind, "read the type of " + what);
    if (kind == H5T_ENUM) return add_enumeration(type, what);
    if (kind == H5T_STRING) {
      const bool variable = H5Tis_variable_str(type) > 0;
      return add(fmt::format("text {} {} {}", variable ? "variable" : std::to_string(size),
                             static_cast<int>(H5Tget_strpad(type)),
                             static_cast<int>(H5Tget_cset(type))));
    }
    if (!is_number(kind)) return add(fmt::format("class {} {}", static_cast<int>(kind), size));
    H5T_pad_t low = H5T_PAD_ERROR, high = H5T_PAD_ERROR;
    H5Tget_pad(type, &low, &high);
    const std::string common = fmt::format(
        "{} {} {} {} {} {}", size, static_cast<int>(H5Tget_order(type)), H5Tget_precision(type),
        H5Tget_offset(type), static_cast<int>(low), static_cast<int>(high));
    if (kind == H5T_INTEGER)
      return add(fmt::format("integer {} {}", common, static_cast<int>(H5Tget_sign(type))));
    size_t sign = 0, exponent = 0, exponent_bits = 0, mantissa = 0, mantissa_bits = 0;
    check(H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits),
          "read the type of " + what);
    add(fmt::format("real {} {} {} {} {} {} {} {} {}", common, sign, exponent, exponent_bits,
                    mantissa, mantissa_bits, H5Tget_ebias(type),
                    static_cast<int>(H5Tget_norm(type)), static_cast<int>(H5Tget_inpad(type))));
  }

  void add_enumeration(hid_t type, const std::string& what) {
    const Handle base(H5Tget_super(type), H5Tclose);
    const int count = check(H5Tget_nmembers(type), "read the type of " + what);
    add("enumeration");
    add_type(base.get(), what);
    add_number(count);
    for (int i = 0; i < count; ++i) {
      const auto member = static_cast<unsigned>(i);
      const std::unique_ptr<char, herr_t (*)(void*)> name(H5Tget_member_name(type, member),
                                                          H5free_memory);
      int64_t value[2] = {};  // H5Tconvert works in place: sized for the wider type
      if (name == nullptr || H5Tget_size(type) > sizeof(value))
        detail::fail("read the type of " + what);
      check(H5Tget_member_value(type, member, value), "read the type of " + what);
      check(H5Tconvert(base.get(), H5T_NATIVE_INT64, 1, value, nullptr, H5P_DEFAULT),
            "read the type of " + what);
      add(std::string(name.get()));
      add_number(value[0]);
    }
  }

  /// Adds type, extents and values of a dataset or attribute; `read(type, transfer list, buffer)`
  /// reads all elements.
  template <class Read>
  void add_values(const Handle& type, const Handle& space, const std::string& what,
                  const Read& read) {
    check(type.get(), "read the type of " + what);
    check(space.get(), "read the shape of " + what);
    add_type(type.get(), what);
    const Shape shape = detail::shape_of(space.get(), "read " + what);
    const H5S_class_t extent = H5Sget_simple_extent_type(space.get());
    std::string text = extent == H5S_NULL ? "null" : extent == H5S_SCALAR ? "scalar" : "simple";
    if (extent == H5S_SIMPLE)
      for (const int64_t length : shape) text += " " + std::to_string(length);
    add(text);
    const H5T_class_t kind = H5Tget_class(type.get());
    const bool variable = H5Tis_variable_str(type.get()) > 0;
    const auto width = variable ? 8 : static_cast<int64_t>(H5Tget_size(type.get()));
    const int64_t count = elements_of(shape);
    if ((!is_number(kind) && kind != H5T_STRING) || count == 0 || count > max_content_bytes / width)
      return;
    if (variable) return add_texts(type.get(), space.get(), static_cast<size_t>(count), what, read);
    std::vector<char> bytes(count * width);
    check(read(type.get(), H5P_DEFAULT, bytes.data()), "read " + what);
    add(bytes.data(), bytes.size());
  }

  template <class Read>
  void add_texts(hid_t type, hid_t space, size_t count, const std::string& what, const Read& read) {
    const std::vector<std::string> texts =
        detail::read_texts(what, type, space, count, max_content_bytes,
                           [&](hid_t memory_type, hid_t transfer_list, void* buffer) {
                             check(read(memory_type, transfer_list, buffer), "read " + what);
                           });
    for (const std::string& text : texts) add(text);
  }

  hid_t file_;
  const std::string& name_;
  Sha256 sha256_;
  std::map<haddr_t, std::string> first_path_;  // first path of each object, by address
};

std::string recorded_digest(hid_t file, const std::string& path) {
  const std::string what = fmt::format("read attribute '{}' of '{}'", content_attribute, path);
  const Handle attribute(H5Aopen(file, content_attribute, H5P_DEFAULT), H5Aclose);
  check(attribute.get(), what);
  const Handle type(H5Aget_type(attribute.get()), H5Tclose);
  const Handle space(H5Aget_space(attribute.get()), H5Sclose);
  if (H5Tget_class(type.get()) != H5T_STRING || H5Sget_simple_extent_npoints(space.get()) != 1)
    throw_runtime("attribute '{}' of '{}' is no text", content_attribute, path);
  return detail::read_texts(path, type.get(), space.get(), 1, max_content_bytes,
                            [&](hid_t memory_type, hid_t, void* buffer) {
                              check(H5Aread(attribute.get(), memory_type, buffer), what);
                            })[0];
}

}  // namespace

std::string content_digest(hid_t file, const std::string& path) {
  return Walk(file, path).digest();
}

bool has_content_digest(hid_t file, const std::string& path) {
  return check(H5Aexists(file, content_attribute),
               fmt::format("look for attribute '{}' of '{}'", content_attribute, path)) > 0;
}

void check_content_digest(hid_t file, const std::string& path) {
  const std::string recorded = recorded_digest(file, path);
  const std::string found = content_digest(file, path);
  if (recorded != found)
    throw_runtime(
        "the contents of '{}' are not what was written: attribute {} is '{}', the contents have "
        "'{}'; after a change on purpose, remove or renew the attribute (inputs/SCHEMA.md)",
        path, content_attribute, recorded, found);
}

void record_content_digest(const std::string& path, const std::string& name) {
  const int64_t bytes = std::filesystem::file_size(path);
  if (bytes > max_content_bytes) return;
  const Reading scope("recording what is in " + name, name);
  reserve_space(path, bytes + attribute_bytes);
  Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
  check(file.get(), fmt::format("open '{}'", name));
  const std::string digest = content_digest(file.get(), name);
  const std::string what = fmt::format("write attribute '{}' of '{}'", content_attribute, name);
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), digest.size());
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  const Handle scalar(H5Screate(H5S_SCALAR), H5Sclose);
  Handle attribute(
      H5Acreate2(file.get(), content_attribute, type.get(), scalar.get(), H5P_DEFAULT, H5P_DEFAULT),
      H5Aclose);
  check(attribute.get(), what);
  check(H5Awrite(attribute.get(), type.get(), digest.data()), what);
  check(attribute.reset(), what);
  check(file.reset(), fmt::format("close '{}'", name));
  release_space(path);
}

}  // namespace gyre::h5

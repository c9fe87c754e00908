#include "io/h5_support.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cfloat>
#include <cstdlib>

#include "core/error.hpp"

namespace gyre::h5::detail {

void silence() {
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

std::string deepest_message() {
  std::string message;
  const auto take_first = [](unsigned, const H5E_error2_t* entry, void* data) -> herr_t {
    auto& text = *static_cast<std::string*>(data);
    if (text.empty() && entry->desc != nullptr) text = entry->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_first, &message);
  H5Eclear2(H5E_DEFAULT);
  std::replace(message.begin(), message.end(), '\n', ' ');
  return message.empty() ? "HDF5 gives no reason" : message;
}

std::string failure_text(const std::string& what) {
  return fmt::format("cannot {}: {}", what, deepest_message());
}

void fail(const std::string& what) {
  throw_runtime("{}", failure_text(what));
}

namespace {

/// Callback for H5Literate and H5Aiterate2, whose third arguments differ.
template <class Info>
herr_t collect_name(hid_t, const char* name, const Info*, void* data) {
  static_cast<std::vector<std::string>*>(data)->push_back(name);
  return 0;
}

}  // namespace

std::vector<std::string> names_of_links(hid_t group, const std::string& what) {
  std::vector<std::string> names;
  check(H5Literate(group, H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, collect_name<H5L_info_t>, &names),
        what);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> names_of_attributes(hid_t object, const std::string& what) {
  std::vector<std::string> names;
  check(
      H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, collect_name<H5A_info_t>, &names),
      what);
  std::sort(names.begin(), names.end());
  return names;
}

hid_t native_type(DType type) {
  switch (type) {
    case DType::f32:
      return H5T_NATIVE_FLOAT;
    case DType::f64:
      return H5T_NATIVE_DOUBLE;
    case DType::bf16:
      break;  // HDF5 1.10 has no 16-bit float
    case DType::i32:
      return H5T_NATIVE_INT32;
    case DType::i64:
      return H5T_NATIVE_INT64;
  }
  return -1;
}

Handle type_of(const StoredType& type) {
  Handle decoded(H5Tdecode(type.description.data()), H5Tclose);
  check(decoded.get(), "understand a type of HDF5");
  return decoded;
}

namespace {

/// 16-bit reals as h5py and PyTorch users write them; HDF5 1.10 has no such type.
hid_t real_of_16_bits(hid_t like, size_t exponent_bits, size_t mantissa_bits) {
  const hid_t type = H5Tcopy(like);
  H5Tset_fields(type, 15, mantissa_bits, exponent_bits, 0, mantissa_bits);
  H5Tset_size(type, 2);
  H5Tset_ebias(type, (size_t{1} << (exponent_bits - 1)) - 1);
  return type;
}

/// An element type that this program understands.
struct KnownType {
  hid_t type;
  Type kind;
};

/// All known types but enumerations and texts. A damaged file can describe any other type, for
/// example one with another exponent bias, whose values HDF5 would silently convert.
const std::vector<KnownType>& known_types() {
  static_assert(LDBL_MANT_DIG >= 64, "a long double holds every integer of 64 bits");
  static const std::vector<KnownType> types{
      {H5T_IEEE_F32LE, Type::f32},
      {H5T_IEEE_F32BE, Type::f32},
      {H5T_IEEE_F64LE, Type::f64},
      {H5T_IEEE_F64BE, Type::f64},
      {H5T_STD_I32LE, Type::i32},
      {H5T_STD_I32BE, Type::i32},
      {H5T_STD_I64LE, Type::i64},
      {H5T_STD_I64BE, Type::i64},
      {H5T_STD_I8LE, Type::integer},
      {H5T_STD_I8BE, Type::integer},
      {H5T_STD_I16LE, Type::integer},
      {H5T_STD_I16BE, Type::integer},
      {H5T_STD_U8LE, Type::integer},
      {H5T_STD_U8BE, Type::integer},
      {H5T_STD_U16LE, Type::integer},
      {H5T_STD_U16BE, Type::integer},
      {H5T_STD_U32LE, Type::integer},
      {H5T_STD_U32BE, Type::integer},
      {H5T_STD_U64LE, Type::integer},
      {H5T_STD_U64BE, Type::integer},
      {H5T_NATIVE_LDOUBLE, Type::real},
      {real_of_16_bits(H5T_IEEE_F32LE, 5, 10), Type::float16},
      {real_of_16_bits(H5T_IEEE_F32BE, 5, 10), Type::float16},
      {real_of_16_bits(H5T_IEEE_F32LE, 8, 7), Type::bfloat16},
      {real_of_16_bits(H5T_IEEE_F32BE, 8, 7), Type::bfloat16},
  };
  return types;
}

}  // namespace

Type classify(hid_t type) {
  switch (H5Tget_class(type)) {
    case H5T_FLOAT:
    case H5T_INTEGER:
      for (const KnownType& known : known_types())
        if (H5Tequal(type, known.type) > 0) return known.kind;
      return Type::other;
    case H5T_ENUM:
      return classify(Handle(H5Tget_super(type), H5Tclose).get()) == Type::other
                 ? Type::other
                 : Type::enumeration;
    case H5T_STRING:
      return Type::text;
    default:
      return Type::other;
  }
}

hid_t file_type(Type type) {
  for (const KnownType& known : known_types())
    if (known.kind == type) return known.type;
  throw_runtime("no dataset of the type '{}' can be written", name_of(type));
}

StoredType describe(hid_t type, const std::string& what) {
  StoredType stored;
  size_t bytes = 0;
  check(H5Tencode(type, nullptr, &bytes), what);
  stored.description.resize(bytes);
  check(H5Tencode(type, stored.description.data(), &bytes), what);
  stored.bytes = static_cast<int64_t>(H5Tget_size(type));
  return stored;
}

const char* foreign_storage(hid_t dataset) {
  const Handle list(H5Dget_create_plist(dataset), H5Pclose);
  check(list.get(), "read the properties of a dataset");
  return H5Pget_layout(list.get()) == H5D_VIRTUAL ? "is virtual"
         : H5Pget_external_count(list.get()) > 0  ? "has external storage"
                                                  : nullptr;
}

std::string missing_filter(hid_t dataset) {
  const Handle list(H5Dget_create_plist(dataset), H5Pclose);
  const int filters = check(H5Pget_nfilters(list.get()), "count the filters of a dataset");
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0;
    size_t values = 0;
    char name[64] = "";
    const H5Z_filter_t filter = check(H5Pget_filter2(list.get(), static_cast<unsigned>(i), &flags,
                                                     &values, nullptr, sizeof(name), name, nullptr),
                                      "describe the filters of a dataset");
    if (H5Zfilter_avail(filter) > 0) continue;
    H5Eclear2(H5E_DEFAULT);
    return fmt::format("{}{}", filter, *name == '\0' ? "" : fmt::format(" ({})", name));
  }
  return "";
}

Shape shape_of(hid_t space, const std::string& what) {
  if (H5Sget_simple_extent_type(space) == H5S_NULL) return {0};
  std::vector<hsize_t> extents(check(H5Sget_simple_extent_ndims(space), what));
  check(H5Sget_simple_extent_dims(space, extents.data(), nullptr), what);
  const bool empty = std::find(extents.begin(), extents.end(), hsize_t{0}) != extents.end();
  int64_t elements = 1;
  for (const hsize_t extent : extents)
    if (!empty && __builtin_mul_overflow(elements, extent, &elements))
      throw_runtime("cannot {}: its shape [{}] has more than 2^63 elements", what,
                    fmt::join(extents, ", "));
  return {extents.begin(), extents.end()};
}

Handle text_type(hid_t like) {
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), H5T_VARIABLE);
  H5Tset_cset(type.get(), like < 0 ? H5T_CSET_UTF8 : H5Tget_cset(like));
  return type;
}

TextMemory::TextMemory(int64_t max_bytes)
    : list_(H5Pcreate(H5P_DATASET_XFER), H5Pclose), left_(max_bytes) {
  check(H5Pset_vlen_mem_manager(list_.get(), allocate, this, release, this), "limit texts");
}

void* TextMemory::allocate(size_t bytes, void* self) {
  auto& memory = *static_cast<TextMemory*>(self);
  memory.exceeded_ = memory.exceeded_ || static_cast<int64_t>(bytes) > memory.left_;
  if (memory.exceeded_) return nullptr;
  memory.left_ -= bytes;
  void* block = std::malloc(bytes);
  if (block != nullptr) memory.blocks_.insert(block);
  return block;
}

void TextMemory::release(void* block, void* self) {
  static_cast<TextMemory*>(self)->blocks_.erase(block);
  std::free(block);
}

void TextMemory::free_all() {
  for (void* block : blocks_) std::free(block);
  blocks_.clear();
}

}  // namespace gyre::h5::detail

#include "io/h5_support.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cfloat>

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

void fail(const std::string& what) {
  throw_runtime("cannot {}: {}", what, deepest_message());
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

Type classify(hid_t type) {
  static_assert(LDBL_MANT_DIG >= 64, "a long double holds every integer of 64 bits");
  const size_t size = H5Tget_size(type), bits = H5Tget_precision(type);
  switch (H5Tget_class(type)) {
    case H5T_FLOAT:
      if (bits > H5Tget_precision(H5T_NATIVE_LDOUBLE)) return Type::other;
      return size == 4 ? Type::f32 : size == 8 ? Type::f64 : Type::real;
    case H5T_INTEGER:
      if (bits > 64) return Type::other;
      if (H5Tget_sign(type) == H5T_SGN_NONE) return Type::integer;
      return size == 4 ? Type::i32 : size == 8 ? Type::i64 : Type::integer;
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

const char* foreign_storage(hid_t dataset) {
  const Handle list(H5Dget_create_plist(dataset), H5Pclose);
  check(list.get(), "read the properties of a dataset");
  return H5Pget_layout(list.get()) == H5D_VIRTUAL ? "is virtual"
         : H5Pget_external_count(list.get()) > 0  ? "has external storage"
                                                  : nullptr;
}

Shape shape_of(hid_t space, const std::string& what) {
  if (H5Sget_simple_extent_type(space) == H5S_NULL) return {0};
  std::vector<hsize_t> extents(static_cast<size_t>(check(H5Sget_simple_extent_ndims(space), what)));
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

}  // namespace gyre::h5::detail

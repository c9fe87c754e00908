#include "io/h5_support.hpp"

#include <algorithm>

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
  const size_t size = H5Tget_size(type);
  switch (H5Tget_class(type)) {
    case H5T_FLOAT:
      return size == 4 ? Type::f32 : size == 8 ? Type::f64 : Type::real;
    case H5T_INTEGER:
      if (H5Tget_sign(type) == H5T_SGN_NONE) return Type::integer;
      return size == 4 ? Type::i32 : size == 8 ? Type::i64 : Type::integer;
    case H5T_STRING:
      return Type::text;
    default:
      return Type::other;
  }
}

Handle text_type(hid_t like) {
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), H5T_VARIABLE);
  H5Tset_cset(type.get(), like < 0 ? H5T_CSET_UTF8 : H5Tget_cset(like));
  return type;
}

}  // namespace gyre::h5::detail

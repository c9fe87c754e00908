#pragma once
// Converts structs with fields (machine/fields.hpp) to JSON and back. For sources of this folder.

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/json.hpp"
#include "core/nearest.hpp"
#include "machine/fields.hpp"

namespace gyre::detail {

template <class T>
concept HasFields = requires(T& value) {
  for_each_field(value, [](const char*, auto&) {});
};

/// Writes fields as JSON; unknown values become null.
struct FieldWriter {
  bool with_samples = true;  ///< if false, a Sampled is written as its value

  Json operator()(const std::string& text) const { return text.empty() ? Json() : Json(text); }
  Json operator()(double value) const { return std::isfinite(value) ? Json(value) : Json(); }
  Json operator()(std::integral auto value) const { return value; }
  template <class T>
  Json operator()(const std::optional<T>& value) const {
    return value ? (*this)(*value) : Json();
  }
  template <class T>
  Json operator()(const std::vector<T>& values) const {
    Json list = Json::array();
    for (const T& value : values) list.push_back((*this)(value));
    return list;
  }
  template <HasFields T>
  Json operator()(const T& value) const {
    if constexpr (std::same_as<T, Sampled>)
      if (!with_samples) return (*this)(value.value);
    Json object = Json::object();
    for_each_field(value, [&](const char* name, const auto& field) {
      if (with_samples || std::string_view(name) != "how") object[name] = (*this)(field);
    });
    return object;
  }
};

/// Reads JSON written by FieldWriter with samples. Throws a usage error that names file, place,
/// value and expected content for a field that is missing or of the wrong kind.
class FieldReader {
 public:
  explicit FieldReader(std::string file) : file_(std::move(file)) {}

  void operator()(const Json& json, const std::string& place, std::string& text) const {
    if (!json.is_null()) require(json.is_string(), json, place, "a text or null");
    text = json.is_null() ? "" : json.get<std::string>();
  }
  void operator()(const Json& json, const std::string& place, double& value) const {
    require(json.is_number() && json.get<double>() >= 0 && std::isfinite(json.get<double>()), json,
            place, "a number of at least 0");
    value = json.get<double>();
  }
  void operator()(const Json& json, const std::string& place, bool& value) const {
    require(json.is_boolean(), json, place, "true or false");
    value = json.get<bool>();
  }
  template <std::integral T>
  void operator()(const Json& json, const std::string& place, T& value) const {
    constexpr auto limit = static_cast<double>(std::numeric_limits<T>::max());
    require(json.is_number_integer() && json.get<double>() >= 0 && json.get<double>() < limit, json,
            place, "a whole number of at least 0");
    value = json.get<T>();
  }
  template <class T>
  void operator()(const Json& json, const std::string& place, std::optional<T>& value) const {
    if (json.is_null()) return value.reset();
    (*this)(json, place, value.emplace());
  }
  template <class T>
  void operator()(const Json& json, const std::string& place, std::vector<T>& values) const {
    require(json.is_array(), json, place, "a list");
    values.resize(json.size());
    for (size_t i = 0; i < values.size(); ++i)
      (*this)(json[i], place + "[" + std::to_string(i) + "]", values[i]);
  }
  template <HasFields T>
  void operator()(const Json& json, const std::string& place, T& value) const {
    for_each_field(value, [&](const char* name, auto& field) {
      (*this)(get(json, place, name), place.empty() ? name : place + "." + name, field);
    });
  }

  /// Returns a field of an object. If it is missing, the usage error names the nearest field.
  const Json& get(const Json& json, const std::string& place, const std::string& name) const;
  void require(bool good, const Json& json, const std::string& place,
               const std::string& wanted) const;

 private:
  std::string file_;
};

}  // namespace gyre::detail

#include "io/checkpoints/rope_keys.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/json.hpp"
#include "io/schemas/schema_names.hpp"

namespace gyre {
namespace {

using h5::AttributeValue;

constexpr std::array<std::pair<const char*, RopeType>, 5> type_names = {
    {{"default", RopeType::plain},
     {"linear", RopeType::linear},
     {"llama3", RopeType::llama3},
     {"yarn", RopeType::yarn},
     {"divided", RopeType::divided}}};

std::optional<double> number_of(const AttributeValue& value) {
  if (const auto* real = std::get_if<double>(&value)) return *real;
  if (const auto* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
  return {};
}

/// The object 'rope_scaling' or 'rope_parameters'.
class RopeObject {
 public:
  RopeObject(ConfigErrors& errors, const char* name, const AttributeValue& value)
      : errors_(errors), name_(name) {
    const auto* text = std::get_if<std::string>(&value);
    try {
      if (text != nullptr && text->starts_with('{')) json_ = parse_json("", *text, "");
    } catch (const Error&) {
      json_ = nullptr;
    }
    if (!json_.is_object())
      errors_.add("'{}' is {}; wanted: an object with 'rope_type'", name_, to_string(value));
  }

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }
  /// A missing key is an error unless there is `otherwise`.
  double number(const char* key, std::optional<double> otherwise = {}) {
    if (const Json* found = find(key, otherwise.has_value())) {
      if (found->is_number()) return found->get<double>();
      wrong(key, "a number");
    }
    return otherwise.value_or(1);
  }
  bool flag(const char* key, bool otherwise) {
    if (const Json* found = find(key, true)) {
      if (found->is_boolean()) return found->get<bool>();
      wrong(key, "true or false");
    }
    return otherwise;
  }
  std::vector<double> numbers(const char* key) {
    std::vector<double> list;
    if (const Json* found = find(key, false)) {
      const auto is_number = [](const Json& item) { return item.is_number(); };
      if (found->is_array() && std::all_of(found->begin(), found->end(), is_number))
        for (const Json& item : *found) list.push_back(item.get<double>());
      else
        wrong(key, "a list of numbers");
    }
    return list;
  }
  RopeType type() {
    const Json* found = find("rope_type", true);
    if (const Json* older = find("type", true); found == nullptr) found = older;
    if (found == nullptr) return RopeType::plain;
    for (const auto& [name, type] : type_names)
      if (*found == name) {
        type_ = name;
        return type;
      }
    errors_.add(
        "'{}' is of the type {}; types that can be computed are "
        "default, linear, llama3 and yarn",
        name_, shown_json(*found));
    unknown_ = true;
    return RopeType::plain;
  }
  /// Adds an error for each key that was neither read nor is ignored, and for each that is both.
  void refuse_others(const std::vector<std::string>* ignored) {
    if (!json_.is_object() || unknown_) return;
    for (const auto& [key, value] : json_.items()) {
      const std::string place = fmt::format("{}.{}", name_, key);
      const bool leave = ignored != nullptr && std::ranges::count(*ignored, place) > 0;
      if (leave && read_.contains(key))
        errors_.add("--ignore-key {}: the type {} reads this key", place, type_);
      if (!value.is_null() && !read_.contains(key) && !leave)
        errors_.add("'{}' has the key '{}', which the type {} does not read{}", name_, key, type_,
                    ignored == nullptr
                        ? ""
                        : fmt::format("; --ignore-key {} if it changes no result", place));
    }
  }

 private:
  const Json* find(const char* key, bool optional) {
    read_.insert(key);
    if (has(key)) return &json_[key];
    if (!optional && !unknown_) errors_.add("'{}' of type {} lacks '{}'", name_, type_, key);
    return nullptr;
  }
  void wrong(const char* key, const char* wanted) {
    errors_.add("'{}' of '{}' is {}; wanted: {}", key, name_, shown_json(json_[key]), wanted);
  }

  ConfigErrors& errors_;
  const char* name_;
  Json json_;
  std::string type_ = "default";
  bool unknown_ = false;
  std::set<std::string> read_;
};

void read_yarn(RopeObject& object, double max_positions, RopeScaling& s) {
  if (object.has("factor") || max_positions <= 0)
    s.factor = object.number("factor");
  else
    s.factor = max_positions / static_cast<double>(s.original_max_position_embeddings);
  s.beta_fast = object.number("beta_fast", 32);
  s.beta_slow = object.number("beta_slow", 1);
  s.truncate = object.flag("truncate", true);
  const double mscale = object.number("mscale", 0), all = object.number("mscale_all_dim", 0);
  const bool both = mscale != 0 && all != 0;
  const double suggested =
      both ? yarn_attention_factor(s.factor, mscale) / yarn_attention_factor(s.factor, all)
           : yarn_attention_factor(s.factor);
  s.attention_factor = object.number("attention_factor", suggested);
}

RopeScaling read_scaling(ConfigErrors& errors, RopeObject& object,
                         std::optional<double> max_positions) {
  RopeScaling s;
  s.type = object.type();
  if (s.type == RopeType::llama3 || s.type == RopeType::yarn) {
    const double original = object.number("original_max_position_embeddings", max_positions);
    if (!(original >= 1 && original < 0x1p53) || original != std::floor(original))
      errors.add("'original_max_position_embeddings' is {}; it must be a whole number from 1 on",
                 original);
    else
      s.original_max_position_embeddings = static_cast<int64_t>(original);
  }
  if (s.type == RopeType::linear || s.type == RopeType::llama3) s.factor = object.number("factor");
  if (s.type == RopeType::llama3) {
    s.low_freq_factor = object.number("low_freq_factor");
    s.high_freq_factor = object.number("high_freq_factor");
  }
  if (s.type == RopeType::yarn) read_yarn(object, max_positions.value_or(0), s);
  if (s.type == RopeType::divided) s.divisors = object.numbers("divisors");
  return s;
}

/// Sets `value` to `found`, if it is given. Adds an error if `value` is another number already.
void set_once(ConfigErrors& errors, const std::string& key, const std::string& other,
              std::optional<double> found, std::optional<double>& value) {
  if (found && value && *found != *value)
    errors.add("'{}' is {}, but '{}' says {}", key, *found, other, *value);
  if (found) value = found;
}

/// The number that is the whole value of `key`, if any. Adds an error for a value of another type.
std::optional<double> outer_number(ConfigErrors& errors, const char* key,
                                   const AttributeValue& value) {
  const std::optional<double> number = number_of(value);
  const bool is_none = std::holds_alternative<std::string>(value) && is_neutral(value, NAN);
  if (!number && !is_none && value != AttributeValue())
    errors.add("'{}' is {}; wanted: a number", key, to_string(value));
  return number;
}

}  // namespace

double yarn_attention_factor(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

void read_rope(ConfigErrors& errors, const std::function<AttributeValue(const std::string&)>& value,
               ModelConfig& config, const std::vector<std::string>* ignored,
               std::optional<double> usual_share) {
  const auto number = [&](const char* key) { return outer_number(errors, key, value(key)); };
  std::optional<double> theta = number("rope_theta"), share = number("partial_rotary_factor");
  const char* name = nullptr;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const AttributeValue found = value(key);
    if (found == AttributeValue() || is_neutral(found, NAN)) continue;
    if (name != nullptr) errors.add("'rope_scaling' and 'rope_parameters' are both there");
    name = key;
  }
  if (name != nullptr) {
    RopeObject object(errors, name, value(name));
    const std::string what = fmt::format("rope_theta' of '{}", name);
    if (object.has("rope_theta"))
      set_once(errors, what, "rope_theta", object.number("rope_theta"), theta);
    if (object.has("partial_rotary_factor"))
      set_once(errors, fmt::format("partial_rotary_factor' of '{}", name), "partial_rotary_factor",
               object.number("partial_rotary_factor"), share);
    config.rope_scaling = read_scaling(errors, object, number("max_position_embeddings"));
    object.refuse_others(ignored);
  }
  if (theta) config.rope_theta = *theta;
  const auto head_dim = static_cast<double>(config.head_dim);
  if (!share) share = usual_share;
  if (share) share = std::trunc(head_dim * std::clamp(*share, -1.0, 2.0));
  set_once(errors, "rotary_dim", "partial_rotary_factor", number("rotary_dim"), share);
  if (!share || *share == head_dim) return;
  if (!(*share >= 2 && *share < head_dim) || std::fmod(*share, 2) != 0)
    errors.add(
        "rotary embedding turns {} of {} elements of a head; "
        "it must be an even number from 2 to head_dim",
        *share, config.head_dim);
  else
    config.rotary_dim = static_cast<int64_t>(*share);
}

std::string rope_json(const RopeScaling& s) {
  const auto is_of = [&](const auto& entry) { return entry.second == s.type; };
  Json json = {{"rope_type", std::ranges::find_if(type_names, is_of)->first}};
  if (s.type == RopeType::divided) json["divisors"] = s.divisors;
  if (s.type == RopeType::linear || s.type == RopeType::llama3 || s.type == RopeType::yarn)
    json["factor"] = s.factor;
  if (s.type == RopeType::llama3 || s.type == RopeType::yarn)
    json["original_max_position_embeddings"] = s.original_max_position_embeddings;
  if (s.type == RopeType::llama3) {
    json["low_freq_factor"] = s.low_freq_factor;
    json["high_freq_factor"] = s.high_freq_factor;
  }
  if (s.type == RopeType::yarn) {
    json["beta_fast"] = s.beta_fast;
    json["beta_slow"] = s.beta_slow;
    json["truncate"] = s.truncate;
    json["attention_factor"] = s.attention_factor;
  }
  return dump_json(json);
}

void check_rope(ConfigErrors& errors, const ModelConfig& c) {
  const RopeScaling& s = c.rope_scaling;
  const auto positive = [&](const std::string& name, double value) {
    if (!(value > 0) || !std::isfinite(value))
      errors.add("{} is {}; it must be positive", name, value);
  };
  positive("rope_theta", c.rope_theta);
  positive("factor of the rotary scaling", s.factor);
  positive("attention_factor", s.attention_factor);
  constexpr double largest = 1000;  // cos and sin times it, squared, in f32
  if (s.attention_factor > largest && std::isfinite(s.attention_factor))
    errors.add("attention_factor is {}; it must be at most {}", s.attention_factor, largest);
  if (s.type == RopeType::llama3) positive("low_freq_factor", s.low_freq_factor);
  if (s.type == RopeType::llama3 && !(s.high_freq_factor > s.low_freq_factor))
    errors.add("high_freq_factor is {}; it must be above low_freq_factor = {}", s.high_freq_factor,
               s.low_freq_factor);
  if (s.type == RopeType::yarn) {
    positive("beta_slow", s.beta_slow);
    if (!(s.beta_fast > s.beta_slow) || !std::isfinite(s.beta_fast))
      errors.add("beta_fast is {}; it must be above beta_slow = {}", s.beta_fast, s.beta_slow);
    if (!(c.rope_theta > 1)) errors.add("rope_theta is {}; YaRN wants more than 1", c.rope_theta);
  }
  if (s.type != RopeType::divided) return;
  if (std::ssize(s.divisors) != c.rotary_width() / 2)
    errors.add("the rotary scaling has {} divisors; {} pairs turn", s.divisors.size(),
               c.rotary_width() / 2);
  for (size_t i = 0; i < s.divisors.size(); ++i)
    positive(fmt::format("divisor {} of the rotary scaling", i), s.divisors[i]);
}

}  // namespace gyre

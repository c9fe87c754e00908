#include "io/checkpoints/tokenizer_file.hpp"

#include <map>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/json_members.hpp"
#include "io/resources.hpp"
#include "io/trust/sha256.hpp"

namespace gyre {
namespace {

constexpr int64_t most_tokens = 1 << 24;  // the limit of a model's vocabulary
constexpr int64_t most_bytes = 1 << 28;
constexpr const char* tokenizer_kind = "a tokenizer.json";

}  // namespace

std::string tokenizer_name(const std::string& path) {
  std::map<int64_t, std::string> tokens;
  const auto add = [&](const std::string& token, const Json& id) {
    const std::optional<int64_t> number = whole_number(id);
    if (!number || *number < 0 || *number >= most_tokens)
      throw_usage("'{}': the id of the token '{}' is {}; wanted: a whole number below {}", path,
                  token, shown_json(id), most_tokens);
    tokens[*number] = token;
  };
  const Json json = parse_json(path, read_text_file(path, tokenizer_kind, most_bytes),
                               tokenizer_kind, {"model/vocab", add});
  const auto at = [](const Json& object, const char* key) {
    return object.is_object() && object.contains(key) ? object[key] : Json();
  };
  if (const Json listed = at(at(json, "model"), "vocab"); listed.is_array())  // with scores
    for (size_t i = 0; i < listed.size(); ++i)
      if (listed[i].is_array() && !listed[i].empty() && listed[i][0].is_string())
        add(listed[i][0].get<std::string>(), Json(i));
  if (tokens.empty())
    throw_usage("'{}': no tokens in 'model.vocab'; wanted: {}", path, tokenizer_kind);
  for (const Json& token : at(json, "added_tokens"))
    if (at(token, "content").is_string()) add(token["content"].get<std::string>(), at(token, "id"));
  Sha256 digest;
  int64_t next = 0;
  const auto feed = [&](const std::string& token) {
    const uint64_t bytes = token.size();
    digest.add(&bytes, sizeof(bytes));
    digest.add(token.data(), token.size());
    ++next;
  };
  for (const auto& [id, token] : tokens) {
    while (next < id) feed("");
    feed(token);
  }
  return "sha256:" + digest.hex();
}

}  // namespace gyre

#include "io/schemas/schema_names.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <sstream>

#include "core/error.hpp"
#include "core/nearest.hpp"
#include "io/schemas/logprobs_inputs.hpp"

namespace gyre {
namespace {

/// Groups with their names; "@" precedes attributes. Suffix "?": may be missing; "~": may be
/// missing depending on others. "*": the reader handles any other datasets below, such as tensors,
/// or answers that it does not know and so does not compare.
constexpr std::pair<const char*, const char*> tables[] = {
    {"gyre/documents",
     "/documents @vocab_size @tokenizer tokens offsets names? text_bytes? unscored? "
     "/reference @model_sha256? @generator? offsets? logprob? entropy? hidden?"},
    {"gyre/model",  // its reader refuses unknown datasets
     "/model @vocab_size @vocab_padded @hidden_size @num_hidden_layers @num_attention_heads "
     "@num_key_value_heads @head_dim @intermediate_size @rope_theta @rms_norm_eps @tokenizer? *"},
    {"gyre/results",
     "/results @model_sha256 @input_sha256 @teacher_sha256? logprob entropy kl? offsets names? "
     "/packed @cp @bin_capacity bin_offsets document cu_seqlens cu_seqlens_padded "
     "/packed/prefixes tree_offsets~ nodes~ documents~"},
    {"gyre/packed",
     "/packed @bin_capacity @slot_multiple @documents @vocab_size @hidden_size @tokenizer "
     "@algorithm bin_offsets document cu_seqlens cu_seqlens_padded ids~ embeddings~ labels "
     "positions names? /packed/prefixes tree_offsets~ nodes~ documents~ "
     "/packed/extras * /reference *"},
    {"gyre/shards",
     "/shards @layout @cp @hidden_size @packed_sha256 bin_offsets slot_offsets index ids~ "
     "embeddings~ labels positions cu_seqlens cu_seqlens_padded /shards/extras *"},
    {"gyre/bshd",
     "/bshd @vocab_size @sentinel~ @pad_id~ input_ids~ inputs_embeds~ labels position_ids~ "
     "seq_lens~ seq_lens_padded? /bshd/extras * /reference *"},
    {"gyre/salm",
     "/salm @vocab_size @pad_id @placeholder_id input_ids inputs_embeds target_ids audio "
     "audio_offsets encoder /reference *"},
    {"gyre/row-shards",
     "/row_shards @cp @tp @hidden_size @pad_positions @input_sha256? index? input_ids? "
     "inputs_embeds? key_mask? labels? position_ids?"},
    {"gyre/ulysses",
     "/ulysses @ranks @heads @kv_heads @head_dim @input_sha256? slot_offsets? ids? positions? "
     "cu_seqlens? cu_seqlens_padded? q? kv? q_exchanged? kv_exchanged? out_token_major? d_kv? "
     "swapped_index? swapped_q? swapped_q_exchanged? swapped_q_ordered?"},
    {"gyre/encoder",
     "/encoder @ranks @hidden_size @input_sha256? frame_offsets? encoder_rank? frames? d_frames? "
     "d_sum? d_split? d_none?"},
    {"gyre/attention",
     "/attention @mask @window @scale offsets query_offsets~ q k k_shared~ v d_out regions~ "
     "selected_keys~ sinks~ /reference @generator? out? lse? d_q? d_k? d_k_shared? d_v? d_sinks? "
     "*"},
    {"gyre/recurrence",
     "/recurrence @scale offsets q k v g beta~ conv_weight~ d_out "
     "/reference @generator? out? d_q? d_k? d_v? d_g? d_beta? d_conv_weight? *"},
    {"gyre/logprobs",  // also logprobs_inputs() and row_parameters(); answers: see the operations
     "/logprobs @vocab_size @temperature? @top_k? @top_p? @min_p? @projection_width~ "
     "/reference @generator? *"},
    {"gyre/attention-results",
     "/results @input_sha256 offsets query_offsets? out lse d_q? d_k? d_k_shared? d_v? d_sinks?"},
    {"gyre/recurrence-results", "/results @input_sha256 offsets out d_q d_k d_v d_g d_beta?"},
    {"gyre/logprobs-results",
     "/results @input_sha256 @vocab_size @temperature @top_k @top_p @min_p *"},
};
constexpr const char* names_of_all = "/ @schema @schema_version @content_sha256? /provenance *";

/// Modifiers of the computation: whole words of their names, and the number, if any, that turns
/// them off. The names are those of FlashAttention, FlexAttention, transformers, vLLM, Megatron and
/// Gyre's other formats. First those of attention scores and masks, then those of distributions
/// over a vocabulary and of sampling.
constexpr const char* modifier_table =
    "softcap=0 soft_cap=0 softcapping=0 logit_cap=0 alibi bias relative_position dropout=0 "
    "dropout_p=0 scale scaling sm_scale qk_norm q_norm k_norm rope rotary sink sinks window "
    "window_size regions mask mask_mod score_mod causal is_causal chunk_size=0 "
    "cu_seqlens segment_ids "
    "temperature=1 temperatures top_k=0 top_p=1 top_a=0 min_p=0 typical_p=1 top_n_sigma=0 "
    "epsilon_cutoff=0 eta_cutoff=0 repetition_penalty=1 penalty=0 penalties "
    "no_repeat_ngram_size=0 bad_words_ids suppress_tokens allowed_token_ids logit_scale=1 "
    "logits_scale=1 guidance_scale=1 label_smoothing=0 z_loss=0";

struct Modifier {
  std::string words;
  double neutral = NAN;
};
const std::vector<Modifier>& modifiers() {
  static const std::vector<Modifier> all = [] {
    std::vector<Modifier> made;
    std::istringstream words(modifier_table);
    for (std::string word; words >> word;) {
      const size_t sign = word.find('=');
      made.push_back({word.substr(0, sign)});
      if (sign != std::string::npos) made.back().neutral = std::stod(word.substr(sign + 1));
    }
    return made;
  }();
  return all;
}

constexpr size_t max_notes = 8;  // per file

std::function<void(const std::string&)>& note_handler() {
  static std::function<void(const std::string&)> handler;
  return handler;
}

std::vector<SchemaName> parse_table(const std::string& text) {
  using Presence = SchemaName::Presence;
  std::vector<SchemaName> names;
  std::istringstream words(text);
  std::string within;
  for (std::string word; words >> word;) {
    if (word.starts_with('/')) {
      within = word;
      continue;
    }
    const char mark = word.back();
    if (mark == '?' || mark == '~') word.pop_back();
    names.push_back({word.starts_with('@') ? within + word : fmt::format("{}/{}", within, word),
                     mark == '?'   ? Presence::optional
                     : mark == '~' ? Presence::depends
                                   : Presence::required});
  }
  return names;
}

/// Finds the modifier whose words occur in a name.
const Modifier* modifier_in(const std::string& name) {
  std::string words = "_";
  for (const char c : name)
    words += std::isalnum(static_cast<unsigned char>(c)) != 0
                 ? static_cast<char>(std::tolower(static_cast<unsigned char>(c)))
                 : '_';
  words += '_';
  const Modifier* longest = nullptr;
  for (const Modifier& modifier : modifiers())
    if (words.find(fmt::format("_{}_", modifier.words)) != std::string::npos &&
        (longest == nullptr || modifier.words.size() > longest->words.size()))
      longest = &modifier;
  return longest;
}

/// Checks the names of a file against those of its schema.
class NameCheck {
 public:
  NameCheck(const h5::File& file, const std::string& schema, const std::vector<std::string>& more)
      : file_(file) {
    for (const SchemaName& name : names_of_schema(schema)) places_.push_back(name.place);
    places_.insert(places_.end(), more.begin(), more.end());
  }

  /// Checks all names in and below a group; "" is the root.
  void look(const std::string& above) {
    const std::string object = above.empty() ? "/" : above;
    look_at_attributes(object);
    const bool is_free = knows(above + "/*");
    for (const std::string& name : file_.links_of(object)) {
      const std::string place = above + "/" + name;
      const bool is_dataset = knows(place);
      if (is_dataset && !file_.has_dataset(place))
        errors_.add("'{}' is no dataset; it must be one", place);
      else if (is_dataset)
        look_at_attributes(place);
      else if (knows(object + "@" + name))
        errors_.add("'{}' must be an attribute of '{}', and is a dataset or a group", name, object);
      else if (!is_group_of_schema(place) && !is_free)
        report(place, fmt::format("'{}'", place), {});
      else if (is_group_of_schema(place) && !file_.has_group(place))
        errors_.add("'{}' is no group; it must be one", place);
      else if (is_group_of_schema(place))
        look(place);
    }
  }

  const ConfigErrors& errors() const { return errors_; }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  bool knows(const std::string& place) const {
    return std::find(places_.begin(), places_.end(), place) != places_.end();
  }
  bool is_group_of_schema(const std::string& place) const {
    return std::any_of(places_.begin(), places_.end(), [&](const std::string& known) {
      return known.starts_with(place + "/") || known.starts_with(place + "@");
    });
  }

  void look_at_attributes(const std::string& object) {
    if (knows(object + "/*") && !is_group_with_attributes(object)) return;
    for (const std::string& name : file_.attributes_of(object)) {
      if (knows(object + "@" + name) || (name == "dtype" && knows(object))) continue;
      const std::string as_dataset = (object == "/" ? "" : object) + "/" + name;
      if (knows(as_dataset))
        errors_.add("'{}' must be a dataset, and is an attribute of '{}'", as_dataset, object);
      else
        report(name, fmt::format("attribute '{}' of '{}'", name, object),
               file_.attribute(object, name));
    }
  }
  bool is_group_with_attributes(const std::string& object) const {
    return std::any_of(places_.begin(), places_.end(),
                       [&](const std::string& known) { return known.starts_with(object + "@"); });
  }

  void report(const std::string& name, const std::string& what, const h5::AttributeValue& value) {
    const Modifier* modifier = modifier_in(last_of(name));
    const bool is_attribute = value != h5::AttributeValue();
    const std::string meant = nearest_place(name);
    const std::string hint = meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant);
    if (modifier == nullptr || (is_attribute && is_neutral(value, modifier->neutral)))
      notes_.push_back(fmt::format("{}: {} is not read{}", file_.path(), what, hint));
    else
      errors_.add("{} {}changes what is computed, and is not read; leave it out{}", what,
                  is_attribute ? fmt::format("is {}: it ", to_string(value)) : "",
                  last_of(meant) == last_of(name) ? hint : "");
  }

  /// Place that was probably meant, or "".
  std::string nearest_place(const std::string& name) const {
    std::vector<std::string> names;
    for (const std::string& place : places_) names.push_back(last_of(place));
    const std::string meant = nearest(last_of(name), names);
    const auto place = std::find(names.begin(), names.end(), meant) - names.begin();
    return meant.empty() ? "" : places_[place];
  }
  static std::string last_of(const std::string& place) {
    return place.substr(place.find_last_of("/@") + 1);
  }

  const h5::File& file_;
  std::vector<std::string> places_;
  ConfigErrors errors_;
  std::vector<std::string> notes_;
};

}  // namespace

const std::vector<SchemaName>& names_of_schema(const std::string& schema) {
  static const std::map<std::string, std::vector<SchemaName>> all = [] {
    std::map<std::string, std::vector<SchemaName>> made;
    for (const auto& [name, table] : tables)
      made.emplace(name, parse_table(fmt::format("{} {}", names_of_all, table)));
    for (const LogprobsInput& input : logprobs_inputs())
      made.at(logprobs_schema).push_back({input.path(), input.presence});
    for (const RowParameter& parameter : row_parameters()) {
      made.at(logprobs_schema)
          .push_back({"/logprobs@" + parameter.name, SchemaName::Presence::optional});
      made.at(logprobs_results_schema)
          .push_back({"/results@" + parameter.name, SchemaName::Presence::optional});
    }
    return made;
  }();
  return all.at(schema);
}

bool is_neutral(const h5::AttributeValue& value, double neutral) {
  if (const auto* truth = std::get_if<bool>(&value)) return !*truth;
  if (const auto* whole = std::get_if<int64_t>(&value))
    return static_cast<double>(*whole) == neutral;
  if (const auto* real = std::get_if<double>(&value)) return *real == neutral;
  const auto* text = std::get_if<std::string>(&value);
  return text != nullptr &&
         (*text == "none" || *text == "None" || *text == "null" || *text == "False" ||
          *text == "false" || *text == fmt::format("{}", neutral));
}

void check_names(const h5::File& file, const std::string& schema,
                 const std::vector<std::string>& more) {
  NameCheck check(file, schema, more);
  check.look("");
  check.errors().throw_if_any(fmt::format("'{}' breaks the schema {}:", file.path(), schema));
  if (!note_handler()) return;
  const std::vector<std::string>& notes = check.notes();
  for (size_t i = 0; i < std::min(notes.size(), max_notes); ++i) note_handler()(notes[i]);
  if (notes.size() > max_notes)
    note_handler()(
        fmt::format("{}: {} more names are not read", file.path(), notes.size() - max_notes));
}

void set_note_handler(std::function<void(const std::string&)> handler) {
  note_handler() = std::move(handler);
}

}  // namespace gyre

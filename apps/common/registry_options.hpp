#pragma once
// Layouts and schedules as options of an app: --layout, --stripe, --chunk, --schedule.

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention/schedules/registry.hpp"
#include "core/error.hpp"
#include "core/option_field.hpp"
#include "report/options.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Returns the names of a registry's entries.
template <class Entry>
std::vector<std::string> names_of(const std::vector<Entry>& entries) {
  std::vector<std::string> names;
  for (const Entry& entry : entries) names.push_back(entry.name);
  return names;
}
template <class Entry>
std::vector<Described> described(const std::vector<Entry>& entries) {
  std::vector<Described> all;
  for (const Entry& entry : entries) all.push_back({entry.name, entry.summary});
  return all;
}

/// The chosen entry and its options.
template <class Options>
struct RegistryChoice {
  std::string name;  ///< name of an entry; a list of them, or "all", if the app admits several
  Options options;
  std::vector<std::string> taken;  ///< names that the app uses for something else; see flag_of

  bool several() const { return lists_several(name); }
  bool wants(const std::string& entry) const { return lists(name, entry); }
};

/// A registry as options. `word` is the kind of its entries: "layout" for --layout.
template <class Entry, class Options>
struct RegistryOptions {
  using Choice = RegistryChoice<Options>;
  using Field = OptionField<Options>;
  const char* word;
  const std::vector<Entry>& entries;
  const std::vector<Field>& fields;

  /// "--chunk", or "--layout-chunk" if the app has another --chunk.
  std::string flag_of(const Choice& choice, const Field& field) const {
    const bool taken =
        std::find(choice.taken.begin(), choice.taken.end(), field.name) != choice.taken.end();
    return taken ? fmt::format("--{}-{}", word, field.name) : fmt::format("--{}", field.name);
  }

  static bool reads(const Entry& entry, const Field& field) {
    return std::find(entry.reads.begin(), entry.reads.end(), field.value) != entry.reads.end();
  }
  /// Names of the entries that read a field: "balanced and balanced-joint".
  std::string readers_of(const Field& field) const {
    std::vector<std::string> names;
    for (const Entry& entry : entries)
      if (reads(entry, field)) names.push_back(entry.name);
    std::string last = names.empty() ? "none" : names.back();
    if (names.size() < 2) return last;
    names.pop_back();
    return fmt::format("{} and {}", fmt::join(names, ", "), last);
  }

  /// Declares --layout and one option for each field.
  void declare(OptionTable& table, Choice& choice, const std::string& summary, bool several) const {
    const AddOptions add(table, "Parallelism"), of_entries(table, "Advanced");
    const std::string option = fmt::format("--{}", word);
    if (several)
      add.choices(option, summary, choice.name, described(entries)).in_key();
    else
      add.choice(option, summary, choice.name, names_of(entries));
    for (const Field& field : fields) {
      const std::string flag = flag_of(choice, field),
                        help = fmt::format("{}; read by {}", field.summary, readers_of(field));
      int64_t& value = choice.options.*field.value;
      if (field.words.empty())
        of_entries.size(flag, help, value, field.minimum);
      else
        of_entries.choice(flag, help, value, field.words);
    }
  }

  /// Adds an error for each given value that no chosen entry reads.
  void check(const Choice& choice, ConfigErrors& errors) const {
    for (const Field& field : fields) {
      const int64_t value = choice.options.*field.value;
      const auto is_reader = [&](const Entry& entry) {
        return choice.wants(entry.name) && reads(entry, field);
      };
      if (value == Options().*field.value || std::any_of(entries.begin(), entries.end(), is_reader))
        continue;
      const std::string readers = readers_of(field);
      errors.add("{} {}: {} {} does not read it; {} {}", flag_of(choice, field),
                 field.text_of(value), word, choice.name, readers,
                 readers.find(' ') == std::string::npos ? "does" : "do");
    }
  }

  /// The title, and a line for each entry.
  std::string help(const std::string& title) const {
    std::string text = title + ":\n";
    for (const Entry& entry : entries)
      text += fmt::format("  {:<21}{}\n", entry.name, entry.summary);
    return text;
  }
};

/// A chosen layout; initially the default.
struct LayoutChoice : RegistryChoice<LayoutOptions> {
  LayoutChoice() { name = default_layout().name; }
  /// The layout's options for `cp` ranks.
  LayoutOptions for_ranks(int cp) const;
};

/// The options with which an app declares and checks a LayoutChoice.
RegistryOptions<LayoutKind, LayoutOptions> layout_choices();

/// A line for each layout.
std::string layout_help();

/// Requirements of layouts on segment slots: "a multiple of 2 cp under dual-chunk-swap".
std::string segment_rule_help();

/// A chosen schedule; initially the default.
struct ScheduleChoice : RegistryChoice<ScheduleOptions> {
  ScheduleChoice() { name = default_schedule().name; }
};

/// The options with which an app declares and checks a ScheduleChoice.
RegistryOptions<Schedule, ScheduleOptions> schedule_choices();

/// A line for each schedule.
std::string schedule_help();

}  // namespace gyre

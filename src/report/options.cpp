#include "report/options.hpp"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

#include "core/index.hpp"

namespace gyre {
namespace {

[[noreturn]] void refuse_choice(const std::string& text, const std::vector<std::string>& choices) {
  const std::string near = nearest(text, choices);
  throw_usage("'{}' is not one of {}{}", text, fmt::join(choices, ", "),
              near.empty() ? "" : "; nearest: " + near);
}

/// Checks that `list` is "all", or different names of `choices`.
void check_list(const std::string& list, const std::vector<Described>& choices) {
  std::vector<std::string> names{"all"};
  for (const Described& choice : choices) names.push_back(choice.name);
  const std::vector<std::string> items = items_of(list);
  for (const std::string& item : items) {
    if (std::ranges::count(items, item) > 1) throw_usage("'{}' is there twice", item);
    if (item == "all" && items.size() > 1) throw_usage("all stands alone, not beside other names");
    if (std::ranges::find(names, item) != names.end()) continue;
    const auto same = [](unsigned char a, unsigned char b) {
      return std::tolower(a) == std::tolower(b);
    };
    for (const Described& choice : choices) {
      const auto found = std::ranges::search(choice.summary, item, same);
      const bool is_name =
          !found.empty() && std::isupper(static_cast<unsigned char>(*found.begin()));
      if (item.size() > 2 && is_name)
        throw_usage("'{}' is called {} here ({})", item, choice.name, choice.summary);
    }
    refuse_choice(item, names);
  }
}

constexpr int max_sizes = 100;

void check_count(const TokenSweep& sweep, ConfigErrors& errors) {
  if (sweep.step > 0) {
    const int64_t count = (sweep.max - sweep.min) / sweep.step + 1;
    if (count > max_sizes)
      errors.add("--step {} makes {} sizes, and at most {} are run; the smallest that works is {}",
                 sweep.step, count, max_sizes,
                 ceil_div(sweep.max - sweep.min + 1, int64_t{max_sizes}));
    return;
  }
  const double span = std::log(sweep.max) - std::log(sweep.min);
  const double steps = span / std::log(sweep.factor);
  if (steps >= max_sizes)
    errors.add(
        "--factor {} makes {:.0f} sizes, and at most {} are run; the smallest that works is {:.4f}",
        sweep.factor, std::floor(steps) + 1, max_sizes, std::exp(span / (max_sizes - 1)));
}

}  // namespace

std::vector<std::string> items_of(const std::string& list) {
  std::vector<std::string> items;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    items.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

std::string complain_about_empty(const std::string& text) {
  return text.empty() ? "an empty text is no value; leave the option out instead" : "";
}

AddOptions::AddOptions(OptionTable& table, const std::string& group)
    : table_(table),
      group_(group.empty() ? table.parser().option_defaults()->get_group() : group) {}

CLI::App& AddOptions::parser() const {
  table_.parser().option_defaults()->group(group_);
  return table_.parser();
}

/// Runs check(text) on the text of an option. A text that it refuses, by throwing an Error, is kept
/// as a complaint, and the default takes its place, so that the other options are read too.
template <class Check>
void AddOptions::checked(CLI::Option* option, const Check& check) const {
  const auto complaint_of = [check](std::string& text) -> std::string {
    try {
      check(text);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  const auto run = [complaint_of, option, &table = table_](std::string& text) -> std::string {
    std::string complaint = complaint_of(text);
    if (complaint.empty() || !table.keeps_complaints()) return complaint;
    table.complain(fmt::format("{}: {}", option->get_name(), complaint));
    text = option->get_default_str();
    complaint_of(text);  // brings the default into the parser's form
    return {};
  };
  option->transform(CLI::Validator(run, ""));
}

void AddOptions::require() const {
  table_.parser().get_options().back()->required();
}

Option& AddOptions::add(const std::string& name, const std::function<Value()>& value,
                        const std::vector<std::string>& choices) const {
  const CLI::Option& option = *table_.parser().get_options().back();
  const std::string flag = option.get_positional() ? name : "--" + option.get_lnames().front();
  std::string recorded = option.get_positional() ? name : option.get_lnames().front();
  std::ranges::replace(recorded, '-', '_');
  const auto* found = std::ranges::find(option_groups, group_, &OptionGroup::name);
  const OptionGroup& group = found == std::end(option_groups) ? option_groups[0] : *found;
  return table_.add({.flag = flag,
                     .name = recorded,
                     .told_by = group.told_by,
                     .value = value,
                     .usual = value(),
                     .choices = choices,
                     .shown = group.shown});
}

Option& AddOptions::flag(const std::string& name, const std::string& help, bool& value) const {
  parser().add_flag(name, value, help);
  return add(name, [&value] { return value; });
}

Option& AddOptions::operator()(const std::string& name, const std::string& help,
                               std::string& value) const {
  parser().add_option(name, value, help)->capture_default_str()->check(complain_about_empty);
  return add(name, [&value] { return value; });
}

Option& AddOptions::operator()(const std::string& name, const std::string& help,
                               std::vector<std::string>& values) const {
  parser().add_option(name, values, help)->check(complain_about_empty);
  return add(name, [&values] { return fmt::format("{}", fmt::join(values, ",")); });
}

Option& AddOptions::operator()(const std::string& name, const std::string& help, double& value,
                               const Range& range) const {
  const auto check = [range](const std::string& text) {
    double number = 0;
    if (!CLI::detail::lexical_cast(text, number) || !std::isfinite(number))
      throw_usage("'{}' is not a finite number", text);
    if (number < range.least || (range.open && number == range.least))
      throw_usage("'{}' is not {} {}", text, range.open ? "above" : "at least", range.least);
    if (number > range.most) throw_usage("'{}' is more than {}", text, range.most);
  };
  checked(parser().add_option(name, value, help)->capture_default_str(), check);
  return add(name, [&value] { return value; });
}

Option& AddOptions::operator()(const std::string& name, const std::string& help, int& value,
                               int minimum, int maximum) const {
  const auto check = [minimum, maximum](const std::string& text) {
    int64_t number = 0;  // numbers beyond int are then above `maximum`, and are called so
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || number < minimum)
      throw_usage("'{}' is not an integer of at least {}", text, minimum);
    if (number > maximum) throw_usage("'{}' is more than {}", text, maximum);
  };
  checked(parser().add_option(name, value, help)->capture_default_str(), check);
  return add(name, [&value] { return int64_t{value}; });
}

Option& AddOptions::count(const std::string& name, const std::string& help, int& value,
                          const std::string& word) const {
  const auto check = [word](std::string& text) {
    int number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool is_number = error == std::errc() && end == text.data() + text.size() && number >= 1;
    if (!is_number && text != word)
      throw_usage("'{}' is not {} and no integer of at least 1", text, word);
    if (text == word) text = "0";
  };
  const auto text_of = [&value, word] { return value == 0 ? word : std::to_string(value); };
  checked(parser()
              .add_option(name, value, help)
              ->default_str(text_of())
              ->type_name(fmt::format("INT|{}", word)),
          check);
  return add(name, text_of);
}

Option& AddOptions::size(const std::string& name, const std::string& help, int64_t& value,
                         int64_t minimum, int64_t maximum) const {
  const auto check = [minimum, maximum](std::string& text) {
    const int64_t size = parse_size(text);
    if (size < minimum) throw_usage("'{}' is less than {}", text, minimum);
    if (size > maximum) throw_usage("'{}' is more than {}", text, maximum);
    text = std::to_string(size);
  };
  checked(parser().add_option(name, value, help)->capture_default_str()->type_name("SIZE"), check);
  return add(name, [&value] { return value; });
}

Option& AddOptions::seed(const std::string& help, int64_t& value) const {
  return size("--seed", help, value, 0, std::numeric_limits<int64_t>::max());
}

Option& AddOptions::choice(const std::string& name, const std::string& help, std::string& value,
                           const std::vector<std::string>& choices) const {
  const auto check = [choices](const std::string& text) {
    if (std::ranges::find(choices, text) == choices.end()) refuse_choice(text, choices);
  };
  checked(parser()
              .add_option(name, value, help)
              ->capture_default_str()
              ->type_name(fmt::format("{}", fmt::join(choices, "|"))),
          check);
  return add(
      name, [&value] { return value; }, choices);
}

Option& AddOptions::choice(const std::string& name, const std::string& help, int64_t& index,
                           const std::vector<std::string>& choices) const {
  const auto check = [choices](std::string& text) {
    const auto found = std::ranges::find(choices, text);
    if (found == choices.end()) refuse_choice(text, choices);
    text = std::to_string(found - choices.begin());
  };
  checked(parser()
              .add_option(name, index, help)
              ->default_str(choices[index])
              ->type_name(fmt::format("{}", fmt::join(choices, "|"))),
          check);
  return add(
      name, [&index, choices] { return choices[index]; }, choices);
}

Option& AddOptions::choices(const std::string& name, const std::string& help, std::string& value,
                            const std::vector<Described>& choices) const {
  std::vector<std::string> names{"all"};
  for (const Described& choice : choices) names.push_back(choice.name);
  checked(parser()
              .add_option(name, value, help + "; several: A,B")
              ->capture_default_str()
              ->type_name(fmt::format("{}", fmt::join(names, "|"))),
          [choices](const std::string& list) { check_list(list, choices); });
  return add(
      name, [&value] { return value; }, names);
}

bool lists(const std::string& list, std::string_view name) {
  return list == "all" || std::ranges::count(items_of(list), name) > 0;
}
bool lists_several(const std::string& list) {
  return list == "all" || list.find(',') != std::string::npos;
}

std::vector<int> parse_numbers(const char* option, const std::string& text, const NumberList& list,
                               ConfigErrors& errors) {
  std::vector<int> numbers;
  for (const std::string& item : items_of(text)) {
    int number = 0;
    const char* const end = item.data() + item.size();
    const auto [last, status] = std::from_chars(item.data(), end, number);
    if (status != std::errc() || last != end || number < list.least || number > list.most) {
      errors.add("{} '{}': '{}' is no number of {} from {} to {}; such as {} {}", option, text,
                 item, list.what, list.least, list.most, option, list.example);
      break;
    }
    if (std::ranges::find(numbers, number) != numbers.end()) {
      errors.add("{} '{}': {} is there twice", option, text, number);
      break;
    }
    numbers.push_back(number);
  }
  return numbers;
}

int64_t parse_size(std::string_view text) {
  uint64_t number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  int shift = 0;
  bool good = error == std::errc();
  if (good && end != last) {
    const size_t unit = std::string_view("KMGkmg").find(*end);
    good = end + 1 == last && unit != std::string_view::npos;
    shift = 10 * (1 + static_cast<int>(unit % 3));
  }
  if (!good) throw_usage("'{}' is not a size (digits, then K, M or G for 2^10, 2^20, 2^30)", text);
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) >> shift)
    throw_usage("'{}' is too large (limit 2^63 - 1)", text);
  return static_cast<int64_t>(number << shift);
}

std::vector<int64_t> TokenSweep::sizes() const {
  if (!sweeps()) return {tokens};
  std::vector<int64_t> all;
  if (step > 0)
    for (int64_t size = min; size <= max; size += step) all.push_back(size);
  if (step > 0) return all;
  double size = min;
  while (size <= max) {
    const int64_t whole = std::llround(size);
    if (all.empty() || whole > all.back()) all.push_back(whole);
    size *= factor;
  }
  return all;
}

void declare_sweep(OptionTable& table, const std::string& what, TokenSweep& sweep, int64_t most) {
  const AddOptions add(table, "Problem");
  add.size("--tokens", what, sweep.tokens, 1, most).in_key();
  add.size("-b,--min", "Smallest size of a sweep; 0: no sweep", sweep.min, 0, most).in_key();
  add.size("-e,--max", "Largest size of a sweep", sweep.max, 0, most).in_key();
  add("-f,--factor", "Ratio of neighbouring sizes of a sweep", sweep.factor,
      {.least = 1, .open = true})
      .in_key();
  add.size("-i,--step", "Difference of neighbouring sizes of a sweep; 0: they have a ratio",
           sweep.step)
      .in_key();
  add("-N,--cycles", "How often all rows are run", sweep.cycles, 1).in_key();
}

void check_sweep(const TokenSweep& sweep, int64_t usual_tokens, ConfigErrors& errors) {
  if (!sweep.sweeps() && sweep.step != 0) errors.add("--step {} needs --min", sweep.step);
  if (sweep.step != 0 && sweep.factor != TokenSweep().factor)
    errors.add("one of --step and --factor, not both");
  if (!sweep.sweeps() && sweep.max != 0) errors.add("--max {} needs --min", sweep.max);
  if (sweep.sweeps() && sweep.tokens != usual_tokens)
    errors.add("one of --tokens and --min, not both");
  if (sweep.sweeps() && sweep.max < sweep.min)
    errors.add("--max {} is less than --min {}", sweep.max, sweep.min);
  else if (sweep.sweeps())
    check_count(sweep, errors);
}

}  // namespace gyre

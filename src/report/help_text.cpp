#include "report/help_text.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "report/options.hpp"

namespace gyre {
namespace {

constexpr size_t help_width = 100, description_column = 30;

/// Breaks `text` after the last `separator` that fits, so that a line starting at column `begin`
/// ends before `help_width`. Further lines start with `begin` blanks.
std::string broken(std::string text, char separator, size_t begin) {
  for (size_t at = 0; text.size() - at > help_width - begin;) {
    size_t last = text.rfind(separator, at + help_width - begin - (separator == ' ' ? 0 : 1));
    if (last == std::string::npos || last <= at) last = text.find(separator, at);
    if (last == std::string::npos) break;
    const std::string blanks(begin, ' ');
    separator == ' ' ? text.replace(last, 1, "\n" + blanks) : text.insert(last + 1, "\n" + blanks);
    at = text.find('\n', last) + 1 + begin;
  }
  return text;
}

class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode /*mode*/) const override {
    return broken(make_description(app), ' ', 0) + make_usage(app, name) + make_positionals(app) +
           groups_text(app) + '\n' + make_footer(app);
  }
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    const std::string name = "  " + make_option_name(option, is_positional);
    std::string text = name + broken(make_option_opts(option), '|', name.size() + 1);
    const std::string description = make_option_desc(option);
    if (description.empty()) return text + '\n';
    if (text.size() >= description_column) text += '\n' + std::string(description_column, ' ');
    text.resize(std::max(text.size(), description_column), ' ');
    return text + broken(description, ' ', description_column) + '\n';
  }

 private:
  std::string groups_text(const CLI::App* app) const {
    std::vector<std::string> groups = app->get_groups();
    const auto place = [](const std::string& group) {
      return std::ranges::find(option_groups, group, &OptionGroup::name) -
             std::begin(option_groups);
    };
    std::ranges::stable_sort(groups, {}, place);
    std::string text;
    for (const std::string& group : groups) {
      const auto options = app->get_options([&](const CLI::Option* option) {
        return option->get_group() == group && option->nonpositional();
      });
      if (!group.empty() && !options.empty()) text += make_group(group, false, options);
    }
    return text;
  }
};

}  // namespace

std::shared_ptr<CLI::FormatterBase> help_formatter() {
  return std::make_shared<HelpFormatter>();
}

}  // namespace gyre

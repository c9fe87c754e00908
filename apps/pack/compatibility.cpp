#include "apps/pack/compatibility.hpp"

#include <fmt/format.h>

#include <charconv>
#include <sstream>

#include "core/error.hpp"
#include "report/options.hpp"

namespace gyre {
namespace {

AttentionCapabilities capabilities_of(const std::string& list) {
  AttentionCapabilities can;
  const std::vector<std::pair<std::string, bool*>> known{{"varlen", &can.varlen},
                                                         {"padded-offsets", &can.padded_offsets},
                                                         {"cp-aware", &can.cp_aware}};
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    if (item == "none") continue;
    bool found = false;
    std::vector<std::string> names{"none"};
    for (const auto& [name, flag] : known) {
      names.push_back(name);
      if (item == name) *flag = found = true;
    }
    if (!found)
      throw_usage("--attention: '{}' is none of {}{}", item, fmt::join(names, ", "),
                  nearest(item, names).empty() ? "" : "; nearest: " + nearest(item, names));
  }
  return can;
}

DeviceCapability device_of(const std::string& text) {
  DeviceCapability device;
  const char* const end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, device.major);
  if (major.ec == std::errc() && major.ptr != end && *major.ptr == '.') {
    const auto minor = std::from_chars(major.ptr + 1, end, device.minor);
    if (minor.ec == std::errc() && minor.ptr == end && device.major > 0 && device.minor >= 0)
      return device;
  }
  throw_usage("--device '{}' is no compute capability such as 9.0", text);
}

}  // namespace

void declare_target_options(CLI::App& app, AttentionTarget& target) {
  add_option(app,
             {"--attention",
              "Ask before packing whether attention that can do this (varlen, padded-offsets, "
              "cp-aware; joined by commas, or none) reads the streams soundly; refuse if not"},
             target.attention);
  add_option(app, {"--fused-flag", "With --attention: value of NVTE_FUSED_ATTN; only 0 matters"},
             target.fused_flag);
  add_option(app, {"--device", "With --attention: compute capability of the GPU, e.g. 9.0"},
             target.device);
  add_choice_option(app,
                    {"--gradient-probe",
                     "With --attention: the fused gradient on that device against a reference"},
                    target.probe, {"not-run", "agrees", "differs"});
  add_flag(app, {"--forward-only", "With --attention: there is no backward pass"},
           target.forward_only);
  add_flag(app, {"--linear-attention", "With --attention: the model has linear-attention layers"},
           target.linear_attention);
}

ParallelSetup setup_of(const AttentionTarget& target, int cp) {
  if (target.attention.empty() &&
      (target.fused_flag != "unset" || !target.device.empty() || target.probe != "not-run" ||
       target.forward_only || target.linear_attention))
    throw_usage(
        "--fused-flag, --device, --gradient-probe, --forward-only and --linear-attention go with "
        "--attention");
  ParallelSetup setup;
  setup.packed = true;
  setup.cp = cp;
  setup.attention = capabilities_of(target.attention);
  if (target.fused_flag != "unset") setup.fused_flag = target.fused_flag;
  if (!target.device.empty()) setup.device = device_of(target.device);
  if (target.probe == "agrees") setup.probe = GradientProbe::agrees;
  if (target.probe == "differs") setup.probe = GradientProbe::differs;
  setup.forward_only = target.forward_only;
  setup.linear_attention = target.linear_attention;
  return setup;
}

std::string compatibility_text(const AttentionTarget& target, int cp) {
  const ParallelSetup setup = setup_of(target, cp);
  if (target.attention.empty()) return "";
  const Compatibility answer = require_compatible(setup);
  if (answer.level == Compatibility::Level::ok)
    return fmt::format("# compatibility: ok: packed rows with cp {}\n", cp);
  return fmt::format("# compatibility: warning: {}\n", answer.message);
}

}  // namespace gyre

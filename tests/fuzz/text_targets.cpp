#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/attention/options.hpp"
#include "apps/logprobs/options.hpp"
#include "apps/pack/options.hpp"
#include "apps/pipeline/options.hpp"
#include "apps/predict/options.hpp"
#include "apps/shard/options.hpp"
#include "comm/emulated.hpp"
#include "core/error.hpp"
#include "io/checkpoints/model_config_file.hpp"
#include "machine/json.hpp"
#include "packing/lengths.hpp"
#include "predict/machine_file.hpp"
#include "report/command_line.hpp"
#include "report/options.hpp"
#include "target.hpp"

namespace gyre::fuzz {
namespace {

constexpr int ranks = 4;

/// The options of a program, as its main function declares and reads them.
struct Parser {
  OptionTable app{"", "fuzz"};
  CommonOptions common;

  template <class Options>
  explicit Parser(Options& options) {
    app.parser().set_help_flag("");
    declare_options(app, options);
    declare_common(app, common);
  }

  Request parse(const std::vector<std::string>& arguments) {
    std::vector<const char*> argv{"fuzz"};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    return parse_command_line(app, static_cast<int>(argv.size()), argv.data());
  }

  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const CLI::Option* option : app.parser().get_options())
      for (const std::string& name : option->get_lnames()) result.push_back(name);
    return result;
  }
};

void check(AttentionOptions& o) {
  check_options(o, ranks);
}
void check(LogprobsOptions& o) {
  check_options(o, ranks);
}
void check(PredictOptions& o) {
  check_options(o, 1);
}
void check(const PackOptions& o) {
  check_options(o);
}
void check(const ShardOptions& o) {
  check_options(o);
}
void check(const PipelineOptions& o) {
  o.setup(ranks);
}

template <class Options>
void parse_and_check(const std::vector<std::string>& arguments) {
  Options options;
  if (Parser(options).parse(arguments) == Request::run) check(options);
}

std::vector<std::string> lines_of(const std::string& text, char end = '\n') {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line, end);) lines.push_back(line);
  return lines;
}

std::string draw_value(Random& random) {
  static const std::vector<std::string> values = lines_of(
      "|0|1|2|3|4|-1|16|1K|3k|7M|1G|8G|1e9|1e-300|1e400|nan|inf|-inf|0x10|2147483647|2147483648|"
      "9223372036854775807|18446744073709551616|all|ring|striped|causal|bf16|f32|both|bwd|none|"
      "last|"
      "gyre|upstream|cuda|cpu|2,2|1,,2|,|dist=fixed,length=3|alpha=1us,beta=1G|true|false|[1,2]|"
      "\"x\"|/|/nosuch/x|a=b|--cp",
      '|');
  const std::string value = values[random() % values.size()];
  return random() % 4 == 0 ? mutate_text(value, random) : value;
}

/// A command line, one argument a line.
std::string draw_arguments(const std::vector<std::string>& names, Random& random) {
  // gyre-pipeline needs both.
  const bool needed = std::find(names.begin(), names.end(), "model") != names.end();
  std::string text = needed && random() % 10 != 0 ? "--input=a.h5\n--model=b.h5\n" : "";
  for (uint64_t i = random() % 6 + 1; i > 0; --i) {
    std::string name = names[random() % names.size()];
    if (name == "config" || name == "help") continue;
    if (random() % 20 == 0) name = mutate_text(name, random);
    const std::string value = draw_value(random);
    text += "--" + name + (random() % 2 == 0 ? "=" + value : "\n" + value) + "\n";
  }
  return text;
}

std::string draw_toml(const std::vector<std::string>& names, Random& random) {
  const bool needed = std::find(names.begin(), names.end(), "model") != names.end();
  std::string text = needed ? "input = \"a.h5\"\nmodel = \"b.h5\"\n" : "";
  for (uint64_t i = random() % 6 + 1; i > 0; --i) {
    const std::string& name = names[random() % names.size()];
    const bool quoted = random() % 2 == 0;
    text += name + " = " + (quoted ? "\"" : "") + draw_value(random) + (quoted ? "\"\n" : "\n");
    if (random() % 8 == 0) text += "[" + names[random() % names.size()] + "]\n";
  }
  return random() % 2 == 0 ? mutate_text(text, random) : text;
}

template <class Options>
void add_program(std::vector<Target>& targets, const std::string& name, const std::string& folder) {
  Options usual;
  const std::vector<std::string> names = Parser(usual).names();
  const auto parse = [](Communicator*, const std::string& text) {
    parse_and_check<Options>(lines_of(text));
    return Digests{};
  };
  const std::string path = folder + "/" + name + ".toml";
  const auto read_toml = [path](Communicator*, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
    parse_and_check<Options>({"--config", path});
    return Digests{};
  };
  targets.push_back({"options-" + name, false, parse, {}, [names](Random& random) {
                       return draw_arguments(names, random);
                     }});
  targets.push_back({"toml-" + name, false, read_toml, {}, [names](Random& random) {
                       return draw_toml(names, random);
                     }});
}

/// What is accepted has a text that reads as the same.
Digests read_length_spec(Communicator*, const std::string& text) {
  const LengthSpec spec = parse_length_spec(text);
  GYRE_CHECK(parse_length_spec(to_string(spec)) == spec, "'{}' reads otherwise", to_string(spec));
  return {};
}

/// A file of gyre-machine/1.
std::string machine_seed() {
  MachineIdentity machine;
  machine.hosts.emplace_back();
  MeasuredMachine measured;
  const MessageTime message{8, median_of({1e-6, 2e-6})};
  measured.rates.one_core_fma = best_of({1e11});
  measured.messages.inside_host = {{0, 1}, 1e-6, 1e10, {message}};
  nlohmann::ordered_json document = {{"schema", machine_schema}};
  document.update(json_of(machine));
  document["measured"] = json_of(measured, true);
  return document.dump();
}

/// A file with a model in it, of all that a model can have.
std::string model_seed() {
  MachineModel machine;
  machine.name = "a machine";
  machine.copy_bytes_per_s = 2e12;
  machine.kernel_bytes_per_s = 1e12;
  machine.memory_bytes = 8e10;
  machine.links.resize(2);
  LinkTier &node = machine.links[0], &network = machine.links[1];
  node.name = "node";
  node.ranks = 8;
  node.latency_s = 1e-6;
  node.bytes_per_s = 4e11;
  node.curve = {{1e3, 1e9}, {1e6, 4e11}};
  node.all_at_once = 0.9;
  node.kernel_slowdown = 0.1;
  network.name = "switch";
  network.latency_s = 1e-5;
  network.bytes_per_s = 5e10;
  KernelSurface& kernel = machine.kernel.surfaces.emplace_back();
  kernel.pass = Pass::backward;
  kernel.head_dim = 64;
  kernel.launch_s = 1e-6;
  kernel.diagonal_s = 1e-10;
  kernel.merge_s = 1e-12;
  kernel.rows = {16, 32};
  kernel.flops_per_s = {1, 2};
  LinearSurface& linear = machine.decoder.linears.emplace_back();
  linear.rows = {16, 64};
  linear.keys = {32, 128};
  linear.flops_per_s = {1, 2, 3, 4};
  machine.decoder.elementwise_bytes_per_s = machine.decoder.logprob_bytes_per_s = 1e12;
  machine.decoder.all_reduces = {{2, {{1024, 1e-5}, {4096, 2e-5}}}};
  const nlohmann::ordered_json model = model_json(machine, "made up");
  return nlohmann::ordered_json{{"schema", machine_schema}, {"model", model}}.dump();
}

constexpr const char* model_toml = R"(schema = "gyre-machine/1"
[model]
name = "a machine"
copy_bytes_per_s = { value = 2e12, source = "s" }
[[model.links]]
tier = "switch"
latency_s = { value = 2e-5, source = "s" }
bytes_per_s = { value = 5e8, source = "s" }
[[model.kernels]]
pass = "fwd"
dtype = "bf16"
head_dim = 128
rows = [512, 1024]
keys = [256, 512]
flops_per_s = { value = [[1e12, 2e12], [4e12, 5e12]], source = "s" }
)";

/// A machine that is accepted is written as one that reads as the same.
Digests read_model(const std::string& path, const std::string& text) {
  const auto document = [](const MachineModel& machine) {
    return nlohmann::ordered_json{{"schema", machine_schema}, {"model", model_json(machine, "s")}}
        .dump();
  };
  const std::string written = document(parse_machine_model(path, text));
  GYRE_CHECK(document(parse_machine_model("written.json", written)) == written,
             "it reads otherwise: {}", written);
  return {};
}

/// A configuration that is accepted has sizes that can be computed with.
Digests read_config(Communicator*, const std::string& text) {
  const ModelConfig config = parse_model_config("config.json", text);
  GYRE_CHECK(config.vocab_padded >= config.vocab_size && config.head_dim > 0, "'{}' is a model",
             text);
  return {};
}

}  // namespace

std::vector<Target> text_targets(const std::string& folder) {
  std::vector<Target> targets;
  const auto target = [&](const char* name, auto read, std::vector<std::string> seeds) {
    targets.push_back({name, false, read, std::move(seeds)});
  };
  target("length-spec", read_length_spec,
         {"dist=fixed,length=512,count=100", "dist=uniform,min=100,max=4K",
          "dist=log-normal,median=1024,sigma=1.2,max=64K",
          "dist=long-tailed,count=4096,max=64K,seed=7",
          "dist=speech,count=1000,min_seconds=0.5,frame_rate=12.5"});
  const auto network = [](Communicator*, const std::string& text) {
    const NetworkModel model = parse_network_model(text);
    GYRE_CHECK(model.latency_s >= 0 && model.bytes_per_s > 0 && model.ranks_per_node > 0,
               "'{}' is a network", text);
    return Digests{};
  };
  target("network", network, {"alpha=10us,beta=5G,node=4", "alpha=0,beta=100M", "beta=1e9"});
  const auto size = [](Communicator*, const std::string& text) {
    GYRE_CHECK(parse_size(text) >= 0, "'{}' is negative", text);
    return Digests{};
  };
  target("size", size, {"4096", "128K", "2M", "1G", "8589934591G"});
  const auto machine = [](Communicator*, const std::string& text) {
    const MachineFile file = parse_machine_file("machine.json", text);
    GYRE_CHECK(!file.hosts.empty() && file.measured.ranks >= 0, "'{}' is a machine", text);
    return Digests{};
  };
  target("machine", machine, {machine_seed()});
  const auto model = [](const char* path) {
    return [path](Communicator*, const std::string& text) { return read_model(path, text); };
  };
  target("model", model("machine.json"), {model_seed()});
  target("model-toml", model("machine.toml"), {model_toml});
  target("config", read_config,
         {R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
"vocab_size": 259, "sliding_window": null, "use_sliding_window": false})"});
  add_program<AttentionOptions>(targets, "attention", folder);
  add_program<LogprobsOptions>(targets, "logprobs", folder);
  add_program<PackOptions>(targets, "pack", folder);
  add_program<ShardOptions>(targets, "shard", folder);
  add_program<PipelineOptions>(targets, "pipeline", folder);
  add_program<PredictOptions>(targets, "predict", folder);
  return targets;
}

}  // namespace gyre::fuzz

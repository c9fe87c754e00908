// gyre-import: converts text files to a documents file, one document per file, bytes as tokens; or
// a checkpoint of another program to a model file.

#include <fmt/ranges.h>

#include <cstdio>

#include "comm/agree.hpp"
#include "core/version.hpp"
#include "io/checkpoints/model_import.hpp"
#include "io/schemas/documents.hpp"
#include "io/text_import.hpp"
#include "report/app.hpp"
#include "report/options.hpp"
#include "report/table.hpp"

namespace {

using namespace gyre;

struct Options {
  std::string output;
  std::vector<std::string> paths;
  std::string model;
  std::vector<std::string> ignored_keys;
  int64_t max_tokens = 0;
};

void declare(OptionTable& table, Options& o) {
  const AddOptions add(table);
  add.required("-o,--output", "File to write (HDF5, gyre/documents; with --model, gyre/model)",
               o.output)
      .writes_file();
  add("paths", "Text files, or folders to search for them", o.paths).reads_files(o.paths);
  add("--model", "Import a model instead: a folder with config.json and safetensors, or NAME.gguf",
      o.model)
      .reads_file();
  add("--ignore-key", "Key of the model's configuration that changes no result", o.ignored_keys);
  add.size("--max-tokens", "Cut files into documents of at most so many tokens; 0: do not cut",
           o.max_tokens);
}

struct Row {
  ImportReport report;
  int64_t documents = 0, tokens = 0, longest = 0;
};

const Table<Row>& import_table() {
  static const Table<Row> table({
      {"files", "", 8, 0, [](const Row& r) { return r.report.files; }},
      {"skipped", "", 8, 0, [](const Row& r) { return std::ssize(r.report.binary); }},
      {"documents", "", 10, 0, [](const Row& r) { return r.documents; }},
      {"tokens", "", 12, 0, [](const Row& r) { return r.tokens; }},
      {"longest", "tokens", 10, 0, [](const Row& r) { return r.longest; }},
      {"text", "bytes", 12, 0, [](const Row& r) { return r.report.bytes; }},
  });
  return table;
}

/// Notes on files that the table does not count.
std::string notes_text(const ImportReport& report, const std::string& output, bool verbose) {
  std::string text;
  if (report.duplicates > 0)
    text +=
        fmt::format("# {} files were reached more than once and count once\n", report.duplicates);
  if (report.not_regular > 0)
    text += fmt::format("# {} things found in folders are no files: dangling links, pipes, ...\n",
                        report.not_regular);
  if (report.left_out > 0)
    text +=
        fmt::format("# '{}' is found among the inputs, and left out: it is the output\n", output);
  if (!report.binary.empty())
    text += fmt::format("# {} files hold a NUL byte and are skipped{}\n", report.binary.size(),
                        verbose ? ":" : " (-v lists them)");
  for (const std::string& path : report.binary)
    if (verbose) text += fmt::format("#     {}\n", path);
  return text;
}

Row row_of(const Documents& documents, const ImportReport& report) {
  return {report, documents.count(), documents.total(), documents.longest()};
}

struct ModelRow {
  ModelConfig config;
  int64_t tensors = 0, files = 0;
};

const Table<ModelRow>& model_table() {
  static const Table<ModelRow> table({
      {"layers", "", 8, 0, [](const ModelRow& r) { return r.config.num_hidden_layers; }},
      {"hidden", "", 8, 0, [](const ModelRow& r) { return r.config.hidden_size; }},
      {"heads", "", 6, 0, [](const ModelRow& r) { return r.config.num_attention_heads; }},
      {"kv_heads", "", 9, 0, [](const ModelRow& r) { return r.config.num_key_value_heads; }},
      {"vocab", "", 8, 0, [](const ModelRow& r) { return r.config.vocab_size; }},
      {"parameters", "", 14, 0, [](const ModelRow& r) { return r.config.parameters(); }},
      {"tensors", "", 8, 0, [](const ModelRow& r) { return r.tensors; }},
      {"files", "", 6, 0, [](const ModelRow& r) { return r.files; }},
  });
  return table;
}

std::string head_line(const Options& o, const AppContext& context) {
  if (context.quiet) return "";
  return fmt::format("# {} {}, ranks {}, writes {}\n", context.info.name, build_info().version,
                     context.world.size(), o.output);
}

void check(const Options& o) {
  if (o.model.empty() == o.paths.empty())
    throw_usage("give either text files or --model; {}",
                o.model.empty() ? "neither is there" : "both are there");
  if (!o.model.empty() && o.max_tokens != 0)
    throw_usage("--max-tokens {}: it is for text files, not for --model", o.max_tokens);
  if (o.model.empty() && !o.ignored_keys.empty())
    throw_usage("--ignore-key {}: it is for --model, not for text files", o.ignored_keys.front());
}

/// Throws if the output is one of the files that the model consists of.
void check_output(const Options& o, const Checkpoint& checkpoint) {
  std::vector<std::string> files = {o.model + "/config.json", o.model + "/tokenizer.json",
                                    o.model + "/model.safetensors.index.json"};
  for (const auto& file : checkpoint.files) files.push_back(file->path());
  for (const std::string& file : files)
    if (is_same_file(o.output, file))
      throw_usage("--output '{}' is a file of the model '{}'", o.output, o.model);
}

ExitCode run_model(const Options& o, AppContext& context) {
  plan_outputs(context);
  OutputFile output(context.world, o.output);
  Checkpoint checkpoint;
  run_agreed(context.world, "opening " + o.model, [&] {
    checkpoint = open_checkpoint(o.model, o.ignored_keys);
    check_output(o, checkpoint);
  });
  write_model(output, checkpoint, provenance_of(context, o.model));
  context.outputs.add(std::move(output));
  context.outputs.publish(head_line(o, context) +
                          model_table().text({{checkpoint.config, std::ssize(checkpoint.tensors),
                                               std::ssize(checkpoint.files)}}));
  return ExitCode::ok;
}

ExitCode run(const Options& o, AppContext& context) {
  run_agreed(context.world, "options", [&] { check(o); });
  if (!o.model.empty()) return run_model(o, context);
  Communicator& world = context.world;
  plan_outputs(context);
  OutputFile output(world, o.output);

  ImportReport report;
  const Documents documents = import_text(world, o.paths, o.max_tokens, report, o.output);
  run_agreed(world, "importing", [&] {
    if (documents.count() == 0)
      throw_usage("nothing to import: {} files found, {} of them hold a NUL byte", report.files,
                  report.binary.size());
  });
  write_documents(output, documents,
                  provenance_of(context, fmt::format("{}", fmt::join(o.paths, "\n"))));
  context.outputs.add(std::move(output));

  std::string text = head_line(o, context);
  if (!context.quiet) text += notes_text(report, o.output, context.verbose);
  context.outputs.publish(text + import_table().text({row_of(documents, report)}));
  return ExitCode::ok;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const AppInfo info{"gyre-import",
                     "Turns text files into a documents file (begin, the bytes, end), "
                     "or a model of another program into a model file. "
                     "For documents in a model's own tokens: gyre-text, of the Python package.",
                     "Examples: gyre-import -o docs.h5 README.md src/\n"
                     "          gyre-import -o model.h5 --model SmolLM2-135M/",
                     false};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare(table, options); },
      [&](AppContext& context) { return run(options, context); });
}

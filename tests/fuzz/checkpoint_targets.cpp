// Readers of other programs' models: safetensors, config.json and GGUF. They have no checksums, so
// that changed numbers may be accepted; what is refused must be refused by the file's name.

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "core/error.hpp"
#include "io/checkpoints/model_import.hpp"
#include "target.hpp"

namespace gyre::fuzz {
namespace {

namespace fs = std::filesystem;

/// Imports the model `model`, as gyre-import does. `input`: the file of it that is fuzzed.
Digests import_model(Communicator& comm, const std::string& model, const std::string& input) {
  try {
    OutputFile output(comm, input + ".imported.h5");
    write_model(output, open_checkpoint(model, {}), {});
  } catch (const Error& error) {
    if (std::string(error.what()).find(model) == std::string::npos)
      throw std::runtime_error(fmt::format("does not name '{}': {}", model, error.what()));
    throw;
  }
  return {};
}

std::string contents_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void link(const std::string& to, const fs::path& at) {
  std::error_code exists;
  fs::create_symlink(fs::absolute(to), at, exists);
}

/// Reads a folder whose file `name` is the case; the others are seeds.
auto folder_reader(const std::string& seeds, const std::string& name,
                   const std::vector<std::string>& others) {
  return [=](Communicator* comm, const std::string& path) {
    const std::string model = path + "." + name;
    fs::create_directory(model);
    link(path, model + "/" + name);
    for (const std::string& other : others) link(seeds + "/" + other, model + "/" + other);
    return import_model(*comm, model, path);
  };
}

template <class T, size_t n>
const T& one_of(const std::array<T, n>& values, Random& random) {
  return values[random() % n];
}

/// Replaces a number of a JSON text.
void change_number(std::string& text, Random& random) {
  constexpr std::array<const char*, 13> numbers = {"0",          "1",
                                                   "-1",         "31",
                                                   "1e400",      "2147483648",
                                                   "4294967297", "1152921504606846976",
                                                   "null",       "9223372036854775807",
                                                   "0.5",        "18446744073709551615",
                                                   "[7]"};
  const size_t from = random() % (text.size() + 1);
  const size_t begin = std::min(text.find_first_of("0123456789", from), text.size());
  const size_t end = std::min(text.find_first_not_of("0123456789", begin), text.size());
  const std::string old = text.substr(begin, end - begin);
  if (old.empty()) return;
  const bool near = random() % 4 == 0 && old.size() < 10;
  text.replace(begin, end - begin,
               near ? std::to_string(std::stol(old) + (random() % 2 == 0 ? 1 : -1))
                    : one_of(numbers, random));
}

/// Puts a quoted word of a JSON text in the place of another one.
void change_word(std::string& text, Random& random) {
  const auto quoted = [&] {
    const size_t begin = std::min(text.find('"', random() % (text.size() + 1)), text.size());
    const size_t end = std::min(text.find('"', begin + 1), text.size());
    return std::pair(begin, end - begin);
  };
  const auto [from, from_length] = quoted();
  const std::string word = text.substr(from, from_length);
  const auto [to, to_length] = quoted();
  text.replace(to, to_length, word);
}

std::string changed_json(std::string text, Random& random) {
  for (uint64_t i = random() % 3 + 1; i > 0; --i) {
    switch (random() % 4) {
      case 0:
        text = mutate_text(text, random);
        break;
      case 1:
        change_word(text, random);
        break;
      default:
        change_number(text, random);
    }
  }
  return text;
}

/// A file with a changed header, of a right length mostly, or with changed bytes.
std::string changed_safetensors(const std::string& seed, Random& random) {
  if (random() % 4 == 0) return mutate_bytes(seed, random);
  uint64_t length = 0;
  std::memcpy(&length, seed.data(), sizeof(length));
  const std::string header = changed_json(seed.substr(sizeof(length), length), random);
  if (random() % 8 != 0) length = header.size();
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  return file + header + seed.substr(sizeof(length) + std::min(length, seed.size()));
}

/// A file with one to three changed numbers in its header, or with changed bytes.
std::string changed_gguf(const std::string& seed, Random& random) {
  if (random() % 4 == 0) return mutate_bytes(seed, random);
  constexpr std::array<uint64_t, 14> numbers = {
      0,          1,          2,          3,           9,          12,        0x7f,
      0xffffffff, 0x80000000, 0x7fffffff, 0x100000000, UINT64_MAX, INT64_MAX, uint64_t{1} << 60};
  const size_t header = seed.rfind("output_norm.weight") + 42;  // with extents, type and offset
  std::string file = seed;
  for (uint64_t i = random() % 3 + 1; i > 0; --i) {
    const uint64_t number = one_of(numbers, random);
    const size_t width = size_t{1} << random() % 4, at = random() % header;
    std::memcpy(file.data() + at, &number, width);
  }
  return file;
}

}  // namespace

std::vector<Target> checkpoint_targets(const std::string& seeds) {
  std::vector<Target> targets;
  const auto target = [&](const char* name, const std::string& seed, auto read, auto change) {
    const auto draw = [change, seed](Random& random) { return change(contents_of(seed), random); };
    targets.push_back({name, true, std::move(read), {seed}, draw});
  };
  const auto gguf = [](Communicator* comm, const std::string& path) {
    link(path, path + ".gguf");
    return import_model(*comm, path + ".gguf", path);
  };
  const auto folder = [&](const char* name, const std::string& file, auto change,
                          const std::vector<std::string>& others) {
    target(name, seeds + "/" + file, folder_reader(seeds, file, others), change);
  };
  const std::string config = "config.json", tensors = "model.safetensors";
  folder("safetensors", tensors, changed_safetensors, {config});
  folder("safetensors-index", tensors + ".index.json", changed_json, {config, tensors});
  folder("checkpoint-config", config, changed_json, {tensors});
  target("gguf", seeds + "/model.gguf", gguf, changed_gguf);
  return targets;
}

}  // namespace gyre::fuzz

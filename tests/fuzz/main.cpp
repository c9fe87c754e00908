// gyre-fuzz: seeded, bounded fuzzing of everything that reads a file or a text.
//
//     gyre-fuzz INPUTS SEEDS SCRATCH draw SEED SECONDS SAVE [TARGET]   mutated seeds, drawn texts
//     gyre-fuzz INPUTS SEEDS SCRATCH list FILE                         lines "target<TAB>path"
//
// SCRATCH is a folder in memory. Prints lines of words between tabs, which fuzz.py reads:
//
//     count TARGET CASES ACCEPTED REFUSED TIMEOUT SIGNAL HANG OTHER WRONG
//     found TARGET END SAVED MESSAGE     a case that is a fault (of draw); SAVED holds it
//     case TARGET PATH END MESSAGE       (of list)

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <iterator>

#include "batch.hpp"
#include "core/error.hpp"

namespace {

using namespace gyre;
using namespace gyre::fuzz;

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw_usage("cannot read '{}'", path);
  return {std::istreambuf_iterator<char>(in), {}};
}

void print_count(const Target& target, const Tally& tally) {
  fmt::print("count\t{}\t{}", target.name, tally.cases);
  for (const uint64_t count : tally.counts) fmt::print("\t{}", count);
  fmt::print("\n");
  std::fflush(stdout);
}

/// Cases of a seed: each draws from a generator of its own.
Cases drawn_cases(const Target& target, uint64_t seed, const std::vector<std::string>& contents) {
  const uint64_t name = hash_bytes(target.name.data(), target.name.size());
  Cases cases;
  cases.input = [&target, &contents, seed, name](uint64_t index) {
    std::seed_seq mix{seed, name, name >> 32, index};
    Random random(mix);
    if (target.draw) return target.draw(random);
    const std::string& content = contents[random() % contents.size()];
    return target.file ? mutate_bytes(content, random) : mutate_text(content, random);
  };
  if (target.file)
    cases.right = [&target](Communicator* comm) {
      Digests digests;
      for (const std::string& path : target.seeds)
        for (const uint64_t digest : target.read(comm, path)) digests.push_back(digest);
      return digests;
    };
  return cases;
}

void draw(const Target& target, uint64_t seed, double seconds, const std::string& save,
          const std::string& scratch) {
  std::vector<std::string> contents;
  for (const std::string& text : target.seeds)
    contents.push_back(target.file ? read_file(text) : text);
  const Cases cases = drawn_cases(target, seed, contents);
  const Tally tally = run_cases(target, cases, uint64_t{1} << 40, seconds, scratch);
  for (const Found& found : tally.found) {
    const std::string path =
        fmt::format("{}/{}-{}-{}-{}", save, target.name, to_string(found.end), seed, found.index);
    std::ofstream(path, std::ios::binary) << cases.input(found.index);
    fmt::print("found\t{}\t{}\t{}\t{}\n", target.name, to_string(found.end), path, found.message);
  }
  print_count(target, tally);
}

/// The cases of a list that are for `target`.
void replay(const Target& target, const std::string& list, const std::string& scratch) {
  std::vector<std::string> paths;
  std::ifstream in(list);
  for (std::string line; std::getline(in, line);)
    if (const size_t tab = line.find('\t'); line.substr(0, tab) == target.name)
      paths.push_back(line.substr(tab + 1));
  if (paths.empty()) return;
  const Cases cases{[&paths](uint64_t index) { return read_file(paths[index]); }};
  const Tally tally = run_cases(target, cases, paths.size(), 3600, scratch);
  std::vector<std::string> messages(paths.size());
  for (const Found& found : tally.found) messages[found.index] = found.message;
  for (size_t i = 0; i < tally.all.size(); ++i)
    fmt::print("case\t{}\t{}\t{}\t{}\n", target.name, paths[i], to_string(tally.all[i]),
               messages[i]);
  print_count(target, tally);
}

int run(const std::vector<std::string>& words) {
  const bool draws = words.size() >= 7 && words[3] == "draw";
  if (!draws && !(words.size() == 5 && words[3] == "list"))
    throw_usage("arguments: INPUTS SEEDS SCRATCH draw SEED SECONDS SAVE [TARGET] | list FILE");
  std::vector<Target> targets = file_targets(words[0], words[1]);
  for (Target& target : checkpoint_targets(words[1])) targets.push_back(std::move(target));
  for (Target& target : text_targets(words[2])) targets.push_back(std::move(target));
  const std::string only = draws && words.size() > 7 ? words[7] : "";
  const double seconds = draws ? std::stod(words[5]) : 0;
  // Texts, of which thousands are read in a second, get a tenth of the time.
  double files = 0, texts = 0;
  for (const Target& target : targets)
    if (only.empty() || only == target.name) ++(target.file ? files : texts);
  if (files + texts == 0) throw_usage("there is no target '{}'", only);
  const auto share = [&](const Target& target) {
    if (files == 0 || texts == 0) return 1 / (files + texts);
    return target.file ? 0.9 / files : 0.1 / texts;
  };
  for (const Target& target : targets) {
    if (!only.empty() && only != target.name) continue;
    if (draws)
      draw(target, std::stoull(words[4]), seconds * share(target), words[6], words[2]);
    else
      replay(target, words[4], words[2]);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "gyre-fuzz: {}\n", error.what());
    return 2;
  }
}

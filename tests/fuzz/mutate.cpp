#include <algorithm>
#include <cstring>

#include "target.hpp"

namespace gyre::fuzz {
namespace {

size_t below(Random& random, size_t n) {
  return static_cast<size_t>(random() % n);
}

/// Where HDF5 keeps its structure: the superblock, and what follows the signatures of its nodes.
std::vector<size_t> metadata_places(const std::string& bytes) {
  constexpr size_t superblock = 1024, after_signature = 512;
  std::vector<bool> marked(bytes.size(), false);
  std::fill_n(marked.begin(), std::min(superblock, bytes.size()), true);
  for (const char* signature : {"TREE", "SNOD", "HEAP", "OHDR", "OCHK", "FRHP", "GCOL", "BTHD"})
    for (size_t at = bytes.find(signature); at != std::string::npos;
         at = bytes.find(signature, at + 1)) {
      const size_t begin = at > after_signature ? at - after_signature : 0;
      const size_t end = std::min(bytes.size(), at + after_signature);
      std::fill(marked.begin() + static_cast<int64_t>(begin),
                marked.begin() + static_cast<int64_t>(end), true);
    }
  std::vector<size_t> places;
  for (size_t i = 0; i < marked.size(); ++i)
    if (marked[i]) places.push_back(i);
  return places;
}

const std::vector<size_t>& cached_places(const std::string& seed) {
  static const std::string* last = nullptr;
  static std::vector<size_t> places;
  if (last != &seed) {
    places = metadata_places(seed);
    last = &seed;
  }
  return places;
}

void overwrite(std::string& bytes, size_t at, uint64_t value, size_t width) {
  width = std::min(width, bytes.size() - at);
  std::memcpy(bytes.data() + at, &value, width);
}

uint64_t extreme(Random& random) {
  constexpr uint64_t values[] = {
      0,          1,          2,          0x7f,        0x80,          0xff,       0x7fff, 0xffff,
      0x7fffffff, 0x80000000, 0xfffffffe, 0x100000000, 0x10000000000, UINT64_MAX, 1000};
  return values[below(random, std::size(values))];
}

void change(std::string& bytes, size_t at, Random& random) {
  switch (below(random, 12)) {
    case 0:
      bytes.insert(at, below(random, 16) + 1, static_cast<char>(random()));
      break;
    case 1:
      bytes.erase(at, below(random, 16) + 1);
      break;
    case 2: {
      const size_t from = below(random, bytes.size()), count = below(random, 64) + 1;
      const std::string part = bytes.substr(from, count);
      bytes.replace(at, std::min(part.size(), bytes.size() - at), part);
      break;
    }
    case 3:
      if (below(random, 4) == 0) bytes.resize(at);
      break;
    case 4:
    case 5:
      overwrite(bytes, at, extreme(random), size_t{1} << below(random, 4));
      break;
    case 6:
      bytes[at] = static_cast<char>(bytes[at] + 1);
      break;
    case 7:
      bytes[at] = static_cast<char>(bytes[at] - 1);
      break;
    default:
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(random, 8)));
  }
}

}  // namespace

std::string mutate_bytes(const std::string& seed, Random& random) {
  std::string bytes = seed;
  const std::vector<size_t>& places = cached_places(seed);
  const size_t changes = below(random, 3) == 0 ? below(random, 8) + 1 : 1;
  for (size_t i = 0; i < changes && !bytes.empty(); ++i) {
    const bool structure = below(random, 4) != 0;
    const size_t at = structure ? places[below(random, places.size())] : random();
    change(bytes, at % bytes.size(), random);
  }
  return bytes;
}

std::string mutate_text(const std::string& seed, Random& random) {
  const std::string alphabet = "0123456789-+.,=eExXkKmMgG \t\n\"'[]{}#/\\:;_%\x01\x7f\xc3\xff";
  std::string text = seed;
  for (size_t i = below(random, 4) + 1; i > 0; --i) {
    const size_t at = below(random, text.size() + 1);
    const char letter = alphabet[below(random, alphabet.size())];
    switch (below(random, 5)) {
      case 0:
        text.insert(at, 1, letter);
        break;
      case 1:
        if (at < text.size()) text.erase(at, below(random, 3) + 1);
        break;
      case 2:
        if (at < text.size()) text.insert(at, text.substr(below(random, text.size()), 8));
        break;
      case 3:
        text.insert(at, below(random, 2) == 0 ? "99999999999999999999" : "-1");
        break;
      default:
        if (at < text.size()) text[at] = letter;
    }
  }
  return text;
}

uint64_t hash_bytes(const void* data, size_t bytes, uint64_t hash) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001b3;
  return hash;
}

}  // namespace gyre::fuzz

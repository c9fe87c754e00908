#include "io/schemas/documents.hpp"

#include <algorithm>

#include "comm/agree.hpp"

namespace gyre {
namespace {

constexpr const char* tokens_path = "/documents/tokens";
constexpr const char* offsets_path = "/documents/offsets";
constexpr const char* names_path = "/documents/names";
constexpr const char* text_bytes_path = "/documents/text_bytes";
constexpr const char* unscored_path = "/documents/unscored";

/// Datasets of a documents file. open_parts always sets tokens and offsets, and the others if
/// present.
struct DocumentParts {
  std::optional<h5::Dataset> tokens, offsets, names, text_bytes, unscored;
};

DocumentParts open_parts(const h5::File& file, Documents& documents) {
  SchemaReader reader(file, documents_schema);
  documents.vocab_size = reader.integer("/documents", "vocab_size");
  documents.tokenizer = reader.text("/documents", "tokenizer");
  DocumentParts parts;
  parts.tokens = reader.dataset(tokens_path, {h5::Type::i32}, {-1});
  parts.offsets = reader.dataset(offsets_path, {h5::Type::i64}, {-1});
  if (parts.offsets && parts.offsets->elements() == 0) {
    reader.errors().add("dataset '{}' is empty; it must hold at least the number 0", offsets_path);
  } else if (parts.offsets) {
    const int64_t count = parts.offsets->elements() - 1;
    if (file.has_dataset(names_path))
      parts.names = reader.dataset(names_path, {h5::Type::text}, {count});
    if (file.has_dataset(text_bytes_path))
      parts.text_bytes = reader.dataset(text_bytes_path, {h5::Type::i64}, {count});
    if (file.has_dataset(unscored_path))
      parts.unscored = reader.dataset(unscored_path, {h5::Type::i64}, {count});
  }
  reader.throw_if_any();
  return parts;
}

/// Adds an error for the first token outside the vocabulary.
void check_tokens(ConfigErrors& errors, const Documents& documents) {
  for (int64_t i = 0; i < documents.count(); ++i) {
    const std::span<const int32_t> document = documents.document(i);
    const auto bad = std::find_if(document.begin(), document.end(), [&](int32_t token) {
      return token < 0 || token >= documents.vocab_size;
    });
    if (bad == document.end()) continue;
    const int64_t position = bad - document.begin();
    errors.add("{}[{}] is {} ({}, position {}); tokens must be 0 to {}", tokens_path,
               documents.begin(i) + position, *bad, documents.label(i), position,
               documents.vocab_size - 1);
    return;
  }
}

/// Adds an error for the first document of which more than its predictions are left out.
void check_unscored(ConfigErrors& errors, const Documents& documents) {
  for (int64_t i = 0; i < std::ssize(documents.unscored); ++i) {
    const int64_t predictions = std::max<int64_t>(0, documents.length(i) - 1);
    if (documents.unscored[i] >= 0 && documents.unscored[i] <= predictions) continue;
    errors.add("{}[{}] is {}; it must be 0 to {}, the predictions of {}", unscored_path, i,
               documents.unscored[i], predictions, documents.label(i));
    return;
  }
}

}  // namespace

std::string Documents::label(int64_t i) const {
  const size_t index = i;
  if (index < names.size()) return fmt::format("document {} ('{}')", i, names[index]);
  return fmt::format("document {}", i);
}

int64_t Documents::longest() const {
  int64_t most = 0;
  for (int64_t i = 0; i < count(); ++i) most = std::max(most, length(i));
  return most;
}

void check_documents(ConfigErrors& errors, const Documents& documents) {
  const size_t before = errors.messages().size();
  const int64_t tokens = std::ssize(documents.tokens);
  if (documents.vocab_size < 1)
    errors.add("vocab_size of '/documents' is {}; it must be at least 1", documents.vocab_size);
  if (documents.tokenizer.empty()) errors.add("tokenizer of '/documents' is empty");
  check_offsets(errors, offsets_path, documents.offsets, tokens,
                fmt::format("the number of elements of {}", tokens_path));
  if (!documents.names.empty() && std::ssize(documents.names) != documents.count())
    errors.add("{} has {} elements; it must have {}, one for each document", names_path,
               documents.names.size(), documents.count());
  const auto bad = std::find_if(documents.text_bytes.begin(), documents.text_bytes.end(),
                                [](int64_t bytes) { return bytes < 0; });
  if (bad != documents.text_bytes.end())
    errors.add("{}[{}] is {}; it must be at least 0", text_bytes_path,
               bad - documents.text_bytes.begin(), *bad);
  if (errors.messages().size() != before) return;
  check_tokens(errors, documents);
  check_unscored(errors, documents);
}

Documents read_documents(Communicator& comm, const std::string& path) {
  const h5::File file = open_schema_file(comm, path, documents_schema);
  Documents documents;
  DocumentParts parts;
  run_agreed(comm, "opening the documents of " + path,
             [&] { parts = open_parts(file, documents); });
  documents.offsets = parts.offsets->read_all<int64_t>();
  documents.tokens = parts.tokens->read_all<int32_t>();
  if (parts.names) documents.names = parts.names->read_texts();
  if (parts.text_bytes) documents.text_bytes = parts.text_bytes->read_all<int64_t>();
  if (parts.unscored) documents.unscored = parts.unscored->read_all<int64_t>();
  run_agreed(comm, "checking the documents of " + path, [&] {
    SchemaReader reader(file, documents_schema);
    check_documents(reader.errors(), documents);
    reader.throw_if_any();
  });
  return documents;
}

void write_documents(OutputFile& output, const Documents& documents, const Provenance& provenance) {
  Communicator& comm = output.comm();
  const int64_t total = documents.total();
  run_agreed(comm, "checking documents", [&] {
    ConfigErrors errors;
    check_documents(errors, documents);
    errors.throw_if_any(fmt::format("'{}' cannot be written:", output.path()));
  });
  run_on_root(comm, "creating " + output.path(), [&] {
    h5::File file = h5::File::create(output.temporary_path());
    write_schema(file, documents_schema, provenance);
    file.create_group("/documents");
    file.write_attribute("/documents", "vocab_size", documents.vocab_size);
    file.write_attribute("/documents", "tokenizer", documents.tokenizer);
    file.write_dataset(offsets_path, std::span<const int64_t>(documents.offsets));
    if (!documents.names.empty())
      file.write_dataset(names_path, std::span<const std::string>(documents.names));
    if (!documents.text_bytes.empty())
      file.write_dataset(text_bytes_path, std::span<const int64_t>(documents.text_bytes));
    if (!documents.unscored.empty())
      file.write_dataset(unscored_path, std::span<const int64_t>(documents.unscored));
    file.create_dataset(tokens_path, DType::i32, {total}, h5::Checksum::fletcher32);
    file.close();
  });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  const int64_t mine = total * comm.rank() / comm.size();
  const int64_t count = total * (comm.rank() + 1) / comm.size() - mine;
  const h5::Slab share{{mine}, {count}};
  file.dataset(tokens_path)
      .write<int32_t>(std::span(&share, 1), std::span(documents.tokens).subspan(mine, count));
  file.close();
}

}  // namespace gyre

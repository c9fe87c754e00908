// Documents files: written and read by all ranks, and every way in which one can be wrong.

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "comm/collective.hpp"
#include "io/schemas/documents.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::on_root;
using test::SharedFolder;
using test::world;

/// Documents of the given lengths, with names.
Documents sample(const std::vector<int64_t>& lengths) {
  Documents documents;
  for (size_t i = 0; i < lengths.size(); ++i) {
    documents.offsets.push_back(documents.offsets.back() + lengths[i]);
    documents.names.push_back(fmt::format("folder/näme {}", i));
  }
  documents.tokens.resize(documents.total());
  for (size_t i = 0; i < documents.tokens.size(); ++i)
    documents.tokens[i] = static_cast<int32_t>(i * 7 % 259);
  return documents;
}

void expect_equal(const Documents& a, const Documents& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.offsets, b.offsets);
  EXPECT_EQ(a.names, b.names);
  EXPECT_EQ(a.text_bytes, b.text_bytes);
  EXPECT_EQ(a.vocab_size, b.vocab_size);
  EXPECT_EQ(a.tokenizer, b.tokenizer);
}

void save(const std::string& path, const Documents& documents) {
  OutputFile output(world(), path);
  write_documents(output, documents, {{"generator", "test"}});
  output.commit();
}

/// A file with the given parts and no checks, made by rank 0 alone.
struct RawFile {
  std::string schema = documents_schema;
  int64_t version = schema_version;
  std::vector<int32_t> tokens{1, 2, 3};
  std::vector<int64_t> offsets{0, 1, 3};
  std::vector<std::string> names{"a", "b"};
  std::vector<int64_t> text_bytes{0, 5};

  void save(const std::string& path) const {
    on_root([&] {
      h5::File file = h5::File::create(path);
      file.write_attribute("/", "schema", schema);
      file.write_attribute("/", "schema_version", version);
      file.create_group("/documents");
      file.write_attribute("/documents", "vocab_size", int64_t{259});
      file.write_attribute("/documents", "tokenizer", std::string("byte-bos-eos"));
      file.write_dataset("/documents/tokens", std::span<const int32_t>(tokens));
      file.write_dataset("/documents/offsets", std::span<const int64_t>(offsets));
      file.write_dataset("/documents/names", std::span<const std::string>(names));
      file.write_dataset("/documents/text_bytes", std::span<const int64_t>(text_bytes));
      file.close();
    });
  }
};

TEST(Documents, WhatIsWrittenIsRead) {
  const SharedFolder folder;
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5, 0, 1, 12, 0, 3}, {1}, {0}, {0, 0, 0}, {100, 200, 3}, {}})
    for (const bool named : {true, false}) {
      Documents documents = sample(lengths);
      if (!named) documents.names.clear();
      if (named) documents.text_bytes = lengths;
      save(folder.file("docs.h5"), documents);
      expect_equal(read_documents(world(), folder.file("docs.h5")), documents);
    }
}

TEST(Documents, LongTransfersGoInRounds) {
  const SharedFolder folder;
  const Documents documents = sample({1000, 0, 77, 4000});
  const int64_t old = set_transfer_limit_bytes(256);
  save(folder.file("docs.h5"), documents);
  expect_equal(read_documents(world(), folder.file("docs.h5")), documents);
  set_transfer_limit_bytes(old);
  expect_equal(read_documents(world(), folder.file("docs.h5")), documents);
}

TEST(Documents, ParallelWriteEqualsSerialRead) {
  const SharedFolder folder;
  const Documents documents = sample({1000, 0, 77});
  save(folder.file("docs.h5"), documents);
  const h5::File file = h5::File::open(folder.file("docs.h5"));
  EXPECT_EQ(file.dataset("/documents/tokens").read_all<int32_t>(), documents.tokens);
  EXPECT_EQ(file.dataset("/documents/names").read_texts(), documents.names);
  EXPECT_EQ(std::get<std::string>(file.attribute("/provenance", "generator")), "test");
}

TEST(Documents, WriteAgainReplacesTheFile) {
  const SharedFolder folder;
  save(folder.file("docs.h5"), sample({3}));
  save(folder.file("docs.h5"), sample({4, 4}));
  EXPECT_EQ(read_documents(world(), folder.file("docs.h5")).count(), 2);
  int files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path()))
    ++files;
  EXPECT_EQ(files, 1) << "no temporary file stays behind";
}

TEST(Documents, PredictionOffsets) {
  const std::vector<int64_t> offsets{0, 5, 5, 6, 8};
  EXPECT_EQ(prediction_offsets(offsets), (std::vector<int64_t>{0, 4, 4, 4, 5}));
  EXPECT_EQ(prediction_offsets(std::vector<int64_t>{0}), (std::vector<int64_t>{0}));
}

TEST(DocumentsRejected, MissingFolderOfTheOutput) {
  const SharedFolder folder;
  expect_error(ExitCode::usage, "there is no folder '" + folder.file("nowhere") + "'",
               [&] { OutputFile(world(), folder.file("nowhere/docs.h5")); });
}

TEST(DocumentsRejected, InvalidOnWriting) {
  const SharedFolder folder;
  Documents documents = sample({3, 4});
  documents.tokens[4] = 259;
  expect_error(ExitCode::usage,
               "/documents/tokens[4] is 259 (document 1 ('folder/näme 1'), position 1); tokens "
               "must be 0 to 258",
               [&] { save(folder.file("docs.h5"), documents); });
  EXPECT_FALSE(std::filesystem::exists(folder.file("docs.h5")));
}

TEST(DocumentsRejected, Truncated) {
  const SharedFolder folder;
  save(folder.file("docs.h5"), sample({1000}));
  on_root([&] { test::copy_truncated(folder.file("docs.h5"), folder.file("short.h5"), 100); });
  expect_error(ExitCode::runtime, "truncated file",
               [&] { read_documents(world(), folder.file("short.h5")); });
}

TEST(DocumentsRejected, FlippedBitInTokens) {
  const SharedFolder folder;
  const Documents documents = sample({1000});
  save(folder.file("docs.h5"), documents);
  on_root([&] {
    std::string pattern(64, '\0');
    std::memcpy(pattern.data(), &documents.tokens[900], pattern.size());
    test::copy_damaged(folder.file("docs.h5"), folder.file("bad.h5"), pattern);
  });
  expect_error(ExitCode::runtime,
               "cannot read dataset '/documents/tokens' of '" + folder.file("bad.h5") +
                   "': data error detected by Fletcher32 checksum",
               [&] { read_documents(world(), folder.file("bad.h5")); });
}

TEST(DocumentsRejected, Contents) {
  const SharedFolder folder;
  const std::string path = folder.file("docs.h5");
  for (const auto& [raw, message] : std::vector<std::pair<RawFile, std::string>>{
           {{.schema = "gyre/model"}, "is of the kind 'gyre/model'; 'gyre/documents' is needed"},
           {{.version = 2},
            "has version 2 of the schema gyre/documents; this program reads version 1"},
           {{.tokens = {1, 2, -5}},
            "/documents/tokens[2] is -5 (document 1 ('b'), position 1); tokens must be 0 to 258"},
           {{.tokens = {300, 2, 3}}, "/documents/tokens[0] is 300 (document 0 ('a'), position 0)"},
           {{.offsets = {}}, "dataset '/documents/offsets' is empty"},
           {{.offsets = {1, 2, 3}}, "/documents/offsets[0] is 1; it must be 0"},
           {{.offsets = {0, 4, 3}},
            "/documents/offsets[2] is 3, less than /documents/offsets[1] = 4; offsets must not "
            "decrease"},
           {{.offsets = {0, 1, 2}},
            "/documents/offsets[2], the last, is 2; it must be 3, the number of elements of "
            "/documents/tokens"},
           {{.names = {"a", "b", "c"}},
            "dataset '/documents/names' is text [3]; it must be text [2]"},
           {{.text_bytes = {1}},
            "dataset '/documents/text_bytes' is int64 [1]; it must be int64 [2]"},
           {{.text_bytes = {1, -2}}, "/documents/text_bytes[1] is -2; it must be at least 0"}}) {
    raw.save(path);
    expect_error(ExitCode::usage, message, [&] { read_documents(world(), path); });
  }
}

TEST(DocumentsRejected, WhatIsNoFileOfGyre) {
  const SharedFolder folder;
  on_root([&] {
    test::write_bytes(folder.file("text.h5"), "no HDF5 at all");
    h5::File::create(folder.file("plain.h5")).close();
  });
  for (const auto& [path, message] : std::vector<std::pair<std::string, std::string>>{
           {"/no/such/file.h5", "cannot read '/no/such/file.h5': No such file or directory"},
           {folder.path(), "it is a folder"},
           {folder.file("text.h5"), "text.h5' is not an HDF5 file"},
           {folder.file("plain.h5"), "is not a file of Gyre: it has no text attribute 'schema'"}})
    expect_error(ExitCode::usage, message, [&] { read_documents(world(), path); });
}

TEST(DocumentsRejected, EverythingMissingIsListedAtOnce) {
  const SharedFolder folder;
  on_root([&] {
    h5::File file = h5::File::create(folder.file("empty.h5"));
    write_schema(file, documents_schema, {});
    file.close();
  });
  for (const char* part : {"'/documents' has no integer attribute 'vocab_size'",
                           "'/documents' has no text attribute 'tokenizer'",
                           "there is no dataset '/documents/tokens'; it must be int32 [any]",
                           "there is no dataset '/documents/offsets'; it must be int64 [any]",
                           "empty.h5' breaks the schema gyre/documents version 1:"})
    expect_error(ExitCode::usage, part, [&] { read_documents(world(), folder.file("empty.h5")); });
}

}  // namespace GYRE_FILE
}  // namespace gyre

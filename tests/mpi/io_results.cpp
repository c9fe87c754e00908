// Results files written by all ranks, a piece each, and the reference beside documents.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "comm/collective.hpp"
#include "io/schemas/model_file.hpp"
#include "io/schemas/results.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::on_root;
using test::SharedFolder;
using test::world;

float logprob_of(int64_t prediction) {
  return -0.25F * static_cast<float>(prediction);
}
float entropy_of(int64_t prediction) {
  return 0.5F * static_cast<float>(prediction);
}

/// A rank's piece, and the values behind it.
struct Piece {
  Piece(int64_t first, int64_t count) : begin(first) {
    for (int64_t i = begin; i < begin + count; ++i) logprob.push_back(logprob_of(i));
    for (int64_t i = begin; i < begin + count; ++i) entropy.push_back(entropy_of(i));
    for (const float x : entropy) kl.push_back(-x);
  }

  int64_t begin;
  std::vector<float> logprob, entropy, kl;
};

ResultsHeader header_for(std::vector<int64_t> offsets) {
  ResultsHeader header;
  header.model_sha256 = std::string(64, 'a');
  header.input_sha256 = std::string(64, 'b');
  header.teacher_sha256 = std::string(64, 'c');
  for (size_t i = 0; i + 1 < offsets.size(); ++i) header.names.push_back(fmt::format("d{}", i));
  header.offsets = std::move(offsets);
  header.cp = 2;
  header.packed = {64, {0, 2, 3}, {1, 0, 2}, {0, 5, 9, 0, 4}, {0, 8, 12, 0, 4}, {}};
  header.provenance = {{"generator", "test"}};
  return header;
}

void save(const std::string& path, const ResultsHeader& header, const Piece& mine) {
  OutputFile output(world(), path);
  write_results(output, header, {mine.begin, mine.logprob, mine.entropy, mine.kl});
  output.commit();
}

/// Expects every prediction in the file, by serial and by parallel reading.
void expect_complete(const std::string& path, int64_t total) {
  const Results results = read_results(world(), path);
  const h5::File file = h5::File::open(path);
  EXPECT_EQ(file.dataset("/results/logprob").read_all<float>(), results.logprob);
  EXPECT_EQ(file.dataset("/results/entropy").read_all<float>(), results.entropy);
  EXPECT_EQ(std::ssize(results.logprob), total);
  for (int64_t i = 0; i < std::ssize(results.logprob); ++i) {
    EXPECT_EQ(results.logprob[i], logprob_of(i)) << i;
    EXPECT_EQ(results.entropy[i], entropy_of(i)) << i;
    EXPECT_EQ(results.kl.at(i), -entropy_of(i)) << i;
  }
}

/// An equal share of `total` predictions, for rank `rank`.
Piece share_of(int64_t total, int64_t rank) {
  const int64_t ranks = world().size(), begin = total * rank / ranks;
  return {begin, total * (rank + 1) / ranks - begin};
}

TEST(Results, PiecesOfAnySizeFromAnyRank) {
  const SharedFolder folder;
  const int64_t ranks = world().size(), rank = world().rank();
  const auto expect = [&](const std::vector<int64_t>& offsets, const Piece& mine) {
    save(folder.file("r.h5"), header_for(offsets), mine);
    expect_complete(folder.file("r.h5"), offsets.back());
  };
  expect({0, 3, 3, 1003}, share_of(1003, rank));
  expect({0, 700}, share_of(700, ranks - 1 - rank));
  expect({0, 50}, rank == ranks - 1 ? Piece(0, 50) : Piece(0, 0));
  expect({0, 0, 0}, {0, 0});
}

TEST(Results, ManyChunksAndRounds) {
  const SharedFolder folder;
  const int64_t total = 600'000;
  const int64_t old = set_transfer_limit_bytes(100'000);
  save(folder.file("r.h5"), header_for({0, total}), share_of(total, world().rank()));
  expect_complete(folder.file("r.h5"), total);
  set_transfer_limit_bytes(old);
}

TEST(Results, HeaderComesBack) {
  const SharedFolder folder;
  const ResultsHeader written = header_for({0, 4, 4, 9});
  save(folder.file("r.h5"), written, share_of(9, world().rank()));
  const ResultsHeader read = read_results(world(), folder.file("r.h5")).header;
  EXPECT_EQ(read.model_sha256, written.model_sha256);
  EXPECT_EQ(read.input_sha256, written.input_sha256);
  EXPECT_EQ(read.teacher_sha256, written.teacher_sha256);
  EXPECT_EQ(read.offsets, written.offsets);
  EXPECT_EQ(read.names, written.names);
  EXPECT_EQ(read.cp, 2);
  EXPECT_EQ(read.packed.bin_capacity, 64);
  EXPECT_EQ(read.packed.bin_offsets, written.packed.bin_offsets);
  EXPECT_EQ(read.packed.document, written.packed.document);
  EXPECT_EQ(read.packed.cu_seqlens, written.packed.cu_seqlens);
  EXPECT_EQ(read.packed.cu_seqlens_padded, written.packed.cu_seqlens_padded);
}

TEST(Results, WithoutATeacherThereAreNoDivergences) {
  const SharedFolder folder;
  ResultsHeader header = header_for({0, 9});
  header.teacher_sha256.clear();
  save(folder.file("r.h5"), header, share_of(9, world().rank()));
  const Results read = read_results(world(), folder.file("r.h5"));
  EXPECT_EQ(read.header.teacher_sha256, "");
  EXPECT_TRUE(read.kl.empty());
  EXPECT_EQ(std::ssize(read.logprob), 9);
  const h5::File file = h5::File::open(folder.file("r.h5"));
  EXPECT_FALSE(file.has_dataset("/results/kl"));
  EXPECT_EQ(file.attribute("/results", "teacher_sha256"), h5::AttributeValue());
}

TEST(ResultsRejected, GapsAndOverlaps) {
  const SharedFolder folder;
  const int last = world().size() - 1;
  // With one rank, its piece is the second.
  const auto write = [&](const Piece& of_first, const Piece& of_last) {
    const Piece& mine = world().rank() == last ? of_last
                        : world().rank() == 0  ? of_first
                                               : Piece(0, 0);
    save(folder.file("r.h5"), header_for({0, 10}), mine);
  };
  expect_error(ExitCode::runtime, "prediction 0 of 10 comes from no rank", [&] {
    write({0, 0}, {0, 0});
  });
  expect_error(ExitCode::runtime, "prediction 9 of 10 comes from no rank", [&] {
    write({0, 0}, {0, 9});
  });
  expect_error(ExitCode::runtime, fmt::format("rank {} has prediction 10, but there are 10", last),
               [&] {
                 write({0, 0}, {0, 11});
               });
  if (last > 0) {
    expect_error(ExitCode::runtime, "prediction 4 of 10 comes from no rank", [&] {
      write({0, 4}, {5, 5});
    });
    expect_error(ExitCode::runtime,
                 fmt::format("prediction 3 comes from rank 0 and from rank {}", last), [&] {
                   write({0, 4}, {3, 7});
                 });
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(ResultsRejected, OffsetsThatDoNotEndAtTheLastPrediction) {
  const SharedFolder folder;
  on_root([&] {
    h5::File file = h5::File::create(folder.file("r.h5"));
    write_schema(file, results_schema, {});
    const std::vector<int64_t> offsets{0, 3}, one{0};
    const std::vector<float> values{1, 2};
    file.write_dataset("/results/logprob", std::span<const float>(values));
    file.write_dataset("/results/entropy", std::span<const float>(values));
    file.write_dataset("/results/offsets", std::span<const int64_t>(offsets));
    file.write_dataset("/packed/bin_offsets", std::span<const int64_t>(one));
    file.write_dataset("/packed/document", std::span<const int64_t>());
    file.write_dataset("/packed/cu_seqlens", std::span<const int32_t>());
    file.write_dataset("/packed/cu_seqlens_padded", std::span<const int32_t>());
    for (const char* name : {"model_sha256", "input_sha256"})
      file.write_attribute("/results", name, std::string("x"));
    for (const char* name : {"cp", "bin_capacity"})
      file.write_attribute("/packed", name, int64_t{1});
    file.close();
  });
  expect_error(
      ExitCode::usage,
      "/results/offsets[1], the last, is 3; it must be 2, the elements of /results/logprob",
      [&] { read_results(world(), folder.file("r.h5")); });
}

/// Two documents of 3 and 1 tokens and a reference of any contents, made by rank 0 alone.
struct ReferenceFile {
  std::vector<int64_t> offsets{0, 2, 2};
  std::vector<double> logprob{-1, -2};
  std::vector<double> entropy{0.5, 0.25};
  h5::Shape hidden_shape{3, 4, 2};

  void save(const std::string& path) const {
    on_root([&] {
      h5::File file = h5::File::create(path);
      write_schema(file, documents_schema, {});
      file.write_dataset("/reference/offsets", std::span<const int64_t>(offsets));
      file.write_dataset("/reference/logprob", std::span<const double>(logprob));
      file.write_dataset("/reference/entropy", std::span<const double>(entropy));
      file.write_attribute("/reference", "model_sha256", std::string("abc"));
      file.write_attribute("/reference", "generator", std::string("by hand"));
      std::vector<float> values(h5::elements_of(hidden_shape));
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
      file.write_dataset("/reference/hidden", std::span<const float>(values), hidden_shape);
      file.close();
    });
  }
};

Documents two_documents() {
  Documents documents;
  documents.tokens = {1, 2, 3, 4};
  documents.offsets = {0, 3, 4};
  return documents;
}

TEST(Reference, HiddenStatesThatNoMachineHoldsAreAnError) {
  const SharedFolder folder;
  const std::string path = folder.file("d.h5");
  ReferenceFile().save(path);
  on_root([&] {
    test::change_file(path, [](hid_t file) {
      H5Ldelete(file, "/reference/hidden", H5P_DEFAULT);
      const hsize_t chunk[] = {1, 1, 1};
      const h5::Handle list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
      H5Pset_chunk(list.get(), 3, chunk);
      test::make_dataset(file, "/reference/hidden", H5T_IEEE_F32LE, {3, 4, hsize_t{1} << 40},
                         nullptr, list.get());
    });
  });
  std::vector<Rows> rows;
  if (world().rank() == 0) rows = {{0, 4}};
  expect_error(ExitCode::runtime,
               "dataset '/reference/hidden' of '" + path +
                   "', [3, 4, 1099511627776], needs 35184372088832 bytes of memory",
               [&] { read_reference_hidden(world(), path, 1, rows); });
}

TEST(Reference, ValuesAndHiddenStates) {
  const SharedFolder folder;
  ReferenceFile().save(folder.file("d.h5"));
  const auto reference = read_reference(world(), folder.file("d.h5"), two_documents(), {3, 2});
  ASSERT_TRUE(reference.has_value());
  EXPECT_EQ(reference->model_sha256, "abc");
  EXPECT_EQ(reference->generator, "by hand");
  EXPECT_EQ(reference->logprob, (std::vector<double>{-1, -2}));
  EXPECT_EQ(reference->entropy, (std::vector<double>{0.5, 0.25}));
  EXPECT_TRUE(reference->has_hidden);

  std::vector<Rows> rows;  // rank 0 reads two ranges, the next one row, the others nothing
  if (world().rank() == 0) rows = {{0, 1}, {2, 2}};
  if (world().rank() == 1) rows = {{1, 1}};
  const Buffer<double> hidden = read_reference_hidden(world(), folder.file("d.h5"), 1, rows);
  const std::vector<double> read(hidden.span().begin(), hidden.span().end());
  std::vector<double> expected;
  if (world().rank() == 0) expected = {8, 9, 12, 13, 14, 15};
  if (world().rank() == 1) expected = {10, 11};
  EXPECT_EQ(read, expected);
}

TEST(ReferenceRejected, Contents) {
  const SharedFolder folder;
  const std::string of_model = "/reference/hidden is of a model of ";
  for (const auto& [contents, message] : std::vector<std::pair<ReferenceFile, std::string>>{
           {{.hidden_shape = {3, 4, 3}},
            of_model + "2 layers and hidden size 3; this model has 2 and 2"},
           {{.hidden_shape = {2, 4, 2}}, of_model + "1 layers and hidden size 2"},
           {{.hidden_shape = {4, 4, 2}}, of_model + "3 layers and hidden size 2"},
           {{.offsets = {0, 3, 3}},
            "/reference/offsets[1] is 3; it must be 2: a document of n tokens has max(0, n - 1) "
            "predictions"},
           {{.offsets = {0, 2}},
            "dataset '/reference/offsets' is int64 [2]; it must be integer [3]"},
           {{.logprob = {-1}}, "dataset '/reference/logprob' is float64 [1]; it must be real [2]"},
           {{.logprob = {-1, std::nan("")}}, "/reference/logprob[1] is nan; it must be finite"},
           {{.entropy = {std::numeric_limits<double>::infinity(), 1}},
            "/reference/entropy[0] is inf; it must be finite"},
           {{.hidden_shape = {3, 5, 2}},
            "dataset '/reference/hidden' is float32 [3, 5, 2]; it must be real [any, 4, any]"}}) {
    contents.save(folder.file("d.h5"));
    expect_error(ExitCode::usage, message, [&] {
      read_reference(world(), folder.file("d.h5"), two_documents(), {3, 2});
    });
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

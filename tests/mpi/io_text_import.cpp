// Text files into documents.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "io/text_import.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::on_root;
using test::SharedFolder;
using test::world;

/// A folder with text, binary and hidden files, links and a pipe.
void make_tree(const SharedFolder& folder) {
  on_root([&] {
    namespace fs = std::filesystem;
    fs::create_directories(folder.file("tree/sub/.git"));
    test::write_bytes(folder.file("tree/b.txt"), "bb");
    test::write_bytes(folder.file("tree/a.txt"), "hello");
    test::write_bytes(folder.file("tree/empty.txt"), "");
    test::write_bytes(folder.file("tree/.hidden"), "no");
    test::write_bytes(folder.file("tree/sub/.git/config"), "no");
    test::write_bytes(folder.file("tree/sub/c.bin"), std::string("x\0y", 3));
    test::write_bytes(folder.file("tree/sub/d.txt"), "\xff\x80z");
    fs::create_symlink("../a.txt", folder.file("tree/sub/link_to_a.txt"));
    fs::create_directory_symlink("..", folder.file("tree/sub/circle"));
    fs::create_symlink("nowhere", folder.file("tree/dangling"));
    mkfifo(folder.file("tree/pipe").c_str(), 0600);
  });
}

TEST(TextImport, FolderSortedWithoutWhatIsNoText) {
  const SharedFolder folder;
  make_tree(folder);
  ImportReport report;
  const Documents documents = import_text(world(), {folder.file("tree/")}, 0, report);
  const std::string root = folder.file("tree");
  EXPECT_EQ(documents.names, (std::vector<std::string>{root + "/a.txt", root + "/b.txt",
                                                       root + "/empty.txt", root + "/sub/d.txt"}));
  EXPECT_EQ(documents.offsets, (std::vector<int64_t>{0, 7, 11, 13, 18}));
  EXPECT_EQ(documents.tokens, (std::vector<int32_t>{256, 'h', 'e', 'l', 'l', 'o', 257,  //
                                                    256, 'b', 'b', 257,                 //
                                                    256, 257,                           //
                                                    256, 255, 128, 'z', 257}));
  EXPECT_EQ(report.files, 5);
  EXPECT_EQ(report.bytes, 10);
  EXPECT_EQ(report.duplicates, 1);
  EXPECT_EQ(report.not_regular, 2);
  EXPECT_EQ(report.binary, std::vector<std::string>{root + "/sub/c.bin"});
}

TEST(TextImport, OrderOfThePathsAndNamesAsTyped) {
  const SharedFolder folder;
  make_tree(folder);
  ImportReport report;
  const std::vector<std::string> paths{folder.file("tree/b.txt"), folder.file("tree/.hidden"),
                                       folder.file("tree/../tree/a.txt"),
                                       folder.file("tree/b.txt")};
  const Documents documents = import_text(world(), paths, 0, report);
  EXPECT_EQ(documents.names, std::vector<std::string>(paths.begin(), paths.end() - 1));
  EXPECT_EQ(report.duplicates, 1);
}

TEST(TextImport, LongFilesAreCut) {
  const SharedFolder folder;
  on_root([&] { test::write_bytes(folder.file("long"), "0123456789"); });
  ImportReport report;
  const Documents documents = import_text(world(), {folder.file("long")}, 6, report);
  EXPECT_EQ(documents.names, (std::vector<std::string>{folder.file("long"), folder.file("long#2"),
                                                       folder.file("long#3")}));
  EXPECT_EQ(documents.offsets, (std::vector<int64_t>{0, 6, 12, 16}));
  EXPECT_EQ(documents.tokens[7], '4');
  EXPECT_EQ(report.bytes, 10);
  EXPECT_EQ(import_text(world(), {folder.file("long")}, 12, report).count(), 1);
}

TEST(TextImport, ManyFilesOverAllRanks) {
  const SharedFolder folder;
  on_root([&] {
    for (int i = 0; i < 40; ++i)
      test::write_bytes(folder.file(fmt::format("{:02}", i)),
                        std::string(static_cast<size_t>(i * i), static_cast<char>('a' + i % 26)));
  });
  ImportReport report;
  const Documents documents = import_text(world(), {folder.path()}, 0, report);
  ASSERT_EQ(documents.count(), 40);
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(documents.length(i), i * i + 2);
    EXPECT_EQ(documents.document(i).front(), byte_tokenizer::bos);
    EXPECT_EQ(documents.document(i).back(), byte_tokenizer::eos);
    EXPECT_EQ(documents.document(i)[1], i == 0 ? byte_tokenizer::eos : 'a' + i % 26);
  }
}

TEST(TextImport, TheOutputOfAnEarlierRunIsLeftOut) {
  const SharedFolder folder;
  make_tree(folder);
  on_root(
      [&] { std::filesystem::create_symlink("../b.txt", folder.file("tree/sub/link_to_b.txt")); });
  ImportReport report;
  const Documents documents =
      import_text(world(), {folder.path()}, 0, report, folder.file("tree/sub/../b.txt"));
  EXPECT_EQ(documents.count(), 3) << "neither b.txt nor the link to it";
  EXPECT_EQ(report.left_out, 2);
}

TEST(TextImportRejected, TheOutputAmongTheInputs) {
  const SharedFolder folder;
  make_tree(folder);
  on_root([&] { std::filesystem::create_symlink("tree/b.txt", folder.file("link")); });
  ImportReport report;
  for (const auto& [input, output] :
       std::vector<std::pair<std::string, std::string>>{{"tree/b.txt", "tree/b.txt"},
                                                        {"tree/b.txt", "tree/sub/../b.txt"},
                                                        {"link", "tree/b.txt"},
                                                        {"tree/b.txt", "link"}})
    expect_error(
        ExitCode::usage,
        "the output '" + folder.file(output) + "' is the file of the input '" + folder.file(input) +
            "'",
        [&] { import_text(world(), {folder.file(input)}, 0, report, folder.file(output)); });
}

TEST(TextImport, NothingToImport) {
  const SharedFolder folder;
  ImportReport report;
  EXPECT_EQ(import_text(world(), {folder.path()}, 0, report).count(), 0);
  EXPECT_EQ(report.files, 0);
}

TEST(TextImportRejected, Paths) {
  const SharedFolder folder;
  make_tree(folder);
  on_root([&] { test::write_bytes(folder.file("bad\xff.txt"), "text"); });
  ImportReport report;
  expect_error(ExitCode::usage, "cannot read 'no/such/path': No such file or directory",
               [&] { import_text(world(), {"no/such/path"}, 0, report); });
  expect_error(ExitCode::usage, "tree/pipe': it is neither a file nor a folder",
               [&] { import_text(world(), {folder.file("tree/pipe")}, 0, report); });
  expect_error(ExitCode::usage, "is not UTF-8 text",
               [&] { import_text(world(), {folder.file("bad\xff.txt")}, 0, report); });
  expect_error(ExitCode::usage,
               "a limit of 2 tokens a document leaves no room for text; at least 3 are needed",
               [&] { import_text(world(), {folder.path()}, 2, report); });
}

}  // namespace GYRE_FILE
}  // namespace gyre

// The digest of a file's contents: made, compared, and what of a file it covers. What Python makes
// of the same files is in tests/python/test_contents.py, and in the inputs.

#include <gtest/gtest.h>

#include <cstring>

#include "io/h5.hpp"
#include "io/schemas/schema.hpp"
#include "io/trust/content_digest.hpp"
#include "io/trust/sha256.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre::h5 {
namespace GYRE_FILE {

using test::change_file;
using test::expect_error;
using test::SharedFolder;

std::string recorded(const std::string& path) {
  const AttributeValue value = File::open(path).attribute("/", content_attribute);
  const auto* text = std::get_if<std::string>(&value);
  return text == nullptr ? "none" : *text;
}

std::string computed(const std::string& path) {
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  return content_digest(file.get(), path);
}

/// A file with something of every kind, and its digest.
std::string sample(const SharedFolder& folder, const std::string& name = "a.h5") {
  const std::string path = folder.file(name);
  File file = File::create(path);
  const std::vector<double> numbers{1, 2};
  const std::vector<std::string> texts{"ab", "c"};
  file.write_attribute("/", "schema", "gyre/none");
  file.write_dataset("/data/x", std::span<const double>(numbers));
  file.write_dataset("/data/names", std::span(texts));
  file.write_attribute("/data", "count", int64_t{2});
  file.close();
  change_file(path, [](hid_t id) {
    H5Lcreate_soft("/data/x", id, "/data/soft", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_hard(id, "/data/x", id, "/data/hard", H5P_DEFAULT, H5P_DEFAULT);
  });
  record_content_digest(path, path);
  return path;
}

TEST(ContentDigest, OfTheInputsIsWhatPythonRecorded) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test::input(""))) {
    if (entry.path().extension() != ".h5") continue;
    ++files;
    EXPECT_EQ(recorded(entry.path()).size(), 64U) << entry.path();
    EXPECT_EQ(recorded(entry.path()), computed(entry.path())) << entry.path();
  }
  EXPECT_GE(files, 12);
}

TEST(ContentDigest, DependsOnContentsAlone) {
  const SharedFolder folder;
  const std::string a = sample(folder, "a.h5"), b = sample(folder, "b.h5");
  EXPECT_EQ(recorded(a).size(), 64U);
  EXPECT_EQ(recorded(a), recorded(b));
  EXPECT_EQ(computed(a), recorded(a)) << "with the attribute as without it";
  change_file(b, [](hid_t file) {  // the same, in other chunks and without a checksum
    H5Ldelete(file, "/data/x", H5P_DEFAULT);
    H5Ldelete(file, "/data/hard", H5P_DEFAULT);
    const double numbers[] = {1, 2};
    test::make_dataset(file, "/data/x", H5T_NATIVE_DOUBLE, {2}, numbers);
    H5Lcreate_hard(file, "/data/x", file, "/data/hard", H5P_DEFAULT, H5P_DEFAULT);
  });
  EXPECT_EQ(computed(b), recorded(b));
}

void replace_attribute(hid_t file, const char* object, const char* name, hid_t type,
                       const void* value) {
  H5Adelete_by_name(file, object, name, H5P_DEFAULT);
  test::make_attribute(file, object, name, type, value);
}

/// /data/x anew, with the values 1 and 2 as `type`.
void retype(hid_t file, hid_t type, hsize_t rows, hsize_t columns) {
  H5Ldelete(file, "/data/x", H5P_DEFAULT);
  const double numbers[] = {1, 2};
  test::make_dataset(file, "/data/x", type, {rows, columns});
  const Handle dataset(H5Dopen2(file, "/data/x", H5P_DEFAULT), H5Dclose);
  ASSERT_GE(H5Dwrite(dataset.get(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, numbers), 0);
}

const std::vector<std::pair<const char*, std::function<void(hid_t)>>> changes{
    {"a value",
     [](hid_t file) {
       const double numbers[] = {1, 2.5};
       const Handle dataset(H5Dopen2(file, "/data/x", H5P_DEFAULT), H5Dclose);
       H5Dwrite(dataset.get(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, numbers);
     }},
    {"where one text ends and the next begins",
     [](hid_t file) {
       const char* texts[] = {"a", "bc"};
       const Handle dataset(H5Dopen2(file, "/data/names", H5P_DEFAULT), H5Dclose);
       const Handle type(H5Dget_type(dataset.get()), H5Tclose);
       H5Dwrite(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, texts);
     }},
    {"the type", [](hid_t file) { retype(file, H5T_IEEE_F32LE, 2, 1); }},
    {"the byte order", [](hid_t file) { retype(file, H5T_IEEE_F64BE, 2, 1); }},
    {"the extents", [](hid_t file) { retype(file, H5T_IEEE_F64LE, 1, 2); }},
    {"an attribute",
     [](hid_t file) {
       const int64_t three = 3;
       replace_attribute(file, "/data", "count", H5T_NATIVE_INT64, &three);
     }},
    {"an attribute's type",
     [](hid_t file) {
       const int32_t two = 2;
       replace_attribute(file, "/data", "count", H5T_NATIVE_INT32, &two);
     }},
    {"an attribute's name",
     [](hid_t file) { H5Arename_by_name(file, "/data", "count", "cound", H5P_DEFAULT); }},
    {"an attribute less",
     [](hid_t file) { H5Adelete_by_name(file, "/data", "count", H5P_DEFAULT); }},
    {"the name of a link",
     [](hid_t file) { H5Lmove(file, "/data/x", file, "/data/y", H5P_DEFAULT, H5P_DEFAULT); }},
    {"the target of a soft link",
     [](hid_t file) {
       H5Ldelete(file, "/data/soft", H5P_DEFAULT);
       H5Lcreate_soft("/data/names", file, "/data/soft", H5P_DEFAULT, H5P_DEFAULT);
     }},
    {"the object of a hard link",
     [](hid_t file) {
       H5Ldelete(file, "/data/hard", H5P_DEFAULT);
       H5Lcreate_hard(file, "/data/names", file, "/data/hard", H5P_DEFAULT, H5P_DEFAULT);
     }},
    {"a group more",
     [](hid_t file) {
       const Handle group(H5Gcreate2(file, "/more", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                          H5Gclose);
     }},
    {"the digest itself",
     [](hid_t file) {
       const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
       H5Tset_size(type.get(), 64);
       replace_attribute(file, "/", content_attribute, type.get(), std::string(64, 'a').c_str());
     }},
};

TEST(ContentDigest, WhateverIsChangedIsNoticed) {
  const SharedFolder folder;
  for (const auto& [what, work] : changes) {
    SCOPED_TRACE(what);
    const std::string path = sample(folder);
    (void)File::open(path);
    change_file(path, work);
    expect_error(
        ExitCode::runtime,
        "the contents of '" + path + "' are not what was written: attribute content_sha256 is '",
        [&] { File::open(path); });
    expect_error(ExitCode::runtime, "the contents of '" + path + "' are not what was written",
                 [&] { open_schema_file(test::world(), path, "gyre/none"); });
    change_file(path, [](hid_t file) { H5Adelete(file, content_attribute); });
    EXPECT_NO_THROW(File::open(path)) << "without a digest nothing is compared";
  }
}

TEST(ContentDigest, WhatCannotBeReadIsNamed) {
  const SharedFolder folder;
  const std::string path = sample(folder);
  const double numbers[] = {1, 2};
  test::copy_damaged(path, folder.file("bad.h5"),
                     std::string(reinterpret_cast<const char*>(numbers), sizeof(numbers)));
  expect_error(ExitCode::runtime,
               "cannot read dataset '/data/hard' of '" + folder.file("bad.h5") +
                   "': data error detected by Fletcher32 checksum",
               [&] { File::open(folder.file("bad.h5")); });
  change_file(path, [](hid_t file) {
    const int64_t number = 0;
    replace_attribute(file, "/", content_attribute, H5T_NATIVE_INT64, &number);
  });
  expect_error(ExitCode::runtime, "attribute 'content_sha256' of '" + path + "' is no text",
               [&] { File::open(path); });
}

TEST(ContentDigest, LargeFilesHaveNone) {
  const SharedFolder folder;
  const std::string path = sample(folder);
  change_file(path, [](hid_t file) {  // a hole: nobody writes it
    const Handle list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_alloc_time(list.get(), H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(list.get(), H5D_FILL_TIME_NEVER);
    test::make_dataset(file, "/large", H5T_STD_I8LE, {hsize_t{max_content_bytes}}, nullptr,
                       list.get());
    H5Adelete(file, content_attribute);
  });
  record_content_digest(path, path);
  EXPECT_EQ(recorded(path), "none");
}

TEST(ContentDigest, IsInEveryOutput) {
  const SharedFolder folder;
  OutputFile output(test::world(), folder.file("out.h5"));
  {
    File file = File::create(output.temporary_path());
    file.write_attribute("/", "schema", "gyre/none");
    file.close();
  }
  output.commit();
  EXPECT_EQ(recorded(folder.file("out.h5")), computed(folder.file("out.h5")));
}

/// A real of 32 bits with another bias of its exponent, an integer with fewer bits than its bytes.
std::vector<Handle> odd_types() {
  std::vector<Handle> types;
  types.emplace_back(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
  H5Tset_ebias(types.back().get(), 126);
  types.emplace_back(H5Tcopy(H5T_IEEE_F64LE), H5Tclose);
  H5Tset_norm(types.back().get(), H5T_NORM_NONE);
  types.emplace_back(H5Tcopy(H5T_STD_I64LE), H5Tclose);
  H5Tset_precision(types.back().get(), 62);
  types.emplace_back(H5Tcopy(H5T_STD_I32LE), H5Tclose);
  H5Tset_precision(types.back().get(), 31);
  H5Tset_offset(types.back().get(), 1);
  types.emplace_back(H5Tenum_create(types.back().get()), H5Tclose);
  const int32_t zero = 0;
  H5Tenum_insert(types.back().get(), "ZERO", &zero);
  return types;
}

TEST(Types, OnlyThoseOfHdf5AreRead) {
  const SharedFolder folder;
  const std::string path = sample(folder);
  for (const Handle& type : odd_types()) {
    change_file(path, [&](hid_t file) {
      H5Ldelete(file, "/data/x", H5P_DEFAULT);
      H5Adelete(file, content_attribute);
      test::make_dataset(file, "/data/x", type.get(), {});
    });
    EXPECT_EQ(File::open(path).dataset("/data/x").type(), Type::other);
    record_content_digest(path, path);
  }
}

TEST(Types, OfSixteenBitsAreReals) {
  const SharedFolder folder;
  const std::string path = sample(folder);
  for (const auto& [exponent, mantissa] : {std::pair<size_t, size_t>{5, 10}, {8, 7}})
    for (const hid_t like : {H5T_IEEE_F32LE, H5T_IEEE_F32BE}) {
      const Handle type(H5Tcopy(like), H5Tclose);
      H5Tset_fields(type.get(), 15, mantissa, exponent, 0, mantissa);
      H5Tset_size(type.get(), 2);
      H5Tset_ebias(type.get(), (size_t{1} << (exponent - 1)) - 1);
      change_file(path, [&](hid_t file) {
        H5Adelete(file, content_attribute);
        retype(file, type.get(), 2, 1);
      });
      {
        const Dataset read = File::open(path).dataset("/data/x");
        EXPECT_EQ(read.type(), exponent == 5 ? Type::float16 : Type::bfloat16);
        EXPECT_EQ(read.read_all<double>(), (std::vector<double>{1, 2}));
      }
      record_content_digest(path, path);
    }
}

/// A file with two texts in /names, the first of which claims to be so long.
std::string claim_text(const SharedFolder& folder, uint32_t length) {
  const std::string path = folder.file("a.h5");
  const std::vector<std::string> texts{"one", "two"};
  File file = File::create(path);
  file.write_dataset("/names", std::span(texts));
  file.close();
  std::string bytes = test::read_bytes(path);
  const uint64_t heap = bytes.find("GCOL");
  const size_t address = bytes.find(std::string(reinterpret_cast<const char*>(&heap), 8));
  if (address == std::string::npos) throw_runtime("there is no text in '{}'", path);
  std::memcpy(&bytes[address - 4], &length, 4);
  test::write_bytes(path, bytes);
  return path;
}

TEST(Texts, OfGigabytesAreRefused) {
  const SharedFolder folder;
  const std::string path = claim_text(folder, 0xfffffff0);
  expect_error(ExitCode::runtime,
               "cannot read dataset '/names' of '" + path + "': memory allocation failed",
               [&] { File::open(path); });
}

TEST(Texts, LongerThanTheirFileAreRefused) {
  const SharedFolder folder;
  const std::string path = claim_text(folder, 1'000'000);
  const Dataset names = File::open(path).dataset("/names");
  expect_error(ExitCode::runtime,
               "dataset '/names' of '" + path + "', [2], claims texts of more than " +
                   std::to_string(std::filesystem::file_size(path)) + " bytes",
               [&] { (void)names.read_texts(); });
}

// SHA-256 against the examples of FIPS 180-4.
std::string sha256_of_bytes(const std::string& bytes) {
  const test::SharedFolder folder;
  test::write_bytes(folder.file("x"), bytes);
  EXPECT_EQ(sha256_of_file(test::world(), folder.file("x")), sha256_of_file(folder.file("x")));
  return sha256_of_file(folder.file("x"));
}

TEST(Sha256, Examples) {
  EXPECT_EQ(sha256_of_bytes(""),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_of_bytes("abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_of_bytes(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, LongerThanOneBlock) {
  std::string bytes(3'000'001, 'x');
  const std::string whole = sha256_of_bytes(bytes);
  bytes.back() = 'y';
  EXPECT_NE(sha256_of_bytes(bytes), whole);
}

TEST(Sha256, MissingFile) {
  test::expect_error(ExitCode::usage, "cannot read '/no/such/file': No such file or directory",
                     [] { sha256_of_file("/no/such/file"); });
}

}  // namespace GYRE_FILE
}  // namespace gyre::h5
